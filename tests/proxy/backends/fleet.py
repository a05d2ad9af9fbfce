"""Backends on a clock of the test's own."""

from __future__ import annotations

import random
from typing import Any

from proxy.backends.backend import Backend, Standing
from proxy.backends.pool import Backends
from proxy.backends.route import Route
from tests.support.running import settings_for

SUSPECT, QUARANTINED = Standing("suspect", 1.0), Standing("quarantined", 1.0)


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Fleet:
    """Backends `b1`, `b2`, … of the model `m`, and what a test does with them."""

    def __init__(self, count: int = 3, limits: int | list[int] = 0, **sections: Any) -> None:
        limits = [limits] * count if isinstance(limits, int) else limits
        entries = [
            {"name": f"b{n}", "url": "http://127.0.0.1:9", "model": "m", "max_concurrency": limit}
            for n, limit in enumerate(limits, 1)
        ]
        self.clock = Clock()
        self.backends = Backends(settings_for(backends=entries, **sections), random.Random(7), self.clock)
        self.all: list[Backend] = self.backends.all
        self.group = self.backends.groups["m"]

    def route(self, **more: Any) -> Route:
        """One request's way."""
        return self.backends.route("m", **more)

    async def order(self, **more: Any) -> list[str]:
        """Who is asked, one after the other failing, without taking a place for longer than that."""
        route, names = self.route(**more), []
        while (turn := await route.take()) is not None:
            names.append(turn.backend.name)
            turn.close()
        return names

    async def first(self, **more: Any) -> str:
        """Who is asked first."""
        turn = await self.route(**more).take()
        assert turn is not None
        turn.close()
        return turn.backend.name

    def fail(self, backend: Backend, kind: Any = "timeout", times: int = 5) -> None:
        """Requests that fail there."""
        for _ in range(times):
            entry = backend.enter()
            backend.failed(entry, kind)
            backend.leave()
            backend.over(entry)
