"""Events on their way to webhooks: from the outbox to one delivery per webhook, its tries, and what is kept of them.

    webhook-delivery:ID     hash: one delivery. `event`, `about`, `type`, `created`, `body` (the very bytes that are
                            sent), `status` (waiting, sending, retrying, delivered, failed), `tries`, `attempts` (JSON,
                            the latest), `since` and `next` (Unix seconds), `tenant`
    webhook-state:WEBHOOK   hash: `sequence`, the last number given; `dropped`; `failures` in a row, `failing_since`,
                            `paused` until when, `disabled` (gone, failing), `disabled_url`, `disabled_at`,
                            `delivered_at`
    webhook-waiting:WEBHOOK sorted set of its deliveries that are not over, scored by number
    webhook-over:WEBHOOK    sorted set of those that were delivered and are kept, likewise
    webhook-failed:WEBHOOK  sorted set of those that failed for good and are kept, likewise
    webhook-sending:WEBHOOK sorted set of those that are being sent, scored by until when they may be
    webhook-slow:TENANT     is there while a tenant (`Endpoint.tenant`) counts as slow
    webhook-tenant-sending:TENANT, webhook-slow-sending   as `webhook-sending`, of all that a tenant has, and of all
                            that slow tenants have
    webhook-unqueued        sorted set of deliveries without a job, scored by the second since when

A delivery's id is its webhook's with its number in the order in which that is told.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import orjson
from redis import Redis
from rq import Retry
from rq.job import Job

from policies.settings import DeliverySettings
from policies.subscription import TEST
from verifier_pool import RQ_PREFIX
from verifier_pool.link.delivery_scripts import AGAIN, BEGIN, END, PLAN, POSTPONE
from verifier_pool.link.endpoints import SETTINGS, Endpoint
from verifier_pool.link.events import Happened
from verifier_pool.link.fair import LANES, FairQueue
from verifier_pool.link.queue import ENDPOINTS, OUTBOX, PREFIX, RETRY_SECONDS, WEBHOOK_JOB, WEBHOOK_QUEUE

UNQUEUED = PREFIX + "webhook-unqueued"
OVER = ("delivered", "failed")
JOB_TIMEOUT = 60
LEASE_SECONDS = 30
"""Seconds after which a try is over whose sender died: longer than any takes."""
SLOW_FOR = 300
"""Seconds for which a tenant counts as slow after one of its receivers was: long enough that being quick in between
gains it nothing."""
MOST_ATTEMPTS = 20
"""Tries of one delivery that are kept."""
SLACK_SECONDS = 86_400
_DELIVERY = PREFIX + "webhook-delivery:"
_SLOW_SENDING = PREFIX + "webhook-slow-sending"
_LOCK = PREFIX + "webhook-queueing"
_BATCH = 500


class Planned(NamedTuple):
    """The deliveries that were made of an event, and for how many webhooks it was dropped."""

    ids: list[str]
    dropped: int


@dataclass(frozen=True, slots=True)
class Delivery:
    """One delivery as it is stored; see above."""

    id: str
    event: str
    about: str
    type: str
    body: bytes
    status: str
    tries: int
    attempts: tuple[dict[str, Any], ...]
    created: float
    since: float
    next: float | None
    tenant: str

    @property
    def endpoint(self) -> str:
        """Id of its webhook."""
        return _endpoint_of(self.id)

    @property
    def number(self) -> int:
        """Its sequence number."""
        return int(self.id.rpartition("-")[2])

    def shown(self) -> dict[str, Any]:
        """As the log of a webhook has it."""
        return {
            "object": "webhook.delivery",
            "id": self.id,
            "webhook_id": f"msg_{self.event}",
            "sequence": self.number,
            "type": self.type,
            "about": self.about,
            "status": self.status,
            "created": self.created,
            "tries": self.tries,
            "next": self.next,
            "attempts": list(self.attempts),
        }


def delivery_key(id: str) -> str:
    """Key of a delivery."""
    return _DELIVERY + id


def state_key(endpoint: str) -> str:
    """Key of a webhook's state."""
    return f"{PREFIX}webhook-state:{endpoint}"


def waiting_key(endpoint: str) -> str:
    """Key of the deliveries that are not over."""
    return f"{PREFIX}webhook-waiting:{endpoint}"


def over_key(endpoint: str) -> str:
    """Key of those that were delivered."""
    return f"{PREFIX}webhook-over:{endpoint}"


def failed_key(endpoint: str) -> str:
    """Key of those that failed for good: the other ones never push them out."""
    return f"{PREFIX}webhook-failed:{endpoint}"


def all_keys(endpoint: str) -> list[str]:
    """Keys of all deliveries that there are."""
    return [waiting_key(endpoint), over_key(endpoint), failed_key(endpoint)]


def sending_key(endpoint: str) -> str:
    """Key of those that are being sent."""
    return f"{PREFIX}webhook-sending:{endpoint}"


def job_of(id: str) -> str:
    """Id of the job of a delivery."""
    return f"webhook-{id}"


def lifetime(retries: Sequence[int]) -> float:
    """Seconds within which a delivery is over, whatever its receiver does."""
    return sum(retries) * 1.1 + SLACK_SECONDS


def plan(
    redis: Redis,
    rules: DeliverySettings,
    retries: Sequence[int],
    happened: Happened,
    targets: Sequence[tuple[Endpoint, str]],
    entry: str = "",
) -> Planned:
    """Make a delivery of an event for each webhook, and take its entry out of the outbox, all or nothing. It is dropped
    where too many wait there already. There are none where somebody did it before, or the webhooks were removed.

    Args:
        targets: webhooks, each with the type of its message.
        retries: the longest of theirs.
    """
    keys = [OUTBOX, UNQUEUED, ENDPOINTS]
    kept = round(lifetime(retries)) + rules.log_ttl
    arguments: list[Any] = [entry, f"{time.time():.3f}", kept, rules.waiting, _DELIVERY, happened.id, happened.about]
    arguments.append(SETTINGS)
    for endpoint, type in targets:
        keys += [state_key(endpoint.id), waiting_key(endpoint.id)]
        arguments += [endpoint.id, type, *happened.body(type), endpoint.tenant]
    dropped, *ids = cast("list[Any]", redis.eval(PLAN, len(keys), *keys, *arguments))
    return Planned([id.decode() for id in ids], int(dropped))


def test(redis: Redis, rules: DeliverySettings, retries: Sequence[int], endpoint: Endpoint, id: str, by: str) -> str:
    """Send a webhook an event that says nothing; returns the delivery's id, '' where too many wait before it."""
    happened = Happened(id, "", "", time.time(), {"by": by}, TEST)
    return next(iter(plan(redis, rules, retries, happened, [(endpoint, TEST)]).ids), "")


def queue_up(redis: Redis, rules: DeliverySettings) -> int:
    """Queue a job for every delivery that has none; returns how many. One process does it at a time."""
    queue = FairQueue(WEBHOOK_QUEUE, connection=redis)
    if not redis.set(_LOCK, b"", nx=True, ex=10):
        return 0
    try:
        ids = [id.decode() for id in cast("list[bytes]", redis.zrange(UNQUEUED, 0, _BATCH - 1))]
        for start in range(0, len(ids), 50):
            chunk = ids[start : start + 50]
            pipeline = redis.pipeline(transaction=False)
            for id in chunk:
                pipeline.hget(delivery_key(id), "tenant")
            tenants = pipeline.execute()
            with redis.pipeline() as pipeline:
                pipeline.multi()  # rq wants to begin it
                for id, tenant in zip(chunk, tenants, strict=True):
                    _enqueue(queue, pipeline, rules, id, tenant.decode() if tenant else _endpoint_of(id))
                pipeline.execute()
        return len(ids)
    finally:
        redis.delete(_LOCK)


def _enqueue(queue: FairQueue, pipeline: Any, rules: DeliverySettings, id: str, tenant: str) -> None:
    job = job_of(id)
    # Of an earlier round, where it is sent again.
    pipeline.delete(Job.key_for(job), f"{RQ_PREFIX}:results:{job}")
    pipeline.zrem(queue.failed_job_registry.key, job)
    queue.enqueue(
        WEBHOOK_JOB,
        id,
        pipeline=pipeline,
        job_id=job,
        description=f"deliver {id}",
        job_timeout=JOB_TIMEOUT,
        result_ttl=0,
        failure_ttl=rules.log_ttl,
        # Spent only when a process is killed at it; what receivers answer is counted with the delivery.
        retry=Retry(max=len(RETRY_SECONDS), interval=list(RETRY_SECONDS)),
        meta={"lane": len(LANES), "tenant": tenant, "tokens": 1, "size": 0},
    )
    pipeline.zrem(UNQUEUED, id)


def begin(redis: Redis, delivery: Delivery, url: str, most: int, now: float) -> tuple[str, str, int]:
    """Whether it may be tried now; see `delivery_scripts.BEGIN`."""
    keys = _keys(delivery)
    arguments: list[Any] = [delivery.id, f"{now:.3f}", f"{now + LEASE_SECONDS:.3f}", most, url]
    word, more, waiting = cast("list[Any]", redis.eval(BEGIN, len(keys), *keys, *arguments))
    return word.decode(), more.decode(), int(waiting)


def end(
    redis: Redis,
    delivery: Delivery,
    rules: DeliverySettings,
    now: float,
    *,
    status: str,
    url: str = "",
    outcome: str = "",
    attempt: Mapping[str, Any] | None = None,
    next: float | None = None,
    paused: float = 0.0,
    slow: bool = False,
) -> str:
    """Note what came of a delivery or of a try (`attempt`); returns why its webhook was switched off by it, or ''.

    Args:
        slow: its receiver took long, whatever it answered.
    """
    attempts = [*delivery.attempts, *([] if attempt is None else [attempt])][-MOST_ATTEMPTS:]
    tries = delivery.tries + (outcome != "")
    failed = status == "failed"
    keys = [*_keys(delivery), failed_key(delivery.endpoint) if failed else over_key(delivery.endpoint)]
    kept = rules.waiting if failed else rules.log
    arguments: list[Any] = [delivery.id, f"{now:.3f}", outcome, status, orjson.dumps(attempts), tries]
    arguments += ["" if next is None else f"{next:.3f}", delivery.number, rules.log_ttl, kept, _DELIVERY]
    arguments += [f"{paused:.3f}", url, rules.disable_after, SLOW_FOR if slow else 0]
    return cast(bytes, redis.eval(END, len(keys), *keys, *arguments)).decode()


def drop(redis: Redis, id: str) -> None:
    """Of a delivery that is no more nothing waits."""
    redis.zrem(waiting_key(_endpoint_of(id)), id)


def postpone(redis: Redis, delivery: Delivery, until: float) -> None:
    """Note when a delivery comes up again that may not be tried now."""
    redis.eval(POSTPONE, 1, delivery_key(delivery.id), f"{until:.3f}")


def again(redis: Redis, rules: DeliverySettings, retries: Sequence[int], id: str) -> str | None:
    """Send a delivery again that is over, with the same id and the same bytes; returns why not, None where it is."""
    endpoint, _, number = id.rpartition("-")
    if not number.isdecimal():
        return "there is no such delivery"
    keys = [delivery_key(id), *all_keys(endpoint), UNQUEUED]
    kept = round(lifetime(retries)) + rules.log_ttl
    said = cast(bytes, redis.eval(AGAIN, len(keys), *keys, id, f"{time.time():.3f}", kept, number)).decode()
    if said == "again":
        return None
    return f"it is not over: {said}" if said else "what was to be sent expired"


def find(redis: Redis, id: str) -> Delivery | None:
    """A delivery, None where there is none (any more)."""
    return read(id, cast("dict[bytes, bytes]", redis.hgetall(delivery_key(id))))


def read(id: str, stored: Mapping[bytes, bytes]) -> Delivery | None:
    """A delivery as its hash holds it."""
    if not stored or b"body" not in stored:
        return None
    held = {name.decode(): value for name, value in stored.items()}
    text = {name: held.get(name, b"").decode() for name in ("event", "about", "type", "status")}
    attempts = orjson.loads(held.get("attempts") or b"[]")
    times = {name: second(held.get(name, b"").decode()) for name in ("created", "since", "next")}
    return Delivery(
        id,
        text["event"],
        text["about"],
        text["type"],
        held["body"],
        text["status"],
        int(held.get("tries", b"0")),
        tuple(attempts),
        times["created"] or 0.0,
        times["since"] or 0.0,
        times["next"],
        held.get("tenant", b"").decode() or _endpoint_of(id),
    )


def _endpoint_of(id: str) -> str:
    return id.rpartition("-")[0]


def _keys(delivery: Delivery) -> list[str]:
    """Those of `BEGIN`."""
    endpoint, tenant = delivery.endpoint, delivery.tenant
    keys = [delivery_key(delivery.id), state_key(endpoint), sending_key(endpoint), waiting_key(endpoint)]
    return [*keys, f"{PREFIX}webhook-tenant-sending:{tenant}", _SLOW_SENDING, f"{PREFIX}webhook-slow:{tenant}"]


def second(text: str | None) -> float | None:
    """A Unix second as it is stored; nothing is None."""
    return float(text) if text else None
