"""The relay's benchmark: its arithmetic, its page, its arguments, and one burst through a real proxy."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import command as benches
from benchmarks.harness.progress import Bar, Clock
from benchmarks.harness.rows import Rows, write_csv
from benchmarks.harness.statistics import Figure
from benchmarks.overhead import command as overhead
from benchmarks.overhead.answer import Ask, paced
from benchmarks.overhead.client import Timed
from benchmarks.overhead.relay import command, report
from benchmarks.overhead.relay.loads import FIRST_SECONDS, LOADS, WARM, Load
from benchmarks.overhead.relay.measure import Bench, Burst, Turn, chunks_between, turns
from benchmarks.overhead.relay.stack import Cores, RelayStack
from benchmarks.overhead.upstream import precise_loop
from benchmarks.overhead.wire import Response
from policies.errors import CountersignError

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "relay"
METADATA: dict[str, Any] = {
    "command": report.COMMAND,
    "started": "2026-01-01 00:00 UTC",
    "seconds": 12.3,
    "rounds": 7,
    "load_before": 0.1,
    "busy": False,
    "chunk_bytes": 2600,
    "cores": {"client": 0, "backend": 0, "store": 0, "gateway": 1},
    "versions": {"countersign": "1"},
    "machine": {"cpu": "Abacus", "cores": 2, "kernel": "6", "python": "3.11", "commit": "f" * 40, "modified": False},
}


def burst(arm: str, number: int, *, added: float = 0.0, chunk_us: float = 0.0, request_ms: float = 0.0) -> Burst:
    """32 streams of 150 tokens whose costs are known."""
    found = Burst(number, 32, arm, 32, chunks=4800)
    found.first_ms = [20 + number + added + at / 100 for at in range(32)]
    found.gaps_ms = [10.0 + added, 11.0 + added, 12.0 + added]
    found.cpu_ms = 32 * request_ms + 4800 * chunk_us / 1000
    found.window_chunks, found.window_cpu_ms = 3000, 3000 * chunk_us / 1000
    found.resident_mib = 99.0
    return found


def bursts() -> list[Burst]:
    rounds = range(1, 8)
    direct = [burst("direct", number) for number in rounds]
    return direct + [burst("proxy", number, added=1.5, chunk_us=80, request_ms=2) for number in rounds]


def test_costs_of_chunks_and_requests_come_apart() -> None:
    mine = bursts()[7:]
    assert report.chunk_cost(mine) == Figure(80, 80, 80)
    requests, whole, resident = report.request_cost(mine), report.whole_cost(mine), report.resident(mine)
    assert requests is not None
    assert requests.value == pytest.approx(2)
    assert whole is not None
    assert whole.value == pytest.approx(80 + 2000 / 150)
    assert resident is not None
    assert resident.value == 99
    assert report.chunk_cost([Burst(1, 32, "proxy", 32)]) is None
    assert report.request_cost([]) is None


def test_the_page_shows_what_was_added() -> None:
    page = report.text(METADATA, bursts())
    assert (
        "| Countersign | 32 | 1.50 (1.50 to 1.50) | 1.50 (1.50 to 1.50) | 80 (80 to 80) | 93 (93 to 93) | 0 of 224 |"
        in page
    )
    assert "| first token, p50 ms | 24.1" in page
    assert "0 in 448 requests" in page
    assert "Busy" not in page
    assert "Too few" not in page


def test_an_arm_that_is_behind_has_no_price_of_a_chunk_alone() -> None:
    """What it passes on while all stream are chunks of earlier: many for little CPU, or few for much."""
    behind = [burst("litellm", number, chunk_us=80, request_ms=2) for number in range(1, 8)]
    for each in behind:
        each.window_chunks //= 10
    assert report.chunk_cost(behind) is None
    assert report.request_cost(behind) is None
    whole = report.whole_cost(behind)
    assert whole is not None
    assert whole.value == pytest.approx(80 + 2000 / 150)


def test_requests_in_a_row_have_a_table_of_their_own() -> None:
    rows = [*bursts()]
    for arm, added in (("direct", 0.0), ("floor", 0.25), ("proxy", 1.0)):
        for number in range(1, 8):
            found = burst(arm, number, added=added)
            found.streams = found.requests = WARM.streams
            found.warm, found.cpu_ms = True, 2.0 * WARM.streams
            rows.append(found)
    page = report.text(METADATA, rows)
    assert "| Countersign | one each 5 ms | 1.00 (1.00 to 1.00) |" in page
    assert "| a bare forwarder | one each 5 ms | 0.25 (0.25 to 0.25) |" in page
    assert "| CPU per request with its chunks, ms |  | 2.00 (2.00 to 2.00) | 2.00 (2.00 to 2.00) |" in page
    assert "| Countersign | 32 | 1.50" in page
    assert "200 streams at once" not in page


def test_when_requests_are_due() -> None:
    rng = np.random.default_rng(1)
    assert WARM.offsets(rng).tolist() == pytest.approx([at * WARM.spacing for at in range(WARM.streams)])
    assert LOADS[1].offsets(rng).tolist() == [0.0]
    many = LOADS[200].offsets(rng)
    assert sorted(many) == many.tolist()
    assert 0 <= many[0] <= many[-1] <= LOADS[200].spread
    assert LOADS[1000].has("litellm", 1)
    assert not LOADS[1000].has("litellm", 2)
    assert not WARM.has("litellm", 1)
    assert all(load.has("floor", number) for load in (*LOADS.values(), WARM) for number in range(1, 8))


def test_failures_and_doubts_are_on_the_page() -> None:
    failed = burst("proxy", 8)
    failed.errors = {"timeout": 3}
    page = report.text(METADATA | {"busy": True, "rounds": 2}, [*bursts(), failed])
    assert "* Countersign, 32 streams: timeout, 3 times" in page
    assert "3 of 256" in page
    assert "**Busy machine**" in page
    assert "**Too few rounds to quote.**" in page


def made(folder: Path, lines: list[Burst]) -> None:
    (folder / report.ROWS).write_text("".join(json.dumps(burst.line()) + "\n" for burst in lines))
    run = {name: METADATA[name] for name in METADATA if name not in ("started", "rounds")} | {"began": "2026"}
    (folder / "metadata.json").write_text(json.dumps({"benchmark": "relay", "what": {}, "runs": [run]}))


def test_the_report_is_made_of_the_rows(tmp_path: Path) -> None:
    made(tmp_path, bursts())
    assert benches.main(["report", str(tmp_path)]) == 0
    page = (tmp_path / report.SUMMARY).read_text()
    assert "`countersign bench relay`, 2026, 12 s, 7 rounds." in page
    assert report.remake(tmp_path) == page
    assert "![first_token](first_token.png)" in page
    assert len((tmp_path / report.CSV).read_text().splitlines()) == 1 + 14 * 32
    assert {"first_token.svg", "cpu_per_chunk.png"} <= {path.name for path in tmp_path.iterdir()}


def test_what_has_a_row_is_not_measured_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--output", str(tmp_path), "--streams", "32", "--rounds", "7"]
    arguments = command.parser().parse_args(run)
    planned = command.planned_turns(arguments)
    assert len({turn.key for turn in planned}) == len(planned) == 7 * 3
    assert planned == command.planned_turns(arguments)
    made(tmp_path, bursts())
    assert {turn.arm for turn in command._left(arguments, planned)} == {"floor"}
    assert command.main([*run, "--dry-run"]) == 0
    assert "21 steps, of which 14 are measured already" in capsys.readouterr().out


class Unsteady:
    """A bench of which every burst through the proxy comes to nothing, as often as it shall."""

    def __init__(self, error: Exception, times: int) -> None:
        self.error, self.times = error, times

    async def warm_up(self) -> None:
        pass

    async def burst(self, turn: Turn) -> Burst:
        if turn.arm == "proxy" and self.times:
            self.times -= 1
            raise self.error
        return replace(burst(turn.arm, turn.round), repeat=turn.repeat)


def run(bench: Any, folder: Path) -> bool:
    arguments = command.parser().parse_args(["--output", str(folder), "--streams", "32", "--rounds", "2"])
    todo = command._left(arguments, command.planned_turns(arguments))
    rows = Rows(folder / report.ROWS)
    return asyncio.run(command._run(bench, todo, rows, Clock(), Bar("relay", io.StringIO())))


def test_a_burst_that_breaks_off_is_a_row_and_is_measured_again(tmp_path: Path) -> None:
    made(tmp_path, [])
    assert not run(Unsteady(OSError("nobody at /some/folder/socket"), 1), tmp_path)
    (lost,) = [each for each in report.read(tmp_path) if each.broken]
    assert (lost.arm, lost.errors) == ("proxy", {"OSError: nobody at socket": 32})
    page = report.remake(tmp_path, plots=False)
    assert "* Countersign, 32 streams: OSError: nobody at socket, 32 times" in page
    with (tmp_path / report.CSV).open() as file:
        lines = list(csv.DictReader(file))
    assert [line["error"] for line in lines].count("OSError: nobody at socket") == 32
    assert len(lines) == 2 * 3 * 32
    assert run(Unsteady(OSError(), 0), tmp_path)
    assert not [each for each in report.read(tmp_path) if each.broken]
    assert len((tmp_path / report.ROWS).read_text().splitlines()) == 2 * 3 + 1
    assert "broke" not in report.remake(tmp_path, plots=False)


def test_a_process_that_ends_ends_the_run_and_leaves_its_row(tmp_path: Path) -> None:
    made(tmp_path, [])
    with pytest.raises(CountersignError, match="proxy ended"):
        run(Unsteady(CountersignError("proxy ended with code 1"), 9), tmp_path)
    assert [each.errors for each in report.read(tmp_path) if each.broken] == [
        {"CountersignError: proxy ended with code 1": 32}
    ]


def test_the_committed_lines_are_made_of_the_committed_rows(tmp_path: Path) -> None:
    write_csv(tmp_path / report.CSV, [line for each in report._every(RESULT) for line in report._requests(each)])
    assert (tmp_path / report.CSV).read_bytes() == (RESULT / report.CSV).read_bytes()


def test_the_committed_page_is_made_of_the_committed_rows() -> None:
    found, meta = report.read(RESULT), json.loads((RESULT / "metadata.json").read_text())
    committed = (RESULT / report.SUMMARY).read_text()
    drawn = re.findall(r"!\[(\w+)\]", committed)
    text = report.text(report.facts(meta, found), found, drawn)
    assert text == committed
    assert not re.search(r"/(work|tmp|home|root)/", text)


def test_windows_lie_where_every_stream_flows() -> None:
    for load in LOADS.values():
        start, end = load.window
        assert load.spread + FIRST_SECONDS < start < end < FIRST_SECONDS + load.tokens * load.interval
    assert LOADS[1000].rate == 2000


def test_chunks_between() -> None:
    def timed(times: list[float]) -> Timed:
        return Timed(0.0, Response(200, {}, "", np.array(times), times[-1], None))

    answers = [timed([1, 2, 3]), timed([2.5, 3.5]), Timed(0.0, None, "timeout")]
    assert chunks_between(answers, 2, 3) == 2


def test_the_gateway_has_a_core_of_its_own() -> None:
    assert Cores.of([0]) == Cores(0, 0, 0, 0)
    assert Cores.of([0, 1]) == Cores(0, 0, 0, 1)
    assert Cores.of([4, 5, 6, 7]) == Cores(6, 5, 4, 7)


def test_a_pace_crosses_any_gateway() -> None:
    ask = Ask.read(b'{"messages": [{"content": "tell %b"}]}' % paced(0.02, 0.5).encode(), 10)
    assert ask.pace == (0.02, 0.5)
    assert Ask.read(b"{}", 10).pace is None


def test_arguments() -> None:
    arguments = command.parser().parse_args(["--relay-only", "--streams", "1", "32", "--litellm", "/somewhere/litellm"])
    assert command.command(arguments) == f"{report.COMMAND} --streams 1 32 --litellm litellm"
    with pytest.raises(SystemExit):
        overhead.main(["--relay-only", "--streams", "7"])
    with pytest.raises(SystemExit):
        overhead.main(["--relay-only", "--rounds", "0"])


def test_a_burst_through_a_real_proxy() -> None:
    load = Load(4, 8, 0.01, 0.02)
    with RelayStack(8, None) as stack, asyncio.Runner(loop_factory=precise_loop) as runner:
        bench = Bench(stack, seed=1)
        found = [runner.run(bench.burst(turn)) for turn in turns([load], stack.arms, [1], seed=1)]
    assert {each.arm for each in found} == {"direct", "floor", "proxy"}
    for each in found:
        assert each.errors == {}
        assert each.chunks == 32
        assert all(first >= 20 for first in each.first_ms)
        assert (each.cpu_ms > 0) == (each.arm != "direct")
