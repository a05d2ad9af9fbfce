"""Records of standing for the operator: read whole, and changed by hand under the same rule as the workers' folds."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from policies import standing
from policies.errors import ApiError, Conflict, StoreFailed
from policies.settings import Settings
from policies.standing import Record
from policies.unit import declaration_name, declaration_of
from proxy.backends.backend import Backend
from proxy.store import Store
from verifier_pool.link import trail
from verifier_pool.link.durable import NotDurable
from verifier_pool.link.scripts import STORE_STANDING, store_standing

_TRIES = 20
_PATIENCE = 3.0
_POLL = 0.05


@dataclass(frozen=True, slots=True)
class _Found:
    """What Redis holds of one backend: the version of its records, the records by declaration, and how many units wait
    to be counted."""

    version: bytes
    records: dict[str, Record]
    waiting: int


class Decision(NamedTuple):
    """What came of the operator's decision: the record, and whether it is as durable as the settings ask for."""

    record: Record
    durably: bool


class Records:
    """The record of each backend as it is declared now. Raises StoreUnavailable when Redis does not answer."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._settings = settings

    async def summary(self, backend: Backend) -> dict[str, Any]:
        """Everything there is to show of it, a new one's where nothing was counted yet."""
        found = await self._find(backend)
        return await asyncio.to_thread(self.show, _present(backend, found, time.time()))

    async def history(self, name: str) -> list[dict[str, Any]]:
        """Every record of a backend of that name, declared now or not, the latest life first."""
        found = await self._read(name)
        records = sorted(found.records.values(), key=lambda record: -record.number)
        return await asyncio.to_thread(lambda: [self.show(record) for record in records])

    def show(self, record: Record) -> dict[str, Any]:
        """A record as JSON has words for it."""
        return standing.summary(record, self._settings.standing_of(record.backend), self._settings.audit)

    async def override(self, backend: Backend, action: str, *, by: str, why: str, actor: str) -> Decision:
        """Do what the operator decided about a backend, durably.

        A pardon waits until the units before it are counted: they belong to the life that it ends.

        Args:
            action: one of `policies.standing.ACTIONS`.
            by, why: whose decision it is and the reason, for the audit trail.
            actor: the same as the audit log has it, which learns of it in the same step (`trail.entry`).

        Raises:
            Conflict: the action makes no sense as things are.
            StoreFailed: others kept writing, or no worker counts the units that wait; nothing was done.
        """
        deadline = time.monotonic() + _PATIENCE
        for attempt in range(_TRIES):
            found = await self._find(backend)
            while action == "pardon" and found.waiting:
                if time.monotonic() > deadline:
                    raise StoreFailed(
                        f"{found.waiting} answers wait for a worker to count them; try again once one has",
                        code="units_waiting",
                    )
                await asyncio.sleep(_POLL)
                found = await self._find(backend)
            made = await self._write(backend, found, action, by, why, actor)
            if made is not None:
                return made
            await asyncio.sleep(random.random() * 0.002 * (attempt + 1))
        raise StoreFailed("others keep changing the standing of this backend; try again", code="contended")

    async def _write(
        self, backend: Backend, found: _Found, action: str, by: str, why: str, actor: str
    ) -> Decision | None:
        """What came of it, or None when somebody else wrote since the record was found."""
        now, declaration = time.time(), declaration_of(backend.settings)
        rules = self._settings.standing_of(backend.name)
        try:
            after = standing.decided(
                found.records, backend.name, declaration, action, by=by, why=why, now=now, rules=rules
            )
        except ValueError as error:
            raise Conflict(str(error), param="action") from error
        before = found.records.get(after.name)
        state = None if before is None else before.state
        said = trail.decision(actor, action, backend.name, state, after.state, why)
        keys, arguments, _ = store_standing(
            backend.name, found.version, found.records, {after.name: after}, self._settings, now, entry=said
        )
        try:
            return Decision(after, durably=True) if await self._store.change(STORE_STANDING, keys, arguments) else None
        except NotDurable:
            return Decision(after, durably=False)

    async def _find(self, backend: Backend) -> _Found:
        return await self._read(backend.name)

    async def _read(self, name: str) -> _Found:
        stored, waiting = await self._store.standing(name)
        version = stored.pop(b"version", b"0")
        return _Found(version, await asyncio.to_thread(_unpacked, stored), waiting)


def _present(backend: Backend, found: _Found, now: float) -> Record:
    declaration = declaration_of(backend.settings)
    record = found.records.get(declaration_name(declaration))
    if record is not None:
        return record
    return standing.new(backend.name, declaration, standing.next_number(found.records.values()), now)


def _unpacked(stored: Mapping[bytes, bytes]) -> dict[str, Record]:
    try:
        return {name.decode(): standing.unpack(value) for name, value in stored.items()}
    except (msgspec.MsgspecError, ValueError) as error:
        raise ApiError("the record of this backend cannot be read", code="standing_unreadable") from error
