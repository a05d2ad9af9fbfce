"""What a record says: what happened to a backend, how much of it is audited next, and all that there is to show."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from policies import _folding, audit
from policies.record import QUARANTINED, SUSPECT, TRIAL, TRUSTED, Left, Record
from policies.settings import AuditSettings, StandingSettings

_SAID = {TRUSTED: "backend.trusted", SUSPECT: "backend.suspect", QUARANTINED: "backend.quarantined"}
_LN10 = math.log(10)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a backend: `backend.trusted`, `.suspect`, `.quarantined`, `.recovered` (it left
    suspicion or quarantine), `.redeclared`, `.runtime_changed`."""

    type: str
    data: dict[str, Any]


def events(before: Record | None, after: Record) -> list[Event]:
    """What happened between two records of one backend and declaration; `before` is None for a new one."""
    found: list[str] = []
    if before is None and after.number > 1 and not after.pardoned_at:
        found.append("backend.redeclared")
    if after.change and (before is None or before.change != after.change):
        found.append("backend.runtime_changed")
    was = before.state if before is not None else TRIAL
    if was != after.state:
        left = was in (SUSPECT, QUARANTINED) and after.state in (TRIAL, TRUSTED)
        found.append("backend.recovered" if left else _SAID.get(after.state, "backend.recovered"))
    return [Event(kind, _told(was, after)) for kind in found]


def audit_rate(record: Record, rules: AuditSettings) -> float:
    """Share of its next generations to audit: the fixed one where the settings have one, else `audit.rate`."""
    if rules.rate is not None:
        return rules.rate
    learnt = record.earned.decided - record.learnt_from
    return 1.0 if record.change else audit.rate(learnt, record.log_suspicion, rules.floor)


def brief(record: Record, rules: StandingSettings, audits: AuditSettings) -> dict[str, Any]:
    """What others need to know of a record at any time, as JSON has words for it: logarithms to base 10."""
    return {
        "state": record.state,
        "audit_rate": audit_rate(record, audits),
        "since": record.since,
        "backend": record.backend,
        "declaration": record.name,
        "life": record.number,
        "evidence_log10": _log10(record.log_evidence),
        "needed_log10": _log10(_folding.needed(record.number, rules.alpha)),
        "suspicion_log10": _log10(record.log_suspicion),
    }


def summary(record: Record, rules: StandingSettings, audits: AuditSettings) -> dict[str, Any]:
    """Everything there is to show of a record, as JSON has words for it: logarithms to base 10, null for none."""
    covered, accused = record.coverage, record.accused
    basis = accused.basis if accused is not None else "replayed"
    return {
        "object": "standing",
        "backend": record.backend,
        "declaration": record.declaration,
        "name": record.name,
        "life": record.number,
        "state": record.state,
        "since": record.since,
        "began": record.began,
        "reasons": list(record.reasons),
        "evidence": {
            "log10": _log10(record.log_evidence),
            "needed_log10": _log10(_folding.needed(record.number, rules.alpha)),
            "alpha": rules.alpha,
            "budget": _folding.budget(record.number, rules.alpha),
            "delta": sum(record.profiles.values()),
            "level": accused.level if accused is not None else _folding.level(record, rules.alpha, basis),
            "accused": msgspec.to_builtins(accused),
        },
        "suspicion_log10": _log10(record.log_suspicion),
        "audit_rate": audit_rate(record, audits),
        "units": {"counted": record.n, "outside": record.outside, "withheld": record.earned.withheld},
        "coverage": {
            "generations": covered.generations,
            "served": covered.tokens,
            "decided": covered.decided_tokens,
            "ratio": covered.ratio,
            "recent": record.earned.recent,
            "audited": covered.audited,
            "replayed": covered.replayed,
            "by_reason": {code: _left(found) for code, found in _most_first(covered.left)},
        },
        "accusing": [msgspec.to_builtins(found) for found in reversed(record.accusing)],
        "keys": {"today": dict(record.day_keys), "day": record.day},
        "chart": [list(point) for point in record.chart],
        "trail": [msgspec.to_builtins(entry) for entry in record.trail],
    }


def _told(was: str, after: Record) -> dict[str, Any]:
    return {
        "backend": after.backend,
        "model": after.declaration.get("model", ""),
        "declaration": after.declaration,
        "life": after.number,
        "before": was,
        "state": after.state,
        "at": after.since,
        "reasons": list(after.reasons),
        "evidence_log10": _log10(after.log_evidence),
        "level": after.accused.level if after.accused is not None else None,
        "accusing": [found.id for found in reversed(after.accusing)],
    }


def _left(found: Left) -> dict[str, Any]:
    return {"generations": found.generations, "tokens": found.tokens, "blame": found.blame}


def _most_first(left: Mapping[str, Left]) -> list[tuple[str, Left]]:
    return sorted(left.items(), key=lambda item: (-item[1].tokens, -item[1].generations, item[0]))


def _log10(value: float) -> float | None:
    return None if value == -math.inf else round(value / _LN10, 4)
