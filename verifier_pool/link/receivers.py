"""The webhook's receiver as admins see it: where events go, how many wait or failed, and an event to try it with.

The event travels as every other does, by the outbox, the sender's queue and the sender, which alone may reach it.
"""

from __future__ import annotations

import secrets
import time
from typing import Any
from urllib.parse import urlsplit

from redis import Redis
from rq.exceptions import NoSuchJobError
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer

from policies.errors import Conflict
from policies.settings import Settings
from verifier_pool.link import trail
from verifier_pool.link.events import body
from verifier_pool.link.fair import FairQueue
from verifier_pool.link.queue import EVENT, OUTBOX, WEBHOOK_QUEUE, disabled_key, event_key

TEST = "webhook.test"
POLL = 0.1
"""Seconds between two looks at what became of an event."""
UNDECIDED = ("waiting", "sending")
_KEPT = 3600
_FAILED = (JobStatus.FAILED, JobStatus.STOPPED, JobStatus.CANCELED)


def described(redis: Redis, settings: Settings) -> list[dict[str, Any]]:
    """Every receiver: one, or none."""
    webhook = settings.webhook
    if webhook is None:
        return []
    queue = FairQueue(WEBHOOK_QUEUE, connection=redis)
    pipeline = redis.pipeline(transaction=False)
    pipeline.exists(disabled_key(webhook.url))
    pipeline.zcard(OUTBOX)
    for registry in (queue.started_job_registry, queue.scheduled_job_registry, queue.failed_job_registry):
        pipeline.zcard(registry.key)
    off, outbox, running, later, dead = pipeline.execute()
    counts = {"outbox": outbox, "waiting": queue.count, "in_flight": running, "later": later, "failed": dead}
    return [
        {
            "object": "webhook",
            "url": _origin(webhook.url),
            "allow_private": webhook.allow_private,
            "retries": list(webhook.retries),
            "disabled": bool(off),
            **counts,
        }
    ]


def attempt(redis: Redis, settings: Settings, actor: str, seconds: float) -> dict[str, Any]:
    """Send an event that says nothing; returns what became of it within `seconds`. Raises what `send` does."""
    deadline, found = time.monotonic() + seconds, send(redis, settings, actor)
    while found["status"] in UNDECIDED and time.monotonic() < deadline:
        time.sleep(POLL)
        found["status"] = status(redis, found["id"])
    return found


def send(redis: Redis, settings: Settings, actor: str) -> dict[str, Any]:
    """Send an event that says nothing; returns it. Raises Conflict without a webhook, or while it is switched off."""
    if settings.webhook is None:
        raise Conflict("the settings name no webhook")
    if redis.exists(disabled_key(settings.webhook.url)):
        raise Conflict("the receiver answered 410 and is switched off; resume it first")
    id, now = secrets.token_hex(16), time.time()
    said = trail.entry(actor, TEST, _host(settings.webhook.url), after={"event": id})
    pipeline = redis.pipeline(transaction=True)
    pipeline.set(event_key(id), body(TEST, now, {"by": actor}), ex=_KEPT)
    pipeline.zadd(OUTBOX, {EVENT + id: now})
    trail.append(pipeline, settings.admin.audit_entries, said)
    pipeline.execute()
    return {"object": "event", "id": id, "type": TEST, "status": "waiting"}


def resume(redis: Redis, settings: Settings, actor: str) -> bool:
    """Send again after a 410; false where the receiver was not switched off."""
    if settings.webhook is None or not redis.delete(disabled_key(settings.webhook.url)):
        return False
    trail.append(redis, settings.admin.audit_entries, trail.entry(actor, "webhook.resume", _host(settings.webhook.url)))
    return True


def _host(url: str) -> str:
    """All of a receiver's URL that anybody may read: the rest may be what lets events in."""
    return urlsplit(url).hostname or ""


def _origin(url: str) -> str:
    """As `_host`, with how it is reached."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def status(redis: Redis, id: str) -> str:
    """What became of an event: `delivered`, `failed`, `retrying`, `sending`, or `waiting`, where no sender took it."""
    try:
        job = Job.fetch(f"webhook-{EVENT.replace(':', '-')}{id}", connection=redis, serializer=JSONSerializer)
    except NoSuchJobError:
        return "waiting" if redis.zscore(OUTBOX, EVENT + id) is not None else "delivered"
    state = job.get_status(refresh=False)
    if state == JobStatus.FINISHED:
        return "delivered"
    if state == JobStatus.SCHEDULED:
        return "retrying"
    return "failed" if state in _FAILED else "sending" if state == JobStatus.STARTED else "waiting"
