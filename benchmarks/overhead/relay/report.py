"""Everything that is made of the rows: `rows.csv`, `summary.md` and, with matplotlib, the plots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import metadata as written
from benchmarks.harness.rows import read as read_rows
from benchmarks.harness.rows import write_csv
from benchmarks.harness.statistics import Figure, Rounds, added_median, added_quantile, median, median_of_medians
from benchmarks.overhead.relay.loads import FIRST_SECONDS, LOADS, WARM, Load
from benchmarks.overhead.relay.measure import UNRECORDED, Burst
from policies.errors import CountersignError

LABELS = {"direct": "direct", "proxy": "Countersign", "litellm": "LiteLLM", "floor": "a bare forwarder"}
COMMAND = "countersign bench relay"
ROWS, CSV, SUMMARY = "rows.jsonl", "rows.csv", "summary.md"
_ALL = (LOADS[1], WARM, *(load for streams, load in sorted(LOADS.items()) if streams > 1))
_CHUNK, _REQUEST = "CPU per chunk alone, µs", "CPU per chunk, its request's shared out, µs"


def remake(folder: Path, plots: bool = True) -> str:
    """Write the report of a folder; returns the page. Raises CountersignError."""
    bursts, meta = read(folder), written.read(folder / written.FILE)
    write_csv(folder / CSV, [line for burst in _every(folder) for line in _requests(burst)])
    drawn: list[str] = []
    if plots and bursts:
        from benchmarks.overhead.relay.plots import draw

        drawn = draw(folder, bursts)
    page = text(facts(meta, bursts), bursts, drawn)
    (folder / SUMMARY).write_text(page, encoding="utf-8")
    return page


def read(folder: Path) -> list[Burst]:
    """The bursts of a folder; of such as broke off, those that were not measured since. Raises CountersignError for
    what is none.
    """
    every = _every(folder)
    measured = {burst.key for burst in every if not burst.broken}
    return [burst for burst in every if not burst.broken or burst.key not in measured]


def _every(folder: Path) -> list[Burst]:
    return [Burst(**line) for line in read_rows(folder / ROWS, {"round", "arm", "streams", "errors"})]


def facts(meta: dict[str, Any], bursts: Sequence[Burst]) -> dict[str, Any]:
    """What the page says of the runs, those left aside that did not get as far as measuring. Raises CountersignError
    where none did.
    """
    first, last = meta["runs"][0], next((run for run in reversed(meta["runs"]) if "cores" in run), None)
    if last is None:
        raise CountersignError(f"{written.FILE} says of no run that measured anything")
    return {
        **{name: last[name] for name in ("command", "chunk_bytes", "cores", "versions", "machine")},
        "started": first["began"],
        "seconds": sum(run.get("seconds", 0.0) for run in meta["runs"]),
        "rounds": len({burst.round for burst in bursts}),
        "load_before": max(run["load_before"] for run in meta["runs"]),
        "busy": any(run["busy"] for run in meta["runs"]),
    }


def _requests(burst: Burst) -> list[dict[str, Any]]:
    """One line per request; what a burst alone knows is in each of them."""
    shared = {
        name: getattr(burst, name) for name in ("round", "arm", "streams", "warm", "repeat", "cpu_ms", "resident_mib")
    }
    shared["failed"] = sum(burst.errors.values())
    answered = [{**shared, "first_ms": first, "error": ""} for first in burst.first_ms]
    unanswered = {error: count for error, count in burst.errors.items() if error != UNRECORDED}
    return [
        *answered,
        *({**shared, "first_ms": None, "error": error} for error, count in unanswered.items() for _ in range(count)),
    ]


def text(metadata: dict[str, Any], bursts: Sequence[Burst], drawn: Sequence[str] = ()) -> str:
    """The page, Markdown."""
    arms = [arm for arm in LABELS if any(burst.arm == arm for burst in bursts)]
    loads = [load for load in _ALL if bursts_of(bursts, "direct", load)]
    parts = [_head(metadata), _short(arms, loads, bursts), *(f"![{name}]({name}.png)" for name in drawn)]
    parts += [_at(load, [arm for arm in arms if bursts_of(bursts, arm, load)], bursts) for load in loads]
    parts += [_errors(bursts), _notes(metadata, arms)]
    return "\n\n".join(parts) + "\n"


def _head(metadata: dict[str, Any]) -> str:
    machine = metadata["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in metadata["versions"].items())
    lines = [
        "# What the relay alone adds",
        "",
        f"`{metadata['command']}`, {metadata['started']}, {metadata['seconds']:.0f} s, {metadata['rounds']} rounds.",
        f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, Python {machine['python']}; "
        f"{packages}; commit {str(machine['commit'])[:12]}{' with changes' if machine['modified'] else ''}.",
    ]
    if metadata["busy"]:
        load = f"load {metadata['load_before']:.2f} before the start"
        lines += ["", f"**Busy machine** ({load}): others computed meanwhile. Do not quote these latencies."]
    if metadata["rounds"] < 7:
        lines += ["", "**Too few rounds to quote.**"]
    return "\n".join(lines)


def _short(arms: Sequence[str], loads: Sequence[Load], bursts: Sequence[Burst]) -> str:
    """What most readers want to know."""
    header = ["", "streams", "first token adds, p50 ms", "p99 ms", _CHUNK, _REQUEST, "failed"]
    rows = [header, ["---", *["---:"] * (len(header) - 1)]]
    for arm in arms:
        for load in loads if arm != "direct" else []:
            mine = bursts_of(bursts, arm, load)
            base, added = _firsts(bursts_of(bursts, "direct", load)), _firsts(mine)
            failed = sum(sum(burst.errors.values()) for burst in mine)
            if not mine:
                continue
            rows.append(
                [
                    LABELS[arm],
                    _named(load),
                    _added(base, added, 0.5),
                    _added(base, added, 0.99),
                    _or_none(chunk_cost(mine), 0),
                    _or_none(whole_cost(mine), 0),
                    f"{failed:,} of {sum(burst.requests for burst in mine):,}",
                ]
            )
    return "## In short\n\n" + _table(rows)


def _named(load: Load) -> str:
    if load.warm:
        return f"one each {1000 * load.spacing:g} ms"
    return "1, from idle" if load.streams == 1 else f"{load.streams:,}"


def _titled(load: Load) -> tuple[str, str]:
    """A load's title, and when its requests are due."""
    if load.warm:
        spacing = f"{1000 * load.spacing:g} ms"
        return f"One request each {spacing}", f"one request each {spacing}, {load.streams} in a row"
    if load.streams == 1:
        return "One request at a time, from idle", "each after the one before, everything asleep meanwhile"
    how = f"due at random times within {load.spread:g} s, whether or not earlier ones were answered"
    return f"{load.streams:,} streams at once", how


def _at(load: Load, arms: Sequence[str], bursts: Sequence[Burst]) -> str:
    title, how = _titled(load)
    of = {arm: bursts_of(bursts, arm, load) for arm in arms}
    others = [arm for arm in arms if arm != "direct"]
    header = ["", "direct", *(f"{LABELS[arm]} adds" for arm in others)]
    rows = [header, ["---", *["---:"] * (len(header) - 1)]]
    firsts = {arm: _firsts(of[arm]) for arm in arms}
    gaps = {arm: [_gaps(of[arm], at) for at in range(3)] for arm in arms}
    for name, q in (("first token, p50 ms", 0.5), ("first token, p95 ms", 0.95), ("first token, p99 ms", 0.99)):
        added = [_added(firsts["direct"], firsts[arm], q) for arm in others]
        rows.append([name, _plain(firsts["direct"], q), *added])
    for name, at in (("gap between tokens, p50 ms", 0), ("gap, p99 ms", 1), ("longest gap, ms", 2)):
        added = [_added(gaps["direct"][at], gaps[arm][at], 0.5) for arm in others]
        rows.append([name, _plain(gaps["direct"][at], 0.5), *added])
    for name, cost, digits in _WARM_COSTS if load.warm else _COSTS:
        rows.append([name, "", *(_or_none(cost(of[arm]), digits) for arm in others)])
    rows.append(["whole answers", *(_served(of[arm]) for arm in ["direct", *others])])
    pace = f"{load.tokens} tokens each, one every {1000 * load.interval:g} ms"
    if not load.warm:
        pace += f" ({load.rate:,.0f} chunks/s in all)"
    return f"## {title}\n\n{pace}; {how}.\n\n{_table(rows)}"


def chunk_cost(bursts: Sequence[Burst]) -> Figure | None:
    """Microseconds of CPU that one chunk more costs, while every stream flows and no request begins or ends: median and
    95 % interval over rounds. None where it cannot be told: an arm that is behind has chunks of other times in it, and
    what a request then costs besides would come out below nothing.
    """
    chunk = _flowing(bursts)
    return None if chunk is None or _besides(bursts, chunk).value < 0 else chunk


def _flowing(bursts: Sequence[Burst]) -> Figure | None:
    return _ratio(bursts, lambda burst: 1000 * burst.window_cpu_ms, lambda burst: burst.window_chunks)


def request_cost(bursts: Sequence[Burst]) -> Figure | None:
    """Milliseconds of CPU per request besides its chunks: all of it, less the chunks' at the price of `chunk_cost`."""
    chunk = chunk_cost(bursts)
    return None if chunk is None else _besides(bursts, chunk)


def _besides(bursts: Sequence[Burst], chunk: Figure) -> Figure:
    found = _ratio(bursts, lambda burst: burst.cpu_ms - burst.chunks * chunk.value / 1000, lambda burst: burst.requests)
    assert found is not None
    return found


def each_cost(bursts: Sequence[Burst]) -> Figure | None:
    """Milliseconds of CPU per request, its chunks among them."""
    return _ratio(bursts, lambda burst: burst.cpu_ms, lambda burst: burst.requests)


def whole_cost(bursts: Sequence[Burst]) -> Figure | None:
    """Microseconds of CPU per chunk, all that a request costs shared out among its chunks."""
    return _ratio(bursts, lambda burst: 1000 * burst.cpu_ms, lambda burst: burst.chunks)


def resident(bursts: Sequence[Burst]) -> Figure | None:
    """MiB while every stream flows."""
    found = [burst.resident_mib for burst in bursts if burst.resident_mib]
    return median(found) if found else None


_COSTS: tuple[tuple[str, Callable[[Sequence[Burst]], Figure | None], int], ...] = (
    (_CHUNK, chunk_cost, 0),
    ("CPU per request besides, ms", request_cost, 2),
    (_REQUEST, whole_cost, 0),
    ("memory (RSS), MiB", resident, 0),
)
_WARM_COSTS: tuple[tuple[str, Callable[[Sequence[Burst]], Figure | None], int], ...] = (
    ("CPU per request with its chunks, ms", each_cost, 2),
)


def _ratio(bursts: Sequence[Burst], value: Callable[[Burst], float], count: Callable[[Burst], float]) -> Figure | None:
    rounds: dict[int, list[Burst]] = {}
    for burst in bursts:
        if not burst.broken:
            rounds.setdefault(burst.round, []).append(burst)
    sums = [(sum(map(value, group)), sum(map(count, group))) for group in rounds.values()]
    ratios = [total / counted for total, counted in sums if counted]
    return median(ratios) if ratios else None


def added_first(bursts: Sequence[Burst], arm: str, load: Load) -> Figure | None:
    """Milliseconds that an arm adds to the median first token; None where it has none."""
    base, mine = _firsts(bursts_of(bursts, "direct", load)), _firsts(bursts_of(bursts, arm, load))
    return added_median(base, mine) if base.keys() & mine.keys() else None


def bursts_of(bursts: Iterable[Burst], arm: str, load: Load) -> list[Burst]:
    """The bursts of an arm under a load."""
    return [burst for burst in bursts if (burst.arm, burst.streams, burst.warm) == (arm, load.streams, load.warm)]


def _firsts(bursts: Sequence[Burst]) -> Rounds:
    return _rounds((burst.round, burst.first_ms) for burst in bursts)


def _gaps(bursts: Sequence[Burst], at: int) -> Rounds:
    return _rounds((burst.round, [burst.gaps_ms[at]]) for burst in bursts if burst.gaps_ms)


def _rounds(samples: Iterable[tuple[int, Sequence[float]]]) -> Rounds:
    found: dict[int, list[float]] = {}
    for number, values in samples:
        if values:
            found.setdefault(number, []).extend(values)
    return {number: np.array(values) for number, values in found.items()}


def _plain(base: Rounds, q: float) -> str:
    if not base:
        return "none"
    if q == 0.5:
        return f"{median_of_medians(base).value:.2f}"
    return f"{np.quantile(np.concatenate(list(base.values())), q):.2f}"


def _added(base: Rounds, arm: Rounds, q: float) -> str:
    return _figure(lambda: added_median(base, arm) if q == 0.5 else added_quantile(base, arm, q), base, arm)


def _figure(make: Callable[[], Figure], base: Rounds, arm: Rounds) -> str:
    return make().text() if base.keys() & arm.keys() else "none"


def _or_none(figure: Figure | None, digits: int) -> str:
    return "none" if figure is None else figure.text(digits)


def _served(bursts: Sequence[Burst]) -> str:
    asked = sum(burst.requests for burst in bursts)
    return f"{asked - sum(sum(burst.errors.values()) for burst in bursts):,} of {asked:,}"


def _errors(bursts: Sequence[Burst]) -> str:
    found: Counter[tuple[str, int, str]] = Counter()
    for burst in bursts:
        for error, count in burst.errors.items():
            found[LABELS[burst.arm], burst.streams, error] += count
    lines = [f"{sum(found.values()):,} in {sum(burst.requests for burst in bursts):,} requests."]
    lines += [
        f"* {arm}, {streams:,} streams: {error}, {count:,} times" for (arm, streams, error), count in found.items()
    ]
    return "## Failures\n\n" + "\n".join(lines)


def _notes(metadata: dict[str, Any], arms: Sequence[str]) -> str:
    parts = [_METHOD.format(first=1000 * FIRST_SECONDS, size=metadata["chunk_bytes"]), _places(metadata["cores"])]
    if "floor" in arms:
        parts.append(_FLOOR)
    if "litellm" in arms:
        parts.append(_OTHER)
    return "## How to read this\n\n" + "\n\n".join(parts)


def _places(cores: dict[str, int]) -> str:
    where = ", ".join(f"{name} on core {core}" for name, core in cores.items())
    shared = len(set(cores.values())) < len(cores)
    return f"Pinned: {where}." + (
        " Client, backend and Valkey have no cores of their own here, so a part of what is late in the columns of\n"
        "gateways is theirs; the medians of `direct` bear the same."
        if shared
        else ""
    )


_METHOD = """\
Times are taken at the client's socket, from the moment a request was due, connections being open already. Bursts of
all arms are shuffled inside each round. A p50 is the median over rounds of (arm's median − direct's median) of that
round; other quantiles of the first token are differences over all requests. Intervals are 95 %, from drawing whole
rounds anew. Gaps are quantiles over all tokens of a burst, compared round by round. CPU is what the
kernel counted for the gateway's processes, Redis not included: of a chunk alone between the moment when the last
stream of a burst flows and the one when the first ends, so that no request begins or ends meanwhile; of a request
besides, what is left of the whole; and all of it divided by all chunks.

"From idle": nothing has run for a tenth of a second when a request comes, nor for ten milliseconds when a token does;
so what it takes to wake a core, and what a cold one takes longer, is in those figures. With one request every few
milliseconds nobody sleeps for long, and only a few requests are under way.

The backend is a script: the first token after {first:g} ms. Asked for evidence it sends what vLLM sends, top-20
logprobs and token ids, in chunks of {size:,} bytes on average; otherwise the plain stream, as to `direct`. Countersign
asks for the evidence, hides it from the client, keeps it, and queues its job in Valkey; no worker runs. Clients have a
key, without limits. Loopback, no TLS."""

_FLOOR = """\
The bare forwarder passes bytes between two sockets (asyncio on uvloop) and does nothing else, so it shows what of all
figures is the price of one more process in between. It carries the plain stream, as LiteLLM does."""

_OTHER = """\
LiteLLM's proxy runs with one worker process, retries and cooldowns off, no database, one master key, and passes the
plain stream on: it asks for no evidence, records nothing, and reads chunks a tenth of the size. It has no turn where
requests come faster than it answers one by one, and at 1,000 streams in every third round."""


def _table(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
