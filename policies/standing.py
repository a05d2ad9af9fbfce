"""Standing: what a backend's answers amount to, and when they accuse it.

Only standing accuses a backend, at a chance of being wrong that the operator sets. A record gathers units of evidence
(`policies.unit`) into e-processes (`policies.eprocess`). In its k-th life a backend is accused once the evidence
reaches 1/α_k with α_k = α/(k(k+1)), Σ α_k ≤ α: an honest backend is accused with probability at most α in all its
lives together, however often one looks (Ville). Where calibrated checks took part, the δ of their profiles is added,
and the evidence must stand without any two client keys' answers, or by the operator's own alone
(`policies._corroboration`).

What counts, of the null hypothesis's point of view, is chosen before the answer is seen: a unit stays outside when its
seed was the client's, when it was counted already, and when its client key had its share of the day. A prompt speaks
against a backend once in exact checks and once in replays: a fault may be the prompt's own, and then asking again
draws nothing new. Under the null, and whatever part of a fault is the prompt's, an answer to a prompt that never failed
fails with no more than the stated chance.

States: `trial` (too little is known), `trusted`, `suspect` (something speaks against it and does not suffice, or it no
longer earns trust), `quarantined` (accused, or by hand; only the operator ends it).

Values in, values out: `fold` makes the next record, `events` says what happened between two.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import msgspec

from policies import _folding, _states
from policies._shown import Event, audit_rate, brief, events, summary
from policies.record import LONGEST_TRAIL, QUARANTINED, SUSPECT, TRIAL, TRUSTED, Entry, Record, pack, unpack
from policies.settings import StandingSettings
from policies.unit import Unit, declaration_name

__all__ = [
    "QUARANTINED",
    "SUSPECT",
    "TRIAL",
    "TRUSTED",
    "Event",
    "Folded",
    "Record",
    "audit_rate",
    "brief",
    "decided",
    "events",
    "fold",
    "names",
    "new",
    "next_number",
    "note_change",
    "override",
    "pack",
    "resumed",
    "summary",
    "unpack",
    "visible",
]

SYSTEM = "countersign"
ACTIONS = ("quarantine", "pardon", "release")
LONGEST_WHY = 500
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories that a reader of the audit trail could not see, or that would hide something from them."""


@dataclass(frozen=True, slots=True)
class Folded:
    """A record after some units, and the names that the backend's memory has to learn."""

    record: Record
    remember: list[str] = field(default_factory=list)


def visible(text: str) -> bool:
    """Whether a name or a reason may go into the audit trail: `LONGEST_WHY` characters at most, all to be seen."""
    return len(text) <= LONGEST_WHY and _UNSEEN.isdisjoint(map(unicodedata.category, text))


def new(backend: str, declaration: Mapping[str, str], number: int, now: float) -> Record:
    """A record that knows nothing. `number` counts the backend's lives (`next_number`), `now` is Unix seconds."""
    if number < 1:
        raise ValueError("lives are counted from 1")
    record = Record(backend, dict(declaration), number, began=now, since=now)
    return _entered(record, now, SYSTEM, "declare", "first seen" if number == 1 else "declared anew", TRIAL)


def next_number(records: Iterable[Record]) -> int:
    """The number of the next life of the backend that these are all records of."""
    return max((record.number for record in records), default=0) + 1


def names(units: Iterable[Unit]) -> list[str]:
    """Under which names a backend's memory would know these units, and prompts that failed."""
    return [name for unit in units for name in (_folding.unit_name(unit), *_folding.prompt_names(unit))]


def fold(record: Record, units: Iterable[Unit], seen: AbstractSet[str], rules: StandingSettings) -> Folded:
    """Count units of this record's backend and declaration, in the order of their verdicts, and decide its state.

    `seen` holds those of their `names` that the backend's memory knows. How units are grouped into calls changes only
    when it is looked at: states and corroborated evidence at the end of each, exact evidence after every unit.
    """
    units = list(units)
    folding = _folding.Fold(record, seen, rules)
    folding.take(units)
    now = max((unit.at for unit in units), default=record.since)
    after = msgspec.structs.replace(folding.record, heard_at=max(now, record.heard_at))
    return Folded(_decided(after, rules, now), folding.remember)


def resumed(record: Record, others: Iterable[Record]) -> Record:
    """The record, as it goes on when its declaration returns after `others` of the backend were heard in its place.

    What it knows stays: evidence is not lost by declaring something else for a while. But audits begin at 100 % again.
    """
    if record.learnt_from == record.earned.decided or all(other.heard_at <= record.heard_at for other in others):
        return record
    return msgspec.structs.replace(record, learnt_from=record.earned.decided)


def note_change(record: Record, reason: str | None, now: float, rules: StandingSettings) -> Record:
    """The declaration is contradicted (`reason` in plain words), or no longer is (None)."""
    if (reason or "") == record.change:
        return record
    return _decided(msgspec.structs.replace(record, change=reason or ""), rules, now)


def override(
    record: Record, action: str, *, by: str, why: str, now: float, rules: StandingSettings, number: int | None = None
) -> Record:
    """What the operator decides, entered into the audit trail.

    `quarantine` takes the backend out by hand; `release` ends that, whatever the evidence then says counting again;
    `pardon` begins a new life: evidence starts again, with the next share of the budget.

    Args:
        number: for a pardon, the backend's `next_number`.

    Raises:
        ValueError: the action does not apply, or says not by whom and why.
    """
    if not by.strip() or not why.strip():
        raise ValueError("say who decides and why")
    if not (visible(by) and visible(why)):
        raise ValueError(f"a name and a reason are text of at most {LONGEST_WHY} characters, all of them visible")
    before = record.state
    if action == "quarantine":
        if record.held:
            raise ValueError("it is quarantined by hand already")
        record = msgspec.structs.replace(record, held=why)
    elif action == "release":
        if not record.held:
            raise ValueError("it is not quarantined by hand")
        record = msgspec.structs.replace(record, held="")
    elif action == "pardon":
        if number is None or number <= record.number:
            raise ValueError("a pardon begins a life of a higher number")
        fresh = Record(record.backend, record.declaration, number, began=now, since=now, trail=record.trail)
        record = msgspec.structs.replace(fresh, change=record.change, pardoned_at=now)
    else:
        raise ValueError(f"{action!r} is none of {', '.join(ACTIONS)}")
    return _entered(_in_state(record, rules, now), now, by, action, why, before)


def decided(
    records: Mapping[str, Record],
    backend: str,
    declaration: Mapping[str, str],
    action: str,
    *,
    by: str,
    why: str,
    now: float,
    rules: StandingSettings,
) -> Record:
    """The record of a backend as it is declared now, after what the operator decides (`override`); a new one where it
    has none. `records` are all of the backend, by name of their declaration. Raises ValueError."""
    number = next_number(records.values())
    before = records.get(declaration_name(declaration)) or new(backend, declaration, number, now)
    number = max(number, before.number + 1)
    return override(before, action, by=by, why=why, now=now, rules=rules, number=number)


def _decided(record: Record, rules: StandingSettings, now: float) -> Record:
    after = _in_state(record, rules, now)
    if after.state == record.state:
        return msgspec.structs.replace(after, since=record.since)
    return _entered(after, now, SYSTEM, after.state, "; ".join(after.reasons), record.state)


def _in_state(record: Record, rules: StandingSettings, now: float) -> Record:
    state, reasons = _states.decide(record, rules)
    trusted = record.trusted_once or state == TRUSTED
    return msgspec.structs.replace(record, state=state, reasons=reasons, since=now, trusted_once=trusted)


def _entered(record: Record, at: float, by: str, action: str, why: str, before: str) -> Record:
    trail = [*record.trail, Entry(at, by, action, why, before, record.state)]
    if len(trail) > LONGEST_TRAIL:
        # Swings between states must not wash out what people decided.
        trail.remove(next((entry for entry in trail if entry.by == SYSTEM), trail[0]))
    return msgspec.structs.replace(record, trail=tuple(trail))
