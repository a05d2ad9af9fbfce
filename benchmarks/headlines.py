"""The README's figures, read from the results: `python -m benchmarks.headlines` puts them there again.

Tables follow the comment that names their source; of what is said in sentences it tells which are out of date. A test
fails when either has drifted from the results.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.cost.at_load import rate, speeds
from benchmarks.cost.plan import IDS, PREFILL, WORKER
from benchmarks.cost.pool import CAPACITY, QUEUEING
from benchmarks.cost.rows import LOAD, POOL, read
from benchmarks.harness.rows import Row
from benchmarks.harness.statistics import Figure
from benchmarks.overhead.relay import report as relay
from benchmarks.overhead.relay.loads import LOADS, WARM
from benchmarks.overhead.report import read_rows
from benchmarks.overhead.samples import Arm, Samples, per, rounds, split
from benchmarks.overhead.tables import added

ROOT = Path(__file__).parents[1]
RESULTS = Path("benchmarks/results")
README = ROOT / "README.md"
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
        str(pool / "summary.md"): [replays(root)],
    }


def sentences(root: Path = ROOT) -> list[str]:
    """What the README says of results in words."""
    load, pool = (read(root / RESULTS / "cost" / name) for name in (LOAD, POOL))
    full = [share for name in ANSWERS if (share := _pool_share(load, pool, name, 0.25)) is not None]
    (at_80,) = (
        row["latency_s"]
        for row in pool
        if (row["phase"], row.get("load"), row.get("level")) == (QUEUEING, "128x512/256", 0.8) and not row["error"]
    )
    every = speeds(load)
    shares = [np.median(every[name, IDS]) / np.median(every[name, WORKER]) for name in ("64x128/1024", "128x512/256")]
    return [
        f"the default quarter of form `full` the pool does {100 * min(full):.0f} to {100 * max(full):.0f} %",
        f"half of the verdicts come within {1000 * at_80['p50']:.0f} ms of the answer's end, 99 % within "
        f"{1000 * at_80['p99']:.0f} ms.",
        f"Replaying every answer takes {100 * min(shares):.0f} to {100 * max(shares):.0f} % of the GPU time",
        *_whole(root),
    ]


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
        rows.append([name, *("" if each is None else f"{each.value:.2g}" for each in found)])
    return _table(["milliseconds added, median", "1 stream", "32 streams"], rows)


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
    return _table(
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
    return _table(head, lines)


def replays(root: Path) -> str:
    """Tokens a second of a prefill, and what of them replays and the pool do."""
    load, pool = (read(root / RESULTS / "cost" / name) for name in (LOAD, POOL))
    lines = []
    for name, answers in ANSWERS.items():
        floor, ids, share = rate(load, name, PREFILL), rate(load, name, IDS), _pool_share(load, pool, name, 0.0)
        assert floor is not None
        assert ids is not None
        assert share is not None
        done = _capacity(pool, name, 0.0)["per_s"]
        lines.append(
            [answers, f"{floor:,.0f}", f"{100 * ids / floor:.1f} %", f"{100 * share:.1f} % ({done:.3g} answers/s)"]
        )
    head = ["answers of", "tokens/s of a bare prefill", "of these, replayed by the engine", "through the whole pool"]
    return _table(head, lines)


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
    return _table(["backend", "answers rejected", "answers to evidence of one in a million"], lines)


def _whole(root: Path) -> list[str]:
    """How many answers came whole through either gateway."""
    bursts = relay.read(root / RESULTS / "relay")
    counts = []
    for arm in ("proxy", "litellm"):
        mine = [burst for burst in bursts if burst.arm == arm]
        asked = sum(burst.requests for burst in mine)
        counts.append((asked - sum(sum(burst.errors.values()) for burst in mine), asked))
    (ours, asked), (theirs, others) = counts
    return [f"{ours:,} of {asked:,} answers came whole through Countersign, {theirs:,} of {others:,} through LiteLLM."]


def _cell(samples: Samples, at: int) -> str:
    """The load with so many streams whose answers are longest; a burst before a closed loop."""
    found = {row["cell"]: (row["kind"], row["asked"][0]) for row in samples.rows if row["at"] == at}
    known = {cell: (kind == "burst", asked) for cell, (kind, asked) in found.items() if kind != "poisson"}
    return str(max(known, key=lambda cell: known[cell]))


def _capacity(pool: Sequence[Row], name: str, share: float) -> Row:
    (found,) = (
        row
        for row in pool
        if (row["phase"], row["share"], row.get("load")) == (CAPACITY, share, name)
        and not (row["warm"] or row["error"])
    )
    return found


def _pool_share(load: Sequence[Row], pool: Sequence[Row], name: str, share: float) -> float | None:
    floor = rate(load, name, PREFILL)
    return None if floor is None else float(_capacity(pool, name, share)["tokens_per_s"] / floor)


def _or_none(figure: Figure | None, digits: int) -> str:
    return "none" if figure is None else f"{figure.value:.{digits}f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def put(text: str, made: Mapping[str, Sequence[str]]) -> str:
    """A page with these tables after the comments that name their sources."""
    for source, each in made.items():
        tables = iter(each)
        pattern = re.compile(rf"(<!-- source: {re.escape(source)} -->\n)(?:\|.*\n)+")
        text = pattern.sub(lambda found, tables=tables: found[1] + next(tables), text)  # type: ignore[misc]
    return text


def missing(text: str, said: Sequence[str]) -> list[str]:
    """Sentences that a page does not have."""
    words = " ".join(text.split())
    return [sentence for sentence in said if sentence not in words]


def main() -> int:
    """Put the tables there; 1 when a sentence has to be written anew."""
    text = put(README.read_text(encoding="utf-8"), tables())
    README.write_text(text, encoding="utf-8")
    stale = missing(text, sentences())
    for sentence in stale:
        print(f"README.md should say: {sentence}")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
