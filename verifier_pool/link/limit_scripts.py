"""Lua that counts what a client key uses. The time is Redis's own, so that it is one for all proxies.

A minute is the last 60 seconds, whenever one looks: what was let in is remembered by its second, and forgotten 60
seconds after the last request of that second. So never more than the limit is let in within any 60 seconds.
"""

from __future__ import annotations

CLOCK = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""
"""Lua: the Unix time in ms."""

WINDOW_MS = 60_000
KEPT_MS = 180_000
"""How long counts are kept after they were last touched; longer than a minute, and than a lease."""

_COMMON = """
local function load(field)
  local raw = redis.call('HGET', KEYS[1], field)
  local list, used = {}, 0
  if raw then
    local stored = cmsgpack.unpack(raw)
    for i = 1, #stored, 2 do
      local at = math.min(stored[i], now)
      if at + 60000 > now and stored[i + 1] > 0 then
        list[#list + 1] = at
        list[#list + 1] = stored[i + 1]
        used = used + stored[i + 1]
      end
    end
  end
  return list, used
end

local function save(field, list)
  if #list > 0 then redis.call('HSET', KEYS[1], field, cmsgpack.pack(list)) else redis.call('HDEL', KEYS[1], field) end
end

local function add(list, amount)
  if amount <= 0 then return end
  if #list > 0 and math.floor(list[#list - 1] / 1000) == math.floor(now / 1000) then
    list[#list - 1] = now
    list[#list] = list[#list] + amount
  else
    list[#list + 1] = now
    list[#list + 1] = amount
  end
end

-- Days since 1970 of the first of a month; months are counted from January of year 0.
local function first_day(month)
  local y, m = math.floor(month / 12), month % 12 + 1
  if m <= 2 then y = y - 1 end
  local era = math.floor(y / 400)
  local yoe = y - era * 400
  local doy = math.floor((153 * ((m + 9) % 12) + 2) / 5)
  return era * 146097 + yoe * 365 + math.floor(yoe / 4) - math.floor(yoe / 100) + doy - 719468
end

-- A budget's period, and the ms at which it ends (-1 is never). Times are UTC.
local function period(every)
  local day = math.floor(now / 86400000)
  if every == 'day' then return 'day ' .. day, (day + 1) * 86400000 end
  if every ~= 'month' then return 'never', -1 end
  local month = math.floor(day / 30.436875) + 23640
  while first_day(month) > day do month = month - 1 end
  while first_day(month + 1) <= day do month = month + 1 end
  return 'month ' .. month, first_day(month + 1) * 86400000
end

local function spent(label)
  local stored = redis.call('HMGET', KEYS[3], 'period', 'tokens', 'requests')
  if stored[1] ~= label then return 0, 0 end
  return tonumber(stored[2] or '0'), tonumber(stored[3] or '0')
end

local function charge(every, tokens, requests)
  local label, ends = period(every)
  local before, count = spent(label)
  redis.call('HSET', KEYS[3], 'period', label, 'tokens', string.format('%.0f', before + tokens),
    'requests', string.format('%.0f', count + requests))
  if ends < 0 then redis.call('PERSIST', KEYS[3]) else redis.call('PEXPIREAT', KEYS[3], ends + 86400000) end
end

local function let_go(lease)
  local held = tonumber(redis.call('HGET', KEYS[1], 'l:' .. lease) or '0')
  redis.call('HDEL', KEYS[1], 'l:' .. lease)
  if held > 0 then redis.call('HINCRBY', KEYS[1], 'h', string.format('%.0f', -held)) end
  redis.call('ZREM', KEYS[2], lease)
end

local function let_lost_go()
  for _, lease in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, 1000)) do let_go(lease) end
end
"""

_ADMIT = """
local rpm, tpm, most_at_once, budget = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local every, lease, lease_ms = ARGV[5], ARGV[6], tonumber(ARGV[7])
local likely, most, least = tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10])
local open, known = ARGV[11] == '1', ARGV[12] == '1'
local refused, wait = '', 0
local requests, requests_used, tokens, tokens_used = {}, 0, {}, 0
local token_cost, budget_cost, budget_left, ends = 0, 0, 0, -1

local function refuse(why, ms)
  if refused == '' then refused = why end
  if ms < 0 or wait < 0 then wait = -1 else wait = math.max(wait, ms) end
end

-- Milliseconds until `cost` more fit; -1 is never.
local function until_fits(list, used, limit, cost)
  if cost > limit then return -1 end
  for i = 1, #list, 2 do
    used = used - list[i + 1]
    if used + cost <= limit then return list[i] + 60000 - now end
  end
  return 0
end

if most_at_once > 0 or budget > 0 then
  let_lost_go()
  -- Asked again because the answer was lost: what is held for it already is its own.
  if redis.call('ZSCORE', KEYS[2], lease) then let_go(lease) end
end

if budget > 0 then
  local label
  label, ends = period(every)
  local used = spent(label)
  local held = tonumber(redis.call('HGET', KEYS[1], 'h') or '0')
  budget_left = budget - used - held
  budget_cost = known and most or math.max(least, math.min(most, budget_left), 1)
  if used + budget_cost > budget then
    refuse('quota', ends < 0 and -1 or ends - now)
  elseif budget_cost > budget_left or budget_left <= 0 then
    refuse('held', 1000)
  end
end
if tpm > 0 then
  tokens, tokens_used = load('t')
  token_cost = likely
  local left = tpm - tokens_used
  if open then
    token_cost = math.max(least, math.min(likely, left), 1)
  end
  if token_cost > left then
    refuse(token_cost > tpm and 'size' or 'tokens', until_fits(tokens, tokens_used, tpm, token_cost))
  end
end
if most_at_once > 0 and redis.call('ZCARD', KEYS[2]) >= most_at_once then
  local over = 0
  for i = 13, #ARGV do
    if redis.call('ZSCORE', KEYS[2], ARGV[i]) then over = over + 1 end
  end
  if redis.call('ZCARD', KEYS[2]) - over >= most_at_once then refuse('concurrency', 1000) end
end
if rpm > 0 then
  requests, requests_used = load('r')
  if requests_used >= rpm then refuse('requests', until_fits(requests, requests_used, rpm, 1)) end
end

if refused == '' then
  if rpm > 0 then
    add(requests, 1)
    requests_used = requests_used + 1
    save('r', requests)
  end
  if tpm > 0 then
    add(tokens, token_cost)
    tokens_used = tokens_used + token_cost
    save('t', tokens)
  end
  if budget > 0 then
    budget_left = budget_left - budget_cost
    redis.call('HSET', KEYS[1], 'l:' .. lease, string.format('%.0f', budget_cost))
    redis.call('HINCRBY', KEYS[1], 'h', string.format('%.0f', budget_cost))
  end
  if most_at_once > 0 or budget > 0 then
    redis.call('ZADD', KEYS[2], now + lease_ms, lease)
    redis.call('PEXPIRE', KEYS[2], 180000)
  end
  redis.call('PEXPIRE', KEYS[1], 180000)
end

local function reset(list) return #list > 0 and list[#list - 1] + 60000 - now or 0 end
return {refused, wait, math.max(rpm - requests_used, 0), reset(requests), math.max(tpm - tokens_used, 0), reset(tokens),
  math.max(budget_left, 0), ends < 0 and -1 or ends - now, token_cost, budget_cost, now}
"""

_SETTLE = """
local lease, admitted, reserved, used, told, every, counts = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]),
  tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6], ARGV[7] == '1'
if reserved >= 0 and used ~= reserved then
  local list = load('t')
  if used > reserved then
    add(list, used - reserved)
  else
    for i = 1, #list, 2 do
      if math.floor(list[i] / 1000) == math.floor(admitted / 1000) then
        list[i + 1] = math.max(list[i + 1] - (reserved - used), 0)
      end
    end
  end
  save('t', list)
  redis.call('PEXPIRE', KEYS[1], 180000)
end
let_go(lease)
if counts then charge(every, math.max(used - told, 0), 1) end
"""

_RENEW = """
local lease, lease_ms, more, every, counts = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4], ARGV[5] == '1'
redis.call('ZADD', KEYS[2], now + lease_ms, lease)
if counts and more > 0 then
  local held = tonumber(redis.call('HGET', KEYS[1], 'l:' .. lease) or '0')
  local part = math.min(held, more)
  if part > 0 then
    redis.call('HINCRBY', KEYS[1], 'l:' .. lease, string.format('%.0f', -part))
    redis.call('HINCRBY', KEYS[1], 'h', string.format('%.0f', -part))
  end
  charge(every, more, 0)
end
redis.call('PEXPIRE', KEYS[1], 180000)
redis.call('PEXPIRE', KEYS[2], 180000)
"""

_SHOW = """
let_lost_go()
local _, requests = load('r')
local _, tokens = load('t')
local label, ends = period(ARGV[1])
local charged, count = spent(label)
local held = tonumber(redis.call('HGET', KEYS[1], 'h') or '0')
return {requests, tokens, redis.call('ZCARD', KEYS[2]), held, charged, count, ends < 0 and -1 or ends - now}
"""

ADMIT = CLOCK + _COMMON + _ADMIT
"""Lua: let a request in, and reserve what it may take, or say why not; one step for all limits.

KEYS: `limit`, `leases`, `spent`. ARGV: requests and tokens per minute, requests at once, budget (0 is none each), its
period, id of the request, ms of its lease; as `policies.limits.Cost` has them: tokens that are likely, at most and at
least, and 1 where it is open, and where it is known; then ids of requests that are over and not settled yet, which
keep no place.

Answers: why it is refused ('' where it is not: `quota`, `held`, `size`, `tokens`, `concurrency`, `requests`), ms until
it may come again (−1 is never); requests left and ms until none counts any more, the same of tokens; the budget left
and ms until it starts again (−1 is never); tokens reserved of the minute, and of the budget; the time.

Asked again with the same id it holds what it held before, once; of the minute it may count twice.
"""

SETTLE = CLOCK + _COMMON + _SETTLE
"""Lua: a request is over. What it did not take is given back, in the second that it was let in; more is charged.

KEYS as ADMIT. ARGV: its id, when it was let in (ms), tokens reserved of the minute (−1 is none), tokens used, how many
of them RENEW charged, the budget's period, 1 where there is a budget.
"""

RENEW = CLOCK + _COMMON + _RENEW
"""Lua: a request is still under way; what it took since the last time is charged to the budget.

KEYS as ADMIT. ARGV: its id, ms of its lease, tokens taken since, the budget's period, 1 where there is a budget.
"""

SHOW = CLOCK + _COMMON + _SHOW
"""Lua: requests and tokens of the last minute, requests under way, tokens held for them, tokens and requests charged in
the period, ms until that ends (−1 is never). KEYS as ADMIT. ARGV: the period."""


def at(script: str, milliseconds: int) -> str:
    """A script as it would run at that time, for tests and simulations."""
    return f"local now = {milliseconds}\n" + script.removeprefix(CLOCK)
