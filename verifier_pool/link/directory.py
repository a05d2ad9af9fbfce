"""The webhooks as a sender needs them: who is told of an event, found without a look at those who are not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True, slots=True)
class Webhooks:
    """All webhooks as they were at one moment; never changed, so that no thread sees half of them."""

    version: bytes | None = None
    own: Listener | None = None
    read: Mapping[bytes, Listener | None] = field(default_factory=dict)
    by_id: Mapping[str, Listener] = field(default_factory=dict)
    by_owner: Mapping[str, Sequence[Listener]] = field(default_factory=dict)
    for_everyone: Sequence[Listener] = ()

    def who_may(self, of: str | None) -> Iterator[Listener]:
        """Those among whom all are that may hear of a key or a backend."""
        own = () if self.own is None else (self.own,)
        if of is None:
            return chain(own, *self.by_owner.values())
        mine = self.by_owner.get(of, ()) if of else ()
        others = (each for each in self.for_everyone if each.endpoint.owner != of)
        return chain(own, self.by_owner.get("", ()), mine, others)


class Directory:
    """The webhooks, read anew when they change, and of those the ones that did; and the client keys, every two seconds.

    An event costs what those may cost that can hear it: the webhooks of one client key and of admins. Safe in several
    threads.
    """

    KEYS_SECONDS = 2.0

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._now = Webhooks()
        self._turn = threading.Lock()
        self._keys: dict[str, StoredKey] = {}
        self._declared: tuple[Sequence[ClientKey], dict[str, ClientKey]] = ((), {})
        self._looked = float("-inf")

    def refresh(self, settings: Settings) -> Webhooks:
        """The webhooks as they are now."""
        now = self._now
        if self._is_current(now, settings):
            return now
        with self._turn:
            # Whoever had the turn before may have read them already.
            if not self._is_current(self._now, settings):
                self._now = self._changed(self._now, settings)
            return self._now

    def find(self, id: str, settings: Settings) -> Endpoint | None:
        """The webhook of this id as it is now; None where there is none (any more)."""
        now = self.refresh(settings)
        if now.own is not None and now.own.endpoint.id == id:
            return now.own.endpoint
        found = now.by_id.get(id)
        return None if found is None else found.endpoint

    def told(self, happened: Happened, settings: Settings, among: Webhooks) -> list[tuple[Endpoint, str]]:
        """Who is told of an event `among` those that `refresh` gave, each with the type of the message."""
        of = None if happened.verification is None else str(happened.verification.get("owner", ""))
        return [
            (each.endpoint, type)
            for each in among.who_may(of)
            if self.may_hear(each.endpoint, settings, of=of) and (type := happened.type_for(each.wanted)) is not None
        ]

    def beside(self, endpoint: Endpoint) -> int:
        """How many webhooks share its turns, with itself."""
        return len(self._now.by_owner.get(endpoint.owner, ())) if endpoint.owner else 1

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

    def _is_current(self, now: Webhooks, settings: Settings) -> bool:
        own = None if now.own is None else now.own.endpoint
        return own == of_settings(settings) and now.version is not None and now.version == self._version()

    def _changed(self, before: Webhooks, settings: Settings) -> Webhooks:
        own = of_settings(settings)
        version = self._version()
        stored = cast("list[bytes]", self._redis.hvals(ENDPOINTS))
        read = {each: before.read[each] if each in before.read else _listener(each) for each in stored}
        listener = None if own is None else Listener(own, own.subscription)
        return _sorted(version, listener, read)

    def _version(self) -> bytes | None:
        return cast("bytes | None", self._redis.get(VERSION))

    def _key(self, sha256: str, settings: Settings) -> ClientKey | None:
        """The client key that lets somebody in now."""
        if time.monotonic() > self._looked + self.KEYS_SECONDS:
            found, _ = keys.read(cast("list[bytes]", self._redis.hvals(keys.KEYS)))
            self._keys = {key.sha256: key for key in found}
            self._looked = time.monotonic()
        of, by_hash = self._declared
        if of is not settings.keys:
            by_hash = {key.sha256: key for key in reversed(settings.keys)}
            self._declared = settings.keys, by_hash
        stored = self._keys.get(sha256)
        return by_hash.get(sha256) or (stored if stored is not None and stored.usable(time.time()) else None)


def _sorted(version: bytes | None, own: Listener | None, read: Mapping[bytes, Listener | None]) -> Webhooks:
    by_id: dict[str, Listener] = {}
    by_owner: dict[str, list[Listener]] = {}
    found: Iterable[Listener] = (each for each in read.values() if each is not None)
    for each in sorted(found, key=lambda each: (each.endpoint.created, each.endpoint.id)):
        by_id[each.endpoint.id] = each
        by_owner.setdefault(each.endpoint.owner, []).append(each)
    for_everyone = [each for each in by_id.values() if each.endpoint.owner and each.wanted.everyone]
    return Webhooks(version, own, read, by_id, by_owner, for_everyone)


def _listener(stored: bytes) -> Listener | None:
    found = read(stored)
    return None if found is None else Listener(found, found.subscription)
