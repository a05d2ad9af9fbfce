"""What the workers think of each backend, as the proxy last heard: its state and its audit rate.

The workers write it to Redis (`standings` of `verifier_pool.queue`); one task here reads it each second, so that no
request ever waits for it. While Redis is away the last known standings hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Annotated, Literal

import msgspec

from policies.errors import StoreUnavailable
from policies.unit import declaration_name, declaration_of
from proxy.backends.backend import Backend, Standing
from proxy.backends.pool import Backends
from proxy.store import Store
from proxy.tasks import end
from verifier_pool.queue import standing_field

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
        self._fields = [field_of(backend) for backend in backends.all]
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
        if not self._fields:
            return
        found = await self._store.standings(self._fields)
        for backend, data in zip(self._backends.all, found, strict=True):
            self._learn(backend, data)

    def _learn(self, backend: Backend, data: bytes | None) -> None:
        try:
            entry = None if data is None else _entry.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            # Nobody may get out of quarantine, or into it, by an entry that says nothing.
            if backend.name not in self._unreadable:
                self._unreadable.add(backend.name)
                logger.error("a backend's standing cannot be read; its last known one holds", extra=_named(backend))
            return
        self._unreadable.discard(backend.name)
        new = self._backends.new if entry is None else Standing(entry.state, entry.audit_rate, entry.since)
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


def field_of(backend: Backend) -> str:
    """Where the workers keep a backend's standing under its present declaration."""
    return standing_field(backend.name, declaration_name(declaration_of(backend.settings)))


def _named(backend: Backend) -> dict[str, str]:
    return {"backend": backend.name}
