"""What the workers think of each backend, as the proxy last heard: its state and its audit rate.

The workers write it to Redis (`standings` of `verifier_pool.link.queue`); one task here reads it each second, so that
no request ever waits for it. While Redis is away the last known standings hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Annotated, Literal

import msgspec

from policies.errors import StoreUnavailable
from policies.settings import BackendSettings, Settings
from policies.unit import declaration_name, declaration_of
from proxy.backends.backend import Backend, Standing
from proxy.backends.pool import Backends
from proxy.store import Store
from proxy.tasks import end
from verifier_pool.link.queue import standing_field

logger = logging.getLogger(__name__)

_EVERY = 1.0


class _Entry(msgspec.Struct):
    """One value of the `standings` hash, as the workers write it; what else it holds is not the proxy's matter."""

    state: Literal["trial", "trusted", "suspect", "quarantined"]
    audit_rate: Annotated[float, msgspec.Meta(ge=0, le=1)]
    since: float


_entry = msgspec.json.Decoder(_Entry)


class Standings:
    """Keeps `Backend.standing` of every backend up to date. A backend that nobody has heard of is new: on trial."""

    def __init__(self, store: Store, backends: Backends) -> None:
        self._store = store
        self._backends = backends
        self._unreadable: set[str] = set()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read once, so that the first request finds them known, and then each second."""
        await self._try()
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Stop reading."""
        if self._task is not None:
            await end(self._task)

    async def refresh(self) -> None:
        """Read now. Raises StoreUnavailable; what was known then stays."""
        backends = list(self._backends.all)
        if not backends:
            return
        found = await self._store.standings([field_of(backend.settings) for backend in backends])
        for backend, data in zip(backends, found, strict=True):
            self._learn(backend, data)

    async def of_others(self, settings: Settings) -> dict[str, Standing]:
        """Standings, by name, of backends that are declared to run something else than they are known for here, and of
        those that are not known. Raises StoreUnavailable."""
        others = [each for each in settings.backends if not self._knows(each)]
        found = await self._store.standings([field_of(each) for each in others]) if others else []
        known = dict[str, Standing]()
        for each, data in zip(others, found, strict=True):
            # Where an entry says nothing, what was known of the backend before goes on.
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                known[each.name] = _standing(data) or self._backends.new
        return known

    def _knows(self, item: BackendSettings) -> bool:
        known = self._backends.named(item.name)
        return known is not None and declaration_of(known.settings) == declaration_of(item)

    def _learn(self, backend: Backend, data: bytes | None) -> None:
        try:
            new = _standing(data) or self._backends.new
        except (msgspec.MsgspecError, UnicodeDecodeError):
            # Nobody may get out of quarantine, or into it, by an entry that says nothing.
            if backend.name not in self._unreadable:
                self._unreadable.add(backend.name)
                logger.error("a backend's standing cannot be read; its last known one holds", extra=_named(backend))
            return
        self._unreadable.discard(backend.name)
        if new.state != backend.standing.state:
            logger.warning("a backend's state changed", extra=_named(backend) | {"state": new.state})
        backend.standing = new

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(_EVERY)
            await self._try()

    async def _try(self) -> None:
        with contextlib.suppress(StoreUnavailable):
            await self.refresh()


def field_of(backend: BackendSettings) -> str:
    """Where the workers keep a backend's standing under this declaration."""
    return standing_field(backend.name, declaration_name(declaration_of(backend)))


def _standing(data: bytes | None) -> Standing | None:
    """What an entry says; None for none. Raises what msgspec does."""
    if data is None:
        return None
    entry = _entry.decode(data)
    return Standing(entry.state, entry.audit_rate, entry.since)


def _named(backend: Backend) -> dict[str, str]:
    return {"backend": backend.name}
