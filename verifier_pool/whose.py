"""Whose doing it is that a response could not be judged.

A check that raises is a fault of ours, and yet a backend that knows of one would go unjudged for ever if all that came
of it were put down to us. So once a job has failed for good it is tried what makes it fail: evidence that breaks its
judging, where the same request without an answer does not, is `unjudgeable`, which counts as the backend's
(`policies.coverage`): it proves nothing, and earns no trust. What breaks without an answer too is the request's doing,
or ours.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from policies.evidence import Evidence

logger = logging.getLogger(__name__)

FAILED = "job_failed: "
UNJUDGEABLE = "unjudgeable: "
_OUTSIDE = frozenset({"AbandonedJobError", "JobTimeoutException", "MemoryError", "WorkHorseKilledException"})
"""Ends of a job that come from outside it, or could take this process along when they are tried again."""


def whose(reason: str, choices: Sequence[Evidence], judged: Callable[[Sequence[Evidence]], object]) -> str:
    """The reason why there is no verdict, by who is to blame.

    Args:
        reason: `job_failed: ` and the type of what was raised; others stay.
        judged: judges choices, without leaving a trace of it anywhere.
    """
    kind = reason.removeprefix(FAILED)
    if kind == reason or kind in _OUTSIDE or not _breaks(choices, judged):
        return reason
    if _breaks([unanswered(choice) for choice in choices], judged):
        return reason
    logger.error("an answer of backend %s breaks its checks: %s", choices[0].backend, kind)
    return UNJUDGEABLE + kind


def unanswered(choice: Evidence) -> Evidence:
    """The same without anything that its backend said."""
    nothing = Evidence(id=choice.id, endpoint=choice.endpoint, backend="", model="", sampling=choice.sampling)
    return replace(
        choice,
        prompt_ids=nothing.prompt_ids,
        output_ids=nothing.output_ids,
        claim_ids=nothing.claim_ids,
        claim_logprobs=nothing.claim_logprobs,
        text="",
        reasoning="",
        tool_calls=(),
        finish_reason=None,
        stop_reason=None,
        usage=None,
        routed_experts=None,
        faults=(),
        complete=False,
        first_token_seconds=None,
        total_seconds=None,
    )


def _breaks(choices: Sequence[Evidence], judged: Callable[[Sequence[Evidence]], object]) -> bool:
    try:
        judged(choices)
    except (OSError, MemoryError, ImportError):
        return False
    except Exception:
        return True
    return False
