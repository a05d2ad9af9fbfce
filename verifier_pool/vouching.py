"""Whether the reference that made a replay was sound: asked before what the replay says is held against a backend.

A reference that went wrong says wrong things until its next canary. So a replay that accuses waits for a canary which
the very same reference took after that replay had come back; whatever waits shares one. Nobody waits longer than
`replay_wait`.

    vouching:ID, vouching2:ID  hash: `until`, the Unix second up to which a response waits in all; `unsound`, how often
                               the reference, or the second one, turned out wrong
    canary:INSTANCE            hash: `good`, number of the last canary that came back right; `bad`, of the one that did
                               not; `over`, it takes no more of them; `none`, it cannot have any
    canary-wanted:INSTANCE     sorted set of replay jobs whose responses wait for one, scored by their `until`
    canary-wanted              sorted set of instances that somebody waited for, scored by the second of the last wish
    canary-alive:TOKEN         is there while a replay loop drives it

An instance is one reference between two starts, `TOKEN.LIFE`. Of another one, a canary says nothing. Canaries are
numbered as they are sent, so no clock decides which came first.
"""

from __future__ import annotations

import logging
import time
from enum import Enum
from hashlib import sha1
from typing import Any, cast

from policies.errors import ReplayError
from verifier_pool.link.queue import PREFIX
from verifier_pool.link.scripts import add_waiting
from verifier_pool.packing import pack_outcomes, stamp_of
from verifier_pool.replays import CANARIES, Stamp, outcome_key, replay_job, vouching_key
from verifier_pool.stages import Stages

logger = logging.getLogger(__name__)

UNSOUND = "reference_unsound"
OVERDUE = "canary_overdue"
"""Reasons of this pool's own: the reference computed wrong numbers each time; no canary came in time."""
MOST_UNSOUND = 2
"""Replays of one response by a reference that turned out wrong, after which there is no other."""
ALIVE_SECONDS = 60
WANTED = PREFIX + "canary-wanted"
BATCH = 500

FORGET = """
local held = redis.call('GET', KEYS[1])
if not held or redis.sha1hex(held) ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
local reason = ARGV[3]
if ARGV[4] ~= '' then
  reason = ''
  if redis.call('HINCRBY', KEYS[2], 'unsound', 1) >= tonumber(ARGV[4]) then
    reason = ARGV[3]
    redis.call('HINCRBY', KEYS[3], ARGV[5], 1)
  end
end
if reason ~= '' then redis.call('SET', KEYS[1], reason, 'EX', ARGV[2]) end
return 1
"""
"""Lua: forget an outcome if it is still the one that was judged, or put a reason in its place.

KEYS: the outcome, its `vouching:ID`, `canaries`. ARGV: SHA-1 of the outcome; seconds that a reason is kept; the packed
reason, or nothing; of an unsound reference how often is too often, and until then it is forgotten without a reason; the
field that counts those.
"""


class Counsel(Enum):
    """What is to be done about a response whose replay accuses: settle it, wait (its judging is queued again when there
    is an answer), or look again, because its outcome was forgotten or replaced."""

    STANDS = "stands"
    WAITS = "waits"
    FORGOTTEN = "forgotten"


class _Word(Enum):
    SOUND = "sound"
    UNSOUND = "unsound"
    GONE = "gone"
    OPEN = "open"


class Vouching:
    """Both sides of it, over one Redis, whose errors pass through. Everything may run twice."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._redis = stages.redis

    # Those who judge

    def counsel(self, id: str, model: str, outcome: bytes, *, second: bool, stored: bytes | None = None) -> Counsel:
        """What to do about a response that this outcome speaks against, which Redis holds as `stored` where it is
        sealed there.

        One without a stamp was made by a reference that has no canaries, and stands.
        """
        stamp = stamp_of(outcome)
        if stamp is None:
            return Counsel.STANDS
        stored = outcome if stored is None else stored
        until = self._begin(id, second)
        word = self._word(stamp)
        if word is _Word.OPEN and time.time() < until:
            self._want(stamp.instance, replay_job(id, second=second), until)
            word = self._word(stamp)  # the answer may have come, and whoever gives it gone, before the wish was there
        if word is _Word.SOUND:
            return Counsel.STANDS
        if word is _Word.OPEN and time.time() < until:
            return Counsel.WAITS
        if word is _Word.UNSOUND:
            logger.warning("a replay of %s is forgotten: its reference computed wrong numbers", id, extra={"id": id})
            self._forget(id, stored, UNSOUND, second, f"{model}{':second' if second else ''}:unsound")
        else:
            self._forget(id, stored, OVERDUE if time.time() >= until else "", second)
        return Counsel.FORGOTTEN

    def _begin(self, id: str, second: bool) -> float:
        key, rules = vouching_key(id, second=second), self._stages.settings
        pipeline = self._redis.pipeline()
        pipeline.hsetnx(key, "until", f"{time.time() + rules.replay_wait:.3f}")
        pipeline.expire(key, rules.evidence_ttl)
        pipeline.hget(key, "until")
        return float(pipeline.execute()[2])

    def _word(self, stamp: Stamp) -> _Word:
        pipeline = self._redis.pipeline()
        pipeline.hmget(_canary_key(stamp.instance), "good", "bad", "over", "none")
        pipeline.exists(_alive_key(stamp.instance))
        (good, bad, over, none), alive = pipeline.execute()
        if none is not None or (good is not None and int(good) > stamp.canaries):
            return _Word.SOUND
        if bad is not None:
            return _Word.UNSOUND
        return _Word.OPEN if alive and over is None else _Word.GONE

    def _want(self, instance: str, job: str, until: float) -> None:
        pipeline = self._redis.pipeline()
        pipeline.zadd(_wanted_key(instance), {job: until})
        pipeline.expire(_wanted_key(instance), self._stages.settings.evidence_ttl)
        pipeline.zadd(WANTED, {instance: time.time()})
        pipeline.execute()

    def _forget(self, id: str, outcome: bytes, reason: str, second: bool, counted: str = "") -> None:
        keys = [outcome_key(id, second=second), vouching_key(id, second=second), CANARIES]
        packed = pack_outcomes([ReplayError(reason)]) if reason else b""
        arguments: list[Any] = [sha1(outcome, usedforsecurity=False).hexdigest(), self._stages.settings.evidence_ttl]
        arguments += [packed, MOST_UNSOUND if counted else "", counted]
        if self._redis.eval(FORGET, len(keys), *keys, *arguments):
            backend = self._stages.backend_of(id)
            if backend:
                add_waiting(self._redis, id, backend, -len(outcome))

    # The replay loop

    def present(self, instance: str, *, burst: bool = False) -> None:
        """This instance is there, for another `ALIVE_SECONDS`; with `burst` as long as anybody waits for it."""
        seconds = max(ALIVE_SECONDS, self._stages.settings.replay_wait) if burst else ALIVE_SECONDS
        self._redis.set(_alive_key(instance), b"", ex=seconds)

    def wanted(self, instance: str) -> bool:
        """Whether anything waits for a canary of this instance."""
        return bool(self._redis.exists(_wanted_key(instance)))

    def answer(self, instance: str, **said: int) -> int:
        """Write down how this instance is, and have all judged that waits for it; returns how many that are.

        Args:
            said: `good` or `bad`, the number of the canary that says so; `over` or `none`, 1.
        """
        pipeline = self._redis.pipeline()
        pipeline.hset(_canary_key(instance), mapping=cast("dict[Any, Any]", said))
        pipeline.expire(_canary_key(instance), 2 * self._stages.settings.evidence_ttl)
        pipeline.execute()
        return self._release(instance, "+inf")

    # The sweeper

    def sweep(self, now: float) -> None:
        """Have judged what waits for an instance that is gone, and what waited for too long."""
        pipeline = self._redis.pipeline()
        pipeline.zremrangebyscore(WANTED, "-inf", now - self._stages.settings.evidence_ttl)
        pipeline.zrange(WANTED, 0, -1)
        for instance in map(bytes.decode, pipeline.execute()[1]):
            alive = self._redis.exists(_alive_key(instance)) and not self._redis.hexists(_canary_key(instance), "over")
            self._release(instance, now if alive else "+inf")

    def _release(self, instance: str, until: float | str) -> int:
        key, count = _wanted_key(instance), 0
        while found := cast("list[bytes]", self._redis.zrangebyscore(key, "-inf", until, 0, BATCH)):
            jobs = [job.decode() for job in found]
            self._stages.judge_again(jobs, key)
            count += len(jobs)
        return count


def _canary_key(instance: str) -> str:
    return f"{PREFIX}canary:{instance}"


def _wanted_key(instance: str) -> str:
    return f"{PREFIX}canary-wanted:{instance}"


def _alive_key(instance: str) -> str:
    return f"{PREFIX}canary-alive:{instance.partition('.')[0]}"
