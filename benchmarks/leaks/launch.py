"""`countersign serve`, with a socket on which this process tells what it holds. Only benchmarks start it so.

`python -m benchmarks.leaks.launch SOCKET [serve's arguments]`. Each line sent to the socket is answered by one of JSON:
`count` what there is, `trace` begins to trace memory, `grown` where it grew since.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import sys
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
from redis.asyncio.connection import AbstractConnection as AsyncRedisConnection
from redis.connection import AbstractConnection as RedisConnection

from proxy import serve
from proxy.services import Services

_SHOWN = 15
_FRAMES = 8


class Probe:
    """Answers for one process."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._before: tracemalloc.Snapshot | None = None

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        try:
            while line := await reader.readline():
                found = {"count": self.count, "trace": self.trace, "grown": self.grown}[line.strip().decode()]()
                writer.write(orjson.dumps(found) + b"\n")
        finally:
            writer.close()

    def count(self) -> dict[str, Any]:
        """Everything that can be left over."""
        services = self._services
        tasks = Counter(_name(task) for task in asyncio.all_tasks() if not task.done())
        return {
            "tasks": dict(tasks),
            "handles": dict(handles(services.settings.port, _port_of(services.settings.redis_url))),
            "in_flight": services.drain.in_flight,
            "outstanding": sum(backend.outstanding for backend in services.backends.all),
            "rss": resident(),
        }

    def trace(self) -> dict[str, Any]:
        """Remember what memory is held, and by whom."""
        if not tracemalloc.is_tracing():
            tracemalloc.start(_FRAMES)
        gc.collect()
        self._before = tracemalloc.take_snapshot()
        return {}

    def grown(self) -> dict[str, Any]:
        """Bytes more than when `trace` was asked, by who holds them; the largest."""
        assert self._before is not None
        gc.collect()
        found = tracemalloc.take_snapshot().compare_to(self._before, "traceback")
        mine = (str(Path(__file__).parent), tracemalloc.__file__)
        rows = []
        for each in found:
            frames = [frame for frame in each.traceback if not frame.filename.startswith(mine)]
            if frames:
                place = " < ".join(f"{_short(frame.filename)}:{frame.lineno}" for frame in frames[::-1][:3])
                rows.append((each.size_diff, each.count_diff, place))
        rows.sort(reverse=True)
        most = [{"at": place, "bytes": size, "objects": count} for size, count, place in rows[:_SHOWN]]
        return {"total": sum(size for size, _, _ in rows), "most": most}


def handles(own: int, redis: int) -> Counter[str]:
    """Open files of this process: what is no socket as `file`, sockets by who is at the other end, or was.

    Args:
        own, redis: ports that this process and Redis listen on.
    """
    found: Counter[str] = Counter()
    dead: set[int] = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            number = int(name)
            kind = "file"
            if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                with socket.socket(fileno=os.dup(number)) as each:
                    kind = _side(each, own, redis)
            found[kind] += 1
            if kind == "dead":
                dead.add(number)
    if dead and (pooled := len(dead & _of_redis())):
        found["dead"] -= pooled
        found["redis, closed"] = pooled
    return found


def _of_redis() -> set[int]:
    """Sockets of Redis clients, which replace one that Redis has closed when they use it next."""
    found: set[int] = set()
    for each in gc.get_objects():
        if isinstance(each, RedisConnection) and (own := getattr(each, "_sock", None)) is not None:
            found.add(own.fileno())
        elif isinstance(each, AsyncRedisConnection) and each._writer is not None:
            found.add(each._writer.get_extra_info("socket").fileno())
    return found


def _side(each: socket.socket, own: int, redis: int) -> str:
    if each.family != socket.AF_INET:
        return "local"
    try:
        peer = each.getpeername()[1]
    except OSError:
        return "listening" if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) else "dead"
    if each.getsockname()[1] == own:
        return "client"
    return "redis" if peer == redis else "backend"


def _port_of(url: str | None) -> int:
    return urlsplit(url or "").port or 6379


def resident() -> int:
    """Bytes of this process in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _name(task: asyncio.Task[Any]) -> str:
    coroutine = task.get_coro()
    return str(getattr(coroutine, "__qualname__", coroutine))


def _short(path: str) -> str:
    return "/".join(Path(path).parts[-2:])


def main(argv: Sequence[str]) -> int:
    """Serve."""
    path, *arguments = argv
    start = Services.start.__func__  # type: ignore[attr-defined]

    async def started(cls: type[Services], *given: Any, **more: Any) -> Services:
        services: Services = await start(cls, *given, **more)
        probe = Probe(services)
        # The server lives as long as something refers to it.
        probe.server = await asyncio.start_unix_server(probe.answer, path)  # type: ignore[attr-defined]
        _PROBES.append(probe)
        return services

    Services.start = classmethod(started)  # type: ignore[method-assign,assignment]
    return serve.main(arguments)


_PROBES: list[Probe] = []

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
