"""An examination as JSON."""

from __future__ import annotations

from typing import Any

from policies.examination import Examination


def as_json(found: Examination) -> dict[str, Any]:
    """An examination as JSON."""
    known = found.receipt
    return {
        "object": "examination",
        "outcome": found.outcome.name.lower(),
        "exit_code": int(found.outcome),
        "id": None if known is None else known.id,
        "key": None if known is None else known.kid,
        "verdict": None if known is None else known.verdict,
        "findings": [
            {
                "about": each.about,
                "holds": each.fault is None,
                "fault": None if each.fault is None else each.fault.name.lower(),
                "words": each.words,
            }
            for each in found.findings
        ],
        "not_compared": list(found.left),
        "statement": None if known is None else dict(known.statement),
        "derived": found.derived,
    }
