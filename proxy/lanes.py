"""Redis commands of many requests over a few connections: whatever is asked while one is busy goes with its next turn.

A pooled connection per command costs more than the command does; and where every write waits for the disk, those of one
turn wait together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import hiredis
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

from proxy.patience import Patience
from proxy.tasks import end

Command = Sequence[str | int | bytes]
_Asked = tuple[Command, "asyncio.Future[tuple[Any, Any]]"]
_LANES = 2
_MOST = 256
"""Commands in one turn, if nothing else is said."""


class Lanes:
    """Sends commands that can be repeated: one on a connection that turns out to be gone is sent again, once.

    Whoever waits for a turn waits for as long as Redis answers those before; if it does not, it has answered none.

    Args:
        redis: a client whose connections have no time-out for answers.
        patience: seconds for the answers of one turn.
        after: a command that each turn ends with.
        most: commands in one turn; whoever asked them goes on with the event loop at the same moment.
    """

    def __init__(self, redis: Redis, patience: float, after: Command | None = None, most: int = _MOST) -> None:
        self._redis = redis
        self._patience = patience
        self._after = after
        self._most = most
        self._waiting: list[_Asked] = []
        # A lane without a connection makes one when it is its turn.
        self._free: list[AbstractConnection | None] = [None] * _LANES
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Close the connections. Whoever waits for an answer is cancelled."""
        await end(*self._tasks)
        for _, future in self._waiting:
            future.cancel()
        for connection in self._free:
            if connection is not None:
                await connection.disconnect(nowait=True)
        await self._redis.aclose()

    async def ask(self, command: Command) -> tuple[Any, Any]:
        """The answers to the command and to `after` (None without); errors among them are values.

        Raises RedisError, OSError or TimeoutError where there is no answer.
        """
        future: asyncio.Future[tuple[Any, Any]] = asyncio.get_running_loop().create_future()
        if not self._free:
            self._waiting.append((command, future))
            return await future
        # Whoever finds a lane free takes his turn himself, and waits for no other task's.
        connection = self._free.pop()
        try:
            connection = await self._take([(command, future)], connection)
        except BaseException:
            connection = None
            raise
        finally:
            self._leave(connection)
        return future.result()

    def _leave(self, connection: AbstractConnection | None) -> None:
        """The lane goes on with whoever waits by now."""
        if not self._waiting:
            self._free.append(connection)
            return
        task = asyncio.create_task(self._serve(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: AbstractConnection | None) -> None:
        try:
            while self._waiting:
                turn, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
                connection = await self._take(turn, connection)
        except BaseException:
            connection = None
            raise
        finally:
            self._free.append(connection)

    async def _take(self, turn: Sequence[_Asked], connection: AbstractConnection | None) -> AbstractConnection | None:
        """Send what these wait for and tell them the answers; returns the connection if it is still good."""
        commands = [command for command, _ in turn]
        if self._after is not None:
            commands.append(self._after)
        kept = connection is not None
        try:
            async with Patience(self._patience):
                while True:
                    if connection is None:
                        connection = self._redis.connection_pool.make_connection()  # type: ignore[no-untyped-call]
                        await connection.connect()
                        _unbuffered(connection)
                    try:
                        answers = await _exchange(connection, commands)
                        break
                    except RedisConnectionError:
                        if not kept:
                            raise
                        await connection.disconnect(nowait=True)
                        connection, kept = None, False
        except BaseException as error:
            # Half an exchange is on it: what comes next would be the answer to something else.
            if connection is not None:
                await connection.disconnect(nowait=True)
            _fail(turn, error)
            if not isinstance(error, RedisError | OSError | TimeoutError):
                raise
            waiting, self._waiting = self._waiting, []
            _fail(waiting, error)
            return None
        last = None if self._after is None else answers[-1]
        for (_, future), answer in zip(turn, answers, strict=False):
            if not future.done():
                future.set_result((answer, last))
        return connection


def _fail(turn: Sequence[_Asked], error: BaseException) -> None:
    for _, future in turn:
        if isinstance(error, Exception) and not future.done():
            future.set_exception(error)
        else:
            future.cancel()


def _unbuffered(connection: AbstractConnection) -> None:
    """Send what is written while it is written: uvloop else waits until every other task had its turn."""
    writer = connection._writer
    if writer is not None:
        writer.transport.set_write_buffer_limits(high=0)


async def _exchange(connection: AbstractConnection, commands: Sequence[Command]) -> list[Any]:
    packed = b"".join([hiredis.pack_command(tuple(command)) for command in commands])  # type: ignore[arg-type]
    await _send(connection, packed)
    return [await _answer(connection) for _ in commands]


async def _send(connection: AbstractConnection, packed: bytes) -> None:
    """As redis-py does, less what it does for each command: that costs as much as the command."""
    writer = connection._writer
    if writer is None or writer.transport.is_closing():
        await connection.send_packed_command([packed], check_health=False)
        return
    try:
        writer.write(packed)
        if writer.transport.get_write_buffer_size():
            await writer.drain()
    except (RuntimeError, OSError) as error:
        raise RedisConnectionError("the connection is gone") from error


async def _answer(connection: AbstractConnection) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error
