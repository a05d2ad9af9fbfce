"""The verification as JSON: one shape for the API, the webhook and inline answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from policies.checks import Check, Verdict, VerdictWord
from policies.evidence import Evidence

Verification = dict[str, Any]


def describe_check(check: Check) -> dict[str, Any]:
    """One check; numbers JSON has no word for become null."""
    return {
        "name": check.name,
        "result": str(check.result),
        "reason": check.reason,
        "level": _number(check.level),
        "metrics": {name: _number(value) for name, value in check.metrics.items()},
    }


def describe(
    choices: Sequence[Evidence], verdicts: Sequence[Verdict], overall: Verdict, decided: float
) -> Verification:
    """The verification of one response; `decided` in Unix seconds."""
    first = choices[0]
    verification = _frame(first.id, str(overall.word), decided) | {
        "reasons": list(overall.reasons),
        "checks": [describe_check(check) for check in overall.checks],
        "backend": first.backend,
        "model": first.model,
        "audited": overall.audited,
        "created": first.created,
        "owner": first.owner,
    }
    if any(choice.sampling.client_seed for choice in choices):
        verification["client_seed"] = True
    if len(choices) > 1:
        verification["choices"] = [
            {
                "index": choice.index,
                "verdict": str(verdict.word),
                "reasons": list(verdict.reasons),
                "checks": [describe_check(check) for check in verdict.checks],
            }
            for choice, verdict in zip(choices, verdicts, strict=True)
        ]
    return verification


def unverified(id: str, reason: str, intent: Mapping[str, Any] | None, decided: float) -> Verification:
    """Nothing was checked, and why. Without an intent nobody owns it, so nobody can read it."""
    known = intent or {}
    return (
        _frame(id, str(VerdictWord.UNVERIFIED), decided)
        | {
            "reasons": [reason],
            "backend": known.get("backend", ""),
            "model": known.get("model", ""),
            "created": known.get("created", decided),
            "owner": known.get("owner", ""),
        }
        | traced(known)
    )


def traced(intent: Mapping[str, Any]) -> dict[str, Any]:
    """What a verification keeps of where it belongs in a trace."""
    return {"trace": intent["trace"]} if "trace" in intent else {}


def pending(intent: Mapping[str, Any]) -> Verification:
    """No verdict yet. `intent` is what was written before the request went up."""
    return unverified(intent["id"], "", intent, 0.0) | {
        "status": "pending",
        "verdict": None,
        "reasons": [],
        "decided": None,
    }


def public(verification: Mapping[str, Any]) -> Verification:
    """What a client or a webhook may see: all but the owner, and where it belongs in a trace."""
    return {key: value for key, value in verification.items() if key not in ("owner", "trace")}


def encode(verification: Mapping[str, Any]) -> bytes:
    """JSON bytes."""
    return orjson.dumps(verification)


def _frame(id: str, verdict: str, decided: float) -> Verification:
    return {
        "id": id,
        "object": "verification",
        "status": "done",
        "verdict": verdict,
        "reasons": [],
        "checks": [],
        "backend": "",
        "model": "",
        "audited": False,
        "created": decided,
        "decided": decided,
        "owner": "",
    }


def _number(value: float | int | None) -> float | int | None:
    if value is None or isinstance(value, int):
        return value
    return float(value) if math.isfinite(value) else None
