"""What the fair queue does in Redis, each in one step (`verifier_pool.link.fair`). Times are virtual: sums of costs.

A queue's own keys, in this order: its four lanes (1-4), sorted sets of job ids by when they start; when each tenant's
last job of a lane ends (5-8), sorted sets of tenants; its state (9), a hash of `turn`, and by number of the lane
`clock…`, the start of its last job, and `served…`, the turn of that; its bell (10), a list to wait on; since when each
job of a lane waits (11), a sorted set of ids by Redis' Unix second.
"""

from __future__ import annotations

PUSH = """
for lane = 1, 4 do
  if redis.call('ZSCORE', KEYS[lane], ARGV[1]) then return 0 end
end
local lane, cost = tonumber(ARGV[2]), tonumber(ARGV[4])
local start = tonumber(redis.call('HGET', KEYS[9], 'clock' .. lane) or 0)
if cost > 0 then
  start = math.max(start, tonumber(redis.call('ZSCORE', KEYS[4 + lane], ARGV[3]) or 0))
  redis.call('ZADD', KEYS[4 + lane], start + cost, ARGV[3])
end
redis.call('ZADD', KEYS[lane], start, ARGV[1])
redis.call('ZADD', KEYS[11], redis.call('TIME')[1], ARGV[1])
if redis.call('LLEN', KEYS[10]) < 64 then redis.call('RPUSH', KEYS[10], '') end
return 1
"""
"""Lua: put a job into its lane, unless it waits already, and ring the bell.

KEYS: the queue's own.
ARGV: job id, number of the lane from 1, tenant, cost; a cost of 0 starts now and is charged to nobody.
"""

TAKE = """
local list, middle, bell, state = KEYS[12], KEYS[13], KEYS[10], KEYS[9]
local wanted, prefix, left, alone = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3]), ARGV[4] == '1'
local turn = tonumber(redis.call('HGET', state, 'turn') or 0)
local taken, seen, dropped, ending = {}, {}, 0, 'taken'

local function choose()
  local top, low, last
  for lane = 1, 4 do
    if redis.call('EXISTS', KEYS[lane]) == 1 then
      if not top then
        top = lane
      elseif (turn + 1) % 8 == 0 then
        local served = tonumber(redis.call('HGET', state, 'served' .. lane) or 0)
        if not low or served < last then low, last = lane, served end
      end
    end
  end
  return low or top
end

local function cost_of(meta)
  local read, value = pcall(cjson.decode, meta or '')
  return math.max(1, read and type(value) == 'table' and tonumber(value.tokens) or 1)
end

while #taken < wanted do
  local id, lane, start = redis.call('LINDEX', list, 0), nil, nil
  if not id then
    lane = choose()
    if not lane then ending = 'empty' break end
    local first = redis.call('ZRANGE', KEYS[lane], 0, 0, 'WITHSCORES')
    id, start = first[1], first[2]
  end
  local job = redis.call('HMGET', prefix .. id, 'status', 'meta')
  local waits = job[1] == 'queued' and not seen[id]
  if waits and left >= 0 then
    local cost = cost_of(job[2])
    if cost > left and not (alone and #taken == 0) then ending = 'full' break end
    left = math.max(left - cost, 0)
  end
  -- A Redis without memory lets a script write once it has written what frees some.
  if lane then redis.call('ZREM', KEYS[lane], id) else redis.call('LPOP', list) end
  if lane then redis.call('ZREM', KEYS[11], id) end
  if lane and waits then
    turn = turn + 1
    redis.call('HSET', state, 'turn', turn, 'served' .. lane, turn, 'clock' .. lane, start)
    redis.call('ZREMRANGEBYSCORE', KEYS[4 + lane], '-inf', start)
  end
  if lane and redis.call('EXISTS', KEYS[lane]) == 0 then
    redis.call('DEL', KEYS[4 + lane])
    redis.call('HDEL', state, 'clock' .. lane)
  end
  if waits then
    seen[id] = true
    redis.call('HINCRBY', prefix .. id, 'takes', 1)
    taken[#taken + 1] = id
    redis.call('RPUSH', middle, id)
  else
    dropped = dropped + 1
    if dropped == 1000 then ending = 'again' break end
  end
end
if ending == 'empty' then redis.call('DEL', bell, state, KEYS[11]) end
table.insert(taken, 1, ending)
return taken
"""
"""Lua: move the next jobs to the intermediate list, and drop what expired, was cancelled or is there twice. A job's
field `takes` says how often it was taken.

KEYS: the queue's own, then rq's list (12) and its intermediate list (13).
ARGV: how many at most, what the key of a job begins with, tokens they may cost together (-1: any), and whether the
first may cost more (1 or 0). Returns the ids behind how it ended: `taken` all that was wanted, `empty`, `full` when the
next one costs more than what is left, `again` after a thousand to drop.
"""

REMOVE = """
local count = redis.call('LREM', KEYS[12], 1, ARGV[1])
for lane = 1, 4 do
  if redis.call('ZREM', KEYS[lane], ARGV[1]) == 1 then
    count = count + 1
    redis.call('ZREM', KEYS[11], ARGV[1])
    if redis.call('EXISTS', KEYS[lane]) == 0 then
      redis.call('DEL', KEYS[4 + lane])
      redis.call('HDEL', KEYS[9], 'clock' .. lane)
    end
  end
end
return count
"""
"""Lua: take a job off the queue. KEYS: the queue's own, then rq's list (12). ARGV: job id. Returns its places."""

OLDEST = """
for _ = 1, 1000 do
  local first = redis.call('ZRANGE', KEYS[5], 0, 0, 'WITHSCORES')
  if not first[1] then return false end
  for lane = 1, 4 do
    if redis.call('ZSCORE', KEYS[lane], first[1]) then return first[2] end
  end
  redis.call('ZREM', KEYS[5], first[1])
end
return false
"""
"""Lua: since when the oldest job of the lanes waits, Unix seconds, where one is known. What somebody took who knows
nothing of the set of these is dropped from it, at most a thousand at a time. KEYS: the lanes (1-4), since when (5)."""

EMPTY = """
local count = 0
for lane = 1, 4 do
  for _, id in ipairs(redis.call('ZRANGE', KEYS[lane], 0, -1)) do
    redis.call('DEL', ARGV[1] .. id, ARGV[1] .. id .. ':dependents', ARGV[2] .. id)
    count = count + 1
  end
end
redis.call('DEL', unpack(KEYS))
return count
"""
"""Lua: delete all that waits. KEYS: the queue's own. ARGV: what keys of jobs, and of their results, begin with."""
