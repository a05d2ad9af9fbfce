"""Fixtures: one Valkey per module, a scripted backend and a proxy per test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import httpx
import orjson
import pytest
import redis
from openai.types.chat import ChatCompletionMessageParam

from policies import codec
from policies.evidence import Evidence
from policies.unit import declaration_name, declaration_of
from tests.support.deadlines import Deadlines
from tests.support.fake_backend import FakeBackend
from tests.support.running import RunningProxy, settings_for
from tests.support.valkey import Valkey
from tests.support.waiting import PATIENCE
from verifier_pool.link.fair import FairQueue
from verifier_pool.link.queue import (
    OPEN,
    STANDINGS,
    VERDICTS,
    VERIFY_QUEUE,
    evidence_key,
    intent_key,
    standing_field,
    verdict_key,
)

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "count"}]
CHAT: dict[str, Any] = {"model": "m", "messages": MESSAGES}


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    with Valkey() as server:
        yield server


@pytest.fixture
def empty_store(valkey: Valkey) -> None:
    """Nothing of an earlier test is in Redis."""
    with valkey.client() as client:
        client.flushall()


@pytest.fixture
def backend() -> Iterator[FakeBackend]:
    with FakeBackend() as server:
        yield server


@pytest.fixture
def second() -> Iterator[FakeBackend]:
    """Another backend, for rigs made with its URL."""
    with FakeBackend() as server:
        yield server


@dataclass
class Rig:
    """A proxy with one scripted backend, a client, and a look into Redis."""

    backend: FakeBackend
    proxy: RunningProxy
    http: httpx.Client
    redis: redis.Redis

    def chat(self, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        """POST a chat request."""
        return self.http.post("/v1/chat/completions", json=CHAT | fields, headers=headers)

    def recorded(self, id: str, timeout: float = PATIENCE) -> list[Evidence] | dict[str, Any]:
        """What Redis got to know of a response: its evidence, or the verdict the proxy gave itself."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if (packed := self.redis.get(evidence_key(id))) is not None:
                return codec.unpack(cast(bytes, packed))
            if (verdict := self.redis.get(verdict_key(id))) is not None:
                document: dict[str, Any] = orjson.loads(cast(bytes, verdict))
                return document
            time.sleep(0.01)
        raise AssertionError(f"nothing was recorded of {id}")

    def open_ids(self) -> list[str]:
        """Generations without a verdict, the one soonest lost first."""
        return [id.decode() for id in cast("list[bytes]", self.redis.zrange(OPEN, 0, -1))]

    def open_until(self, id: str) -> float:
        """The second at which a generation counts as lost; 0 when it is closed."""
        return float(self.redis.zscore(OPEN, id) or 0.0)

    def queued(self, id: str) -> bool:
        """Whether its job waits."""
        return id in FairQueue(VERIFY_QUEUE, connection=self.redis).job_ids

    def evidence(self, id: str) -> Evidence:
        """The evidence of a response with one choice."""
        found = self.recorded(id)
        assert isinstance(found, list), found
        (only,) = found
        return only

    def verdict(self, id: str) -> dict[str, Any]:
        """The verdict the proxy wrote itself."""
        found = self.recorded(id)
        assert isinstance(found, dict), found
        return found

    def decide(self, id: str, word: str, owner: str, backend: str = "b1") -> None:
        """Do as a worker does."""
        document = {
            "id": id,
            "object": "verification",
            "status": "done",
            "verdict": word,
            "reasons": [],
            "checks": [],
            "backend": backend,
            "model": "m",
            "audited": True,
            "created": 1.0,
            "decided": 2.0,
            "owner": owner,
        }
        self.redis.set(verdict_key(id), orjson.dumps(document), nx=True, ex=60)
        self.redis.publish(VERDICTS, id)

    @contextmanager
    def worker(self, words: str | Mapping[str, str], owner: str, delay: float = 0.0) -> Iterator[None]:
        """Decides every generation that gets evidence, by one word or by its backend's."""
        over = threading.Event()

        def work() -> None:
            done: set[str] = set()
            while not over.wait(0.01):
                for id in self.open_ids():
                    if id not in done and self.redis.exists(evidence_key(id)):
                        done.add(id)
                        time.sleep(delay)
                        backend = orjson.loads(cast(bytes, self.redis.get(intent_key(id))))["backend"]
                        self.decide(id, words if isinstance(words, str) else words[backend], owner, backend)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def stand(self, backend: str, state: str | None, **more: Any) -> None:
        """Say of a backend what workers say, or (None) nothing; returns once the proxy knows."""
        (known,) = (item for item in self.proxy.services.backends.all if item.name == backend)
        name = declaration_name(declaration_of(known.settings))
        entry = {"state": state, "audit_rate": 0.5, "since": 3.0, "backend": backend, "declaration": name} | more
        if state is None:
            self.redis.hdel(STANDINGS, standing_field(backend, name))
        else:
            self.redis.hset(STANDINGS, standing_field(backend, name), orjson.dumps(entry))
        deadline = time.monotonic() + PATIENCE
        while known.standing.state != (state or "trial"):
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.fixture(autouse=True)
def _quick_standings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standings are read ten times a second instead of once."""
    monkeypatch.setattr("proxy.backends.standings._EVERY", 0.1)


@pytest.fixture
def deadlines(monkeypatch: pytest.MonkeyPatch) -> Deadlines:
    """Those of proxies that are made from here on."""
    return Deadlines(monkeypatch)


@pytest.fixture
def make_rig(backend: FakeBackend, valkey: Valkey) -> Iterator[Callable[..., Rig]]:
    """A rig with settings of the test's own."""
    with ExitStack() as stack:

        def make(*more_urls: str, **sections: Any) -> Rig:
            return stack.enter_context(rigged(backend, valkey, *more_urls, **sections))

        yield make


@contextmanager
def rigged(backend: FakeBackend, valkey: Valkey, *more_urls: str, **sections: Any) -> Iterator[Rig]:
    """A rig around these."""
    with (
        RunningProxy(settings_for(backend.url, *more_urls, **sections), valkey.url) as proxy,
        httpx.Client(base_url=proxy.url, timeout=PATIENCE) as http,
        valkey.client() as client,
    ):
        yield Rig(backend, proxy, http, client)


@pytest.fixture(scope="module")
def lasting(valkey: Valkey) -> Iterator[Rig]:
    """A rig with the defaults for all tests of a module that leave it as it was."""
    with FakeBackend() as own, rigged(own, valkey) as rig:
        yield rig


@pytest.fixture
def shared(lasting: Rig) -> Rig:
    """The same, with a backend that remembers nothing."""
    lasting.backend.reset()
    return lasting


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    """A rig with the defaults."""
    return make_rig()
