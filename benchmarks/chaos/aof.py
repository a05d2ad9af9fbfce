"""Every write that Valkey kept, read back from its append-only file: how often a verdict was written, and a unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from benchmarks.chaos.valkey import APPENDED
from verifier_pool.link.queue import OUTBOX, evidence_key, intent_key, units_key, verdict_key


@dataclass
class Writes:
    """How often what was written, by id."""

    intents: Counter[str] = field(default_factory=Counter)
    evidence: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[str] = field(default_factory=Counter)
    units: Counter[str] = field(default_factory=Counter)
    outbox: Counter[str] = field(default_factory=Counter)


def writes(folder: Path) -> Writes:
    """What the file in a Valkey's folder holds."""
    found = Writes()
    prefixes = [
        (intent_key("").encode(), found.intents),
        (evidence_key("").encode(), found.evidence),
        (verdict_key("").encode(), found.verdicts),
    ]
    units, outbox = units_key("").encode(), OUTBOX.encode()
    for path in sorted((folder / APPENDED).glob("*.incr.aof"), key=lambda path: int(path.name.split(".")[-3])):
        for command in commands(path.read_bytes()):
            name, key = command[0].upper(), command[1] if len(command) > 1 else b""
            if name == b"SET":
                for prefix, counts in prefixes:
                    if key.startswith(prefix):
                        counts[key[len(prefix) :].decode()] += 1
            elif name == b"RPUSH" and key.startswith(units):
                found.units.update(str(orjson.loads(unit)["id"]) for unit in command[2:])
            elif name == b"ZADD" and key == outbox:
                found.outbox[command[-1].decode()] += 1
    return found


def commands(data: bytes) -> Iterator[list[bytes]]:
    """The commands of an append-only file in order; one cut short at the end, and annotations, are left out."""
    at = 0
    while at < len(data):
        end = data.find(b"\r\n", at)
        if end < 0:
            return
        if data[at : at + 1] == b"#":
            at = end + 2
            continue
        if data[at : at + 1] != b"*":
            raise ValueError(f"no command at byte {at}")
        command, after = [], end + 2
        for _ in range(int(data[at + 1 : end])):
            end = data.find(b"\r\n", after)
            if end < 0:
                return
            size = int(data[after + 1 : end])
            if len(data) < end + 4 + size:
                return
            command.append(data[end + 2 : end + 2 + size])
            after = end + 4 + size
        at = after
        yield command
