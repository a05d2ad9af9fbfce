"""Records of standing in Redis: units folded into them, overrides, events. Any number of processes may do it at once.

A fold reads a backend's records and the first of its units at one moment, computes, and writes everything back in one
step (`scripts.STORE_STANDING`) that does nothing when somebody wrote in between; then it is made again. So a unit is
counted once, or is still in the list, whatever dies when.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import cast

import msgspec
import orjson
from redis import Redis

from policies import standing
from policies.settings import AuditSettings, Settings, StandingSettings
from policies.standing import Folded, Record
from policies.unit import Unit, declaration_name, declaration_of
from verifier_pool import declarations
from verifier_pool.link import durable, trail
from verifier_pool.link.queue import (
    KINDS,
    STANDINGS,
    UNFOLDED,
    declaration_key,
    seen_key,
    standing_field,
    standing_key,
    tally_key,
    units_key,
    waiting_key,
)
from verifier_pool.link.scripts import STORE_STANDING, store_standing

logger = logging.getLogger(__name__)

BATCH = 256
"""Units folded in one step."""
TRIES = 20

_VERSION = b"version"


class Contended(Exception):
    """Others kept writing the same backend's records; nothing was done."""


@dataclass(frozen=True, slots=True)
class _Found:
    """What Redis held of one backend at one moment. `changes` says by runtime what contradicts it."""

    backend: str
    version: bytes
    records: dict[str, Record]
    units: list[bytes]
    changes: dict[str, str]
    marked: bool


@dataclass(frozen=True, slots=True)
class _Made:
    """What is to become of it. `taken` units are done with, `unread` of them could not be counted; the audit log gets
    the `entry`."""

    records: dict[str, Record]
    taken: int = 0
    unread: int = 0
    remember: list[str] = field(default_factory=list)
    entry: str = ""


class Standings:
    """The records of all backends. Redis's own errors pass through.

    A record that cannot be read raises msgspec.DecodeError: nothing is put in its place.
    """

    def __init__(self, redis: Redis, settings: Settings) -> None:
        self._redis = redis
        self._settings = settings
        self._script = redis.register_script(STORE_STANDING)

    def records(self, backend: str) -> dict[str, Record]:
        """A backend's records by name of their declaration."""
        return _unpacked(cast("dict[bytes, bytes]", self._redis.hgetall(standing_key(backend))))

    def backends(self) -> list[str]:
        """Backends that have a record, those that the settings no longer name among them."""
        fields = cast("list[bytes]", self._redis.hkeys(STANDINGS))
        return sorted({name.decode().rpartition(":")[0] for name in fields})

    def fold(self, backend: str, seconds: float = 2.0) -> int:
        """Count what waits in the backend's list; returns how many units that was.

        Begins no further step after `seconds`; a step takes some ten milliseconds. What is left is anybody's.
        """
        deadline = time.monotonic() + seconds
        total = folded = self._fold(backend, deadline)
        while folded == BATCH and time.monotonic() <= deadline:
            folded = self._fold(backend, deadline)
            total += folded
        return total

    def fold_left(self, seconds: float = 2.0) -> int:
        """Count what others left behind: the proxies, and workers that died. Returns how many units that was.

        Begins no further step after `seconds`. What goes wrong with one backend is logged and keeps none of the others
        waiting.
        """
        deadline, total = time.monotonic() + seconds, 0
        backends = sorted(name.decode() for name in cast("set[bytes]", self._redis.smembers(UNFOLDED)))
        random.shuffle(backends)
        for backend in backends:
            if time.monotonic() > deadline:
                break
            try:
                total += self.fold(backend, deadline - time.monotonic())
            except ValueError as error:
                logger.error("the standing of backend %s cannot be kept: %s", backend, type(error).__name__)
        return total

    def override(self, backend: str, action: str, *, by: str, why: str, actor: str = "") -> Record:
        """Do what the operator decided about a backend as it is declared now, durably; returns its record.

        Units that wait are counted first, so that a pardon leaves them behind.

        Args:
            action: one of `policies.standing.ACTIONS`.
            by, why: the operator's name and reason, for the audit trail.
            actor: see `trail.entry`: the audit log has it in the same step. Without one it is not told.

        Raises:
            KeyError: the settings name no such backend.
            ValueError: the action makes no sense now, or says not by whom and why.
            Contended: see there.
            NotDurable: it was done, and Redis may lose it in a crash.
        """
        declaration, rules = declaration_of(self._settings.backend(backend)), self._settings.standing_of(backend)
        self.fold(backend, math.inf)
        for found in self._tries(backend):
            now = time.time()
            after = standing.decided(found.records, backend, declaration, action, by=by, why=why, now=now, rules=rules)
            before = found.records.get(after.name)
            state = None if before is None else before.state
            said = trail.decision(actor, action, backend, state, after.state, why) if actor else ""
            try:
                if self._commit(found, _Made({after.name: after}, entry=said), now, durably=True):
                    return after
            except durable.NotDurable as error:
                raise durable.NotDurable(f"{trail.MAYBE_LOST} ({error})") from error
        raise Contended(backend)

    def _fold(self, backend: str, deadline: float) -> int:
        for found in self._tries(backend):
            now = time.time()
            made = self._folded(found, now)
            if not (made.taken or made.records or found.marked):
                return 0
            if self._commit(found, made, now):
                return made.taken
            if time.monotonic() > deadline:
                break
        logger.info("others are folding the units of backend %s", backend)
        return 0

    def _tries(self, backend: str) -> Iterator[_Found]:
        for attempt in range(TRIES):
            yield self._read(backend)
            time.sleep(random.random() * 0.002 * (attempt + 1))

    def _read(self, backend: str) -> _Found:
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.hgetall(standing_key(backend))
        pipeline.lrange(units_key(backend), 0, BATCH - 1)
        pipeline.hgetall(declaration_key(backend))
        pipeline.sismember(UNFOLDED, backend)
        stored, units, contradicted, marked = pipeline.execute()
        entries = declarations.parsed(contradicted).items()
        changes = {runtime: declarations.in_words(entry) for runtime, entry in entries}
        return _Found(backend, stored.get(_VERSION, b"0"), _unpacked(stored), units, changes, bool(marked))

    def _folded(self, found: _Found, now: float) -> _Made:
        """Count the units, and note what contradicts declarations; the records that changed come back."""
        units = [unit for unit in (_decoded(data, found.backend) for data in found.units) if unit is not None]
        unread = len(found.units) - len(units)
        seen, records = self._seen(found.backend, units), dict(found.records)
        remember = sorted(seen)
        for name, group in _by_declaration(units).items():
            record = records.get(name)
            if record is None:
                number = standing.next_number(records.values())
                record = standing.new(found.backend, group[0].declaration, number, group[0].at)
            record = standing.resumed(record, records.values())
            folded, lost = _counted(record, group, seen, self._settings.standing_of(found.backend))
            records[name], unread = folded.record, unread + lost
            remember += folded.remember
            seen |= set(folded.remember)
        for name, record in records.items():
            # Said now, so that its first answers are audited in full already, should it be declared again.
            record = standing.resumed(record, records.values())
            change = found.changes.get(record.declaration.get("runtime", ""))
            records[name] = standing.note_change(record, change, now, self._settings.standing_of(found.backend))
        changed = {name: record for name, record in records.items() if record is not found.records.get(name)}
        return _Made(changed, len(found.units), unread, remember)

    def _seen(self, backend: str, units: Sequence[Unit]) -> set[str]:
        names = list(dict.fromkeys(standing.names(units)))
        if not names:
            return set()
        pipeline = self._redis.pipeline(transaction=False)
        for name in names:
            pipeline.zscore(seen_key(backend, name), name)
        return {name for name, score in zip(names, pipeline.execute(), strict=True) if score is not None}

    def _commit(self, found: _Found, made: _Made, now: float, *, durably: bool = False) -> bool:
        """Write back, unless somebody else wrote since `found` was read; events go to the outbox with it. What a person
        decided is written `durably`; what units say would be counted again."""
        keys, arguments, happened = store_standing(
            found.backend,
            found.version,
            found.records,
            made.records,
            self._settings,
            now,
            taken=made.taken,
            unread=made.unread,
            remember=made.remember,
            entry=made.entry,
        )
        if durably:
            done = durable.evaluate(self._redis, self._settings.durability, STORE_STANDING, keys, arguments)
        else:
            done = self._script(keys=keys, args=arguments)
        if not done:
            return False
        if made.unread:
            logger.error("%d units of backend %s could not be read and are dropped", made.unread, found.backend)
        for event in happened:
            level = logging.INFO if event.data["state"] in (standing.TRIAL, standing.TRUSTED) else logging.WARNING
            logger.log(level, "%s: backend %s is %s", event.type, found.backend, event.data["state"])
        return True


def forget(redis: Redis, backend: str) -> None:
    """Remove everything of a backend that was made for a test. Of a real one nothing may be: its lives are counted."""
    names = [name for name in cast("list[bytes]", redis.hkeys(STANDINGS)) if name.decode().startswith(f"{backend}:")]
    pipeline = redis.pipeline(transaction=True)
    pipeline.delete(standing_key(backend), units_key(backend), declaration_key(backend), waiting_key(backend))
    pipeline.delete(tally_key(backend))
    pipeline.delete(*(seen_key(backend, kind) for kind in KINDS))
    pipeline.srem(UNFOLDED, backend)
    if names:
        pipeline.hdel(STANDINGS, *names)
    pipeline.execute()


def audit_rate(redis: Redis, rules: AuditSettings, backend: str, declaration: Mapping[str, str]) -> float:
    """Share of a backend's generations to audit, from its standing so far; everything while nothing is known of it."""
    if rules.rate is not None:
        return rules.rate
    stored = cast("bytes | None", redis.hget(STANDINGS, standing_field(backend, declaration_name(declaration))))
    try:
        return max(rules.floor, float(orjson.loads(stored or b"{}").get("audit_rate", 1.0)))
    except (ValueError, TypeError, AttributeError):
        return 1.0


def _counted(
    record: Record, units: Sequence[Unit], seen: AbstractSet[str], rules: StandingSettings
) -> tuple[Folded, int]:
    """The record with these units, and how many of them it cannot hold. One such spoils no other."""
    try:
        return standing.fold(record, units, seen, rules), 0
    except ValueError:
        if len(units) == 1:
            return Folded(record), 1
    first, lost = _counted(record, units[: len(units) // 2], seen, rules)
    second, more = _counted(first.record, units[len(units) // 2 :], seen | set(first.remember), rules)
    return Folded(second.record, first.remember + second.remember), lost + more


def _by_declaration(units: Sequence[Unit]) -> dict[str, list[Unit]]:
    found: dict[str, list[Unit]] = {}
    for unit in units:
        found.setdefault(declaration_name(unit.declaration), []).append(unit)
    return found


def _decoded(data: bytes, backend: str) -> Unit | None:
    try:
        unit = msgspec.json.decode(data, type=Unit)
    except msgspec.DecodeError:
        return None
    return unit if unit.backend == backend else None


def _unpacked(stored: Mapping[bytes, bytes]) -> dict[str, Record]:
    return {name.decode(): standing.unpack(value) for name, value in stored.items() if name != _VERSION}
