"""The result as lines and as a page; the page is made of the lines alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from benchmarks.leaks.stage import BACKENDS, EXPIRE_SECONDS, REDIS_AWAY_SECONDS, Outcome

WARM_SHARE = 0.25
"""Of the run, in which memory still finds its level."""
LEAST_SECONDS = 90.0
"""After that, without which there is no telling a level from a slope."""
SLOPE_LIMIT = 1.0
"""MiB a minute of growth, after that, beyond which memory counts as leaking."""
MIB = 2**20

Line = Mapping[str, Any]


def write(outcome: Outcome, metadata: Mapping[str, Any], stem: Path) -> str:
    """Write `stem` with `.jsonl` and `.md`; returns the page."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    first, *others = outcome.lines()
    lines = [{"metadata": metadata} | first, *others]
    stem.with_suffix(".jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    return render(stem)


def render(stem: Path) -> str:
    """Make the page again from its lines; returns it."""
    page = text([orjson.loads(line) for line in stem.with_suffix(".jsonl").read_bytes().splitlines()])
    stem.with_suffix(".md").write_text(page)
    return page


def leaks(lines: Sequence[Line]) -> list[str]:
    """What is left over that should not be, in words."""
    first = lines[0]
    before, after = first["before"], first["after"]
    found = [f"{after[name]} requests {word}" for name, word in _GAUGES.items() if after[name]]
    if first["settled"] is None:
        found.append("something was still in flight when patience ended")
    for name, count in after["tasks"].items():
        if count > before["tasks"].get(name, 0):
            found.append(f"{count - before['tasks'].get(name, 0)} tasks `{name}`")
    for name in ("client", "file", "local"):
        if (more := after["handles"].get(name, 0) - before["handles"].get(name, 0)) > 0:
            found.append(f"{more} handles of kind {name}")
    if (more := after["handles"].get("backend", 0) - BACKENDS) > 0:
        found.append(f"{more} connections to backends, beyond one of each for its probes")
    if dead := after["handles"].get("dead", 0):
        found.append(f"{dead} connections that the other side closed")
    if first["tally"]["endless"]:
        found.append(f"{sum(first['tally']['endless'].values())} requests without an end in 30 s")
    found += [f"keys `{key['name']}` without a time to live" for key in _keys(lines) if not key["why"]]
    if (growth := slope(lines)) is not None and growth > SLOPE_LIMIT:
        found.append(f"memory, {growth:.2f} MiB a minute")
    return found


def slope(lines: Sequence[Line]) -> float | None:
    """Growth of the proxy's memory after warm-up, MiB a minute (least squares); None of too few samples."""
    samples = _samples(lines)
    late = [sample for sample in samples if sample["at"] >= WARM_SHARE * samples[-1]["at"]] if samples else []
    if len(late) < 8 or late[-1]["at"] - late[0]["at"] < LEAST_SECONDS:
        return None
    at = np.array([sample["at"] for sample in late]) / 60
    return float(np.polyfit(at, [sample["rss"] / MIB for sample in late], 1)[0])


def text(lines: Sequence[Line]) -> str:
    """The page, Markdown."""
    first = lines[0]
    metadata, scene, tally = first["metadata"], first["scene"], first["tally"]
    machine = metadata["machine"]
    found = leaks(lines)
    verdict = "Nothing is left over." if not found else "**Left over**: " + "; ".join(found) + "."
    rate = tally["sent"] / first["seconds"]
    parts = [
        "# What is left when everybody has gone",
        f"`{metadata['command']}`, {metadata['started']}, {machine['cpu']}, {machine['cores']} cores, "
        f"commit {str(machine['commit'])[:12]}{' with changes' if machine['modified'] else ''}.",
        verdict,
        f"{scene['clients']} clients sent {tally['sent']:,} requests in {first['seconds']:.0f} s ({rate:.0f} a second; "
        "client, backend, proxy, worker and Redis on one machine), of which the proxy counts "
        f"{first['counted']:,.0f} as relayed: not those with a wrong key, for verdicts, or cut short before their end. "
        f"Redis was killed {first['deaths']} times and came back after {REDIS_AWAY_SECONDS:g} s.",
        _table("how clients went", tally["ways"]),
        _table("what the backend did", tally["acts"]),
        _table("how it ended", tally["outcomes"]),
        _held(lines),
        _memory(lines),
        _rows(lines),
    ]
    return "\n\n".join(parts) + "\n"


_GAUGES = {"in_flight": "in flight", "outstanding": "outstanding at backends"}


def _held(lines: Sequence[Line]) -> str:
    first = lines[0]
    before, after = first["before"], first["after"]
    samples = _samples(lines)
    rows = []
    for name, read in _COUNTS.items():
        most = max((read(sample) for sample in samples), default=0)
        rows.append(f"| {name} | {read(before)} | {most} | {read(after)} |")
    tasks = ", ".join(f"`{name}` {count}" for name, count in sorted(after["tasks"].items()))
    return (
        "## Held by the proxy\n\n| | before | most | after |\n|---|---:|---:|---:|\n"
        + "\n".join(rows)
        + f"\n\nTasks in the end: {tasks}."
    )


def _handles(name: str) -> Any:
    return lambda sample: sample["handles"].get(name, 0)


_COUNTS: Mapping[str, Any] = {
    "tasks": lambda sample: sum(sample["tasks"].values()),
    "requests in flight": lambda sample: sample["in_flight"],
    "outstanding at backends": lambda sample: sample["outstanding"],
    "connections of clients": _handles("client"),
    "connections to backends": _handles("backend"),
    "connections to Redis": _handles("redis"),
    "those that Redis closed, until they are used next": _handles("redis, closed"),
    "other connections that the other side closed": _handles("dead"),
    "other handles": lambda sample: sum(sample["handles"].get(name, 0) for name in ("file", "local", "listening")),
}


def _memory(lines: Sequence[Line]) -> str:
    first = lines[0]
    growth, samples = slope(lines), _samples(lines)
    most = max((sample["rss"] for sample in samples), default=0)
    trend = "too few samples for a slope" if growth is None else f"{round(growth, 2) + 0.0:+.2f} MiB a minute"
    said = [
        f"Resident memory: {first['before']['rss'] / MIB:.0f} MiB before, {most / MIB:.0f} MiB at most, "
        f"{first['after']['rss'] / MIB:.0f} MiB after; from the first quarter on {trend}."
    ]
    if grown := first["grown"]:
        said.append(
            f"Python's own memory, traced over {first['scene']['trace'] / 2:.0f} s more of the same traffic after as "
            f"much of it: {grown['total'] / 1024:+.0f} KiB. The most:\n\n| at | KiB | objects |\n|---|---:|---:|\n"
            + "\n".join(f"| {row['at']} | {row['bytes'] / 1024:.1f} | {row['objects']} |" for row in grown["most"][:8])
        )
    return "## Memory\n\n" + "\n\n".join(said)


def _rows(lines: Sequence[Line]) -> str:
    said = (
        f"Every key was looked at {EXPIRE_SECONDS} s and more after the end. {lines[0]['expiring']:,} had a time to "
        "live; these had none:"
    )
    rows = [
        f"| `{key['name']}` | {key['kind']} | {key['keys']} | {key['entries']} | {key['why'] or '**nothing**'} |"
        for key in _keys(lines)
    ]
    head = "| key | kind | keys | entries | bounded by |\n|---|---|---:|---:|---|"
    return "## Redis\n\n" + said + "\n\n" + "\n".join([head, *rows])


def _table(name: str, counts: Mapping[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return f"| {name} | times |\n|---|---:|\n" + "\n".join(f"| {key} | {count:,} |" for key, count in ordered)


def _keys(lines: Sequence[Line]) -> list[dict[str, Any]]:
    return [line["key"] for line in lines if "key" in line]


def _samples(lines: Sequence[Line]) -> list[dict[str, Any]]:
    return [line["sample"] for line in lines if "sample" in line]
