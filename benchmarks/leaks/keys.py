"""What Redis holds without a time to live, key by key, and what of it is meant to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redis import Redis

from verifier_pool.link.queue import PREFIX

_PREFIX = re.escape(PREFIX)
DECLARED: Mapping[str, str] = {
    _PREFIX + "audit-secret": "one",
    _PREFIX + "standings?(:.*)?": "one field per declaration of each backend",
    _PREFIX + "rq:queues": "names of queues, of which there are two",
    _PREFIX + "rq:workers(:.*)?": "names of workers, each until some minutes after it ended",
    _PREFIX + "open": "what has no verdict yet",
    _PREFIX + "outbox": "verdicts that nobody was told of yet",
    _PREFIX + "units:.*": "answers not yet in a standing, up to 100,000",
    _PREFIX + "unfolded": "names of backends with such",
    _PREFIX + "(keys|client-keys)(:.*)?": "client keys, as many as an admin made",
    _PREFIX + "spent:.*": "what was charged to budgets that never end, one of each client key until it is forgotten",
    _PREFIX + "(keys|backends)-version": "one",
    _PREFIX + "backends": "backends that an admin changed",
    _PREFIX + "receipt-keys": "what signs receipts, and what signed earlier, as often as an admin rotated",
    _PREFIX + "log(-last|-tiles:.*)?": "the log of receipts: 32 bytes of each verdict, for good",
    _PREFIX + "audit-log": "what admins did, up to `admin.audit_entries`",
}
"""Keys that stay, as regular expressions, and why each is bounded."""
_ID = re.compile(r"[0-9a-f]{8,}(-[0-9a-f]{4,})*")


@dataclass(slots=True)
class Kept:
    """Keys without a time to live that are named alike: how many, and how many entries all of them have.

    `why` says why they are bounded; empty where nobody has declared them.
    """

    name: str
    kind: str
    keys: int
    entries: int
    why: str


def kept(redis: Redis) -> tuple[list[Kept], int]:
    """Every key is looked at: those without a time to live, and the number of the others."""
    found: dict[str, Kept] = {}
    expiring = 0
    for key in redis.scan_iter(count=1000):
        if redis.ttl(key) != -1:
            expiring += 1
            continue
        text = key.decode(errors="replace")
        kind = _text(redis.type(key))
        name = _ID.sub("*", text)
        group = found.setdefault(name, Kept(name, kind, 0, 0, why(text)))
        group.keys += 1
        group.entries += _entries(redis, key, kind)
    return sorted(found.values(), key=lambda each: each.name), expiring


def why(key: str) -> str:
    """Why a key may stay, or nothing."""
    return next((reason for pattern, reason in DECLARED.items() if re.fullmatch(pattern, key)), "")


def _entries(redis: Any, key: bytes, kind: str) -> int:
    size = {"zset": redis.zcard, "set": redis.scard, "hash": redis.hlen, "list": redis.llen, "stream": redis.xlen}
    return int(size[kind](key)) if kind in size else 1


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
