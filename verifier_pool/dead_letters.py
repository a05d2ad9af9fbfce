"""Jobs that failed for good: what can still be done about one.

A verdict is written once. Where a generation has its verdict, and a dead-lettered one nearly always has (`unverified`
with the reason), nothing that runs later changes it, so only what is undecided is queued anew, and webhooks. No letter
holds anything of a prompt or an answer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from redis import Redis
from rq.job import Job

from policies.settings import Settings
from policies.verification import unverified
from verifier_pool import RQ_PREFIX
from verifier_pool.link import deliveries, delivery_log, endpoints, trail
from verifier_pool.link.fair import FairQueue
from verifier_pool.link.letters import WEBHOOK, Letter, chosen, find
from verifier_pool.link.queue import OPEN, evidence_key
from verifier_pool.link.scripts import note_waiting
from verifier_pool.link.sealing import Sealer
from verifier_pool.link.signing import signer_of
from verifier_pool.replays import FAILED, is_second, outcome_key
from verifier_pool.stages import Stages
from verifier_pool.store import Store
from verifier_pool.units import of_unverified

_MOST_NAMED = 100
"""Jobs that one entry of the audit log names."""


def act(
    redis: Redis, settings: Settings, action: str, ids: Sequence[str] | None, *, actor: str
) -> list[dict[str, Any]]:
    """`requeue` or `drop` the letters of these ids, of jobs or of generations, or all (None), and put it into the audit
    log; returns what became of each: `job`, `id`, `done` and, where it was not, `why`.
    """
    found, unknown = find(redis), list[str]()
    if ids is not None:
        found, unknown = chosen(found, ids)
    done = [_done(redis, settings, letter, action) for letter in found]
    done += [{"job": id, "id": id, "done": False, "why": "there is no such dead letter"} for id in unknown]
    jobs = {"jobs": [each["job"] for each in done if each["done"]][:_MOST_NAMED]}
    counts = {"done": sum(each["done"] for each in done), "refused": sum(not each["done"] for each in done)}
    said = trail.entry(actor, f"queue.{action}", "all" if ids is None else " ".join(ids), after=counts | jobs)
    trail.append(redis, settings.admin.audit_entries, said)
    return done


def _done(redis: Redis, settings: Settings, letter: Letter, action: str) -> dict[str, Any]:
    why = None
    if action == "requeue":
        why = requeue(redis, settings, letter)
    else:
        drop(redis, settings, letter)
    return {"job": letter.job, "id": letter.id, "done": why is None, "why": why}


def requeue(redis: Redis, settings: Settings, letter: Letter) -> str | None:
    """Queue a dead letter anew; returns why not, None when it was."""
    if letter.stage == WEBHOOK:
        return _deliver_again(redis, settings, letter)
    if letter.verdict is not None:
        why = f" ({', '.join(letter.why)})" if letter.why else ""
        return f"its verdict is {letter.verdict}{why}, and a verdict is written once"
    if not redis.exists(evidence_key(letter.id)):
        return "its evidence expired; a worker ends it as unverified"
    if letter.stage.startswith("replay") and redis.exists(outcome_key(letter.id, second=is_second(letter.job))):
        return "its generation is being judged without this replay"
    rules, now = settings.verification, time.time()
    with redis.pipeline() as pipeline:
        pipeline.multi()  # rq wants to begin it, and the old job has to go before
        _forget(redis, letter, pipeline)
        # From its first pass it continues where it was, and asks for this replay again.
        Stages(redis, rules).verify(letter.id, pipeline)
        pipeline.zadd(OPEN, {letter.id: now + rules.lost_after})
        note_waiting(pipeline, letter.id, letter.backend, now, rules.evidence_ttl)
        pipeline.execute()
    return None


def drop(redis: Redis, settings: Settings, letter: Letter) -> None:
    """Delete a dead letter. What is undecided ends as it would have: unverified, or judged without its replay."""
    if letter.verdict is None and letter.stage != WEBHOOK:
        if letter.stage.startswith("replay"):
            reason = f"{FAILED}: {letter.reason}"
            Stages(redis, settings.verification).give_up(letter.id, reason, second=is_second(letter.job))
        else:
            webhook = settings.webhook is not None
            ttl, signer = settings.verification.verdict_ttl, signer_of(redis, settings)
            sealer = Sealer.of(settings.storage)
            store = Store(redis, verdict_ttl=ttl, webhook=webhook, signer=signer, sealer=sealer)
            intent = store.intent(letter.id)
            verification = unverified(letter.id, f"job_failed: {letter.reason}", intent, time.time())
            store.settle(verification, of_unverified(verification, intent))
    with redis.pipeline() as pipeline:
        _forget(redis, letter, pipeline)
        pipeline.execute()


def _deliver_again(redis: Redis, settings: Settings, letter: Letter) -> str | None:
    id = letter.job.removeprefix("webhook-")
    endpoint, _ = endpoints.one(redis, settings, id.rpartition("-")[0])
    if endpoint is None:
        return "there is no webhook any more that it was for"
    if delivery_log.state(redis, endpoint)["disabled"]:
        return "its webhook is switched off; `countersign webhooks resume` first"
    return deliveries.again(redis, settings.deliveries, settings.deliveries.retries, id)


def _forget(redis: Redis, letter: Letter, pipeline: Any) -> None:
    pipeline.zrem(FairQueue(letter.queue, connection=redis).failed_job_registry.key, letter.job)
    pipeline.delete(
        Job.key_for(letter.job), f"{RQ_PREFIX}:results:{letter.job}", f"{RQ_PREFIX}:executions:{letter.job}"
    )
