"""Commands of many over few connections, against a real Valkey and one that misbehaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from redis.exceptions import RedisError, ResponseError

from proxy.lanes import Command, Lanes
from tests.support.valkey import Valkey
from tests.support.waiting import PATIENCE
from verifier_pool.link import connection


@asynccontextmanager
async def lanes(
    url: str, *, patience: float = 2.0, after: Command | None = None, most: int = 256
) -> AsyncIterator[Lanes]:
    made = Lanes(connection.connect_async(url, connect_timeout=PATIENCE), patience, after, most)
    try:
        yield made
    finally:
        await made.close()


def test_everybody_gets_his_own_answer(valkey: Valkey) -> None:
    async def test() -> None:
        async with lanes(valkey.url) as made:
            answers = await asyncio.gather(*(made.ask(("ECHO", str(number))) for number in range(1000)))
            assert [answer for answer, _ in answers] == [str(number).encode() for number in range(1000)]
            assert {last for _, last in answers} == {None}

    asyncio.run(test())


def test_an_error_is_one_commands_answer_alone(valkey: Valkey) -> None:
    async def test() -> None:
        async with lanes(valkey.url, after=("ECHO", "end")) as made:
            (good, last), (bad, _) = await asyncio.gather(made.ask(("ECHO", "a")), made.ask(("NONSENSE",)))
            assert good == b"a"
            assert last == b"end"
            assert isinstance(bad, ResponseError)

    asyncio.run(test())


def test_a_connection_that_was_closed_is_replaced(valkey: Valkey) -> None:
    async def test() -> None:
        async with lanes(valkey.url) as made:
            for _ in range(4):
                assert (await made.ask(("ECHO", "a")))[0] == b"a"
                await made.ask(("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"))
                ((mine, _),) = await asyncio.gather(made.ask(("CLIENT", "ID")))
                other = connection.connect(valkey.url)
                other.client_kill_filter(_id=str(mine))
                other.close()

    asyncio.run(test())


def test_whoever_asked_left(valkey: Valkey) -> None:
    async def test() -> None:
        async with lanes(valkey.url) as made:
            left = [asyncio.ensure_future(made.ask(("ECHO", str(number)))) for number in range(10)]
            await asyncio.sleep(0)
            for future in left[::2]:
                future.cancel()
            assert [(await future)[0] for future in left[1::2]] == [b"1", b"3", b"5", b"7", b"9"]

    asyncio.run(test())


def test_waiting_for_those_before_is_not_silence(valkey: Valkey) -> None:
    async def test() -> None:
        async with lanes(valkey.url, patience=1.4, most=2) as made:
            started = time.monotonic()
            slow = [made.ask(("BLPOP", "nothing", "0.1")) for _ in range(32)]
            assert await asyncio.gather(*slow) == [(None, None)] * 32
            assert time.monotonic() - started > 1.5

    asyncio.run(test())


def test_whoever_waits_for_a_redis_that_hangs_waits_no_longer() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1024):
            pass
        writer.close()

    async def test() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, lanes(f"redis://127.0.0.1:{port}", patience=0.3, most=2) as made:
            # One after another they would take minutes.
            async with asyncio.timeout(PATIENCE):
                said = await asyncio.gather(*(made.ask(("ECHO", "a")) for _ in range(500)), return_exceptions=True)
            assert all(isinstance(each, RedisError | OSError | TimeoutError) for each in said)
            await asyncio.sleep(0.05)

    asyncio.run(test())


@pytest.mark.parametrize("answer", [None, b"", b"rubbish\r\n"])
def test_a_redis_that_hangs_closes_or_raves(answer: bytes | None) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        if answer is None:
            while await reader.read(1024):
                pass
        writer.write(answer or b"")
        writer.close()

    async def test() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, lanes(f"redis://127.0.0.1:{port}", patience=0.3) as made:
            for _ in range(3):
                with pytest.raises((RedisError, OSError, TimeoutError)):
                    await made.ask(("ECHO", "a"))
            await asyncio.sleep(0.05)

    asyncio.run(test())
