"""Names that hang, or are none: their backends cannot be reached, and nobody else notices."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvloop

from policies.errors import BackendUnavailable
from policies.settings import TimeoutSettings
from proxy.backends.probes import Probes
from proxy.relay.transport import AiohttpTransport, UpstreamRequest
from proxy.resolver import Resolver
from tests.proxy.conftest import Rig
from tests.support import wire
from tests.support.fake_backend import FakeBackend
from tests.support.waiting import PATIENCE, until, wait_until

_real = socket.getaddrinfo


class Names:
    """A name server that says nothing of `….slow.test` until it is told to, and knows none of `….none.test`.

    Attributes:
        asked: what it was asked, each time.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.go = threading.Event()

    def getaddrinfo(self, host: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(host, str) and host.endswith(".test"):
            self.asked.append(host)
            if host.endswith(".none.test"):
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            assert self.go.wait(PATIENCE)
            host = "127.0.0.1"
        return _real(host, *arguments, **options)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    found = Names()
    monkeypatch.setattr(socket, "getaddrinfo", found.getaddrinfo)
    yield found
    found.go.set()


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_hundred_that_hang_hold_up_nobody(names: Names, loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def test() -> None:
        resolver = Resolver()
        hanging = [asyncio.create_task(resolver.resolve(f"n{n}.slow.test", 80)) for n in range(100)]
        await until(lambda: len(names.asked) == 100)
        async with asyncio.timeout(PATIENCE / 2):
            assert await asyncio.to_thread(lambda: 1) == 1
            assert await asyncio.get_running_loop().getaddrinfo("localhost", 80)
            assert [each["port"] for each in await resolver.resolve("127.0.0.1", 80)] == [80]
        assert not any(task.done() for task in hanging)
        names.go.set()
        for found in await asyncio.gather(*hanging):
            assert [(each["host"], each["port"]) for each in found] == [("127.0.0.1", 80)]

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(test())


async def test_whoever_asks_for_the_same_waits_for_the_same(names: Names) -> None:
    resolver = Resolver()
    first, *others = (asyncio.create_task(resolver.resolve("one.slow.test", port)) for port in (80, 80, 81))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    names.go.set()
    assert [found[0]["port"] for found in await asyncio.gather(*others)] == [80, 81]
    assert names.asked == ["one.slow.test"]
    await resolver.resolve("one.slow.test")
    assert names.asked == ["one.slow.test"] * 2


@pytest.mark.parametrize("host", ["x.none.test", "a..b", "x" * 64 + ".test.", "\udc80"])
async def test_what_is_no_name_is_an_error_of_the_system(names: Names, host: str) -> None:
    names.go.set()
    with pytest.raises(OSError, match=r"name|Name|host"):
        await Resolver().resolve(host)


def test_threads_that_hang_keep_no_process(names: Names) -> None:
    async def test() -> None:
        asking = asyncio.create_task(Resolver().resolve("x.slow.test"))
        await asyncio.sleep(0)
        asking.cancel()

    asyncio.run(test())
    hanging = [each for each in threading.enumerate() if each.name == "resolver"]
    assert hanging
    assert all(each.daemon for each in hanging)
    # The loop is gone by the time it has an answer.
    names.go.set()
    for each in hanging:
        each.join(PATIENCE)
        assert not each.is_alive()


@pytest.mark.parametrize("host", ["b.slow.test", "b.none.test", "a..b"])
async def test_such_a_backend_cannot_be_reached(names: Names, host: str) -> None:
    transport = AiohttpTransport(TimeoutSettings(connect=0.3))
    try:
        began = time.monotonic()
        with pytest.raises(BackendUnavailable):
            await transport.send(UpstreamRequest(f"http://{host}:9/v1/chat/completions", [], b"{}"))
        if "slow" in host:
            assert time.monotonic() - began >= 0.3
    finally:
        await transport.close()


@pytest.mark.parametrize("host", ["b2.slow.test", "b2.none.test"])
def test_its_breaker_counts_and_others_serve(
    names: Names, make_rig: Callable[..., Rig], backend: FakeBackend, host: str
) -> None:
    two = [
        {"name": name, "url": url, "model": "m", "served_model": "served"}
        for name, url in (("b1", backend.url), ("b2", f"http://{host}:9"))
    ]
    rig = make_rig(
        backends=two,
        # The other one has so long, too.
        timeouts={"connect": 2.0, "first_byte": PATIENCE},
        breaker={"failures": 1, "open_seconds": PATIENCE},
        relay={"retries": 0},
    )
    backend.script = [wire.whole(wire.BODY)]
    b2 = rig.proxy.services.backends.all[1]
    began = time.monotonic()
    answers = []
    while b2.breaker.state == "closed":
        answers.append(rig.chat().status_code)
        assert time.monotonic() - began < PATIENCE
    assert set(answers) == {200}
    assert b2.failure is not None
    assert (b2.breaker.kind, b2.failure.kind, b2.outstanding) == ("unreachable", "unreachable", 0)
    alone = rig.chat()
    assert alone.status_code == 200
    assert set(names.asked) == {host}


def test_alone_it_is_unavailable(names: Names, make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(
        backends=[{"name": "b1", "url": "http://b1.slow.test:9", "model": "m"}],
        timeouts={"connect": 0.2, "first_byte": PATIENCE},
    )
    response = rig.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "backend_unavailable")
    assert "retry-after" in response.headers
    for _ in range(3):
        rig.chat()
    # Whoever comes while it is looked up waits with the first.
    assert names.asked == ["b1.slow.test"]


def test_probes_of_it_pile_up_nowhere(names: Names, make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(
        backends=[{"name": "b1", "url": "http://b1.slow.test:9", "model": "m"}],
        health={"interval": 0.05, "timeout": 0.05, "down_after": 3, "up_after": 1},
    )
    (b1,) = rig.proxy.services.backends.all
    wait_until(lambda: not b1.up)
    assert isinstance(rig.proxy.services.probes, Probes)
    assert b1.complaint is not None
    assert b1.complaint.kind == "timeout"
    assert names.asked == ["b1.slow.test"]
