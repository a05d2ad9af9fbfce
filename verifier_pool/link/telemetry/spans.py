"""What spans say of verdicts."""

from __future__ import annotations

from policies.verification import Verification
from verifier_pool.link.telemetry import names
from verifier_pool.link.telemetry.tracing import Attributes


def of_verdict(verification: Verification) -> Attributes:
    """Attributes of `names.VERDICT`."""
    return {
        names.ID: verification["id"],
        names.BACKEND: verification["backend"] or None,
        names.MODEL: verification["model"] or None,
        names.WORD: str(verification["verdict"]),
        names.REASONS: [str(reason).partition(":")[0] for reason in verification["reasons"]],
        names.AUDITED: bool(verification.get("audited")),
    }
