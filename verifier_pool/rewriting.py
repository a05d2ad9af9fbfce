"""What was deleted leaves Redis' append-only file, too: workers ask, in turn, that it be written anew.

A key that is deleted or expires is gone for whoever asks Redis. Its append-only file holds the command that wrote it
until the file is written anew, which Redis does by itself once it has doubled and has 64 MiB: on a small installation
that may take months, and what was written are prompts and answers.
"""

from __future__ import annotations

import logging

from redis import Redis
from redis.exceptions import ResponseError

from verifier_pool.link.queue import PREFIX

logger = logging.getLogger(__name__)

REWRITING = PREFIX + "rewriting"
"""Is there while it is nobody's turn to ask."""
AGAIN_SECONDS = 60
"""How soon it is asked again when Redis writes its file anew just then: it began before."""


def rewrite_in_turn(redis: Redis, seconds: int) -> bool:
    """Have Redis write its append-only file anew, in the background, unless somebody had it do that within `seconds`.

    Returns whether it does. It does not where it keeps no such file, and where we may not ask for it, which is logged.
    """
    if not seconds or not redis.set(REWRITING, b"", nx=True, ex=seconds):
        return False
    try:
        if not int(redis.info("persistence").get("aof_enabled", 0)):
            return False
        redis.bgrewriteaof()
    except ResponseError as error:
        if "in progress" in str(error):
            redis.expire(REWRITING, min(seconds, AGAIN_SECONDS))
            return False
        logger.warning(
            "Redis refuses to write its append-only file anew (BGREWRITEAOF): what was deleted stays in it until it"
            " does so by itself"
        )
        return False
    return True
