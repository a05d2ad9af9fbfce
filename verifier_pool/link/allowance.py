"""How often somebody may have something sent at will, by a count in Redis for so many seconds."""

from __future__ import annotations

from redis import Redis

from policies.errors import RateLimited
from verifier_pool.link.queue import PREFIX

SPEND = """
local spent = tonumber(redis.call('GET', KEYS[1]) or 0)
if spent + tonumber(ARGV[1]) > tonumber(ARGV[2]) then return math.max(redis.call('TTL', KEYS[1]), 1) end
redis.call('INCRBY', KEYS[1], ARGV[1])
if spent == 0 then redis.call('EXPIRE', KEYS[1], ARGV[3]) end
return 0
"""
"""Lua: spend as much (ARGV, first) of what there is (second) for so many seconds (third), or nothing of it. KEYS: what
was spent. Returns 0, or after how many seconds there is all of it again."""


def spend(redis: Redis, what: str, owner: str, count: int, most: int, seconds: int) -> None:
    """Note that an owner does something `count` times, where that is at most `most` times in `seconds`.

    Raises RateLimited, where it is not; then nothing is noted.
    """
    left = int(redis.eval(SPEND, 1, f"{PREFIX}spent:{what}:{owner}", count, most, seconds))
    if left:
        raise RateLimited(f"at most {most} in {seconds} s can be sent at will", retry_after=float(left))
