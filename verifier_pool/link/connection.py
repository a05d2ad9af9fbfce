"""Clients of Redis, for the proxy and the workers: of one server, of whoever Sentinel says is master, of a cluster.

All keys of ours and of rq share one hash tag, so in a cluster one node has them all. A client is therefore an ordinary
one whose connections find that node, as Sentinel's find the master; so transactions, scripts, blocking commands and
everything rq does work there too. While the slot moves, Redis counts as down. URLs: `verifier_pool.link.redis_url`.
"""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import redis.asyncio.sentinel as async_sentinel
from redis import Redis, sentinel
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio.connection import ConnectionPool as AsyncConnectionPool
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.connection import ConnectionPool
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MasterDownError,
    MaxConnectionsError,
    MovedError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.retry import Retry

from policies.errors import SettingsError
from verifier_pool import TAG
from verifier_pool.link.redis_url import EXPECTED, parse

SLOT = key_slot(TAG.encode())
"""Number of the hash slot that all keys are in."""

_MISPLACED = ("WRONGTYPE", "not an integer", "not a valid float", "not a float")
"""In what Redis says of a value that is no number, or of another type than the command is for."""
_NO_MOST = 2**31
"""Connections of one client: as many as ask at once, which is for those to bound; a pool that refuses looks like an
outage."""
_ASKED_SECONDS = 0.8
"""How long a Sentinel or a node is asked where to go: two that are gone leave the third its turn within the two seconds
that a request waits."""
_OURS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL, errno.EAGAIN}
_ELSEWHERE = (MovedError, AskError, ClusterDownError, TryAgainError, MasterDownError)


def connect(url: str, *, timeout: float | None = None, connect_timeout: float = 5.0, retries: int = 1) -> Redis:
    """A client, which connects with its first command.

    Args:
        timeout, connect_timeout: seconds for each answer, and for a connection.
        retries: how often a command is sent again when its connection broke: a pooled one may have been closed by a
            restart. Never after a time-out.

    Raises:
        SettingsError: the URL is none of those above. It may hold a password, so it is not repeated.
    """
    retry = Retry(NoBackoff(), retries, supported_errors=(RedisConnectionError,))
    where = parse(url)
    given = {"socket_timeout": timeout, "socket_connect_timeout": connect_timeout, "retry": retry}
    asking = where.client(min(connect_timeout, _ASKED_SECONDS)) | {"retry": Retry(NoBackoff(), 0)}
    pool: ConnectionPool
    try:
        match where.kind:
            case "sentinel":
                pool = _Masters(where.name, sentinel.Sentinel(where.hosts, sentinel_kwargs=asking), **where.pool(given))  # type: ignore[no-untyped-call]
            case "cluster":
                pool = _Masters("", _Slot(where.hosts, asking), slot=True, **where.pool(given))
            case _:
                pool = ConnectionPool.from_url(url, **given)
        pool.max_connections = _NO_MOST
        pool.make_connection()
    except (ValueError, TypeError, RedisError):
        raise SettingsError("redis_url", EXPECTED) from None
    return Redis.from_pool(pool)


def connect_async(
    url: str, *, timeout: float | None = None, connect_timeout: float = 5.0, retries: int = 1
) -> AsyncRedis:
    """As `connect`, for an event loop; its `aclose` closes everything."""
    retry = AsyncRetry(NoBackoff(), retries, supported_errors=(RedisConnectionError,))
    where = parse(url)
    given = {"socket_timeout": timeout, "socket_connect_timeout": connect_timeout, "retry": retry}
    asking = where.client(min(connect_timeout, _ASKED_SECONDS)) | {"retry": AsyncRetry(NoBackoff(), 0)}
    pool: AsyncConnectionPool
    try:
        match where.kind:
            case "sentinel":
                sentinels = async_sentinel.Sentinel(where.hosts, sentinel_kwargs=asking)  # type: ignore[no-untyped-call]
                pool = _AsyncMasters(where.name, sentinels, **where.pool(given))
            case "cluster":
                pool = _AsyncMasters("", _AsyncSlot(where.hosts, asking), slot=True, **where.pool(given))
            case _:
                pool = AsyncConnectionPool.from_url(url, **given)
        pool.max_connections = _NO_MOST
        pool.connection_class = type("Connection", (_Reset, pool.connection_class), {})
        pool.make_connection()  # type: ignore[no-untyped-call]
    except (ValueError, TypeError, RedisError):
        raise SettingsError("redis_url", EXPECTED) from None
    return AsyncRedis.from_pool(pool)


def of_cluster(redis: Redis) -> bool:
    """Whether a client of `connect` talks to a cluster."""
    return isinstance(getattr(redis.connection_pool, "sentinel_manager", None), _Slot)


def about_one_key(error: BaseException) -> bool:
    """Whether an error says that something else is under one name than what belongs there, and nothing about Redis."""
    return isinstance(error, ResponseError) and any(sign in str(error) for sign in _MISPLACED)


def our_own(error: BaseException | None) -> bool:
    """Whether an error says that this machine has no more connections to give, and nothing about Redis."""
    while error is not None:
        if isinstance(error, MaxConnectionsError) or (isinstance(error, OSError) and error.errno in _OURS):
            return True
        error = error.__cause__ or error.__context__
    return False


class _Reset:
    """A connection that the other side has reset is a ConnectionError; uvloop says RuntimeError to whoever writes."""

    async def connect(self, *arguments: Any, **options: Any) -> Any:
        try:
            found = await super().connect(*arguments, **options)  # type: ignore[misc]
        except RuntimeError as error:
            raise RedisConnectionError("the connection is gone") from error
        _end_with_the_other_side(self._writer)  # type: ignore[attr-defined]
        return found

    async def send_packed_command(self, *arguments: Any, **options: Any) -> Any:
        try:
            return await super().send_packed_command(*arguments, **options)  # type: ignore[misc]
        except RuntimeError as error:
            raise RedisConnectionError("the connection is gone") from error


def _end_with_the_other_side(writer: asyncio.StreamWriter | None) -> None:
    """asyncio keeps a connection that the other side has closed until somebody writes to it; a pool may never."""
    protocol: Any = None if writer is None else writer.transport.get_protocol()
    if isinstance(protocol, asyncio.StreamReaderProtocol) and "eof_received" not in vars(protocol):
        reads = type(protocol).eof_received

        def ended() -> bool:
            reads(protocol)
            return False

        protocol.eof_received = ended  # type: ignore[method-assign]


class _Connection(sentinel.SentinelManagedConnection):
    """To the node that has our slot, until it says that it no longer has it."""

    def read_response(self, *arguments: Any, **options: Any) -> Any:
        try:
            return super().read_response(*arguments, **options)
        except _ELSEWHERE as error:
            self.disconnect()  # type: ignore[no-untyped-call]
            raise RedisConnectionError("the slot is elsewhere") from error


class _SecureConnection(_Connection, sentinel.SentinelManagedSSLConnection):
    pass


class _AsyncConnection(async_sentinel.SentinelManagedConnection):
    async def read_response(self, *arguments: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*arguments, **options)
        except _ELSEWHERE as error:
            await self.disconnect()
            raise RedisConnectionError("the slot is elsewhere") from error


class _AsyncSecureConnection(_AsyncConnection, async_sentinel.SentinelManagedSSLConnection):
    pass


class _Masters(sentinel.SentinelConnectionPool):
    """Connections to whichever server is the master; lets go of the Sentinels with them."""

    def __init__(self, name: str, manager: Any, *, slot: bool = False, ssl: bool, **options: Any) -> None:
        if slot:
            options["connection_class"] = _SecureConnection if ssl else _Connection
        else:
            options["ssl"] = ssl
        super().__init__(name, manager, **options)  # type: ignore[no-untyped-call]

    def disconnect(self, inuse_connections: bool = True) -> None:
        super().disconnect(inuse_connections)
        if inuse_connections:
            self.sentinel_manager.close()


class _AsyncMasters(async_sentinel.SentinelConnectionPool):
    def __init__(self, name: str, manager: Any, *, slot: bool = False, ssl: bool, **options: Any) -> None:
        if slot:
            options["connection_class"] = _AsyncSecureConnection if ssl else _AsyncConnection
        else:
            options["ssl"] = ssl
        super().__init__(name, manager, **options)  # type: ignore[no-untyped-call]

    async def disconnect(self, inuse_connections: bool = True) -> None:
        await super().disconnect(inuse_connections)
        if inuse_connections:
            await self.sentinel_manager.aclose()


class _Slot:
    """Asks a cluster's nodes which of them has our slot: those it knows from the last answer, then those of the URL."""

    def __init__(self, hosts: tuple[tuple[str, int], ...], asking: dict[str, Any]) -> None:
        self._seeds, self._asking = hosts, asking
        self._known: tuple[tuple[str, int], ...] = ()

    def discover_master(self, _: str) -> tuple[str, int]:
        for host, port in (*self._known, *self._seeds):
            try:
                with Redis(host=host, port=port, **self._asking) as node:
                    return self._found(node.execute_command("CLUSTER", "SLOTS"), host)
            except (RedisError, OSError):
                continue
        raise RedisConnectionError("no node knows who has the slot")

    def close(self) -> None:
        """Nothing is kept open."""

    def _found(self, slots: list[list[Any]], asked: str) -> tuple[str, int]:
        """The node with our slot. One that does not know its own name leaves it out: it is the one that was asked."""
        for first, last, (name, port, *_), *replicas in slots:
            if first <= SLOT <= last:
                nodes = [(_text(name) or asked, int(port))]
                nodes += [(_text(other[0]) or asked, int(other[1])) for other in replicas]
                self._known = tuple(nodes)
                return nodes[0]
        raise RedisConnectionError("nobody has the slot")


class _AsyncSlot(_Slot):
    async def discover_master(self, _: str) -> tuple[str, int]:  # type: ignore[override]
        for host, port in (*self._known, *self._seeds):
            try:
                async with AsyncRedis(host=host, port=port, **self._asking) as node:
                    return self._found(await node.execute_command("CLUSTER", "SLOTS"), host)  # type: ignore[no-untyped-call]
            except (RedisError, OSError, RuntimeError):
                continue
        raise RedisConnectionError("no node knows who has the slot")

    async def aclose(self) -> None:
        """Nothing is kept open."""


def _text(value: bytes | str | None) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""
