"""What becomes of an event in Redis, each step whole: planned, begun, tried, over, sent again."""

from __future__ import annotations

PLAN = """
if ARGV[1] ~= '' and redis.call('ZREM', KEYS[1], ARGV[1]) == 0 then return {0} end
local made, at = {0}, 9
for n = 1, (#ARGV - 8) / 5 do
  local state, waiting = KEYS[2 + 2 * n], KEYS[3 + 2 * n]
  local known = ARGV[at] == ARGV[8] or redis.call('HEXISTS', KEYS[3], ARGV[at]) == 1
  local number = known and redis.call('HINCRBY', state, 'sequence', 1)
  if known and redis.call('ZCARD', waiting) >= tonumber(ARGV[4]) then
    redis.call('HINCRBY', state, 'dropped', 1)
    made[1] = made[1] + 1
  elseif known then
    local id = ARGV[at] .. '-' .. number
    redis.call('HSET', ARGV[5] .. id, 'event', ARGV[6], 'about', ARGV[7], 'type', ARGV[at + 1], 'created', ARGV[2],
      'body', ARGV[at + 2] .. number .. ARGV[at + 3], 'status', 'waiting', 'tries', 0, 'since', ARGV[2],
      'tenant', ARGV[at + 4])
    redis.call('EXPIRE', ARGV[5] .. id, ARGV[3])
    redis.call('ZADD', waiting, number, id)
    redis.call('ZADD', KEYS[2], ARGV[2], id)
    made[#made + 1] = id
  end
  at = at + 5
end
return made
"""
"""Lua: take an event out of the outbox and make a delivery of it for every webhook that is told, or nothing where
somebody did it before. A number is given even to what is dropped, so that whoever counts sees it. A webhook that was
removed is told nothing, and nothing of it is written again.

KEYS: `outbox`, `webhook-unqueued`, `webhooks`, and of each webhook its state and what waits for it. ARGV: the entry of
the outbox ('' for none), Unix second, seconds that a delivery is kept, how many may wait, how keys of deliveries begin,
the event's id, what it is about, the id of the webhook of the settings, and of each webhook its id, the type, the body
before and after its number, and whose turn it takes. Returns for how many it was dropped, and ids.
"""

BEGIN = """
local status = redis.call('HGET', KEYS[1], 'status')
if not status then
  redis.call('ZREM', KEYS[4], ARGV[1])
  return {'gone', '0', 0}
end
if status == 'delivered' or status == 'failed' then return {'over', '0', 0} end
local off = redis.call('HGET', KEYS[2], 'disabled')
if off and redis.call('HGET', KEYS[2], 'disabled_url') == ARGV[5] then return {'off', off, 0} end
local waiting = redis.call('ZCARD', KEYS[4])
local paused = redis.call('HGET', KEYS[2], 'paused')
if paused and tonumber(paused) > tonumber(ARGV[2]) then return {'paused', paused, waiting} end
local failures = redis.call('HGET', KEYS[2], 'failures') or '0'
local slow, most = redis.call('EXISTS', KEYS[7]) == 1, tonumber(ARGV[4])
local bounds = {[3] = failures == '0' and most or 1, [5] = slow and 1 or most, [6] = slow and most or nil}
for key, bound in pairs(bounds) do
  redis.call('ZREMRANGEBYSCORE', KEYS[key], '-inf', ARGV[2])
  if redis.call('ZCARD', KEYS[key]) >= bound and not redis.call('ZSCORE', KEYS[key], ARGV[1]) then
    return {'busy', '0', waiting}
  end
end
for key in pairs(bounds) do
  redis.call('ZADD', KEYS[key], ARGV[3], ARGV[1])
  redis.call('EXPIRE', KEYS[key], 600)
end
redis.call('HSET', KEYS[1], 'status', 'sending')
return {'send', failures, waiting}
"""
"""Lua: whether a delivery may be tried now, and if so, note it: one at a time at a webhook that fails, and for a
tenant that was slow lately; to all those tenants together as many as to any single one that was not.

KEYS: the delivery, the webhook's state, those that are being sent to it, what waits for it, those that are being sent
to its tenant, those that are to tenants that were slow, and what is there while its tenant counts as that. ARGV: id,
Unix second, until when this try may take, how many may be sent at once, the URL. Returns a word, with `off` why, with
`paused` until when, with `send` how often it failed lately; and how many wait.
"""

POSTPONE = "if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HSET', KEYS[1], 'next', ARGV[1]) end"
"""Lua: note when a delivery (KEYS) comes up again (ARGV, Unix second)."""

END = """
for _, key in ipairs({3, 5, 6}) do redis.call('ZREM', KEYS[key], ARGV[1]) end
if ARGV[15] ~= '0' then redis.call('SET', KEYS[7], '', 'EX', ARGV[15]) end
local known = redis.call('EXISTS', KEYS[1]) == 1
if not known then redis.call('ZREM', KEYS[4], ARGV[1]) end
local outcome, status, now = ARGV[3], ARGV[4], ARGV[2]
if known then
  redis.call('HSET', KEYS[1], 'status', status, 'attempts', ARGV[5], 'tries', ARGV[6], 'next', ARGV[7])
  if status == 'delivered' or status == 'failed' then
    redis.call('ZREM', KEYS[4], ARGV[1])
    redis.call('ZADD', KEYS[8], ARGV[8], ARGV[1])
    redis.call('EXPIRE', KEYS[1], ARGV[9])
    redis.call('EXPIRE', KEYS[8], ARGV[9])
    local over, kept = redis.call('ZCARD', KEYS[8]) - tonumber(ARGV[10]), status == 'failed' and ARGV[1]
    for _, id in ipairs(over > 0 and redis.call('ZRANGE', KEYS[8], 0, over) or {}) do
      if over > 0 and id ~= kept then
        over = over - 1
        redis.call('ZREM', KEYS[8], id)
        local lost = redis.call('DEL', ARGV[11] .. id) == 1 and kept
        if lost and redis.call('EXISTS', KEYS[2]) == 1 then redis.call('HINCRBY', KEYS[2], 'dropped', 1) end
      end
    end
  end
end
if redis.call('EXISTS', KEYS[2]) == 0 then return '' end
if outcome == 'good' then
  redis.call('HDEL', KEYS[2], 'failures', 'failing_since', 'paused')
  redis.call('HSET', KEYS[2], 'delivered_at', now)
elseif outcome == 'bad' or outcome == 'gone' then
  redis.call('HSETNX', KEYS[2], 'failing_since', now)
  redis.call('HINCRBY', KEYS[2], 'failures', 1)
  redis.call('HSET', KEYS[2], 'paused', ARGV[12])
  local why = outcome == 'gone' and 'gone'
  if tonumber(now) - tonumber(redis.call('HGET', KEYS[2], 'failing_since')) > tonumber(ARGV[14]) then
    why = why or 'failing'
  end
  if why then redis.call('HSET', KEYS[2], 'disabled', why, 'disabled_url', ARGV[13], 'disabled_at', now) end
  return why or ''
end
return ''
"""
"""Lua: note what came of a delivery, or of a try. Of what is gone, it or its webhook, nothing is written. Where more is
over than is kept the first goes, and is counted as dropped where it failed; what has failed just now stays.

KEYS: those of `BEGIN`, what is over and ended as this does. ARGV: id, Unix second; `good`, `bad`, `gone` (410) or '' of
what the receiver did; status, tries as JSON, their number, Unix second of the next one; its sequence number, seconds
and number of what is kept of those that are over, how their keys begin; until when nothing else is tried, the URL,
seconds of failures after which it is switched off; seconds for which its tenant counts as slow, 0 where it was not.
Returns why it was switched off now, or ''.
"""

AGAIN = """
local status = redis.call('HGET', KEYS[1], 'status')
if status ~= 'delivered' and status ~= 'failed' then return status or '' end
redis.call('HSET', KEYS[1], 'status', 'waiting', 'tries', 0, 'since', ARGV[2], 'next', '')
redis.call('EXPIRE', KEYS[1], ARGV[3])
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('ZREM', KEYS[4], ARGV[1])
redis.call('ZADD', KEYS[2], ARGV[4], ARGV[1])
redis.call('ZADD', KEYS[5], ARGV[2], ARGV[1])
return 'again'
"""
"""Lua: send again what is over. KEYS: the delivery, what waits, what was delivered, what failed, `webhook-unqueued`.
ARGV: id, Unix second, seconds that it is kept, its sequence number. Returns `again`, or how it is instead ('' where it
is not kept).
"""
