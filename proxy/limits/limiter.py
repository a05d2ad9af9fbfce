"""Lets requests in within their key's limits, holds what they may take, and settles it when they are over."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from policies.errors import NoConnection, RateLimited, StoreUnavailable
from policies.limits import Cost
from policies.settings import LimitSettings
from proxy.api.auth import Client
from proxy.limits import answer
from proxy.limits.counted import Counted
from proxy.metrics import Metrics
from proxy.store import Call, Store
from proxy.tasks import end
from verifier_pool.link.keys import counted_keys, settled_key
from verifier_pool.link.limit_scripts import ADMIT, RENEW, SETTLE

logger = logging.getLogger(__name__)

LEASE = 60.0
"""Seconds after which a request whose proxy is gone gives back its place, and what it held."""
_RENEW = LEASE / 3
_AT_ONCE = 256
_MOST_OWED = 100_000
_AGAIN = 0.25
_LAST = 2.0
_ASKED = 3
_HELD = ("held", "tokens")
"""Refusals that an earlier request's end may turn, once it is settled."""


def _nothing() -> int:
    return 0


class _Debt(NamedTuple):
    client: str
    lease: str
    call: Call


@dataclass(slots=True, eq=False)
class Admission:
    """A request that was let in.

    Attributes:
        headers: what its answer says of the limits.
        held: whether anything is held for it in Redis that is not settled yet.
        reserved: tokens of the minute; −1 is none.
        used: how many tokens it took so far. `told`: how many of them Redis knows of.
    """

    client: Client
    limits: LimitSettings
    headers: answer.Headers = ()
    held: bool = False
    leased: bool = False
    reserved: int = -1
    at: int = 0
    used: Callable[[], int] = _nothing
    told: int = 0
    lease: str = field(default_factory=lambda: secrets.token_hex(8))

    def taken(self) -> int:
        """As `used`; where that raises, what Redis knows of: a place that is not given back would be worse."""
        try:
            return self.used()
        except Exception:
            logger.exception("what a request took cannot be told", extra={"key": self.client.name})
            return self.told


class Limiter:
    """One round trip lets a request in, within all limits of its key at once. What it took is settled later, together
    with others', so that nobody waits for it.

    While Redis is away there are no limits; what is owed then is settled when it is back, up to 100,000 requests.
    """

    def __init__(self, store: Store, metrics: Metrics) -> None:
        self._store = store
        self._metrics = metrics
        self._admit, self._settle, self._renew = map(store.script, (ADMIT, SETTLE, RENEW))
        self._running: set[Admission] = set()
        self._owed: deque[_Debt] = deque()
        self._batch: list[_Debt] = []
        self._debts: dict[str, set[str]] = defaultdict(set)
        self._borrowed = self._paid = 0
        self._marks = settled_key(secrets.token_hex(8)), settled_key(secrets.token_hex(8))
        self._mark = ""
        self._owing = asyncio.Event()
        # A request that is renewed as it ends must not come back to life.
        self._turn = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to settle, and to renew what long requests hold."""
        self._tasks = [asyncio.create_task(self._settling()), asyncio.create_task(self._renewing())]

    async def close(self) -> None:
        """Settle what can be settled soon."""
        await end(*self._tasks)
        with contextlib.suppress(StoreUnavailable, TimeoutError):
            async with asyncio.timeout(_LAST):
                await self._pay()
        if self._owed:
            logger.error("requests that were not settled at the end", extra={"count": len(self._owed)})

    async def admit(self, client: Client, cost: Cost) -> Admission:
        """Let a request in; `client` has limits. Raises RateLimited, with the headers of its answer in `headers`."""
        assert client.limits is not None
        limits = client.limits
        admission = Admission(client, limits)
        try:
            counted = await self._ask(admission, cost)
        except NoConnection as ours:
            # Not Redis, but too many of ours: whoever brings that about shall not be rid of his limits.
            self._metrics.refused.add(1, {"reason": "uncounted"})
            raise RateLimited("requests cannot be counted right now; try again in 1s", retry_after=1.0) from ours
        except StoreUnavailable:
            self._metrics.unlimited.add(1)
            return admission
        admission.headers = answer.headers_of(limits, counted)
        if counted.refused:
            self._metrics.refused.add(1, {"reason": counted.refused})
            error = answer.refusal(limits, counted)
            error.headers = (*admission.headers, *answer.again(error))
            raise error
        admission.at = counted.at
        admission.leased = bool(limits.concurrency or limits.tokens)
        admission.reserved = counted.tokens_cost if limits.tokens_per_minute else -1
        admission.held = admission.leased or admission.reserved >= 0
        if admission.leased:
            self._running.add(admission)
        return admission

    async def _ask(self, admission: Admission, cost: Cost) -> Counted:
        """What Redis says. Whoever has an answer may ask the next thing at once, though Redis does not know yet that it
        is over: it keeps no place then, and where tokens are held for it, that is settled first."""
        client = admission.client.id
        arguments = _asked(admission.limits, admission.lease, cost)
        for _ in range(_ASKED):
            over = [*islice(self._debts.get(client, ()), _AT_ONCE)]
            counted = Counted.read(await self._store.count(self._admit, counted_keys(client), [*arguments, *over]))
            if counted.refused not in _HELD or not (over or client in self._debts):
                break
            await self._pay(self._borrowed)
        return counted

    def settle(self, admission: Admission, used: int) -> None:
        """The request is over and took that many tokens; returns at once. Only the first time counts."""
        self._running.discard(admission)
        if not admission.held:
            return
        admission.held = False
        limits = admission.limits
        arguments: list[str | int] = [admission.lease, admission.at, admission.reserved, used, admission.told]
        arguments += [limits.every, int(bool(limits.tokens))]
        if len(self._owed) == _MOST_OWED:
            logger.error("a request is not settled: too many are owed", extra={"key": admission.client.name})
            self._forget(self._owed.popleft())
        client = admission.client.id
        self._owed.append(_Debt(client, admission.lease, (self._settle, counted_keys(client), arguments)))
        self._debts[client].add(admission.lease)
        self._borrowed += 1
        self._owing.set()

    async def _settling(self) -> None:
        while True:
            await self._owing.wait()
            self._owing.clear()
            while self._owed or self._batch:
                try:
                    await self._pay()
                except StoreUnavailable:
                    await asyncio.sleep(_AGAIN)

    async def _pay(self, due: int | None = None) -> None:
        """Settle everything that is owed, or the first `due` of all that ever was. Raises StoreUnavailable; what may or
        may not be done is then asked about."""
        while self._paid < (self._borrowed if due is None else due):
            async with self._turn:
                # Whoever had the turn before may have settled it.
                if self._batch or self._owed:
                    await self._pay_some()

    async def _pay_some(self) -> None:
        if not self._batch:
            self._batch = [self._owed.popleft() for _ in range(min(len(self._owed), _AT_ONCE))]
            self._mark = secrets.token_hex(8)
        elif await self._store.marked((self._marks[0], self._mark)):
            self._forget(*self._batch)
            self._batch = []
            return
        await self._store.call_all([debt.call for debt in self._batch], (self._marks[0], self._mark))
        self._forget(*self._batch)
        self._batch = []

    def _forget(self, *debts: _Debt) -> None:
        """These are settled, or never will be."""
        for debt in debts:
            self._paid += 1
            self._debts[debt.client].discard(debt.lease)
            if not self._debts[debt.client]:
                del self._debts[debt.client]

    async def _renewing(self) -> None:
        while True:
            await asyncio.sleep(_RENEW)
            running = [each for each in self._running if each.at]
            for first in range(0, len(running), _AT_ONCE):
                try:
                    async with self._turn:
                        await self._keep(running[first : first + _AT_ONCE])
                except StoreUnavailable:
                    continue
                except Exception:
                    logger.exception("requests under way were not renewed")

    async def _keep(self, running: Iterable[Admission]) -> None:
        """Say that these requests are still under way, and what they took since."""
        calls: list[Call] = []
        for each in running:
            if each not in self._running:
                continue
            more = max(each.taken() - each.told, 0)
            each.told += more
            limits = each.limits
            arguments: list[str | int] = [each.lease, int(LEASE * 1000), more, limits.every, int(bool(limits.tokens))]
            calls.append((self._renew, counted_keys(each.client.id), arguments))
        if calls:
            await self._store.call_all(calls, (self._marks[1], ""))


def _asked(limits: LimitSettings, lease: str, cost: Cost) -> list[str | int]:
    """ARGV of `ADMIT`."""
    numbers = (limits.requests_per_minute, limits.tokens_per_minute, limits.concurrency, limits.tokens)
    tokens = (cost.likely, cost.most, cost.least)
    flags = (int(cost.open), int(cost.known))
    return [*(each or 0 for each in numbers), limits.every, lease, int(LEASE * 1000), *tokens, *flags]
