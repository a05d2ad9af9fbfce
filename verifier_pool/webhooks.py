"""Events to webhooks: signed, tried again over days, and kept among the failed jobs when all tries fail.

Every verdict and whatever happens to a backend goes into an outbox in the same step that writes it. This process makes
of each one delivery per webhook that is told (`link.deliveries`), in the step that takes it out of the outbox, and of
each delivery a job. So an event may come twice (same `webhook-id`, same bytes) and in any order, and none is lost,
whoever is killed when.
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from redis import Redis
from redis.exceptions import RedisError
from rq import Retry, get_current_job

from policies.errors import CountersignError, SealError, SettingsError
from policies.settings import Settings, WebhookSettings
from policies.signature import secret_keys, sign, verify_signature
from verifier_pool import delivery, metrics
from verifier_pool.context import Context, current
from verifier_pool.link import deliveries, events
from verifier_pool.link.deliveries import OVER, Delivery
from verifier_pool.link.directory import Directory
from verifier_pool.link.endpoints import SETTINGS, Endpoint, any_registered, secrets_of
from verifier_pool.link.events import Happened
from verifier_pool.link.queue import ENDPOINTS, EVENT, OUTBOX
from verifier_pool.link.telemetry import names
from verifier_pool.store import Store
from verifier_pool.traced import delivering

__all__ = ["check_settings", "dead_letter", "deliver", "drain_outbox", "next_wait", "verify_signature"]

logger = logging.getLogger(__name__)

JITTER = 0.1
"""Share by which a wait is drawn longer, so that deliveries that failed together do not come back together."""

MAX_RETRY_AFTER = 6 * 3600
MAX_PAUSE = 3600
"""Seconds for which nothing else is tried at a webhook that failed, at most: so long it may be back unnoticed."""
SLOW = 3.0
"""Seconds after which a receiver that answers was slow: who works before it answers is held up by itself alone."""
A_SECOND = 50
"""Deliveries of a tenant that come back in a second after their webhook rested, about; fewer where it has others."""
BATCH = 500
DRAIN_SECONDS = 0.5
_UNREADABLE_SECONDS = 60
"""Until a delivery comes up again whose webhook is there and cannot be read, as where a newer release wrote it."""
_AGAIN = 10**6
"""How often a job may come back: a delivery counts its tries itself."""
_SLOW_DOWN = (429, 502, 503, 504)

clock = time.time
"""Unix seconds; tests let days pass."""


class DeliveryFailed(CountersignError):
    """An event did not reach its receiver and will not be tried again by itself."""


class Anyone:
    """True where there are webhooks, or were: Redis is asked every two seconds until it says so."""

    EVERY_SECONDS = 2.0

    def __init__(self, redis: Redis, settings: Settings) -> None:
        self._redis = redis
        self._found = settings.webhook is not None
        self._next = 0.0

    def __bool__(self) -> bool:
        if not self._found and time.monotonic() >= self._next:
            self._next = time.monotonic() + self.EVERY_SECONDS
            with contextlib.suppress(RedisError):
                self._found = any_registered(self._redis)
        return self._found


def check_settings(settings: WebhookSettings | None) -> None:
    """Raises SettingsError when the secret of the settings' webhook is malformed or its URL is plain http."""
    if settings is None:
        return
    try:
        secret_keys(settings.secret.get_secret_value())
    except ValueError as error:
        raise SettingsError("webhook.secret", str(error)) from error
    if not settings.url.startswith("https://") and not settings.allow_private:
        raise SettingsError("webhook.url", "https, or allow_private for a receiver in your own network")


def drain_outbox(store: Store, settings: Settings, directory: Directory) -> int:
    """Make deliveries of the verdicts and events in the outbox, and jobs of those, for a while; returns how many came
    out of it."""
    deadline, total = time.monotonic() + DRAIN_SECONDS, 0
    while done := _told(store, settings, directory):
        total += done
        if time.monotonic() > deadline:
            break
    while deliveries.queue_up(store.redis, settings.deliveries) and time.monotonic() < deadline + DRAIN_SECONDS:
        pass
    return total


def _told(store: Store, settings: Settings, directory: Directory) -> int:
    """Make deliveries of the first events in the outbox; returns how many those were."""
    among = directory.refresh(settings)
    ids = store.outbox(BATCH)
    for id in ids:
        happened = _happened(store, settings, id)
        if happened is None:
            metrics.undelivered("expired")
            logger.error("an event expired before any webhook could be told of it", extra={"id": id})
            store.sent(id)
            continue
        told = directory.told(happened, settings, among)
        retries = max((retries_of(settings, endpoint.id) for endpoint, _ in told), key=sum, default=())
        made = deliveries.plan(store.redis, settings.deliveries, retries, happened, told, id)
        if made.dropped:
            metrics.undelivered("dropped", made.dropped)
            logger.error("too much waits for a webhook; an event is dropped for it", extra={"id": id})
    return len(ids)


def deliver(id: str) -> str | Retry:
    """Try one delivery. Returns what became of it, or when to try again.

    Raises:
        DeliveryFailed: the last try failed, its webhook is switched off or gone; the job stays among the failed ones,
            from where it can be queued again by hand.
    """
    context = current()
    redis, settings = context.store.redis, context.settings
    found = deliveries.find(redis, id)
    if found is None:
        return _unknown(context, id)
    if found.status in OVER:
        return found.status
    endpoint = context.directory.find(found.endpoint, settings)
    if endpoint is None:
        if redis.hexists(ENDPOINTS, found.endpoint):
            return _later(context, found, "", clock() + _UNREADABLE_SECONDS)
        _give_up(context, found, "", "removed", "its webhook was removed")
    if not context.directory.is_there(endpoint, settings):
        _give_up(context, found, endpoint.url, "key_gone", "the client key that it was registered with is gone")
    now, rules = clock(), settings.deliveries
    word, more, waiting = deliveries.begin(redis, found, endpoint.url, max(1, rules.senders // 2), now)
    match word:
        case "gone" | "over":
            return word
        case "off":
            _give_up(context, found, endpoint.url, "switched_off", f"its webhook is switched off ({more})")
        case "paused" | "busy":
            spread = 2.0 + waiting * context.directory.beside(endpoint) / A_SECOND
            wait = max(float(more) - now, 0.0) + 1.0 + random.random() * spread
            return _later(context, found, endpoint.url, now + wait)
    return _try(context, endpoint, found, failures=int(more))


def _later(context: Context, found: Delivery, url: str, at: float) -> Retry:
    """Try it at that Unix second, which is no try that failed, unless that is too late."""
    if at > found.since + deliveries.lifetime(retries_of(context.settings, found.endpoint)):
        _give_up(context, found, url, "down", "its webhook failed for as long as it may be tried")
    deliveries.postpone(context.store.redis, found, at)
    return Retry(max=_AGAIN, interval=round(max(at - clock(), 1.0)))


def _try(context: Context, endpoint: Endpoint, found: Delivery, *, failures: int) -> str | Retry:
    settings = context.settings
    verification = context.store.verdict(found.about) if found.about == found.event else None
    began = time.monotonic()
    with delivering(verification, get_current_job(), found.tries + 1) as span:
        outcome = _send(context, endpoint, found)
        seconds = time.monotonic() - began
        metrics.delivered(outcome.status, outcome.error, seconds)
        if span is not None:
            span.set({names.STATUS: outcome.status, names.OUTCOME: "delivered" if outcome.delivered else "failed"})
            if not outcome.delivered:
                span.failed(outcome.error or str(outcome.status))
    now = clock()
    answered = {"status": outcome.status} if outcome.status is not None else {"error": outcome.error}
    attempt: dict[str, Any] = {"at": round(now, 3), **answered, "milliseconds": round(1000 * seconds)}
    noted: dict[str, Any] = {"url": endpoint.url, "attempt": attempt, "slow": seconds >= SLOW}
    redis, rules = context.store.redis, settings.deliveries
    if outcome.delivered:
        deliveries.end(redis, found, rules, now, status="delivered", outcome="good", **noted)
        metrics.arrived(now - found.created)
        return "delivered"
    retries = retries_of(settings, endpoint.id)
    why = str(outcome.status or outcome.error)
    logger.warning("delivery of %s, try %d: %s", found.id, found.tries + 1, why, extra={"id": found.event})
    draw = random.random()
    noted["paused"] = now + pause(retries, failures, outcome, draw)
    gone = outcome.status == 410
    last = gone or found.tries >= len(retries)
    wait = 0 if last else next_wait(retries, found.tries, outcome.retry_after, draw)
    noted |= {"status": "failed"} if last else {"status": "retrying", "next": now + wait}
    off = deliveries.end(redis, found, rules, now, outcome="gone" if gone else "bad", **noted)
    if off:
        said = "answered 410" if gone else f"failed for {rules.disable_after} s"
        logger.error("webhook %s %s and is switched off; `countersign webhooks resume` undoes it", endpoint.id, said)
    if last:
        _fail("410 Gone" if gone else f"every try failed, the last with {why}")
    return Retry(max=_AGAIN, interval=wait)


def next_wait(retries: Sequence[int], attempt: int, retry_after: float | None, draw: float) -> int:
    """Seconds until the next try: the scheduled wait plus up to a tenth, or longer if the receiver asked.

    Args:
        attempt: tries that failed before this one.
        draw: uniform in [0, 1).
    """
    wait = retries[attempt] * (1 + JITTER * draw)
    return round(max(wait, min(retry_after or 0.0, MAX_RETRY_AFTER)))


def pause(retries: Sequence[int], failures: int, outcome: delivery.Outcome, draw: float) -> int:
    """Seconds for which nothing is tried at a webhook that failed: as long as a delivery waits that failed so often, an
    hour at most; or longer where it asked for that, being overloaded.

    Args:
        failures: in a row, before this one.
    """
    wait = min(retries[min(failures, len(retries) - 1)] if retries else 0, MAX_PAUSE) * (1 + JITTER * draw)
    asked = min(outcome.retry_after or 0.0, MAX_RETRY_AFTER) if outcome.status in _SLOW_DOWN else 0.0
    return round(max(wait, asked))


def retries_of(settings: Settings, endpoint: str) -> tuple[int, ...]:
    """The waits between the tries of a webhook's deliveries, seconds."""
    own = settings.webhook if endpoint == SETTINGS else None
    return settings.deliveries.retries if own is None else own.retries


def dead_letter(job_id: str, reason: str) -> None:
    """A delivery failed for good. One whose sender was killed too often does not know it yet."""
    logger.error("%s is a dead letter: %s", job_id, reason)
    context = current()
    found = deliveries.find(context.store.redis, id := job_id.removeprefix("webhook-"))
    if found is None:
        deliveries.drop(context.store.redis, id)
    elif found.status not in OVER:
        deliveries.end(context.store.redis, found, context.settings.deliveries, clock(), status="failed")


def _happened(store: Store, settings: Settings, id: str) -> Happened | None:
    if id.startswith(EVENT):
        models = {backend.name: backend.model for backend in settings.backends}
        return events.of_stored(id.removeprefix(EVENT), store.event(id), models)
    try:
        verification = store.verdict(id)
        return None if verification is None else events.of_verdict(verification)
    except (KeyError, ValueError):  # not one that a worker wrote
        return None


def _unknown(context: Context, id: str) -> str:
    """What was removed, or expired. A job of an earlier release names an event instead: it is told anew."""
    if id.startswith(EVENT) or "-" not in id:
        context.store.redis.zadd(OUTBOX, {id: clock()})
        return "told anew"
    deliveries.drop(context.store.redis, id)
    return "gone"


def _send(context: Context, endpoint: Endpoint, found: Delivery) -> delivery.Outcome:
    settings, now = context.settings, clock()
    id = f"msg_{found.event}"
    try:
        secret = secrets_of(endpoint, context.store.sealer, settings, now)
        signature = sign(secret, id, int(now), found.body)
    except (SealError, ValueError):
        # Nothing is ever sent unsigned.
        return delivery.Outcome(error="no_secret")
    headers = {
        "content-type": "application/json",
        "user-agent": "countersign",
        "webhook-id": id,
        "webhook-timestamp": str(int(now)),
        "webhook-signature": signature,
    }
    return delivery.post(endpoint.url, headers, found.body, now=now, reach=_reach(settings, endpoint))


def _reach(settings: Settings, endpoint: Endpoint) -> delivery.Reach:
    if endpoint.id == SETTINGS:
        return delivery.Reach(anywhere=settings.webhook is not None and settings.webhook.allow_private)
    return delivery.Reach(networks=settings.deliveries.networks, ports=settings.deliveries.ports)


def _give_up(context: Context, found: Delivery, url: str, code: str, reason: str) -> NoReturn:
    metrics.undelivered(code)
    now = clock()
    attempt = {"at": round(now, 3), "error": code}
    rules = context.settings.deliveries
    deliveries.end(context.store.redis, found, rules, now, status="failed", url=url, attempt=attempt)
    _fail(reason)


def _fail(reason: str) -> NoReturn:
    job = get_current_job()
    if job is not None:
        job.retries_left = 0
    raise DeliveryFailed(reason)
