"""Answers a backend gave before, kept in Redis as hashes, so that a cached answer under a fresh seed shows.

    answers:BACKEND:PROMPT  hash: answer → "SEED ID:CHOICE" of the one that gave it first
    answered:BACKEND        sorted set of the above keys, scored by the second they were last used

PROMPT and the answers are keyed hashes (HMAC-SHA256, 128 bits) of ids and sampling parameters; no content is kept.
Memory is bounded: `MOST_PROMPTS` keys per backend, the longest unused going first, `MOST_ANSWERS` in each, all gone
after `TTL` seconds without use. Noting and asking are one script, so that of two answers judged at once one is first.
"""

from __future__ import annotations

import hmac
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from policies.evidence import Evidence
from policies.hazard import drawn_again
from policies.structure import REPEATED_LEVEL, Earlier
from verifier_pool.link.queue import answered_key, answers_key

TTL = 86_400
MOST_PROMPTS = 20_000
MOST_ANSWERS = 64

logger = logging.getLogger(__name__)

_NOTE = """
local first = redis.call('HGET', KEYS[1], ARGV[1])
local answers = redis.call('HLEN', KEYS[1])
local same = 0
if first then
  local seed, by = string.match(first, '^(%S+) (.+)$')
  if by == ARGV[3] then answers = answers - 1
  elseif seed ~= ARGV[2] then same = 1 end
elseif answers < tonumber(ARGV[7]) then
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. ' ' .. ARGV[3])
end
redis.call('EXPIRE', KEYS[1], ARGV[5])
redis.call('ZADD', KEYS[2], ARGV[4], KEYS[1])
redis.call('EXPIRE', KEYS[2], ARGV[5])
local over = redis.call('ZCARD', KEYS[2]) - tonumber(ARGV[6])
if over > 0 then
  for _, key in ipairs(redis.call('ZRANGE', KEYS[2], 0, over - 1)) do redis.call('DEL', key) end
  redis.call('ZREMRANGEBYRANK', KEYS[2], 0, over - 1)
end
return {answers, same}
"""


def note(
    redis: Redis, secret: bytes, choices: Sequence[Evidence], vocab_size: int | None = None
) -> list[Earlier | None]:
    """Remembers the choices of one response; returns what was known before of each one's request.

    None for all when Redis does not answer: then nothing was asked. Safe to repeat: a choice never meets itself.
    Choices that tell nothing (T = 0, no seed, broken off, or likely to come again) are not remembered.
    """
    try:
        return [_note(redis, secret, choice, vocab_size) for choice in choices]
    except RedisError as error:
        logger.warning("earlier answers cannot be looked up: %s", type(error).__name__)
        return [None] * len(choices)


def _note(redis: Redis, secret: bytes, choice: Evidence, vocab_size: int | None) -> Earlier:
    if not _telling(choice, vocab_size):
        return Earlier()
    prompt, answer = hashes(secret, choice)
    keys = [answers_key(choice.backend, prompt), answered_key(choice.backend)]
    arguments = (
        answer,
        str(choice.sampling.seed),
        f"{choice.id}:{choice.index}",
        f"{time.time():.3f}",
        str(TTL),
        str(MOST_PROMPTS),
        str(MOST_ANSWERS),
    )
    result: Any = redis.eval(_NOTE, len(keys), *keys, *arguments)
    return Earlier(answers=int(result[0]), same=int(result[1]))


def hashes(secret: bytes, choice: Evidence) -> tuple[str, str]:
    """Keyed hashes of (prompt, model, sampling parameters without seed) and of the answer, hex."""
    sampling = replace(choice.sampling, seed=None, client_seed=False)
    asked = repr((choice.model, sampling)).encode("utf-8", "backslashreplace")
    return (
        hmac.digest(secret, asked + b"\0" + choice.prompt_ids.tobytes(), "sha256")[:16].hex(),
        hmac.digest(secret, choice.output_ids.tobytes(), "sha256")[:16].hex(),
    )


def _telling(choice: Evidence, vocab_size: int | None) -> bool:
    """Whether the same answer again would be a wonder."""
    sound = choice.complete and not choice.faults
    if not sound or choice.sampling.seed is None or not len(choice.output_ids) or not len(choice.prompt_ids):
        return False
    chance = drawn_again(choice, vocab_size)
    return chance is not None and chance <= math.log(REPEATED_LEVEL)
