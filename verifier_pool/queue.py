"""What the proxy and the workers agree on in Redis: names of queues, jobs, keys and channels.

Nothing here opens a connection; this is the only module of `verifier_pool` that the proxy imports.

    intent:ID    JSON, written before the request goes up; holds owner, backend, model, mode
    open         sorted set of ids without a verdict, scored by the second they count as lost
    evidence:ID  packed evidence (policies.codec), deleted with its TTL
    verdict:ID   the verification as JSON, written once (SET NX); first writer wins
    verdicts     channel: an id is published when its verdict is stored
"""

from __future__ import annotations

PREFIX = "countersign:"
VERIFY_QUEUE = "countersign-verify"
WEBHOOK_QUEUE = "countersign-webhooks"
VERIFY_JOB = "verifier_pool.jobs.verify"
WEBHOOK_JOB = "verifier_pool.webhooks.deliver"
OPEN = PREFIX + "open"
VERDICTS = PREFIX + "verdicts"
AUDIT_SECRET = PREFIX + "audit-secret"


def intent_key(id: str) -> str:
    """Key of the intent, JSON."""
    return f"{PREFIX}intent:{id}"


def evidence_key(id: str) -> str:
    """Key of the packed evidence."""
    return f"{PREFIX}evidence:{id}"


def verdict_key(id: str) -> str:
    """Key of the verification, JSON."""
    return f"{PREFIX}verdict:{id}"
