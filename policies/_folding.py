"""The next record from a record and the units that came since."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

import msgspec

from policies import _corroboration, coverage, eprocess
from policies.eprocess import Floats
from policies.record import (
    HALF_LIFE,
    LAST_ACCUSING,
    MOST_POINTS,
    WINDOW,
    Accusation,
    Accusing,
    Coverage,
    Heard,
    Left,
    Record,
)
from policies.settings import StandingSettings
from policies.unit import EARLIER_LIFE, EXACT, KEY_SHARE, REPEATED, REPLAYED, Unit

_DAY = 86400
_FORGETS = 0.5 ** (1 / HALF_LIFE)
_MOST_REASONS = 64
_MOST_KEYS = 1024


class Fold:
    """Takes units one by one; `record` is where it stands, `remember` what the backend's memory has to learn."""

    def __init__(self, record: Record, seen: AbstractSet[str], rules: StandingSettings) -> None:
        self.record = record
        self.remember: list[str] = []
        self._seen = set(seen)
        self._rules = rules
        self._m, self._r = record.m, record.r

    def take(self, units: Iterable[Unit]) -> None:
        """Count units, in the order of their verdicts."""
        for unit in units:
            if unit.served < self.record.pardoned_at:
                self._leave_out(EARLIER_LIFE)
                continue
            self.record = msgspec.structs.replace(self.record, coverage=_covered(self.record.coverage, unit))
            if not unit.outcomes:
                continue
            outside = unit.outside or self._outside(unit)
            if outside:
                self._leave_out(outside)
            else:
                self._count(unit)
        self.record = msgspec.structs.replace(
            self.record,
            log_m=tuple(self._m.ravel().tolist()),
            log_r=tuple(self._r.ravel().tolist()),
        )

    def _leave_out(self, why: str) -> None:
        counts = {**self.record.outside, why: self.record.outside.get(why, 0) + 1}
        self.record = msgspec.structs.replace(self.record, outside=counts)

    def _outside(self, unit: Unit) -> str:
        """Why a unit may not speak, from the past and its secret draw; notes that its key was heard."""
        if unit_name(unit) in self._seen:
            return REPEATED
        record = self.record
        day = max(int(unit.at // _DAY), record.day)
        keys, total = (record.day_keys, record.day_total) if day == record.day else ({}, 0)
        own = keys.get(unit.key, 0)
        if own or len(keys) < _MOST_KEYS:
            keys = {**keys, unit.key: own + 1}
        self.record = msgspec.structs.replace(record, day=day, day_total=total + 1, day_keys=keys)
        may = unit.operator or unit.draw < key_chance(own, total - own, self._rules)
        return "" if may else KEY_SHARE

    def _count(self, unit: Unit) -> None:
        record, rules = self.record, self._rules
        everything = eprocess.steps(*eprocess.null_means(unit.outcomes, rules.fault_rate))
        # What failed once on a prompt may be the prompt's doing, and would be again: it has spoken. It still worries.
        spoken = {name: found for name, found in unit.outcomes.items() if _failed(unit, name) not in self._seen}
        new = eprocess.steps(*eprocess.null_means(spoken, rules.fault_rate))
        n = record.n + 1
        self._m, _ = eprocess.advance(self._m, self._r, new, n)
        _, self._r = eprocess.advance(self._m, self._r, everything, n)
        replayed = {name: found for name, found in spoken.items() if name in REPLAYED}
        self._learn([unit_name(unit), *(_failed(unit, name) for name, (x, _) in spoken.items() if x > 0)])
        failed = tuple(name for name, (value, _) in unit.outcomes.items() if value > 0)
        heard, accusing = record.heard, record.accusing
        if replayed:
            heard = (*heard, Heard(n, unit.key, unit.operator, replayed))[-WINDOW:]
        if failed:
            accusing = (*accusing, Accusing(unit.id, unit.at, failed))[-LAST_ACCUSING:]
        evidence = float(eprocess.log_evidence(self._m))
        self.record = msgspec.structs.replace(
            record,
            n=n,
            heard=heard,
            accusing=accusing,
            withheld=record.withheld + int(unit.outcomes.get("withheld", (0.0, 0.0))[0] > 0),
            asked=record.asked + int("withheld" in unit.outcomes),
            profiles={**record.profiles, unit.profile: unit.delta} if replayed and unit.profile else record.profiles,
            chart=_charted(record.chart, n, evidence / math.log(10)),
        )
        self._accuse(unit.at, evidence)

    def _learn(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self._seen:
                self._seen.add(name)
                self.remember.append(name)

    def _accuse(self, at: float, evidence: float) -> None:
        record = self.record
        if record.accused is not None or evidence < needed(record.number, self._rules.alpha):
            return
        found = accusation(record, self._m, at, self._rules)
        if found is not None:
            self.record = msgspec.structs.replace(record, accused=found)


def key_chance(own: int, others: int, rules: StandingSettings) -> float:
    """Chance that a unit of a client key is counted, after `own` of its units and `others` of other keys that day.

    Certain within the allowance. Beyond it such that the key makes up `key_share` of what is counted, so that a friend
    of the backend, served well, cannot drown what it does to others. Where there are too few others for that, the
    chance falls as allowance/own: what is counted then grows with the logarithm of the key's traffic, and never stops.
    """
    if own < rules.key_allowance or rules.key_share == 1:
        return 1.0
    even = rules.key_share / (1 - rules.key_share) * others / own
    return min(1.0, max(even, rules.key_allowance / own))


def budget(number: int, alpha: float) -> float:
    """α_k of a backend's k-th life, α/(k(k+1)): all lives together spend at most α."""
    return alpha / (number * (number + 1))


def needed(number: int, alpha: float) -> float:
    """Logarithm of the evidence that accuses in the k-th life."""
    return -math.log(budget(number, alpha))


def level(record: Record, alpha: float, basis: str) -> float:
    """Bound on the probability that an honest backend is accused: α_k, plus the δ of profiles where they took part."""
    errors = sum(record.profiles.values()) if basis == "replayed" else 0.0
    return min(1.0, budget(record.number, alpha) + errors)


def accusation(record: Record, log_m: Floats, at: float, rules: StandingSettings) -> Accusation | None:
    """The accusation that the evidence carries, if it does: by exact checks alone, or corroborated."""
    enough = needed(record.number, rules.alpha)
    exact = float(eprocess.log_evidence(log_m, EXACT))
    if exact >= enough:
        return _accusation(record, at, "exact", exact, rules)
    found = _corroboration.log_evidence(record.heard, exact, rules.fault_rate, enough)
    return _accusation(record, at, "replayed", found, rules) if found >= enough else None


def _accusation(record: Record, at: float, basis: str, evidence: float, rules: StandingSettings) -> Accusation:
    return Accusation(at, record.n, basis, evidence / math.log(10), level(record, rules.alpha, basis))


def unit_name(unit: Unit) -> str:
    """Under which name the backend's memory knows the unit."""
    return f"u:{unit.unit}"


def prompt_names(unit: Unit) -> tuple[str, str]:
    """Under which names it knows a prompt that failed: an exact check, or one that speaks of a replay."""
    return f"px:{unit.prompt}", f"pr:{unit.prompt}"


def _failed(unit: Unit, process: str) -> str:
    exact, replayed = prompt_names(unit)
    return exact if process in EXACT else replayed


def _covered(known: Coverage, unit: Unit) -> Coverage:
    decided = not unit.undecided
    left = known.left
    if not decided:
        code = unit.undecided if unit.undecided in left or len(left) < _MOST_REASONS else "other"
        before = left.get(code, Left(0, 0, unit.blame))
        left = {**left, code: Left(before.generations + 1, before.tokens + unit.tokens, unit.blame)}
    excused = not decided and unit.blame != coverage.BACKEND
    return Coverage(
        generations=known.generations + 1,
        tokens=known.tokens + unit.tokens,
        decided=known.decided + decided,
        decided_tokens=known.decided_tokens + (unit.tokens if decided else 0),
        audited=known.audited + unit.audited,
        replayed=known.replayed + unit.replayed,
        left=left,
        recent_served=known.recent_served * _FORGETS + unit.tokens,
        recent_decided=known.recent_decided * _FORGETS + (unit.tokens if decided else 0),
        recent_excused=known.recent_excused * _FORGETS + (unit.tokens if excused else 0),
    )


def _charted(chart: tuple[tuple[int, float], ...], n: int, log10: float) -> tuple[tuple[int, float], ...]:
    """The chart with one more point; when it is full, every second of the older half goes."""
    if len(chart) >= MOST_POINTS:
        half = len(chart) // 2
        chart = (*chart[:half:2], *chart[half:])
    return (*chart, (n, round(log10, 3)))
