"""Fixtures: three backends behind a proxy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from proxy.backends.pool import Backends
from tests.proxy.backends.fleet import Clock
from tests.proxy.backends.live import QUICK, Trio
from tests.proxy.conftest import Rig
from tests.support import wire
from tests.support.fake_backend import FakeBackend
from tests.support.valkey import Valkey


@pytest.fixture
def empty(valkey: Valkey) -> None:
    """Nothing is left in Redis of the test before."""
    with valkey.client() as client:
        client.flushall()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """By which backends rest, and are tried again, in proxies that are made from here on."""
    clock = Clock()
    monkeypatch.setattr("proxy.services.Backends", partial(Backends, clock=clock))
    return clock


@pytest.fixture
def third() -> Iterator[FakeBackend]:
    """One more backend."""
    with FakeBackend() as server:
        yield server


@pytest.fixture
def trio(make_rig: Callable[..., Rig], backend: FakeBackend, second: FakeBackend, third: FakeBackend) -> Trio:
    """Makes a rig with three backends that answer."""

    def make(**sections: Any) -> tuple[Rig, list[FakeBackend]]:
        rig = make_rig(second.url, third.url, **{"breaker": QUICK} | sections)
        servers = [backend, second, third]
        for server in servers:
            server.script = [wire.whole(wire.BODY)]
        return rig, servers

    return make
