"""The next record from a record and the units that came since."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from heapq import nlargest

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
    Earned,
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
FRIENDS = 2
"""Client keys that may be with the backend."""
ATTENTION = 8
"""Units of a key that count for certain after one that spoke against the backend. A friend who buys them with such a
one speaks against it in one of nine."""
_OTHERS = "others"
"""Stands for the client keys of a day beyond the first `_MOST_KEYS`, which have one allowance together."""
EXACT_BASIS = "exact"
REPLAYED_BASIS = "replayed"


class Fold:
    """Takes units one by one; `record` is where it stands, `remember` what the backend's memory has to learn."""

    def __init__(self, record: Record, seen: AbstractSet[str], rules: StandingSettings) -> None:
        self.record = record
        self.remember: list[str] = []
        self._seen = set(seen)
        self._rules = rules
        self._m, self._r = record.m, record.r

    def take(self, units: Iterable[Unit]) -> None:
        """Count units, in the order of their verdicts.

        What exact checks say is compared with what accuses after every unit, what needs corroboration at the end.
        """
        last = None
        for unit in units:
            if unit.served < self.record.pardoned_at:
                self._leave_out(EARLIER_LIFE)
                continue
            outside = unit.outside or (self._outside(unit) if unit.outcomes else "")
            self._cover(unit, outside)
            if outside:
                self._leave_out(outside)
            elif unit.outcomes and self._count(unit):
                last = unit.at
        if last is not None:
            self._accuse(last)
        self.record = msgspec.structs.replace(
            self.record,
            log_m=tuple(self._m.ravel().tolist()),
            log_r=tuple(self._r.ravel().tolist()),
        )

    def _cover(self, unit: Unit, outside: str) -> None:
        self.record = msgspec.structs.replace(
            self.record,
            coverage=_covered(self.record.coverage, unit),
            earned=self.record.earned if outside == REPEATED else _earned(self.record.earned, unit, outside),
        )

    def _leave_out(self, why: str) -> None:
        counts = {**self.record.outside, why: self.record.outside.get(why, 0) + 1}
        self.record = msgspec.structs.replace(self.record, outside=counts)

    def _outside(self, unit: Unit) -> str:
        """Why a unit may not speak, from the past and its secret draw; notes that its key was heard."""
        if unit_name(unit) in self._seen:
            return REPEATED
        record, day = self.record, int(unit.at // _DAY)
        # An earlier day is a verdict of the last minutes before midnight; much earlier, and a clock was wrong before.
        same = day in (record.day, record.day - 1)
        heard, counted = (record.day_heard, record.day_keys) if same else ({}, {})
        against = record.day_against if same else {}
        key = unit.key if unit.key in heard or len(heard) < _MOST_KEYS else _OTHERS
        own = heard.get(key, 0)
        # Whose answers spoke against the backend is heard in full for a while: thinned out are those it serves well.
        may = unit.operator or own < against.get(key, 0) or unit.draw < key_chance(own, counted, self._rules)
        if any(x > 0 for x, _ in unit.outcomes.values()):
            against = {**against, key: own + 1 + ATTENTION}
        self.record = msgspec.structs.replace(
            record,
            day=record.day if same else day,
            day_heard={**heard, key: own + 1},
            day_keys={**counted, key: counted.get(key, 0) + may},
            day_against=against,
        )
        return "" if may else KEY_SHARE

    def _count(self, unit: Unit) -> bool:
        """Let a unit speak; whether it speaks against the backend."""
        record, rules = self.record, self._rules
        everything = eprocess.steps(*eprocess.null_means(unit.outcomes, rules.fault_rate))
        # What failed once on a prompt may be the prompt's doing, and would be again: it has spoken. It still worries.
        spoken = {name: found for name, found in unit.outcomes.items() if _failed(unit, name) not in self._seen}
        new = everything
        if len(spoken) < len(unit.outcomes):
            new = eprocess.steps(*eprocess.null_means(spoken, rules.fault_rate))
        n = record.n + 1
        self._m, self._r = eprocess.advance(self._m, new, n), eprocess.worry(self._r, everything)
        replayed = {name: found for name, found in spoken.items() if name in REPLAYED}
        against = [name for name, (x, _) in spoken.items() if x > 0]
        self._learn([unit_name(unit), *(_failed(unit, name) for name in against)])
        failed = tuple(name for name, (value, _) in unit.outcomes.items() if value > 0)
        heard, accusing = record.heard, record.accusing
        if replayed:
            heard = (*heard, Heard(n, unit.key, unit.operator, replayed))[-WINDOW:]
        if failed:
            accusing = (*accusing, Accusing(unit.id, unit.at, failed))[-LAST_ACCUSING:]
        self.record = msgspec.structs.replace(
            record,
            n=n,
            heard=heard,
            accusing=accusing,
            profiles={**record.profiles, unit.profile: unit.delta} if replayed and unit.profile else record.profiles,
            chart=_charted(record.chart, n, float(eprocess.log_evidence(self._m)) / math.log(10)),
        )
        if any(name in EXACT for name in against):
            self._accuse(unit.at, EXACT_BASIS)
        return bool(against)

    def _learn(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self._seen:
                self._seen.add(name)
                self.remember.append(name)

    def _accuse(self, at: float, basis: str = REPLAYED_BASIS) -> None:
        if self.record.accused is None:
            found = accusation(self.record, self._m, at, self._rules, basis)
            self.record = msgspec.structs.replace(self.record, accused=found)


def key_chance(own: int, counted: Mapping[str, int], rules: StandingSettings) -> float:
    """Chance that a unit of a client key is counted, after `own` of its units that day.

    Certain within the allowance above what counted of the third key, so that clients of equal weight all count in full.
    Beyond that limit it is limit/own, and what counts grows with the logarithm of the key's traffic. So two friends of
    the backend, whom it serves well, cannot drown what it does to others. (After each answer that speaks against the
    backend the next `ATTENTION` of its key count for certain.)

    Args:
        counted: of each key, what counted that day.
    """
    if own < rules.key_allowance:
        return 1.0
    third = nlargest(FRIENDS + 1, counted.values())[FRIENDS:]
    return min(1.0, (rules.key_allowance + sum(third)) / own)


def budget(number: int, alpha: float) -> float:
    """α_k of a backend's k-th life, α/(k(k+1)): all lives together spend at most α."""
    return alpha / (number * (number + 1))


def needed(number: int, alpha: float) -> float:
    """Logarithm of the evidence that accuses in the k-th life."""
    return -math.log(budget(number, alpha))


def level(record: Record, alpha: float, basis: str) -> float:
    """Bound on the probability that an honest backend is ever accused: α over all its lives, plus the δ of every
    profile that took part where replays did."""
    errors = sum(record.profiles.values()) if basis == REPLAYED_BASIS else 0.0
    return min(1.0, alpha + errors)


def accusation(record: Record, log_m: Floats, at: float, rules: StandingSettings, basis: str) -> Accusation | None:
    """The accusation that the evidence carries, if it does: by exact checks alone, or by all of them, corroborated."""
    enough = needed(record.number, rules.alpha)
    found = float(eprocess.log_evidence(log_m, EXACT))
    if basis == REPLAYED_BASIS:
        if float(eprocess.log_evidence(log_m)) < enough:
            return None
        found = _corroboration.log_evidence(record.heard, found, rules.fault_rate, enough)
    if found < enough:
        return None
    return Accusation(at, record.n, basis, found / math.log(10), level(record, rules.alpha, basis))


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
    return Coverage(
        generations=known.generations + 1,
        tokens=known.tokens + unit.tokens,
        decided=known.decided + decided,
        decided_tokens=known.decided_tokens + (unit.tokens if decided else 0),
        audited=known.audited + unit.audited,
        replayed=known.replayed + unit.replayed,
        left=left,
    )


def _earned(known: Earned, unit: Unit, outside: str) -> Earned:
    """What a unit earns or costs. One that may not speak earns nothing; what the backend did there costs all the same:
    a client's seed makes nobody leave out evidence."""
    decided, evasive = not unit.undecided, unit.blame == coverage.BACKEND
    missing = unit.outcomes.get("withheld", (0.0, 0.0))[0] > 0
    if outside and not evasive and not missing:
        return known
    excused = not decided and not evasive
    return Earned(
        decided=known.decided + (decided and not outside),
        replayed=known.replayed + (unit.replayed and not outside),
        withheld=known.withheld + missing,
        asked=known.asked + ("withheld" in unit.outcomes),
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
