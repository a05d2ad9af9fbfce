"""The webhooks as a sender needs them: who is told of an event, found without a look at those who are not."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import cast

from redis import Redis

from policies.settings import ClientKey, Settings, StoredKey
from policies.subscription import Subscription
from verifier_pool.link import keys
from verifier_pool.link.endpoints import VERSION, Endpoint, of_settings, read
from verifier_pool.link.events import Happened
from verifier_pool.link.queue import ENDPOINTS


@dataclass(frozen=True, slots=True)
class Listener:
    """A webhook, with what it takes: read once, as that costs more than to ask it."""

    endpoint: Endpoint
    wanted: Subscription


class Directory:
    """The webhooks, read anew when they change, and of those the ones that did; and the client keys, every two seconds.

    An event costs what those may cost that can hear it: the webhooks of one client key and of admins.
    """

    KEYS_SECONDS = 2.0

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._version: bytes | None = None
        self._read: dict[bytes, Listener | None] = {}
        self._by_id: dict[str, Listener] = {}
        self._by_owner: dict[str, list[Listener]] = {}
        self._for_everyone: list[Listener] = []
        self._own: Listener | None = None
        self._keys: dict[str, StoredKey] = {}
        self._declared: tuple[Sequence[ClientKey], dict[str, ClientKey]] = ((), {})
        self._looked = float("-inf")

    def refresh(self, settings: Settings) -> None:
        """Read what has changed."""
        own = of_settings(settings)
        if own is None or self._own is None or self._own.endpoint != own:
            self._own = None if own is None else Listener(own, own.subscription)
        version = cast("bytes | None", self._redis.get(VERSION))
        if version == self._version and version is not None:
            return
        stored = cast("list[bytes]", self._redis.hvals(ENDPOINTS))
        self._read = {each: self._read[each] if each in self._read else _listener(each) for each in stored}
        self._sort(each for each in self._read.values() if each is not None)
        self._version = version

    def find(self, id: str, settings: Settings) -> Endpoint | None:
        """The webhook of this id as it is now; None where there is none (any more)."""
        self.refresh(settings)
        if self._own is not None and self._own.endpoint.id == id:
            return self._own.endpoint
        found = self._by_id.get(id)
        return None if found is None else found.endpoint

    def told(self, happened: Happened, settings: Settings) -> list[tuple[Endpoint, str]]:
        """Who is told of an event, each with the type of the message, as of the last `refresh`."""
        of = None if happened.verification is None else str(happened.verification.get("owner", ""))
        return [
            (each.endpoint, type)
            for each in self._who_may(of)
            if self.may_hear(each.endpoint, settings, of=of) and (type := happened.type_for(each.wanted)) is not None
        ]

    def beside(self, endpoint: Endpoint) -> int:
        """How many webhooks share its turns, with itself."""
        return len(self._by_owner.get(endpoint.owner, ())) if endpoint.owner else 1

    def may_hear(self, endpoint: Endpoint, settings: Settings, *, of: str | None) -> bool:
        """Whether a webhook may be told something: of the key whose SHA-256 is `of`, or of a backend (None).

        The operator's hear everything. What the key of another may no longer see it is not told any more, whatever it
        was registered for.
        """
        if not endpoint.owner:
            return True
        key = self._key(endpoint.owner, settings)
        if key is None:
            return False
        return (key.admin and (of is None or endpoint.wanted.get("everyone") is True)) or of == endpoint.owner

    def is_there(self, endpoint: Endpoint, settings: Settings) -> bool:
        """Whether whoever registered a webhook may still use the proxy."""
        return not endpoint.owner or self._key(endpoint.owner, settings) is not None

    def _who_may(self, of: str | None) -> Iterator[Listener]:
        """Those among whom all are that may hear of a key or a backend."""
        own = () if self._own is None else (self._own,)
        if of is None:
            return chain(own, *self._by_owner.values())
        mine = self._by_owner.get(of, []) if of else []
        others = (each for each in self._for_everyone if each.endpoint.owner != of)
        return chain(own, self._by_owner.get("", []), mine, others)

    def _sort(self, found: Iterable[Listener]) -> None:
        self._by_id, self._by_owner, self._for_everyone = {}, {}, []
        for each in sorted(found, key=lambda each: (each.endpoint.created, each.endpoint.id)):
            self._by_id[each.endpoint.id] = each
            self._by_owner.setdefault(each.endpoint.owner, []).append(each)
            if each.endpoint.owner and each.wanted.everyone:
                self._for_everyone.append(each)

    def _key(self, sha256: str, settings: Settings) -> ClientKey | None:
        """The client key that lets somebody in now."""
        if time.monotonic() > self._looked + self.KEYS_SECONDS:
            found, _ = keys.read(cast("list[bytes]", self._redis.hvals(keys.KEYS)))
            self._keys = {key.sha256: key for key in found}
            self._looked = time.monotonic()
        if self._declared[0] is not settings.keys:
            self._declared = (settings.keys, {key.sha256: key for key in reversed(settings.keys)})
        stored = self._keys.get(sha256)
        declared = self._declared[1].get(sha256)
        return declared or (stored if stored is not None and stored.usable(time.time()) else None)


def _listener(stored: bytes) -> Listener | None:
    found = read(stored)
    return None if found is None else Listener(found, found.subscription)
