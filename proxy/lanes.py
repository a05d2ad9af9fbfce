"""Redis commands of many requests over a few connections: whatever is asked while one is busy goes with its next turn.

A pooled connection per command costs more than the command does; and where every write waits for the disk, those of one
turn wait together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

from proxy.tasks import end

Command = Sequence[str | int | bytes]
_LANES = 2
_MOST = 256
"""Commands in one turn."""


class Lanes:
    """Sends commands that can be repeated: one on a connection that turns out to be gone is sent again, once.

    Args:
        redis: a client whose connections have no time-out for answers.
        patience: seconds for the answers of one turn.
        after: a command that each turn ends with.
    """

    def __init__(self, redis: Redis, patience: float, after: Command | None = None) -> None:
        self._redis = redis
        self._patience = patience
        self._after = after
        self._waiting: list[tuple[Command, asyncio.Future[Any]]] = []
        self._something = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to send."""
        self._tasks = [asyncio.create_task(self._lane()) for _ in range(_LANES)]

    async def close(self) -> None:
        """Stop, and close the connections. Whoever waits for an answer is cancelled."""
        await end(*self._tasks)
        for _, future in self._waiting:
            future.cancel()
        await self._redis.aclose()

    def ask(self, command: Command) -> asyncio.Future[Any]:
        """The answers to the command and to `after` (None without), as a pair; errors among them are values.

        The future raises RedisError, OSError or TimeoutError where there is no answer.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((command, future))
        self._something.set()
        return future

    async def _lane(self) -> None:
        connection: AbstractConnection | None = None
        try:
            while True:
                while not self._waiting:
                    self._something.clear()
                    await self._something.wait()
                turn, self._waiting = self._waiting[:_MOST], self._waiting[_MOST:]
                connection = await self._take(turn, connection)
        finally:
            if connection is not None:
                await connection.disconnect(nowait=True)

    async def _take(
        self, turn: Sequence[tuple[Command, asyncio.Future[Any]]], connection: AbstractConnection | None
    ) -> AbstractConnection | None:
        """Send what these wait for and tell them the answers; returns the connection if it is still good."""
        commands = [command for command, _ in turn]
        if self._after is not None:
            commands.append(self._after)
        kept = connection is not None
        try:
            async with asyncio.timeout(self._patience):
                while True:
                    if connection is None:
                        connection = self._redis.connection_pool.make_connection()  # type: ignore[no-untyped-call]
                        await connection.connect()
                    try:
                        answers = await _exchange(connection, commands)
                        break
                    except RedisConnectionError:
                        if not kept:
                            raise
                        await connection.disconnect(nowait=True)
                        connection, kept = None, False
        except (RedisError, OSError, TimeoutError) as error:
            for _, future in turn:
                if not future.done():
                    future.set_exception(error)
            if connection is not None:
                await connection.disconnect(nowait=True)
            return None
        except BaseException:
            for _, future in turn:
                future.cancel()
            raise
        last = None if self._after is None else answers[-1]
        for (_, future), answer in zip(turn, answers, strict=False):
            if not future.done():
                future.set_result((answer, last))
        return connection


async def _exchange(connection: AbstractConnection, commands: Sequence[Command]) -> list[Any]:
    await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
    return [await _answer(connection) for _ in commands]


async def _answer(connection: AbstractConnection) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error
