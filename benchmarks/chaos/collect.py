"""The witnesses of the ledger, read when all is over: Redis, the backend's log, the proxies' logs."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import orjson
from redis import Redis

from benchmarks.chaos.fleet import Member
from benchmarks.chaos.ledger import Away, Kept, Served
from benchmarks.chaos.upstream import marker_of
from policies import codec, standing
from policies.errors import EvidenceError
from verifier_pool.link.queue import (
    OPEN,
    OUTBOX,
    STANDINGS,
    UNITS_DROPPED,
    evidence_key,
    intent_key,
    standing_key,
    units_key,
    verdict_key,
)

_GONE = "redis does not answer"
_BACK = "redis answers again"


def kept(redis: Redis) -> Kept:
    """What Redis holds."""
    backends = {name.decode().rpartition(":")[0] for name in cast("list[bytes]", redis.hkeys(STANDINGS))}
    units = list(redis.scan_iter(units_key("*"), count=1000))
    return Kept(
        intents=_documents(redis, intent_key("")),
        verdicts=_documents(redis, verdict_key("")),
        waiting=[id.decode() for id in cast("list[bytes]", redis.zrange(OPEN, 0, -1))],
        markers=_markers(redis),
        counted={backend: _counted(redis, backend) for backend in backends},
        unfolded=sum(int(redis.llen(key)) for key in units),
        dropped=sum(int(count) for count in cast("list[bytes]", redis.hvals(UNITS_DROPPED))),
        outbox=[id.decode() for id in cast("list[bytes]", redis.zrange(OUTBOX, 0, -1))],
    )


def served(log: Path) -> list[Served]:
    """The backend's log."""
    over, asked = set(), []
    for line in log.read_bytes().splitlines():
        entry = orjson.loads(line)
        if entry["event"] == "asked":
            asked.append(entry)
        elif entry["complete"]:
            over.add(entry["marker"])
    return [Served(entry["marker"], entry["kind"], entry["at"], entry["marker"] in over) for entry in asked]


def away(proxies: Iterable[Member]) -> list[Away]:
    """When each proxy held Redis for away."""
    found = []
    for member in proxies:
        for log in member.logs:
            since = None
            for entry in _lines(log):
                if entry["message"].startswith(_GONE) and since is None:
                    since = _seconds(entry["time"])
                elif entry["message"].startswith(_BACK) and since is not None:
                    found.append(Away(member.name, since, _seconds(entry["time"])))
                    since = None
            if since is not None:
                found.append(Away(member.name, since, log.stat().st_mtime + 60))
    return found


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    for line in path.read_bytes().splitlines():
        try:
            entry = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(entry, dict) and "message" in entry:
            yield entry


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _documents(redis: Redis, prefix: str) -> dict[str, dict[str, Any]]:
    keys = list(redis.scan_iter(prefix + "*", count=1000))
    values = cast("list[bytes | None]", redis.mget(keys)) if keys else []
    pairs = zip(keys, values, strict=True)
    return {key.decode()[len(prefix) :]: orjson.loads(value) for key, value in pairs if value is not None}


def _markers(redis: Redis) -> dict[str, int]:
    prefix, found = evidence_key(""), {}
    for key in redis.scan_iter(prefix + "*", count=1000):
        packed = cast("bytes | None", redis.get(key))
        if packed is None:
            continue
        try:
            choices = codec.unpack(packed)
        except EvidenceError:
            continue
        found[key.decode()[len(prefix) :]] = marker_of(choices[0].request) if choices else -1
    return found


def _counted(redis: Redis, backend: str) -> int:
    stored = cast("dict[bytes, bytes]", redis.hgetall(standing_key(backend)))
    records = [standing.unpack(value) for name, value in stored.items() if name != b"version"]
    return sum(record.coverage.generations for record in records)
