"""Whatever a dying Redis does to a connection of the event loop, it is a ConnectionError."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop
from redis.exceptions import ConnectionError as RedisConnectionError

from tests.support.valkey import Valkey
from tests.support.waiting import PATIENCE, until
from verifier_pool.link.connection import connect_async

AT_ONCE = struct.pack("ii", 1, 0)


@contextlib.contextmanager
def resetting() -> Iterator[str]:
    """A server that accepts connections and resets each."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
                connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"redis://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()


def test_a_connection_that_is_reset_while_it_is_made_is_a_connection_error() -> None:
    async def ask(url: str, errors: Counter[str]) -> None:
        redis = connect_async(url, timeout=PATIENCE, connect_timeout=PATIENCE)

        async def ping() -> None:
            for _ in range(50):
                try:
                    await redis.ping()
                except Exception as error:
                    errors[type(error).__name__] += 1

        await asyncio.gather(*(ping() for _ in range(20)))
        await redis.aclose()

    errors: Counter[str] = Counter()
    with resetting() as url:
        uvloop.run(ask(url, errors))
    assert errors == {"ConnectionError": 1000}


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_connection_ends_with_its_server(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    """Also one that is in no use, and may never be again."""

    async def outlive() -> None:
        with Valkey() as valkey:
            redis = connect_async(valkey.url, timeout=PATIENCE, connect_timeout=PATIENCE)
            assert await redis.ping()
            (idle,) = redis.connection_pool._available_connections
            assert idle._writer is not None
            transport = idle._writer.transport
            assert not transport.is_closing()
        await until(transport.is_closing)
        with pytest.raises(RedisConnectionError):
            await redis.ping()
        await redis.aclose()

    run(outlive())
