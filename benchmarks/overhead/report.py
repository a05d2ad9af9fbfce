"""Everything that is made of the rows: `rows.csv`, `summary.md` and, with matplotlib, the plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import machine, metadata
from benchmarks.harness.rows import Row, read, write_csv
from benchmarks.overhead import tables
from benchmarks.overhead.agreement import agreement
from benchmarks.overhead.samples import Samples
from benchmarks.overhead.steps import STEP

ROWS = "rows.jsonl"
CSV = "rows.csv"
SUMMARY = "summary.md"
FEWEST_ROUNDS, ROUGH_ROUNDS = 4, 5
"""Of every arm, without which nothing should be quoted, and without which figures are rough."""
_STEP = ("round", "audit", "arm", "cell", "repeat")
_REQUEST = (
    *("asked", "prompt", "chunks", "ttft_ms", "total_ms", "gap_p50_ms", "gap_p99_ms", "gap_max_ms", "gap_mean_ms"),
    *("verdict_ms", "verdicts", "errors"),
)


def read_rows(folder: Path) -> list[Row]:
    """The rows of a folder. Raises CountersignError for what is no row."""
    return read(folder / ROWS, {"what", "arm", "error"})


def remake(folder: Path, plots: bool = True) -> tuple[str, int]:
    """Write the report; returns its text and how many requests failed. Raises CountersignError."""
    rows, meta = read_rows(folder), metadata.read(folder / metadata.FILE)
    write_csv(folder / CSV, lines(rows))
    samples = Samples(rows)
    drawn: list[str] = []
    if plots and samples.rows:
        from benchmarks.overhead.plots import draw

        drawn = draw(folder, samples)
    text = summary(samples, rows, meta, drawn)
    (folder / SUMMARY).write_text(text, encoding="utf-8")
    return text, sum(samples.failures.values()) + len(broken(rows))


def lines(rows: Sequence[Row]) -> list[Row]:
    """One line per request; and one per step that broke off, count of bytes, and run of the witness."""
    found: list[Row] = []
    for row in rows:
        step = {name: row[name] for name in ("what", *_STEP) if name in row}
        if row["what"] != STEP or row["error"]:
            rest = {name: value for name, value in row.items() if name not in ("error", "kind", "at")}
            found.append(step | rest | {"errors": row["error"]})
        else:
            found += [step | {name: row[name][place] for name in _REQUEST} for place in range(row["requests"])]
    return found


def broken(rows: Sequence[Row]) -> list[Row]:
    """Rows of what broke off and was not measured since."""
    good = {_key(row) for row in rows if not row["error"]}
    return [row for row in rows if row["error"] and _key(row) not in good]


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("what", *_STEP, "mix", "tool"))


def summary(samples: Samples, rows: Sequence[Row], meta: dict[str, Any], drawn: Sequence[str] = ()) -> str:
    """The page."""
    parts = [_head(samples, meta)]
    if samples.rows:
        parts += [tables.short(samples), *(f"![{name}]({name}.png)" for name in drawn)]
        parts += [tables.latency(samples, cell) for cell in samples.cells]
        parts += [tables.verdicts(samples), tables.occupied(samples), tables.costs(samples)]
        parts += [tables.chunk_costs(samples), tables.traffic(samples, rows), agreement(rows)]
    parts += [tables.errors(samples, broken(rows)), _notes(meta)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(samples: Samples, meta: dict[str, Any]) -> str:
    runs = meta["runs"]
    first, last = runs[0], runs[-1]
    versions = ", ".join(f"{name} {found}" for name, found in last["engine_packages"].items())
    seconds = sum(run.get("seconds", 0) for run in runs)
    fewest, most = samples.rounds
    lines = [
        "# What Countersign adds to a request",
        f"{machine.words(last['machine'])}{'; ' + versions if versions else ''}; {first['began']}, {seconds:.0f} s, "
        f"{_rounds(fewest, most)}.",
        metadata.busy(meta),
    ]
    if fewest < FEWEST_ROUNDS:
        lines.append("**Too few rounds to quote.**")
    elif fewest < ROUGH_ROUNDS:
        lines.append(f"**Only {fewest} rounds of some arms: these figures are rough.**")
    return "\n\n".join(each for each in lines if each)


def _rounds(fewest: int, most: int) -> str:
    return f"{most} rounds" if fewest == most else f"{fewest} to {most} rounds of each arm"


def _notes(meta: dict[str, Any]) -> str:
    what = meta["what"]
    if what["backend"] == "scripted":
        backend = _SCRIPT.format(first=1000 * what["first"], gap=1000 * what["gap"])
    else:
        backend = _REAL.format(model=what["model"])
    return "\n\n".join(["## How to read this", _METHOD, backend, _replay(what), _LIMITS])


def _replay(what: dict[str, Any]) -> str:
    if what["reference"] == "none":
        return (
            "No reference is configured (audit rate 0): a verdict before the end waits for the CPU checks `structure` "
            "and `selection` only."
        )
    where = {"engine": "an engine of the pool's own", "same": "the backend itself, which is honest here"}
    profile = "Without a profile no audited answer passes."
    if what["profile"]:
        profile = f"The profile is {what['profile']}."
    elif what.get("calibrate"):
        profile = f"The profile was made just before, of {what['calibrate']} answers per load of the same backend."
    return (
        f"Replays are done by {where.get(what['reference'], 'a server of its own')}, on this machine and beside the "
        f"backend, which they slow down: that is in the figures. {profile}"
    )


_METHOD = """\
Times are taken at the client's socket, from the moment a request was due: in open loops its intended time, in closed
ones when its connection was open. Every arm is measured in every round, in random order, beside a `direct` of the same
minutes; `relayed only` is a proxy that passes bytes on, asks for no evidence and verifies nothing. A p50 row is the
median over rounds of (arm's median − direct's median) of that round; other quantiles are differences over all requests.
Intervals are 95 %, from drawing whole rounds anew; of five rounds or fewer they come out too narrow. Each further token
is the time from the first token to the last by their number; an event may hold several, and gaps are between events.
Gap rows are taken inside each request first. Tails are told only where there are requests enough for them."""

_SCRIPT = """\
The backend is a script: the first token after {first:g} ms, then one every {gap:g} ms. Asked for evidence it sends
top-20 logprobs and token ids, as vLLM does, otherwise the plain stream; so the figures hold the reading of the larger
frames but not a model's work for them. A script this fast overstates capacity."""

_REAL = """\
The backend is a real server with {model}. Its own work for top-20 logprobs, which `direct` and `relayed only` do not
ask for, is in the figures of the verified arms; so is whatever else it was doing. No arm asks it for them without the
proxy, so that only how busy the proxy was tells the two apart."""

_LIMITS = """\
Client, backend, proxy, workers and Valkey (Unix socket) share this one machine over loopback, without TLS. Not in the
figures: network between machines, webhooks."""
