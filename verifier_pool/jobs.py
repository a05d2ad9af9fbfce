"""The verification job. Idempotent: it may run twice, or again after a crash, and one verdict comes of it."""

from __future__ import annotations

import logging
import time

from rq import Retry, get_current_job

from policies import audit, codec
from policies.errors import EvidenceError, ReplayError
from policies.evidence import Evidence
from policies.verification import unverified
from verifier_pool import declarations, history
from verifier_pool.context import NO_MODEL, Context, current
from verifier_pool.judge import judge
from verifier_pool.queue import RETRY_SECONDS

logger = logging.getLogger(__name__)


def verify(id: str) -> str | Retry:
    """Judge one recorded response and store its verdict. Returns the verdict's word, or when to try again.

    Raises:
        EvidenceError: the evidence is unreadable; the verdict says so, and the job stays among the failed
            ones for a person to look at.
    """
    context = current()
    stored = context.store.verdict(id)
    if stored is not None:
        return str(stored.get("verdict"))
    packed = context.store.evidence(id)
    if packed is None:
        return _settle_unverified(context, id, "evidence_expired")
    try:
        choices = codec.unpack(packed)
        if not choices or any(choice.id != id for choice in choices):
            raise EvidenceError("the evidence holds no choice, or another response's")
    except EvidenceError:
        _settle_unverified(context, id, "evidence_unreadable")
        _do_not_retry()
        raise
    try:
        return _verify(context, id, choices)
    except ReplayError as error:
        wait = RETRY_SECONDS[_attempt()]
        logger.warning("verification %s waits %d s for the reference: %s", id, wait, error.reason)
        return Retry(max=len(RETRY_SECONDS), interval=wait)


def give_up(id: str, reason: str) -> None:
    """The job will not run again: close its id with the reason unless a verdict is there."""
    _settle_unverified(current(), id, reason)


def _verify(context: Context, id: str, choices: list[Evidence]) -> str:
    name, backend, runtime = choices[0].model, choices[0].backend, choices[0].runtime
    model = context.settings.models.get(name, NO_MODEL)
    verification = judge(
        choices,
        model=model,
        reference=context.references.get(name),
        profile=context.profiles.get(name),
        audited=audit.chosen(context.secret, id, context.settings.audit.rate),
        form="full" if audit.wants_full(context.secret, id, context.settings.audit.full) else "ids",
        last_try=_attempt() >= len(RETRY_SECONDS),
        declaration_expired=declarations.expired(context.store.redis, backend, runtime),
        earlier=history.note(context.store.redis, context.secret, choices, model.vocab_size),
    )
    changed = declarations.note(context.store.redis, verification, runtime)
    if context.store.settle(verification) and changed:
        declarations.count(context.store.redis, backend)
    return str(verification["verdict"])


def _settle_unverified(context: Context, id: str, reason: str) -> str:
    verification = unverified(id, reason, context.store.intent(id), time.time())
    if context.store.settle(verification):
        logger.warning("verification %s ends unverified: %s", id, reason)
    return str(verification["verdict"])


def _attempt() -> int:
    """How often this job already asked to be run again; the last try outside a worker."""
    job = get_current_job()
    return len(RETRY_SECONDS) if job is None else int(job.number_of_retries or 0)


def _do_not_retry() -> None:
    job = get_current_job()
    if job is not None:
        job.retries_left = 0
