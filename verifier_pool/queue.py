"""What the proxy and the workers agree on in Redis: names of queues, jobs, keys and channels.

Nothing here opens a connection; this is the only module of `verifier_pool` that the proxy imports.

    intent:ID    JSON, written before the request goes up; holds owner, backend, model, mode
    open         sorted set of ids without a verdict, scored by the second they count as lost
    evidence:ID  packed evidence (policies.codec), deleted with its TTL
    verdict:ID   the verification as JSON, written once (SET NX); first writer wins
    verdicts     channel: an id is published when its verdict is stored
    outbox       sorted set of ids whose verdict still has to go to the webhook, scored by its second
    declaration:BACKEND  hash of declared runtimes that the backend's answers contradicted, JSON each
    runtime-changes      hash: by backend, answers that fitted another runtime than the declared one
"""

from __future__ import annotations

from typing import Any

from rq import Retry

from policies.settings import VerificationSettings

PREFIX = "countersign:"
VERIFY_QUEUE = "countersign-verify"
WEBHOOK_QUEUE = "countersign-webhooks"
VERIFY_JOB = "verifier_pool.jobs.verify"
WEBHOOK_JOB = "verifier_pool.webhooks.deliver"
OPEN = PREFIX + "open"
OUTBOX = PREFIX + "outbox"
VERDICTS = PREFIX + "verdicts"
RUNTIME_CHANGES = PREFIX + "runtime-changes"
AUDIT_SECRET = PREFIX + "audit-secret"
WEBHOOK_DISABLED = PREFIX + "webhook-disabled"

STORE_VERDICT = """
local stored = redis.call('SET', KEYS[1], ARGV[1], 'NX', 'EX', ARGV[2])
redis.call('ZREM', KEYS[2], ARGV[3])
if not stored then return 0 end
if ARGV[4] ~= '' then redis.call('ZADD', KEYS[3], ARGV[4], ARGV[3]) end
redis.call('EXPIRE', KEYS[4], ARGV[6])
redis.call('PUBLISH', ARGV[5], ARGV[3])
return 1
"""
"""Lua: store a verdict once, close its id, put it in the outbox and announce it, or do nothing but close.

KEYS are those of `store_verdict_keys`, ARGV those of `store_verdict_args`. Returns 1 when this call stored it.
"""

RETRY_SECONDS = (1, 5, 30)
"""Waits before a verification is tried again."""


def intent_key(id: str) -> str:
    """Key of the intent, JSON."""
    return f"{PREFIX}intent:{id}"


def evidence_key(id: str) -> str:
    """Key of the packed evidence."""
    return f"{PREFIX}evidence:{id}"


def verdict_key(id: str) -> str:
    """Key of the verification, JSON."""
    return f"{PREFIX}verdict:{id}"


def declaration_key(backend: str) -> str:
    """Key of the backend's contradicted declarations, a hash by runtime."""
    return f"{PREFIX}declaration:{backend}"


def answers_key(backend: str, prompt: str) -> str:
    """Key of the answers a backend gave to one request, a hash (verifier_pool.history)."""
    return f"{PREFIX}answers:{backend}:{prompt}"


def answered_key(backend: str) -> str:
    """Key of the sorted set of a backend's answers keys."""
    return f"{PREFIX}answered:{backend}"


def store_verdict_keys(id: str) -> list[str]:
    """KEYS of `STORE_VERDICT`."""
    return [verdict_key(id), OPEN, OUTBOX, intent_key(id)]


def store_verdict_args(id: str, verification: bytes, ttl: int, webhook_at: float | None) -> list[bytes | str | int]:
    """ARGV of `STORE_VERDICT`; `webhook_at` is the Unix second of the verdict, None without a webhook."""
    return [verification, ttl, id, "" if webhook_at is None else f"{webhook_at:.3f}", VERDICTS, 300]


def verify_options(id: str, settings: VerificationSettings) -> dict[str, Any]:
    """Keyword arguments of `Queue.enqueue(VERIFY_JOB, id, **verify_options(id, …))`, every lifetime explicit."""
    return {
        "job_id": id,
        "description": f"verify {id}",
        "job_timeout": settings.job_timeout,
        "ttl": settings.evidence_ttl,
        "result_ttl": 60,
        "failure_ttl": settings.verdict_ttl,
        "retry": Retry(max=len(RETRY_SECONDS), interval=list(RETRY_SECONDS)),
    }
