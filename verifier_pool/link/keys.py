"""Client keys in Redis, and what is counted of each: names, records and how they are changed.

    keys          hash: by name a key as JSON (policies.settings.StoredKey), with its SHA-256 and never its text
    keys-version  another text after each change of `keys`

and, by the key's id, with a TTL where nothing else is said:

    limit:ID      hash: `r` and `t`, requests and tokens let in lately (msgpack: time in ms, amount, …), `h` the tokens
                  of the budget that are held for requests under way, and of each of those `l:LEASE` its part
    leases:ID     sorted set of requests under way, scored by the millisecond at which they count as lost
    settled:MARK  which batch of a proxy's requests was settled last, so that none is twice
    spent:ID      hash: `period`, and the `tokens` and `requests` charged in it; no TTL where the period never ends
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

from pydantic import ValidationError
from redis import Redis

from policies.settings import ClientKey, DurabilitySettings, StoredKey, hash_key
from verifier_pool.link import trail
from verifier_pool.link.limit_scripts import SHOW
from verifier_pool.link.queue import PREFIX

KEYS = PREFIX + "keys"
VERSION = PREFIX + "keys-version"
LONGEST = 512
"""Bytes of a key's text beyond which nobody looks further."""
_PREFIX_BYTES = 5
_TOLD = ("admin", "operator", "evidence", "retain", "limits", "prefix", "expires", "revoked")


def new_text() -> tuple[str, str]:
    """A new key's text, `sk-<prefix>_<32 random bytes, base64url>`, and its prefix."""
    prefix = "sk-" + base64.b32encode(secrets.token_bytes(_PREFIX_BYTES)).decode().lower()
    return f"{prefix}_{base64.urlsafe_b64encode(secrets.token_bytes(32)).decode().rstrip('=')}", prefix


def id_of(sha256: str) -> str:
    """What a key's counts are kept under: 128 bits of its hash."""
    return sha256[:32]


def counted_keys(id: str) -> tuple[str, str, str]:
    """Keys of what is counted: `limit`, `leases`, `spent`."""
    return f"{PREFIX}limit:{id}", f"{PREFIX}leases:{id}", f"{PREFIX}spent:{id}"


def settled_key(proxy: str) -> str:
    """Key of a proxy's mark."""
    return f"{PREFIX}settled:{proxy}"


def read(stored: Iterable[bytes]) -> tuple[list[StoredKey], int]:
    """The records that can be read, by name, and how many cannot; those let nobody in."""
    found, unreadable = [], 0
    for each in stored:
        try:
            found.append(StoredKey.model_validate_json(each))
        except ValidationError:
            unreadable += 1
    return sorted(found, key=lambda key: key.name), unreadable


def write(key: StoredKey | None) -> str:
    """A record for Redis; '' for none."""
    return "" if key is None else key.model_dump_json(exclude_none=True)


def change_arguments(
    name: str, before: str, after: StoredKey | None, entry: str = "", most: int = 1
) -> tuple[list[str], list[str]]:
    """KEYS and ARGV of `trail.CHANGE`, with the `entry` of the audit log, which keeps the last `most`."""
    return trail.change_arguments((KEYS, VERSION), name, before, write(after), entry, most)


def told(key: StoredKey | None) -> dict[str, Any] | None:
    """A key as the audit log shows it."""
    if key is None:
        return None
    found = described(key, key.created)
    return {name: found[name] for name in _TOLD if found.get(name) is not None}


def issue(name: str, created: float, **more: Any) -> tuple[str, StoredKey]:
    """A new key: its text, which is told once, and its record. Raises ValidationError."""
    text, prefix = new_text()
    return text, StoredKey(name=name, sha256=hash_key(text), prefix=prefix, created=created, **more)


def described(key: ClientKey, now: float) -> dict[str, Any]:
    """What there is to say of a key, as JSON; nothing that would let anybody in."""
    limits = None if key.limits is None else key.limits.model_dump(exclude_none=True)
    found = {"name": key.name, "admin": key.admin, "operator": key.operator, "evidence": key.may_read}
    found |= {"retain": key.retain, "limits": limits}
    if not isinstance(key, StoredKey):
        return {**found, "from": "settings", "state": "active"}
    state = "revoked" if key.revoked is not None else "active" if key.usable(now) else "expired"
    times = {"created": key.created, "expires": key.expires, "revoked": key.revoked}
    return {**found, "from": "redis", "state": state, "prefix": key.prefix, **times}


class Use(NamedTuple):
    """What is counted of a key now, as `limit_scripts.SHOW` answers it: requests and tokens let in within the last
    minute; requests under way and tokens of the budget held for them; tokens and requests charged in the budget's
    period, and ms until that ends (−1 is never)."""

    requests: int
    tokens: int
    under_way: int
    held: int
    charged: int
    charged_requests: int
    ends: int


class KeyStore:
    """The keys in Redis, for a command at a terminal."""

    def __init__(self, redis: Redis, durability: DurabilitySettings | None = None) -> None:
        self.redis = redis
        self._durability = durability or DurabilitySettings()
        self._show = redis.register_script(SHOW)

    def all(self) -> tuple[list[StoredKey], int]:
        """See `read`."""
        return read(cast("list[bytes]", self.redis.hvals(KEYS)))

    def get(self, name: str) -> tuple[StoredKey | None, str]:
        """A key's record, None where there is none or it cannot be read, and how it is stored."""
        stored = cast("bytes | None", self.redis.hget(KEYS, name))
        found, _ = read([stored] if stored else [])
        return found[0] if found else None, (stored or b"").decode(errors="surrogateescape")

    def change(self, name: str, before: str, after: StoredKey | None, entry: str = "", most: int = 1) -> bool:
        """Put a record in the place of what was stored; false when that has changed. See `change_arguments`, and
        `trail.change` for what it raises."""
        return trail.change(self.redis, self._durability, *change_arguments(name, before, after, entry, most))

    def use(self, key: ClientKey, every: str) -> Use:
        """What is counted of it; `every` is its budget's period."""
        return Use(*map(int, self._show(keys=list(counted_keys(id_of(key.sha256))), args=[every])))

    def forget_counts(self, key: StoredKey) -> None:
        """Drop what was counted of it."""
        self.redis.delete(*counted_keys(id_of(key.sha256)))
