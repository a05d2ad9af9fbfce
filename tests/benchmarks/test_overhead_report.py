"""From rows to tables: what was added, what it costs, and what went wrong."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from argparse import Namespace
from pathlib import Path
from typing import cast

import pytest

from benchmarks.harness.progress import Bar, Clock
from benchmarks.harness.rows import Row, Rows
from benchmarks.overhead import report
from benchmarks.overhead.agreement import agreement
from benchmarks.overhead.cells import Cell, mixes
from benchmarks.overhead.measure import Bench
from benchmarks.overhead.report import CSV, ROWS, SUMMARY, remake, summary
from benchmarks.overhead.run import _steps
from benchmarks.overhead.samples import TOKEN, Arm, Samples, rounds, split
from benchmarks.overhead.stack import Stack
from benchmarks.overhead.steps import BYTES, DIRECT, INLINE, PLAIN, QUIET_SECONDS, Step, done, left
from benchmarks.overhead.witness import OURS, THEIRS, Run, broken
from policies.errors import CountersignError
from tests.benchmarks.overhead_rows import META, heard, rows, step

RESULTS = Path(report.__file__).parents[1] / "results" / "overhead"


def page(found: list[Row]) -> str:
    return summary(Samples(found), found, META)


def test_what_an_arm_adds_is_the_difference_inside_rounds() -> None:
    text = page(rows())
    assert "| closed 4, 32/64 | relayed only | 1.00 (1.00 to 1.00) | 0.00 (0.00 to 0.00) | 1.00" in text
    assert "| closed 4, 32/64 | verified before the end, audit 0% | 2.50 (2.50 to 2.50)" in text
    assert "7.50 (7.50 to 7.50)" in text
    assert "Too few rounds" not in text
    assert "Busy" not in text


def test_tails_need_requests_enough() -> None:
    few, many = page(rows(3)), page(rows(7))
    assert "| first token, p99 |  |  |" in few
    assert "Too few rounds to quote" in few
    assert "| first token, p99 | 27." in many


def test_the_mark_goes_by_the_arm_with_fewest_rounds() -> None:
    assert "60 s, 7 rounds." in page(rows())
    assert "Too few rounds" not in page(rows(4))
    uneven = [row for row in rows(5) if row.get("round") != 5 or row["arm"] == "async"]
    text = page(uneven)
    assert "60 s, 4 to 5 rounds of each arm." in text
    assert "| rounds | 4 | 4 | 5 | 4 |" in text
    assert "Too few rounds" not in text
    fewer = [row for row in uneven if row.get("round") != 4 or row["arm"] != INLINE]
    assert "60 s, 3 to 5 rounds of each arm." in page(fewer)
    assert "Too few rounds to quote" in page(fewer)


def test_how_busy_the_proxy_was_is_told_of_the_time_in_which_requests_ran() -> None:
    step_seconds = 2.0 - 0.001 - QUIET_SECONDS
    share, speed = 25 * (3 + 6.4) / step_seconds / 10, 25 * 64 / step_seconds
    text = page(rows())
    assert f"| closed 4, 32/64 | direct | {speed:.0f} | 1.00 |  |  |" in text
    assert f"| closed 4, 32/64 | relayed only | {speed:.0f} | 1.00 | {12.5 / step_seconds:.1f} | 78 |" in text
    assert f"| closed 4, 32/64 | verified after, audit 0% | {speed:.0f} | 1.00 | {share:.1f} | 147 |" in text
    assert "GPU at work" not in text
    lumps = [
        row | ({"chunks": [16] * 25, "gpu_percent": 40.0} if row["arm"] == "async" else {})
        for row in rows()
        if row["what"] == "step"
    ]
    text = page(lumps)
    assert f"| closed 4, 32/64 | verified after, audit 0% | {speed:.0f} | 0.25 | {share:.1f} | 147 | 40 |" in text
    assert f"| closed 4, 32/64 | direct | {speed:.0f} | 1.00 |  |  |  |" in text


def test_chunks_and_requests_come_apart() -> None:
    mine = [row for row in rows() if row["arm"] == "async" and row["what"] == "step"]
    found = split(mine)
    assert found is not None
    assert found[0].value == pytest.approx(100)
    assert found[1].value == pytest.approx(3)
    assert split([row for row in mine if row["mix"] == "32/4"]) is None
    assert "| verified after, audit 0% | closed 4 | 147 (147 to 147) | 100 (100 to 100) | 3.00" in page(rows())


def test_verdicts_bytes_and_costs_are_told() -> None:
    text = page(rows())
    assert "| closed 4, 32/64 | 0% | 12.0 |" in text
    assert "| 32/64 | verified after | 100 | 3,000 | 47 |" in text
    assert "| closed 4, 32/64 | verified after, audit 0% | 100 | 10 | 50 | 1 |" in text
    assert "| closed 4, 32/64 | verified after, audit 0% | 9.4 | 2 | 0 | 0 | 0 | 0 |" in text


def test_a_direct_of_the_same_minutes_is_what_audits_are_held_against() -> None:
    slow = [step(arm, number, audit=1.0) for number in range(1, 6) for arm in (DIRECT, "async")]
    for row in slow:
        row["ttft_ms"] = [value + 500 for value in row["ttft_ms"]]
    found = Samples([*rows(), *slow])
    assert [arm.audit for arm in found.arms if arm.name == "async"] == [0.0, 1.0]
    assert "audit 100% | 2.00 (2.00 to 2.00)" in page([*rows(), *slow])
    assert found.beside("closed 4 32/64", Arm("async", 1.0)) == slow[::2]
    assert {arm.name for arm in found.arms} == {PLAIN, "async", INLINE}


def test_failures_are_counted_and_left_out() -> None:
    bad = step("async", 8)
    bad["errors"][0], bad["ttft_ms"][0] = "timeout", None
    lost = step(INLINE, 8, undecided=2)
    text = page([*rows(), bad, lost])
    assert "* async: timeout, 1 times" in text
    assert "* inline: a step ended without all verdicts, 1 times" in text


def test_what_broke_off_is_told_until_it_is_measured(tmp_path: Path) -> None:
    mix = mixes("32/64")
    lost = Step(8, 0.0, "async", Cell("closed", 4, mix, 25)).broken(ValueError("no number at /some/folder/f"))
    unheard = broken(Run(1, THEIRS, DIRECT), OSError("gone"))
    (tmp_path / "metadata.json").write_text(json.dumps(META))

    def remade(found: list[Row]) -> tuple[str, int]:
        kept = Rows(tmp_path / ROWS)
        kept.path.unlink(missing_ok=True)
        for row in found:
            kept.append(row)
        return remake(tmp_path, plots=False)

    text, failed = remade([lost, unheard, *rows()])
    assert failed == 2
    assert "* async, closed 4 32/64, broke off: ValueError: no number at f" in text
    assert "* direct, witness, broke off: OSError: gone" in text
    assert done([lost]) == set()
    with (tmp_path / CSV).open() as file:
        lines = list(csv.DictReader(file))
    assert [line["errors"] for line in lines if line["errors"]] == ["ValueError: no number at f", "OSError: gone"]
    assert len(lines) == 7 * 4 * 2 * 25 + 2 + 2
    text, failed = remade([lost, unheard, *rows(8), heard(THEIRS, DIRECT, 1, 3.0)])
    assert failed == 0
    assert "broke off" not in text


async def test_a_step_that_breaks_off_is_a_row_and_the_rest_goes_on(tmp_path: Path) -> None:
    planned = [Step(number, 0.0, DIRECT, Cell("closed", 4, mixes("32/64"), 25)) for number in (1, 2, 3)]

    class Unsteady:
        def __init__(self, error: Exception) -> None:
            self.error = error

        async def step(self, found: Step) -> Row:
            if found.round == 2:
                raise self.error
            return step(DIRECT, found.round)

    class Still:
        def audit(self, rate: float) -> None:
            pass

    async def run(error: Exception, name: str) -> tuple[bool, Rows]:
        kept, bench, stack = Rows(tmp_path / name), cast(Bench, Unsteady(error)), cast(Stack, Still())
        found = _steps(Namespace(), stack, bench, planned, kept, Clock(), Bar("overhead", io.StringIO()))
        return await found, kept

    complete, kept = await run(ValueError("odd"), "a")
    assert not complete
    assert [row["error"] for row in kept] == ["", "ValueError: odd", ""]
    assert left(planned, done(kept)) == planned[1:2]
    with pytest.raises(CountersignError, match="ended"):
        await run(CountersignError("proxy ended"), "b")
    assert [row["error"] for row in Rows(tmp_path / "b")] == ["", "CountersignError: proxy ended"]


def test_a_busy_machine_is_marked() -> None:
    meta = json.loads(json.dumps(META))
    meta["runs"][0] |= {"busy": True, "load_before": 3.0}
    assert "**Busy machine**: load 3.00" in summary(Samples(rows()), rows(), meta)


def test_every_file_is_made_of_the_rows_alone(tmp_path: Path) -> None:
    (tmp_path / ROWS).write_text("".join(json.dumps(row) + "\n" for row in rows()))
    (tmp_path / "metadata.json").write_text(json.dumps(META))
    text, failed = remake(tmp_path)
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert remake(tmp_path) == (text, failed)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first
    assert failed == 0
    assert {"added_latency.png", "added_latency.svg", "verdict_latency.png", "cpu_per_request.svg"} <= first.keys()
    assert (tmp_path / SUMMARY).read_text() == text
    with (tmp_path / CSV).open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 7 * 4 * 2 * 25 + 2
    assert [(line["arm"], line["down"]) for line in lines if line["what"] == BYTES] == [
        (DIRECT, "1000"),
        ("async", "9000"),
    ]
    assert lines[0]["arm"] == DIRECT
    assert float(lines[0]["ttft_ms"]) == 21.0


@pytest.mark.parametrize("name", sorted(path.parent.name for path in RESULTS.glob(f"*/{ROWS}")))
def test_the_committed_files_are_made_of_the_committed_rows(name: str, tmp_path: Path) -> None:
    committed = RESULTS / name
    for file in (ROWS, "metadata.json"):
        shutil.copy(committed / file, tmp_path / file)
    text, _ = remake(tmp_path, plots=False)
    assert text == re.sub(r"!\[.*\n\n", "", (committed / SUMMARY).read_text())
    assert (tmp_path / CSV).read_bytes() == (committed / CSV).read_bytes()


def test_no_committed_file_names_a_folder_of_a_machine() -> None:
    told = [path for kind in ("json", "jsonl", "md", "csv") for path in RESULTS.rglob(f"*.{kind}")]
    assert told
    for path in told:
        text = re.sub(r"https?://\S+", "", path.read_text())
        assert re.findall(r"(?<![\w.])/(?:home|root|tmp|usr|mnt|opt|srv|var|work\w*|Users)/\S*", text) == [], path


def test_two_tools_agree_within_their_noise() -> None:
    found = [
        heard(tool, arm, number, 30.0 + shift + number + (5.0 if arm == "async" else 0.0))
        for number in range(1, 6)
        for arm in (DIRECT, "async")
        for tool, shift in ((OURS, 0.0), (THEIRS, 0.5))
    ]
    text = agreement([*found, heard(THEIRS, DIRECT, 6, 0.0, error="OSError: gone")])
    assert "| direct | first token | 33.00" in text
    assert "-0.50" in text
    assert (
        "| verified after, added | first token | 5.00 (5.00 to 5.00) | 5.00 (5.00 to 5.00) | 0.00 | 0.00 | yes |"
        in text
    )
    assert "1 runs failed: OSError: gone." in text
    apart = [row | {"ttft_ms": [value + 40 for value in row["ttft_ms"]]} for row in found if row["tool"] == THEIRS]
    assert "| NO |" in agreement([*apart, *(row for row in found if row["tool"] == OURS)])
    assert agreement(rows()) == ""
    few = agreement([row for row in found if row["round"] < 3])
    assert "| -0.50 |" in few
    assert "NO |" not in few
    assert "yes |" not in few


def test_a_token_has_its_share_of_the_answer_however_many_an_event_brings() -> None:
    row = step("async", 1, tokens=64, requests=3)
    row["total_ms"] = [row["ttft_ms"][0] + 63 * 8.0, row["ttft_ms"][1] + 63 * 8.0, None]
    row["gap_p50_ms"] = [176.0] * 3
    (found,) = rounds([row], TOKEN).values()
    assert found.tolist() == pytest.approx([8.0, 8.0])
