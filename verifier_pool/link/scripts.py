"""What changes several keys of `verifier_pool.link.queue` in one step: scripts, with what they are called with."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from policies import standing, tally
from policies.settings import Settings
from policies.standing import Event, Record
from policies.verification import encode
from verifier_pool.link.events import stored
from verifier_pool.link.queue import (
    ENDPOINTS,
    EVENT,
    KINDS,
    MOST_REMEMBERED,
    MOST_TOLD,
    MOST_UNITS,
    OPEN,
    OUTBOX,
    REMEMBERED,
    STANDINGS,
    UNFOLDED,
    UNITS_DROPPED,
    UNTOLD,
    VERDICTS,
    content_keys,
    event_key,
    intent_key,
    seen_key,
    standing_key,
    tally_key,
    units_key,
    verdict_key,
    waiting_bytes_key,
    waiting_key,
    waiting_sizes_key,
)
from verifier_pool.link.trail import TRAIL

INTENT_SLACK = 60
"""Seconds for which an intent outlives what it was written for. Evidence that is later than that after it comes with
another one, so that it is never without."""

OPEN_INTENT = """
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[4])
"""
"""Lua: write an intent and expect its verdict, both or neither: an intent that nobody expects one for is never swept.

KEYS: the intent, `open`. ARGV: the intent as JSON, seconds it is kept, Unix second at which it counts as lost, id.
"""

STORE_VERDICT = """
-- A Redis without memory lets a script write once it has written what frees some.
redis.call('ZREM', KEYS[2], ARGV[3])
redis.call('ZREM', KEYS[7], ARGV[3])
local size = redis.call('HGET', KEYS[9], ARGV[3])
if size then
  redis.call('HDEL', KEYS[9], ARGV[3])
  redis.call('DECRBY', KEYS[10], size)
end
local stored = redis.call('SET', KEYS[1], ARGV[1], 'NX', 'EX', ARGV[2])
if not stored then return 0 end
if ARGV[11] ~= '' or redis.call('HLEN', KEYS[12]) > 0 then
  if redis.call('ZCARD', KEYS[3]) < tonumber(ARGV[12]) then
    redis.call('ZADD', KEYS[3], ARGV[4], ARGV[3])
  else
    redis.call('INCR', KEYS[13])
  end
end
local read, intent = pcall(cjson.decode, redis.call('GET', KEYS[4]) or '{}')
local retain = read and type(intent) == 'table' and intent['retain']
local kept = not (retain == 'none' or (retain == 'rejects' and ARGV[13] ~= 'reject'))
if not kept then redis.call('UNLINK', KEYS[14], KEYS[15], KEYS[16], KEYS[17], KEYS[18]) end
redis.call('EXPIRE', KEYS[4], ARGV[6])
if ARGV[8] ~= '' then
  if redis.call('LLEN', KEYS[5]) < tonumber(ARGV[9]) then
    redis.call('RPUSH', KEYS[5], ARGV[8])
    redis.call('SADD', KEYS[6], ARGV[7])
  else
    redis.call('HINCRBY', KEYS[8], ARGV[7], 1)
  end
end
for at = 14, #ARGV do
  if redis.call('HLEN', KEYS[11]) < 1000 or redis.call('HEXISTS', KEYS[11], ARGV[at]) == 1 then
    redis.call('HINCRBY', KEYS[11], ARGV[at], 1)
  end
end
if #ARGV > 13 then redis.call('EXPIRE', KEYS[11], ARGV[10]) end
redis.call('PUBLISH', ARGV[5], ARGV[3])
return 1
"""
"""Lua: store a verdict once with its unit of evidence, count it, close its id, put it in the outbox and announce it, or
do nothing but close. Its bytes no longer wait, and what its key does not retain (`policies.settings.Retain`) goes in
the same step.

KEYS are those of `store_verdict_keys`, ARGV those of `store_verdict_args`. Returns 1 when this call stored it.
"""

STORE_STANDING = """
if (redis.call('HGET', KEYS[1], 'version') or '0') ~= ARGV[1] then return 0 end
redis.call('HINCRBY', KEYS[1], 'version', 1)
local backend, now, folded, unread = ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local records, names, events = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local remembered, most, lifetime, at = tonumber(ARGV[9]), tonumber(ARGV[10]), ARGV[11], 14
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
if tonumber(ARGV[12]) > 0 then
  redis.call('HINCRBY', KEYS[11], 'tokens|served', ARGV[12])
  redis.call('HINCRBY', KEYS[11], 'tokens|decided', ARGV[13])
  redis.call('EXPIRE', KEYS[11], remembered)
end
local heard = ARGV[at] ~= '' or redis.call('HLEN', KEYS[10]) > 0
at = at + 1
for number = 1, events do
  if heard then
    redis.call('SET', KEYS[11 + number], ARGV[at + 1], 'EX', lifetime)
    redis.call('ZADD', KEYS[5], now, ARGV[at])
  end
  at = at + 2
end
if ARGV[at + 1] ~= '' then redis.call('XADD', KEYS[9], 'MAXLEN', ARGV[at], '*', 'entry', ARGV[at + 1]) end
return 1
"""
"""Lua: store what a fold made of the first units of a backend, unless somebody stored another version meanwhile.

KEYS and ARGV are those of `store_standing`. Returns 1 when this call stored it, 0 when it has to be made again.
"""

NOTE_WAITING = """
if redis.call('EXISTS', KEYS[4]) == 1 then return end
local late = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', tonumber(ARGV[2]) - tonumber(ARGV[3]), 'LIMIT', 0, 1000)
for _, id in ipairs(late) do
  redis.call('ZREM', KEYS[1], id)
  local size = redis.call('HGET', KEYS[2], id)
  if size then
    redis.call('HDEL', KEYS[2], id)
    redis.call('DECRBY', KEYS[3], size)
  end
end
redis.call('ZADD', KEYS[1], ARGV[2], ARGV[1])
if ARGV[4] ~= '' then
  local before = tonumber(redis.call('HGET', KEYS[2], ARGV[1]) or 0)
  redis.call('HSET', KEYS[2], ARGV[1], ARGV[4])
  redis.call('INCRBY', KEYS[3], tonumber(ARGV[4]) - before)
end
for n = 1, 3 do redis.call('EXPIRE', KEYS[n], ARGV[3]) end
"""
"""Lua: count a generation among those that wait unless it is decided, and no longer those whose evidence must have
expired.

KEYS: `waiting_keys`, the verdict. ARGV: id, Unix second, seconds it can wait, its bytes or nothing to leave them.
"""

ADD_WAITING = """
if redis.call('ZSCORE', KEYS[1], ARGV[1]) then
  redis.call('HINCRBY', KEYS[2], ARGV[1], ARGV[2])
  redis.call('INCRBY', KEYS[3], ARGV[2])
  for n = 2, 3 do redis.call('EXPIRE', KEYS[n], redis.call('TTL', KEYS[1])) end
end
"""
"""Lua: add to (or take from) the bytes of a generation that waits. KEYS: `waiting_keys`. ARGV: id, bytes."""


def open_intent(id: str, intent: bytes, ttl: int, lost_at: float) -> tuple[str | bytes | int, ...]:
    """The command that writes an intent (JSON) for `ttl` seconds and some more, which counts as lost at the Unix second
    `lost_at`. To repeat it does no harm."""
    return ("EVAL", OPEN_INTENT, 2, intent_key(id), OPEN, intent, ttl + INTENT_SLACK, f"{lost_at:.3f}", id)


def waiting_keys(backend: str) -> list[str]:
    """KEYS of `NOTE_WAITING` and `ADD_WAITING`."""
    return [waiting_key(backend), waiting_sizes_key(backend), waiting_bytes_key(backend)]


def note_waiting(pipeline: Any, id: str, backend: str, now: float, ttl: int, size: int | None = None) -> None:
    """Count a generation among those that wait, until its verdict or for `ttl` seconds.

    Args:
        pipeline: redis-py's, or a client.
        size: bytes in Redis that wait with it; None leaves what was noted before.
    """
    pipeline.eval(
        NOTE_WAITING, 4, *waiting_keys(backend), verdict_key(id), id, f"{now:.3f}", ttl, "" if size is None else size
    )


def add_waiting(pipeline: Any, id: str, backend: str, size: int) -> None:
    """More bytes wait with a generation, or fewer where `size` is negative; nothing happens after its verdict."""
    pipeline.eval(ADD_WAITING, 3, *waiting_keys(backend), id, size)


def store_verdict_keys(id: str, backend: str) -> list[str]:
    """KEYS of `STORE_VERDICT`."""
    kept = [verdict_key(id), OPEN, OUTBOX, intent_key(id)]
    waiting, *sizes = waiting_keys(backend)
    kept += [units_key(backend), UNFOLDED, waiting, UNITS_DROPPED, *sizes, tally_key(backend)]
    return [*kept, ENDPOINTS, UNTOLD, *content_keys(id)]


def store_verdict_args(
    verification: Mapping[str, Any], unit: bytes | None, ttl: int, *, webhook: bool
) -> list[bytes | str | int]:
    """ARGV of `STORE_VERDICT`.

    Args:
        unit: what the response says about its backend (`policies.unit.Unit` as JSON); None where no backend is known.
        ttl: seconds the verdict is kept.
        webhook: whether it goes to the outbox in any case, and not only where a webhook is registered.
    """
    at, verdict = f"{verification['decided']:.3f}", str(verification["verdict"])
    kept = [encode(verification), ttl, verification["id"], at, VERDICTS, 300, verification["backend"]]
    kept += [unit or b"", MOST_UNITS, REMEMBERED, "1" if webhook else "", MOST_TOLD, verdict]
    return [*kept, *tally.fields(verification)]


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
    entry: str = "",
) -> tuple[list[str], list[bytes | str | int], list[Event]]:
    """KEYS and ARGV of `STORE_STANDING`, and what happened.

    Webhooks, where there are any, are told of that, unless the settings do not name the backend: then it is not the
    operator's, but was made for a test.

    Args:
        version: as it was read together with `before`.
        before, after: records by name of their declaration; `after` holds those to be written.
        now: Unix seconds.
        taken, unread: first units of the list that are done with, and how many of them could not be counted.
        remember: names that the backend's memory learns, or met again.
        entry: what the audit log learns with it (`trail.entry`); '' is nothing.
    """
    happened = [event for name, record in after.items() for event in standing.events(before.get(name), record)]
    tells = backend in {each.name for each in settings.backends}
    told = {secrets.token_hex(16): event for event in happened} if tells else {}
    keys = [standing_key(backend), units_key(backend), UNFOLDED, STANDINGS, OUTBOX, UNITS_DROPPED]
    keys += [*(seen_key(backend, kind) for kind in KINDS), TRAIL, ENDPOINTS, tally_key(backend)]
    arguments: list[bytes | str | int] = [version, backend, f"{now:.3f}", taken, unread]
    arguments += [len(after), len(remember), len(told)]
    arguments += [REMEMBERED, MOST_REMEMBERED, settings.verification.verdict_ttl, *_counted(before, after)]
    for name, record in after.items():
        known = standing.brief(record, settings.standing_of(backend), settings.audit)
        arguments += [name, standing.pack(record), orjson.dumps(known)]
    for name in remember:
        arguments += [keys.index(seen_key(backend, name)) + 1, name]
    arguments.append("" if settings.webhook is None else "1")
    for id, event in told.items():
        arguments += [EVENT + id, stored(event.type, now, event.data)]
    arguments += [settings.admin.audit_entries, entry]
    return [*keys, *map(event_key, told)], arguments, happened


def _counted(before: Mapping[str, Record], after: Mapping[str, Record]) -> tuple[int, int]:
    """Output tokens that records learnt of, and those of them that are decided. A life that begins has none."""
    served = decided = 0
    for name, record in after.items():
        known = before.get(name)
        same = known is not None and known.number == record.number
        served += record.coverage.tokens - (known.coverage.tokens if known is not None and same else 0)
        decided += record.coverage.decided_tokens - (known.coverage.decided_tokens if known is not None and same else 0)
    return served, decided
