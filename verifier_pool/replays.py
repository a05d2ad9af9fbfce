"""Replays on their way through Redis: what a reference is asked, what came of it, and the job between the two.

    replay-request:ID, replay-request2:ID  what the reference, or the second one, is asked about a response
    replayed:ID, replayed2:ID              what came of it, written once (SET NX): the first outcome is the outcome
    replaying                              sorted set of replay jobs that are not done, scored by the second at which
                                           they are given up

`verifier_pool.packing` says what they look like.
"""

from __future__ import annotations

from typing import NamedTuple

from policies.evidence import Evidence, ReplayForm
from policies.media import asked_with_media
from verifier_pool.link.fair import SUFFIXES
from verifier_pool.link.queue import CANARIES as CANARIES
from verifier_pool.link.queue import PREFIX
from verifier_pool.link.queue import queue_of as queue_of
from verifier_pool.reference.base import ReplayRequest

REPLAY_JOB = "verifier_pool.replays.replay"
REPLAYING = PREFIX + "replaying"

FINAL_REASONS = frozenset({"too_long", "refused", "bad_ids", "bad_request", "nothing_to_replay"})
"""Replay failures that trying again cannot cure."""
BACKLOG = "reference_backlog"
FAILED = "replay_failed"
UNREADABLE = "bad_replay"
"""Reasons of this pool's own: it waited too long, its job failed for good, its bytes are damaged."""


def replay(id: str, second: bool = False) -> None:
    """Names the job of a replay. A replay loop runs it (`verifier_pool.replay_loop`); nobody calls it.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError("a replay is run by a replay loop")


def replay_job(id: str, *, second: bool = False) -> str:
    """Id of the job that replays a response."""
    return id + SUFFIXES["replay2" if second else "replay"]


def response_of(job_id: str) -> str:
    """Id of the response that a job is about."""
    return job_id.partition("-")[0]


def is_second(job_id: str) -> bool:
    """Whether a replay's job is about the second reference."""
    return job_id.endswith(SUFFIXES["replay2"])


def is_replay(job_id: str) -> bool:
    """Whether a job is a replay, and not one of the passes."""
    return job_id.endswith((SUFFIXES["replay"], SUFFIXES["replay2"]))


def request_key(id: str, *, second: bool = False) -> str:
    """Key of what a reference is asked."""
    return f"{PREFIX}replay-request{'2' if second else ''}:{id}"


def outcome_key(id: str, *, second: bool = False) -> str:
    """Key of what came of it."""
    return f"{PREFIX}replayed{'2' if second else ''}:{id}"


def vouching_key(id: str, *, second: bool = False) -> str:
    """Key of how a response waited for its reference to be shown sound (`verifier_pool.vouching`)."""
    return f"{PREFIX}vouching{'2' if second else ''}:{id}"


class Stamp(NamedTuple):
    """Who made a replay: which instance of a reference, and how many canaries it had been sent when that came back."""

    instance: str
    canaries: int


def can_replay(choice: Evidence) -> bool:
    """Whether there is anything to replay, and ids are all that it takes."""
    return len(choice.prompt_ids) > 0 and len(choice.output_ids) > 0 and not asked_with_media(choice)


def request_of(choice: Evidence, form: ReplayForm = "full", experts: bool = False) -> ReplayRequest:
    """What a reference is told of a choice: ids, never a logprob."""
    return ReplayRequest(
        prompt_ids=choice.prompt_ids,
        output_ids=choice.output_ids,
        endpoint=choice.endpoint,
        request=choice.request,
        choice=choice.index,
        candidate_ids=choice.claim_ids,
        form=form,
        experts=experts and choice.routed_experts is not None,
    )
