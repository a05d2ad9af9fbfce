"""What the proxy and the workers agree on in Redis: names of queues, jobs, keys and channels.

Nothing here opens a connection; this is the only module of `verifier_pool` that the proxy imports.

    intent:ID    JSON, written before the request goes up; holds owner, backend and its declaration, model, mode
    open         sorted set of ids without a verdict, scored by the second they count as lost
    evidence:ID  packed evidence (policies.codec), deleted with its TTL
    verdict:ID   the verification as JSON, written once (SET NX); first writer wins
    verdicts     channel: an id is published when its verdict is stored
    outbox       sorted set of ids whose verdict, and of `event:ID` whose event, still has to go to the webhook, scored
                 by its second
    event:ID     body of a webhook event that is about no single verdict, JSON
    declaration:BACKEND  hash of declared runtimes that the backend's answers contradicted, JSON each
    runtime-changes      hash: by backend, answers that fitted another runtime than the declared one
    waiting:BACKEND      sorted set of ids with a job but no verdict, scored by the second they were queued
    audited:ID   whether the secret choice took a response, written once, so that a second run chooses alike

Standing (verifier_pool.standing):

    units:BACKEND     list of units (policies.unit) as JSON, in the order of their verdicts, that no record holds yet
    unfolded          set of backends that have any
    standing:BACKEND  hash: `version`, an integer, and by name of its declaration a packed record (policies.standing)
    standing-seen:BACKEND:KIND  sorted set of names of units that were counted (KIND u) and of prompts that failed (p),
                      scored by the second they were last met
    standings         hash: by `BACKEND:DECLARATION` what others need to know, JSON (`standing_field`)
    units-dropped     hash: by backend, units that were not folded: the list was full, or they could not be read
    second-unchecked  hash: by backend, units whose accusing replay the second reference could not repeat
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from rq import Retry

from policies import standing
from policies.settings import AuditSettings, Settings, VerificationSettings
from policies.standing import Event, Record
from verifier_pool import TAG
from verifier_pool.events import body

PREFIX = TAG + ":"
VERIFY_QUEUE = "countersign-verify"
WEBHOOK_QUEUE = "countersign-webhooks"
VERIFY_JOB = "verifier_pool.jobs.verify"
WEBHOOK_JOB = "verifier_pool.webhooks.deliver"
OPEN = PREFIX + "open"
OUTBOX = PREFIX + "outbox"
VERDICTS = PREFIX + "verdicts"
RUNTIME_CHANGES = PREFIX + "runtime-changes"
UNFOLDED = PREFIX + "unfolded"
STANDINGS = PREFIX + "standings"
UNITS_DROPPED = PREFIX + "units-dropped"
SECOND_UNCHECKED = PREFIX + "second-unchecked"
EVENT = "event:"
"""Begins an entry of the outbox that names an event."""
AUDIT_SECRET = PREFIX + "audit-secret"
WEBHOOK_DISABLED = PREFIX + "webhook-disabled"

STORE_VERDICT = """
local stored = redis.call('SET', KEYS[1], ARGV[1], 'NX', 'EX', ARGV[2])
redis.call('ZREM', KEYS[2], ARGV[3])
redis.call('ZREM', KEYS[7], ARGV[3])
if not stored then return 0 end
if ARGV[4] ~= '' then redis.call('ZADD', KEYS[3], ARGV[4], ARGV[3]) end
redis.call('EXPIRE', KEYS[4], ARGV[6])
if ARGV[8] ~= '' then
  if redis.call('LLEN', KEYS[5]) < tonumber(ARGV[9]) then
    redis.call('RPUSH', KEYS[5], ARGV[8])
    redis.call('SADD', KEYS[6], ARGV[7])
  else
    redis.call('HINCRBY', KEYS[8], ARGV[7], 1)
  end
end
redis.call('PUBLISH', ARGV[5], ARGV[3])
return 1
"""
"""Lua: store a verdict once with its unit of evidence, close its id, put it in the outbox and announce it, or do
nothing but close.

KEYS are those of `store_verdict_keys`, ARGV those of `store_verdict_args`. Returns 1 when this call stored it.
"""

STORE_STANDING = """
if (redis.call('HGET', KEYS[1], 'version') or '0') ~= ARGV[1] then return 0 end
redis.call('HINCRBY', KEYS[1], 'version', 1)
local backend, now, folded, unread = ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local records, names, events = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local remembered, most, lifetime, at = tonumber(ARGV[9]), tonumber(ARGV[10]), ARGV[11], 12
if folded > 0 then redis.call('LTRIM', KEYS[2], folded, -1) end
if unread > 0 then redis.call('HINCRBY', KEYS[6], backend, unread) end
if redis.call('EXISTS', KEYS[2]) == 0 then redis.call('SREM', KEYS[3], backend) end
for _ = 1, records do
  redis.call('HSET', KEYS[1], ARGV[at], ARGV[at + 1])
  redis.call('HSET', KEYS[4], backend .. ':' .. ARGV[at], ARGV[at + 2])
  at = at + 3
end
for _ = 1, names do
  redis.call('ZADD', KEYS[tonumber(ARGV[at])], now, ARGV[at + 1])
  at = at + 2
end
if names > 0 then
  for _, key in ipairs({KEYS[7], KEYS[8]}) do
    redis.call('ZREMRANGEBYSCORE', key, '-inf', tonumber(now) - remembered)
    redis.call('ZREMRANGEBYRANK', key, 0, -most - 1)
    redis.call('EXPIRE', key, remembered)
  end
end
for number = 1, events do
  redis.call('SET', KEYS[8 + number], ARGV[at + 1], 'EX', lifetime)
  redis.call('ZADD', KEYS[5], now, ARGV[at])
  at = at + 2
end
return 1
"""
"""Lua: store what a fold made of the first units of a backend, unless somebody stored another version meanwhile.

KEYS and ARGV are those of `store_standing`. Returns 1 when this call stored it, 0 when it has to be made again.
"""

RETRY_SECONDS = (1, 5, 30)
"""Waits before a verification is tried again."""

REMEMBERED = 30 * 86_400
"""Seconds for which a unit or prompt is remembered after it was met, as long as there are at most `MOST_REMEMBERED` of
its kind."""
MOST_REMEMBERED = 100_000
KINDS = ("u", "p")
"""How the names of units and of prompts begin."""
MOST_UNITS = 100_000
"""Units of one backend that wait for a worker; more are dropped and counted."""


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


def waiting_key(backend: str) -> str:
    """Key of the backend's generations that wait for their verdict (`note_waiting`); its size is their number."""
    return f"{PREFIX}waiting:{backend}"


def audited_key(id: str) -> str:
    """Key of the secret choice about a response."""
    return f"{PREFIX}audited:{id}"


def event_key(id: str) -> str:
    """Key of the body of a webhook event."""
    return f"{PREFIX}event:{id}"


def units_key(backend: str) -> str:
    """Key of the backend's units that no record holds yet, a list."""
    return f"{PREFIX}units:{backend}"


def standing_key(backend: str) -> str:
    """Key of the backend's records, a hash by name of the declaration."""
    return f"{PREFIX}standing:{backend}"


def seen_key(backend: str, name: str) -> str:
    """Key of the backend's memory of names like this one (`policies.standing.names`), a sorted set.

    Units and prompts have one each: there are many more units, and they must not make it forget prompts.
    """
    return f"{PREFIX}standing-seen:{backend}:{name[:1]}"


def standing_field(backend: str, declaration: str) -> str:
    """Field of `STANDINGS` for a backend under the declaration of that name (`policies.unit.declaration_name`).

    Its value is JSON: `state`, `audit_rate`, `since` (Unix seconds), `backend`, `declaration`. A new backend has none.
    """
    return f"{backend}:{declaration}"


def note_waiting(pipeline: Any, id: str, backend: str, now: float, ttl: int) -> None:
    """Count a generation among those that wait, until its verdict or for `ttl` seconds. `pipeline` is redis-py's."""
    key = waiting_key(backend)
    pipeline.zadd(key, {id: now})
    pipeline.zremrangebyscore(key, "-inf", now - ttl)
    pipeline.expire(key, ttl)


def store_verdict_keys(id: str, backend: str) -> list[str]:
    """KEYS of `STORE_VERDICT`."""
    kept = [verdict_key(id), OPEN, OUTBOX, intent_key(id)]
    return [*kept, units_key(backend), UNFOLDED, waiting_key(backend), UNITS_DROPPED]


def store_verdict_args(
    id: str, backend: str, verification: bytes, unit: bytes | None, ttl: int, webhook_at: float | None
) -> list[bytes | str | int]:
    """ARGV of `STORE_VERDICT`.

    Args:
        unit: what the response says about its backend (`policies.unit.Unit` as JSON); None where no backend is known.
        ttl: seconds the verdict is kept.
        webhook_at: the Unix second of the verdict, None without a webhook.
    """
    at = "" if webhook_at is None else f"{webhook_at:.3f}"
    return [verification, ttl, id, at, VERDICTS, 300, backend, unit or b"", MOST_UNITS]


def store_standing(
    backend: str,
    version: bytes,
    before: Mapping[str, Record],
    after: Mapping[str, Record],
    settings: Settings,
    now: float,
    *,
    taken: int = 0,
    unread: int = 0,
    remember: Sequence[str] = (),
) -> tuple[list[str], list[bytes | str | int], list[Event]]:
    """KEYS and ARGV of `STORE_STANDING`, and what happened.

    The webhook, if there is one, is told of that, unless the settings do not name the backend: then it is not the
    operator's, but was made for a test.

    Args:
        version: as it was read together with `before`.
        before, after: records by name of their declaration; `after` holds those to be written.
        now: Unix seconds.
        taken, unread: first units of the list that are done with, and how many of them could not be counted.
        remember: names that the backend's memory learns, or met again.
    """
    happened = [event for name, record in after.items() for event in standing.events(before.get(name), record)]
    tells = settings.webhook is not None and backend in {each.name for each in settings.backends}
    told = {secrets.token_hex(16): event for event in happened} if tells else {}
    keys = [standing_key(backend), units_key(backend), UNFOLDED, STANDINGS, OUTBOX, UNITS_DROPPED]
    keys += [seen_key(backend, kind) for kind in KINDS]
    arguments: list[bytes | str | int] = [version, backend, f"{now:.3f}", taken, unread]
    arguments += [len(after), len(remember), len(told)]
    arguments += [REMEMBERED, MOST_REMEMBERED, settings.verification.verdict_ttl]
    for name, record in after.items():
        arguments += [name, standing.pack(record), _entry(record, settings.audit)]
    for name in remember:
        arguments += [keys.index(seen_key(backend, name)) + 1, name]
    for id, event in told.items():
        arguments += [EVENT + id, body(event.type, now, event.data)]
    return [*keys, *map(event_key, told)], arguments, happened


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


def _entry(record: Record, rules: AuditSettings) -> bytes:
    return orjson.dumps(
        {
            "state": record.state,
            "audit_rate": standing.audit_rate(record, rules),
            "since": record.since,
            "backend": record.backend,
            "declaration": record.name,
        }
    )
