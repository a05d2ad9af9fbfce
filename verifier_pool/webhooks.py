"""Events to the operator's webhook, signed, tried again, and kept among the failed jobs when all tries fail.

Every verdict and whatever happens to a backend goes into an outbox in the same step that writes it; this process moves
them to its own queue. A receiver may see an event twice (same `webhook-id`, same bytes) and in any order.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from typing import NoReturn

from rq import Queue, Retry, get_current_job
from rq.exceptions import DuplicateJobError
from rq.serializers import JSONSerializer

from policies.errors import CountersignError, SettingsError
from policies.settings import Settings, WebhookSettings
from policies.verification import Verification
from verifier_pool import delivery, metrics
from verifier_pool.context import current
from verifier_pool.link import events
from verifier_pool.link.queue import EVENT, WEBHOOK_JOB, WEBHOOK_QUEUE, disabled_key
from verifier_pool.link.telemetry import names
from verifier_pool.signature import secret_keys, sign, verify_signature
from verifier_pool.store import Store
from verifier_pool.traced import delivering

__all__ = ["check_settings", "dead_letter", "deliver", "drain_outbox", "next_wait", "verify_signature"]

logger = logging.getLogger(__name__)

JITTER = 0.1
"""Share by which a wait is drawn longer, so that deliveries that failed together do not come back together."""

MAX_RETRY_AFTER = 6 * 3600
JOB_TIMEOUT = 60
BATCH = 500


class DeliveryFailed(CountersignError):
    """An event did not reach its receiver and will not be tried again by itself."""


def check_settings(settings: WebhookSettings | None) -> None:
    """Raises SettingsError when there is no webhook, its secret is malformed or its URL is plain http."""
    if settings is None:
        raise SettingsError("webhook", "a url and a secret")
    try:
        secret_keys(settings.secret.get_secret_value())
    except ValueError as error:
        raise SettingsError("webhook.secret", str(error)) from error
    if not settings.url.startswith("https://") and not settings.allow_private:
        raise SettingsError("webhook.url", "https, or allow_private for a receiver in your own network")


def drain_outbox(store: Store, settings: Settings) -> int:
    """Queue a delivery for every verdict and event in the outbox; returns how many."""
    assert settings.webhook is not None
    ids = store.outbox(BATCH)
    queue = Queue(WEBHOOK_QUEUE, connection=store.redis, serializer=JSONSerializer)
    for id in ids:
        try:
            queue.enqueue(
                WEBHOOK_JOB,
                id,
                job_id="webhook-" + id.replace(":", "-"),
                description=f"deliver {id}",
                unique=True,
                job_timeout=JOB_TIMEOUT,
                result_ttl=60,
                failure_ttl=settings.verification.verdict_ttl,
                # Spent only when this process is killed at it; what receivers answer is counted by `deliver`.
                retry=Retry(max=3, interval=[5, 60, 300]),
            )
        except DuplicateJobError:
            logger.info("delivery of %s is queued already", id)
        store.sent(id)
    return len(ids)


def deliver(id: str) -> str | Retry:
    """Send one verdict, or the event of that name. Returns `delivered`, or when to try again.

    Raises:
        DeliveryFailed: the last try failed, the receiver said 410, or what was to be sent is gone; the job stays among
            the failed ones, from where it can be queued again by hand.
    """
    context = current()
    settings = context.settings.webhook
    check_settings(settings)
    assert settings is not None
    redis, off = context.store.redis, disabled_key(settings.url)
    if redis.exists(off):
        metrics.undelivered("switched_off")
        _fail("the receiver is switched off")
    verification = None if id.startswith(EVENT) else context.store.verdict(id)
    body = _body(context.store, id, verification)
    if body is None:
        metrics.undelivered("expired")
        _fail("what was to be sent expired")
    with delivering(verification, get_current_job()) as span:
        began = time.monotonic()
        outcome = _send(settings, id.removeprefix(EVENT), body)
        metrics.delivered(outcome.status, outcome.error, time.monotonic() - began)
        if span is not None:
            span.set({names.STATUS: outcome.status, names.OUTCOME: "delivered" if outcome.delivered else "failed"})
            if not outcome.delivered:
                span.failed(outcome.error or str(outcome.status))
    if outcome.delivered:
        return "delivered"
    if outcome.status == 410:
        redis.set(off, id)
        logger.error("the webhook's receiver answered 410 and is switched off; delete the Redis key %s to resume", off)
        _fail("410 Gone")
    attempt = _attempt()
    said = outcome.status or outcome.error
    logger.warning("delivery of %s, try %d: %s", id, attempt + 1, said, extra={"id": id})
    if attempt >= len(settings.retries):
        _fail(f"every try failed, the last with {outcome.status or outcome.error}")
    wait = next_wait(settings.retries, attempt, outcome.retry_after, random.random())
    return Retry(max=len(settings.retries), interval=wait)


def next_wait(retries: Sequence[int], attempt: int, retry_after: float | None, draw: float) -> int:
    """Seconds until the next try: the scheduled wait plus up to a tenth, or longer if the receiver asked.

    Args:
        attempt: tries that failed before this one.
        draw: uniform in [0, 1).
    """
    wait = retries[attempt] * (1 + JITTER * draw)
    return round(max(wait, min(retry_after or 0.0, MAX_RETRY_AFTER)))


def dead_letter(job_id: str, reason: str) -> None:
    """A delivery failed for good."""
    logger.error("%s is a dead letter: %s", job_id, reason)


def _body(store: Store, id: str, verification: Verification | None) -> bytes | None:
    if id.startswith(EVENT):
        return store.event(id)
    return None if verification is None else events.of_verdict(verification)


def _send(settings: WebhookSettings, id: str, body: bytes) -> delivery.Outcome:
    now = time.time()
    headers = {
        "content-type": "application/json",
        "user-agent": "countersign",
        "webhook-id": f"msg_{id}",
        "webhook-timestamp": str(int(now)),
        "webhook-signature": sign(settings.secret.get_secret_value(), f"msg_{id}", int(now), body),
    }
    return delivery.post(settings.url, headers, body, allow_private=settings.allow_private, now=now)


def _attempt() -> int:
    job = get_current_job()
    return 0 if job is None else int(job.number_of_retries or 0)


def _fail(reason: str) -> NoReturn:
    job = get_current_job()
    if job is not None:
        job.retries_left = 0
    raise DeliveryFailed(reason)
