"""Units of evidence as a backend's answers leave them, for tests of standing."""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec
import orjson
from redis import Redis

from policies.settings import Settings
from policies.unit import Unit, declaration_name, declaration_of
from policies.verification import unverified
from verifier_pool.link.queue import EVENT, UNFOLDED, units_key
from verifier_pool.standing import Standings
from verifier_pool.store import Store

CLEAN = {"selection": (0.0, 0.0), "structure": (0.0, 0.0), "withheld": (0.0, 0.0)}
REJECTED = {**CLEAN, "selection": (1.0, 0.0)}


def told(settings: Settings, backend: str = "honest", **changes: Any) -> Unit:
    """A unit of an audited answer that passed everything, under the present declaration."""
    fields: dict[str, Any] = {
        "id": secrets.token_hex(16),
        "at": time.time(),
        "backend": backend,
        "declaration": declaration_of(settings.backend(backend)),
        "key": secrets.token_hex(8),
        "unit": secrets.token_hex(8),
        "prompt": secrets.token_hex(8),
        "tokens": 10,
        "verdict": "pass",
        "audited": True,
        "replayed": True,
        "outcomes": CLEAN,
    }
    return Unit(**fields | changes)


def settle(redis: Redis, unit: Unit) -> bool:
    """Store a verdict with this unit."""
    intent = {"backend": unit.backend, "declaration": unit.declaration}
    return Store(redis, verdict_ttl=600).settle(unverified(unit.id, "backlog", intent, unit.at), unit)


def push(redis: Redis, *units: Unit | bytes, backend: str = "honest") -> None:
    """Put units where verdicts leave them."""
    redis.rpush(units_key(backend), *(unit if isinstance(unit, bytes) else msgspec.json.encode(unit) for unit in units))
    redis.sadd(UNFOLDED, backend)


def outbox(redis: Redis) -> list[str]:
    """What waits for the webhook, oldest first."""
    return Store(redis, verdict_ttl=600).outbox(10_000)


def events(redis: Redis) -> list[dict[str, Any]]:
    """Bodies of the events among it."""
    store = Store(redis, verdict_ttl=600)
    return [orjson.loads(store.event(name) or b"") for name in outbox(redis) if name.startswith(EVENT)]


def record(redis: Redis, settings: Settings, backend: str = "honest") -> Any:
    """The backend's record under its present declaration, None without one."""
    name = declaration_name(declaration_of(settings.backend(backend)))
    return Standings(redis, settings).records(backend).get(name)
