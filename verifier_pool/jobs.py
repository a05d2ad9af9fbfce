"""The verification job. Idempotent: it may run twice, or again after a crash, and one verdict comes of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

from rq import Retry, get_current_job

from policies import audit, codec
from policies.checks import VerdictWord
from policies.errors import EvidenceError, ReplayError
from policies.evidence import Evidence
from policies.unit import Unit, declaration_of, of_response
from policies.verification import Verification, unverified
from verifier_pool import declarations, history
from verifier_pool.context import NO_MODEL, Context, current
from verifier_pool.judge import judge
from verifier_pool.queue import RETRY_SECONDS, SECOND_UNCHECKED
from verifier_pool.standing import audit_rate
from verifier_pool.units import accusing, confirmed, of_unverified

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
    backend, runtime, redis = choices[0].backend, choices[0].runtime, context.store.redis
    chosen = _chosen(context, id, choices[0])
    model = context.settings.models.get(choices[0].model, NO_MODEL)
    judged = partial(
        judge,
        choices,
        model=model,
        form="full" if audit.wants_full(context.secret, id, context.settings.audit.full) else "ids",
        declaration_expired=declarations.expired(redis, backend, runtime),
        earlier=history.note(redis, context.secret, choices, model.vocab_size),
    )
    verification, unit = _weighed(context, choices, chosen, judged)
    changed = declarations.note(redis, verification, runtime)
    if context.store.settle(verification, unit):
        if changed:
            declarations.count(redis, backend)
        if verification.get("second_reference", {}).get("unchecked"):
            redis.hincrby(SECOND_UNCHECKED, backend, 1)
    _fold(context, backend)
    return str(verification["verdict"])


def _weighed(
    context: Context, choices: Sequence[Evidence], chosen: bool, judged: Callable[..., Verification]
) -> tuple[Verification, Unit]:
    """The verification of a response, and the unit it is in its backend's standing. `judged` is `judge` of its choices.

    Raises:
        ReplayError: the reference had a passing trouble and this is not the last try.
    """
    name = choices[0].model
    reference, profile = context.references.get(name), context.profiles.get(name)
    replayed = partial(judged, reference=reference, profile=profile)
    verification = replayed(audited=chosen, last_try=_attempt() >= len(RETRY_SECONDS))
    unit = of_response(
        choices,
        verification,
        context.secret,
        operator=(context.store.intent(choices[0].id) or {}).get("operator") is True,
        profile=context.profile_names.get(name, ""),
        delta=profile.delta if profile is not None else 0.0,
    )
    if not chosen and reference is not None and _doubtful(verification):
        # The verdict hears this replay. The unit does not: it was made before, of what every answer is asked.
        return replayed(audited=True) | {"extra_replay": True}, unit
    if accusing(unit) and name in context.second_references:
        again = judged(reference=context.second_references[name], profile=context.second_profiles[name], audited=True)
        unit, found = confirmed(unit, of_response(choices, again, context.secret, operator=unit.operator))
        verification["second_reference"] = asdict(found)
    return verification, unit


def _chosen(context: Context, id: str, choice: Evidence) -> bool:
    """Whether the response is audited, from the secret, its id and its backend's past alone; the same in every run."""
    settings = context.settings
    rate = audit_rate(context.store.redis, settings.audit, choice.backend, declaration_of(choice))
    chosen = audit.chosen(context.secret, id, rate)
    return context.store.choose(id, chosen, settings.verification.evidence_ttl)


def _doubtful(verification: Verification) -> bool:
    """Whether the checks that need no reference speak against the answer or its declaration."""
    return verification["verdict"] == VerdictWord.REJECT or declarations.fitting(verification) is not None


def _settle_unverified(context: Context, id: str, reason: str) -> str:
    intent = context.store.intent(id)
    verification = unverified(id, reason, intent, time.time())
    if context.store.settle(verification, of_unverified(verification, intent)):
        logger.warning("verification %s ends unverified: %s", id, reason)
        _fold(context, verification["backend"])
    return str(verification["verdict"])


def _fold(context: Context, backend: str) -> None:
    """Let the standing follow. The verdict stands whatever becomes of this; what is left is folded by the timer."""
    try:
        context.standings.fold(backend)
    except ValueError as error:
        logger.error("the standing of backend %s cannot be kept: %s", backend, error)


def _attempt() -> int:
    """How often this job already asked to be run again; the last try outside a worker."""
    job = get_current_job()
    return len(RETRY_SECONDS) if job is None else int(job.number_of_retries or 0)


def _do_not_retry() -> None:
    job = get_current_job()
    if job is not None:
        job.retries_left = 0
