"""What an earlier release left in Redis, under names that did not share a hash tag, is taken over under today's.

Standings, the secret that picks audits, verdicts, what is open and its evidence keep their lifetimes. Where both names
exist, as when processes of both releases ran at once, what is there under today's name stays and the rest joins it.
Jobs are not taken over: the sweeper queues anew what has evidence and no job, the outbox what was to be sent.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, cast

from redis import Redis
from redis.exceptions import NoPermissionError

from verifier_pool.link import connection
from verifier_pool.link.queue import EVENT, OUTBOX, PREFIX, VERIFY_QUEUE, WEBHOOK_QUEUE

logger = logging.getLogger(__name__)

OLD = "countersign:"
_SIGNS = tuple(OLD + name for name in ("audit-secret", "standings", "open", "outbox", "unfolded"))
_CHUNK = 500
_RQ = ("queue", "intermediate", "wip", "finished", "failed", "deferred", "scheduled", "canceled")
"""Where rq keeps ids of a queue's jobs: `rq:KIND:QUEUE`, lists or sorted sets."""

_MOVE = """
local old, new = KEYS[1], KEYS[2]
local kind = redis.call('TYPE', old).ok
if kind == 'none' then return 0 end
if redis.call('EXISTS', new) == 0 then
  redis.call('RENAME', old, new)
  return 1
end
local lives = redis.call('PTTL', new)
if kind == redis.call('TYPE', new).ok then
  if kind == 'zset' then
    redis.call('ZUNIONSTORE', new, 2, old, new, 'AGGREGATE', 'MAX')
  elseif kind == 'set' then
    redis.call('SUNIONSTORE', new, old, new)
  elseif kind == 'hash' then
    local fields = redis.call('HGETALL', old)
    for at = 1, #fields, 2 do redis.call('HSETNX', new, fields[at], fields[at + 1]) end
  elseif kind == 'list' then
    while redis.call('RPOPLPUSH', old, new) do end
  end
end
if lives > 0 then redis.call('PEXPIRE', new, lives) end
redis.call('DEL', old)
return 1
"""
"""Lua: give a key its new name, or add what it holds to what has that name. KEYS: the old and the new one."""


def take_over(redis: Redis) -> int:
    """Rename what an earlier release left, if it left anything; returns how many keys. Redis's errors pass through.

    Earlier releases knew no cluster, so nothing is looked for there.
    """
    if connection.of_cluster(redis) or not _left(redis):
        return 0
    try:
        return _taken_over(redis)
    except NoPermissionError:
        logger.error("an earlier release left keys that this user of Redis may not touch; they stay where they are")
        return 0


def _taken_over(redis: Redis) -> int:
    tell = _deliveries(redis)
    moved = 0
    for names in _chunks(redis.scan_iter(match=OLD + "*", count=_CHUNK)):
        pipeline = redis.pipeline(transaction=False)
        for name in names:
            pipeline.eval(_MOVE, 2, name, PREFIX.encode() + name[len(OLD) :])
        moved += sum(pipeline.execute())
    if tell:
        redis.zadd(OUTBOX, dict.fromkeys(tell, 0.0), nx=True)
    _forget_jobs(redis)
    logger.warning("taken over from an earlier release: %d keys, %d deliveries", moved, len(tell))
    return moved


def _left(redis: Redis) -> bool:
    try:
        return bool(redis.exists(*_SIGNS))
    except NoPermissionError:  # a user who may see today's names alone
        return False


def _deliveries(redis: Redis) -> list[str]:
    """Entries of the outbox whose deliveries had not ended."""
    ids = [job.removeprefix("webhook-") for job in _jobs(redis, WEBHOOK_QUEUE, ("queue", "wip", "scheduled"))]
    event = EVENT.replace(":", "-")
    return [EVENT + id.removeprefix(event) if id.startswith(event) else id for id in ids]


def _forget_jobs(redis: Redis) -> None:
    for queue in (VERIFY_QUEUE, WEBHOOK_QUEUE):
        jobs = _jobs(redis, queue, _RQ)
        gone = [f"rq:{kind}:{queue}" for kind in _RQ] + [f"rq:queue:{queue}:intermediate"]
        gone += [f"rq:{what}:{job}" for job in jobs for what in ("job", "results", "executions")]
        for names in _chunks(iter(gone)):
            redis.unlink(*names)
        redis.srem("rq:queues", f"rq:queue:{queue}")


def _jobs(redis: Redis, queue: str, kinds: Sequence[str]) -> list[str]:
    """Ids of an earlier release's jobs. rq writes executions of running ones as `JOB:EXECUTION`."""
    found: list[bytes] = []
    for name in [*(f"rq:{kind}:{queue}" for kind in kinds), f"rq:queue:{queue}:intermediate"]:
        kind = cast(bytes, redis.type(name))
        found += cast("list[bytes]", redis.lrange(name, 0, -1)) if kind == b"list" else []
        found += cast("list[bytes]", redis.zrange(name, 0, -1)) if kind == b"zset" else []
    return list(dict.fromkeys(each.decode(errors="replace").partition(":")[0] for each in found))


def _chunks(names: Iterator[Any]) -> Iterator[list[Any]]:
    chunk: list[Any] = []
    for name in names:
        chunk.append(name)
        if len(chunk) == _CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
