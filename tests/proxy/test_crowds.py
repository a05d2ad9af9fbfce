"""Many ask Redis at the same moment: they wait for each other, none of them for another kind, and it is no outage."""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from policies.errors import NoConnection, RateLimited, StoreUnavailable
from policies.limits import NOTHING
from policies.settings import LimitSettings, VerificationSettings, hash_key
from proxy.api.auth import Client
from proxy.generation import Generation
from proxy.limits.limiter import Limiter
from proxy.metrics import Metrics
from proxy.outage import Outage
from proxy.store import Store
from tests.proxy.conftest import CHAT
from tests.support import wire
from tests.support.fake_backend import FakeBackend
from tests.support.running import RunningProxy, settings_for
from tests.support.valkey import Valkey
from tests.support.waiting import PATIENCE
from verifier_pool.link.limit_scripts import SHOW
from verifier_pool.link.queue import PREFIX

CROWD = 200


@pytest.fixture
def running(backend: FakeBackend, valkey: Valkey, caplog: pytest.LogCaptureFixture) -> Iterator[RunningProxy]:
    """A proxy with a key, which saw no outage when the test is over."""
    caplog.set_level(logging.WARNING)
    keys = [{"name": each, "sha256": hash_key(f"sk-{each}"), "admin": each == "root"} for each in ("k", "root")]
    with RunningProxy(settings_for(backend.url, keys=keys), valkey.url) as proxy:
        yield proxy
    assert [record.message for record in caplog.records if "redis" in record.message] == []


async def _statuses(url: str, paths: list[str], key: str = "sk-k") -> Counter[int]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, headers={"authorization": f"Bearer {key}"}) as http:

        async def ask(path: str) -> int:
            async with http.get(path) as answer:
                return answer.status

        return Counter(await asyncio.gather(*map(ask, paths)))


@pytest.mark.parametrize("wait", ["", "?wait=0.1"])
def test_a_crowd_asks_for_verdicts(running: RunningProxy, wait: str) -> None:
    paths = [f"/v1/verifications/{number:032x}{wait}" for number in range(CROWD)]
    assert asyncio.run(_statuses(running.url, paths)) == {404: CROWD}


@pytest.mark.parametrize("path", ["/v1/keys", "/v1/keys/k", "/v1/keys/none", "/v1/backends/b1/standing"])
def test_a_crowd_asks_for_anything_else(running: RunningProxy, path: str) -> None:
    status = 404 if path.endswith("none") else 200
    assert asyncio.run(_statuses(running.url, [path] * CROWD, "sk-root")) == {status: CROWD}


@asynccontextmanager
async def stored(url: str) -> AsyncIterator[tuple[Store, Outage]]:
    outage, metrics = Outage(), Metrics()
    store = Store(url, VerificationSettings(), outage, metrics)
    try:
        yield store, outage
    finally:
        await store.close()
        metrics.close()


def _generation(number: int) -> Generation:
    return Generation(f"{number:032x}", "k", "chat", "m", "async", stream=False)


def _everything(store: Store, count: int) -> list[Callable[[], Coroutine[Any, Any, object]]]:
    """Every way of asking, by so many at once."""
    script = store.script(SHOW)
    names = [f"{PREFIX}{name}:x" for name in ("limit", "leases", "spent")]
    ways: list[Callable[[], Coroutine[Any, Any, object]]] = [
        lambda: store.count(script, names, ["day"]),
        lambda: store.call(script, names, ["day"]),
        lambda: store.verification("x"),
        lambda: store.intent("x"),
        lambda: store.standing("b1"),
        lambda: store.standings(["b1"]),
        lambda: store.key("x"),
        store.all_keys,
    ]
    return [*(ways * count), *((lambda n=n: store.open(_generation(n))) for n in range(count))]


@pytest.mark.parametrize("option", ["", "?max_connections=1"])
def test_a_crowd_of_everything(valkey: Valkey, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.store.PATIENCE", PATIENCE)
    monkeypatch.setattr("proxy.asking.PATIENCE", PATIENCE)

    async def test() -> None:
        async with stored(valkey.url + option) as (store, outage):
            await asyncio.gather(*(ask() for ask in _everything(store, 150)))
            assert not outage.down

    asyncio.run(test())


def test_nobody_waits_for_another_kind(valkey: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every connection for reads is taken, and every one for what is asked in passing, requests are let in."""
    monkeypatch.setattr("proxy.store.PATIENCE", PATIENCE)
    monkeypatch.setattr("proxy.asking.PATIENCE", PATIENCE)

    async def test() -> None:
        async with stored(valkey.url) as (store, outage):
            await store.verification("x")
            busy = [asyncio.create_task(store._reads.ask(("BLPOP", PREFIX + "nothing", "0"))) for _ in range(2)]
            await asyncio.sleep(0.05)
            reads = [asyncio.create_task(store.verification("x")) for _ in range(CROWD)]
            for _ in range(store._asking.places._value):
                await store._asking.places.acquire()
            aside = [asyncio.create_task(store.key("x")) for _ in range(CROWD)]
            await asyncio.sleep(0)
            script = store.script(SHOW)
            await store.count(script, [f"{PREFIX}{name}:x" for name in ("limit", "leases", "spent")], ["day"])
            await store.open(_generation(1))
            await store.keys(None)
            assert not any(each.done() for each in (*busy, *reads, *aside))
            with valkey.client() as client:
                client.rpush(PREFIX + "nothing", "1", "2")
            assert await asyncio.gather(*reads) == [None] * CROWD
            store._asking.places.release()
            assert await asyncio.gather(*aside) == [None] * CROWD
            assert not outage.down

    asyncio.run(test())


def test_a_loop_that_stands_still_is_no_outage(valkey: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.store.PATIENCE", 0.4)
    monkeypatch.setattr("proxy.asking.PATIENCE", 0.4)

    async def test() -> None:
        async with stored(valkey.url) as (store, outage):
            for ask in _everything(store, 1):
                await ask()
            asked = [asyncio.create_task(ask()) for ask in _everything(store, 10)]
            for _ in range(3):
                await asyncio.sleep(0)
                time.sleep(0.6)  # noqa: ASYNC251
            await asyncio.gather(*asked)
            assert not outage.down

    asyncio.run(test())


def test_without_a_connection_left_nothing_is_said_of_redis(valkey: Valkey) -> None:
    """This process has no file descriptors left: that is for whoever asks, and nobody else goes without Redis."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def test() -> None:
        async with stored(valkey.url) as (store, outage):
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            try:
                for ask in _everything(store, 1):
                    with pytest.raises(NoConnection):
                        await ask()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert not outage.down
            for ask in _everything(store, 1):
                await ask()

    asyncio.run(test())


def test_who_cannot_be_counted_is_not_let_in(valkey: Valkey) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    client = Client("", "k", admin=False, operator=False, id="x", limits=LimitSettings(requests_per_minute=1))

    async def test() -> None:
        async with stored(valkey.url) as (store, _):
            metrics = Metrics()
            limiter = Limiter(store, metrics)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            try:
                with pytest.raises(RateLimited, match="cannot be counted") as refused:
                    await limiter.admit(client, NOTHING)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert refused.value.retry_after == 1
            metrics.close()

    asyncio.run(test())


def test_a_silent_redis_is_an_outage_for_all_who_wait(valkey: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.store.PATIENCE", 0.5)
    monkeypatch.setattr("proxy.asking.PATIENCE", 0.5)

    async def test() -> None:
        async with stored(valkey.url) as (store, outage):
            for ask in _everything(store, 1):
                await ask()
            valkey.freeze()
            try:
                asked = [asyncio.create_task(ask()) for ask in _everything(store, CROWD)]
                # One after another they would take minutes.
                async with asyncio.timeout(PATIENCE):
                    said = await asyncio.gather(*asked, return_exceptions=True)
                assert {type(each) for each in said} == {StoreUnavailable}
                assert outage.down
            finally:
                valkey.thaw()

    asyncio.run(test())


def test_answers_are_verified_while_a_crowd_reads(running: RunningProxy, backend: FakeBackend) -> None:
    backend.script = [wire.whole(wire.BODY)]

    async def test() -> None:
        crowd = asyncio.create_task(
            _statuses(running.url, [f"/v1/verifications/{number:032x}" for number in range(4 * CROWD)])
        )
        headers = {"authorization": "Bearer sk-k"}
        async with aiohttp.ClientSession(running.url, headers=headers) as http:
            for _ in range(20):
                async with http.post("/v1/chat/completions", json=CHAT) as answer:
                    assert answer.status == 200
                    assert "x-countersign-verdict" not in answer.headers
        assert await crowd == {404: 4 * CROWD}

    asyncio.run(test())
