"""Declared runtimes that a backend's own answers contradict, kept in Redis until the operator acts.

A declaration expires when an answer does not fit the declared sampling noise but another known one: an upgrade that
nobody declared is the usual reason. Until then `selection` says nothing about that backend at T > 0. Declaring another
runtime leaves the old entry behind; `countersign noise accept BACKEND` removes it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, cast

import orjson
from redis import Redis
from redis.exceptions import WatchError

from policies import selection
from policies.settings import DurabilitySettings
from verifier_pool.link import durable, trail
from verifier_pool.link.queue import RUNTIME_CHANGES, UNFOLDED, declaration_key, standing_key

logger = logging.getLogger(__name__)


def expired(redis: Redis, backend: str, runtime: str) -> bool:
    """Whether this declaration of this backend was contradicted."""
    return bool(redis.hexists(declaration_key(backend), runtime))


def entries(redis: Redis, backend: str) -> dict[str, dict[str, Any]]:
    """Contradicted runtimes of a backend: `fits`, the verification `id` that showed it, `at` (Unix seconds)."""
    return parsed(cast("dict[bytes, bytes]", redis.hgetall(declaration_key(backend))))


def parsed(stored: Mapping[bytes, bytes]) -> dict[str, dict[str, Any]]:
    """`entries`, from the hash as Redis holds it."""
    return {name.decode(): orjson.loads(value) for name, value in stored.items()}


def in_words(entry: Mapping[str, Any]) -> str:
    """What contradicted a declaration, for people."""
    return f"answer {entry['id']} fits {entry['fits']}"


def accept(redis: Redis, backend: str, rules: DurabilitySettings, actor: str, most: int) -> list[str]:
    """Take the declarations of a backend at their word again, durably; returns the runtimes that had expired.

    Its standing follows with the next fold (`verifier_pool.standing`), which this asks for.

    Args:
        actor: who does that, for the audit log, of which the last `most` entries are kept.

    Raises:
        NotDurable: it was done, and may be lost.
    """
    key = declaration_key(backend)
    with durable.transaction(redis, rules) as pipeline:
        while True:
            pipeline.watch(key)  # type: ignore[no-untyped-call]
            accepted = sorted(parsed(cast("dict[bytes, bytes]", pipeline.hgetall(key))))
            pipeline.multi()
            pipeline.delete(key)
            pipeline.sadd(UNFOLDED, backend)
            # A fold that read the old entries must not be the last word.
            pipeline.hincrby(standing_key(backend), "version", 1)
            trail.append(pipeline, most, trail.entry(actor, "noise.accept", backend, after={"runtimes": accepted}))
            try:
                pipeline.execute()
            except WatchError:
                continue
            except durable.NotDurable as error:
                raise durable.NotDurable(f"{trail.MAYBE_LOST} ({error})") from error
            return accepted


def count(redis: Redis, backend: str) -> None:
    """One more answer of this backend fitted another runtime."""
    redis.hincrby(RUNTIME_CHANGES, backend, 1)


def counted(redis: Redis) -> dict[str, int]:
    """Such answers so far, by backend."""
    stored = cast("dict[bytes, bytes]", redis.hgetall(RUNTIME_CHANGES))
    return {name.decode(): int(value) for name, value in stored.items()}


def note(redis: Redis, verification: Mapping[str, Any], runtime: str) -> str | None:
    """Expires the declared `runtime` where a verification says `runtime_changed`; returns the runtime that fits.

    The first to say so alerts: an error in the log. Safe to repeat.
    """
    fits = fitting(verification)
    if fits is None:
        return None
    backend, id = verification["backend"], verification["id"]
    entry = orjson.dumps({"fits": fits, "id": id, "at": time.time()})
    if redis.hsetnx(declaration_key(backend), runtime, entry):
        logger.error(
            "backend %s does not run its declared runtime %s: answer %s fits %s. Selection is inconclusive at T > 0 "
            "until another runtime is declared, or `countersign noise accept %s`",
            backend,
            runtime,
            id,
            fits,
            backend,
        )
    return fits


def fitting(verification: Mapping[str, Any]) -> str | None:
    """The runtime that the answer fits, where a check says that it is not the declared one."""
    checks = [*verification["checks"]]
    for choice in verification.get("choices", ()):
        checks += choice["checks"]
    reasons = (check["reason"] for check in checks if check["name"] == selection.NAME)
    return next(filter(None, map(selection.fitting_runtime, reasons)), None)
