"""Figures of the README and of capacity.md, read from results: `python -m benchmarks.headlines` puts them there again.

Tables follow the comment that names their source; of what is said in sentences it tells which are out of date. A test
fails when either has drifted from the results.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import sentences as said
from benchmarks import served
from benchmarks.cost.at_load import rate
from benchmarks.cost.in_pool import capacity, share_of_floor
from benchmarks.cost.plan import IDS, PREFILL
from benchmarks.cost.rows import LOAD, POOL, read
from benchmarks.harness.statistics import Figure
from benchmarks.overhead.relay import report as relay
from benchmarks.overhead.relay.loads import LOADS, WARM
from benchmarks.overhead.report import read_rows
from benchmarks.overhead.samples import Arm, Samples, per, rounds, split
from benchmarks.overhead.tables import added
from benchmarks.sentences import RESULTS
from benchmarks.served import table, two

ROOT = Path(__file__).parents[1]
README, CAPACITY = ROOT / "README.md", ROOT / "docs" / "capacity.md"
ANSWERS = {
    "64x128/1024": "128 + 1,024 tokens",
    "128x512/256": "512 + 256 tokens",
    "96x256/16+96x512/32+32x1024/1+32x128/64": "16 to 1,024 tokens, mixed",
}
BACKENDS = {
    "eager-64": "honest, eager kernels, 64 at once",
    "fp8": "FP8 weights, own logprobs",
    "kv-fp8": "FP8 cache, own logprobs",
    "fp8 spoofed": "FP8 weights, the true model's logprobs",
    "fp8 spoofed, bent": "the same, logprobs bent until the tokens win",
}
AFTER, BEFORE = Arm("async", 0.0), Arm("inline", 0.0)


def tables(root: Path = ROOT) -> dict[str, list[str]]:
    """By source, relative to the repository: the tables made of it, in the README's order."""
    scripted, pool = RESULTS / "overhead" / "scripted", RESULTS / "cost"
    samples = Samples(read_rows(root / scripted))
    return {
        str(RESULTS / "detection.md"): [detection(root)],
        str(scripted / "summary.md"): [latency(samples), cpu(samples)],
        str(RESULTS / "relay" / "summary.md"): [streams(root)],
        **{
            served.source(name): [served.latency(results, served.HEADS[name])]
            for name, results in served.opened(root).items()
        },
        str(pool / "summary.md"): [replays(root)],
    }


def sentences(root: Path = ROOT) -> list[str]:
    """What the README says of results in words."""
    return said.sentences(root, list(ANSWERS))


def capacities(root: Path = ROOT) -> dict[str, list[str]]:
    """By source, the tables of capacity.md that are made of results; its others name theirs and are written by hand."""
    return {
        served.source(name): [served.capacity(results, served.HEADS[name])]
        for name, results in served.opened(root).items()
    }


def latency(samples: Samples) -> str:
    """What the proxy adds to an answer's times, at one stream and at many."""
    cells = [_cell(samples, at) for at in (1, 32)]
    lines = [
        ("first token", AFTER, "ttft_ms", 0.5),
        ("whole answer", AFTER, "total_ms", 0.5),
        ("whole answer with the verdict of the CPU checks in it", BEFORE, "total_ms", 0.5),
        ("first token, 99th percentile", AFTER, "ttft_ms", 0.99),
    ]
    rows = []
    for name, arm, metric, q in lines:
        found = [
            added(rounds(samples.beside(cell, arm), metric), rounds(samples.of(cell, arm), metric), q) for cell in cells
        ]
        rows.append([name, *("none" if each is None else two(each.value) for each in found)])
    return table(["milliseconds added, median", "1 stream", "32 streams"], rows)


def cpu(samples: Samples) -> str:
    """What a token and a request cost the proxy and the workers."""
    token, request, worker = (list[str]() for _ in range(3))
    for at in (1, 32):
        kind = _cell(samples, at).partition(" ")[0]
        mine = [row for cell in samples.cells if cell.startswith(f"{kind} {at} ") for row in samples.of(cell, AFTER)]
        found = split(mine)
        assert found is not None
        token.append(f"{found[0].value:.0f}")
        request.append(f"{found[1].value:.1f}")
        long = samples.of(_cell(samples, at), AFTER)
        answer = per(long, lambda row: row["cpu_ms"]["verify"], lambda row: row["requests"])
        worker.append("" if answer is None else f"{answer.value:.1f}")
    return table(
        ["CPU", "1 stream", "32 streams"],
        [
            ["proxy, µs per streamed token", *token],
            ["proxy, ms per request", *request],
            ["worker, ms per answer", *worker],
        ],
    )


def streams(root: Path) -> str:
    """The relay beside a bare forwarder and LiteLLM."""
    bursts = relay.read(root / RESULTS / "relay")
    (idle, *more), lines = sorted(LOADS.items()), []
    for name, load in [
        (f"{idle[0]}, from idle", idle[1]),
        (f"one each {1000 * WARM.spacing:.0f} ms", WARM),
        *((f"{count:,}", load) for count, load in more),
    ]:
        cells = [name]
        for arm in ("proxy", "floor", "litellm"):
            first, chunk = relay.added_first(bursts, arm, load), relay.chunk_cost(relay.bursts_of(bursts, arm, load))
            cells += [_or_none(first, 2), _or_none(chunk, 0)]
        lines.append(cells)
    head = [
        "streams",
        "first token adds, median ms",
        "CPU per chunk, µs",
        "a bare forwarder: ms",
        "a bare forwarder: µs",
        "LiteLLM: ms",
        "LiteLLM: µs",
    ]
    return table(head, lines)


def replays(root: Path) -> str:
    """Tokens a second of a prefill, and what of them replays and the pool do."""
    load, pool = (read(root / RESULTS / "cost" / name) for name in (LOAD, POOL))
    lines = []
    for name, answers in ANSWERS.items():
        floor, ids, share = rate(load, name, PREFILL), rate(load, name, IDS), share_of_floor(load, pool, name, 0.0)
        assert floor is not None
        assert ids is not None
        assert share is not None
        done = capacity(pool, name, 0.0)["per_s"]
        lines.append(
            [answers, f"{floor:,.0f}", f"{100 * ids / floor:.1f} %", f"{100 * share:.1f} % ({done:.3g} answers/s)"]
        )
    head = ["answers of", "tokens/s of a bare prefill", "of these, replayed by the engine", "through the whole pool"]
    return table(head, lines)


def detection(root: Path) -> str:
    """How many single answers are rejected, and how many it takes to accuse."""
    page = (root / RESULTS / "detection" / "h200" / "summary.md").read_text(encoding="utf-8")
    lines = []
    for arm, name in BACKENDS.items():
        found = re.search(
            rf"^\| {re.escape(arm)} \| (\d+) \| \d+ \| \d+ \| (\d+) \|.* \| ([^|]+) \|$", page, re.MULTILINE
        )
        assert found is not None
        lines.append([name, f"{found[2]} of {found[1]}", found[3].partition(" /")[0].strip()])
    return table(["backend", "answers rejected", "answers to evidence of one in a million"], lines)


def _cell(samples: Samples, at: int) -> str:
    """The load with so many streams whose answers are longest; a burst before a closed loop."""
    found = {row["cell"]: (row["kind"], row["asked"][0]) for row in samples.rows if row["at"] == at}
    known = {cell: (kind == "burst", asked) for cell, (kind, asked) in found.items() if kind != "poisson"}
    return str(max(known, key=lambda cell: known[cell]))


def _or_none(figure: Figure | None, digits: int) -> str:
    return "none" if figure is None else f"{figure.value:.{digits}f}"


def put(text: str, made: Mapping[str, Sequence[str]]) -> str:
    """A page with these tables after the comments that name their sources."""
    for source, each in made.items():
        tables = iter(each)
        pattern = re.compile(rf"(<!-- source: {re.escape(source)} -->\n)(?:\|.*\n)*")
        text = pattern.sub(lambda found, tables=tables: found[1] + next(tables), text)  # type: ignore[misc]
    return text


def missing(text: str, said: Sequence[str]) -> list[str]:
    """Sentences that a page does not have."""
    words = " ".join(text.split())
    return [sentence for sentence in said if sentence not in words]


def main() -> int:
    """Put the tables there; 1 when a sentence has to be written anew."""
    stale = 0
    for page, made, words in (
        (README, tables(), sentences()),
        (CAPACITY, capacities(), [*served.sentences(ROOT), *served.remarks(ROOT)]),
    ):
        text = put(page.read_text(encoding="utf-8"), made)
        page.write_text(text, encoding="utf-8")
        for sentence in missing(text, words):
            print(f"{page.name} should say: {sentence}")
            stale += 1
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
