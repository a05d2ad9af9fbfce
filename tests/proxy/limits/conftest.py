"""Proxies with limited keys, over one Valkey."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import redis
import yaml

from policies.settings import LimitSettings, StoredKey, hash_key
from tests.proxy.conftest import CHAT
from tests.support.fake_backend import FakeBackend
from tests.support.running import RunningProxy, settings_for
from tests.support.valkey import Valkey
from tests.support.waiting import PATIENCE, wait_until
from verifier_pool.link.keys import KeyStore, Use, issue


@dataclass
class Door:
    """Proxies over one Redis, and keys made there."""

    backend: FakeBackend
    redis: redis.Redis
    proxies: list[RunningProxy]
    clients: list[httpx.Client]
    made: dict[str, StoredKey] = field(default_factory=dict)

    @property
    def store(self) -> KeyStore:
        return KeyStore(self.redis)

    def key(self, name: str = "app", **fields: Any) -> str:
        """Make a key; limits are given by their names."""
        limits = {word: fields.pop(word) for word in list(fields) if word in LimitSettings.model_fields}
        text, key = issue(name, time.time(), limits=LimitSettings(**limits) if limits else None, **fields)
        assert self.store.change(name, "", key)
        self.made[text] = key
        return text

    def ask(self, key: str, path: str = "/v1/chat/completions", *, at: int = 0, **fields: Any) -> httpx.Response:
        """POST a request by a key."""
        headers = {"authorization": f"Bearer {key}"}
        return self.clients[at].post(path, json=CHAT | fields, headers=headers)

    def openai(self, key: str, **options: Any) -> openai.OpenAI:
        """The real client; close it."""
        return openai.OpenAI(base_url=f"{self.proxies[0].url}/v1", api_key=key, **{"max_retries": 0, **options})

    def use(self, key: str, every: str = "month") -> Use:
        """What is counted of a key."""
        return self.store.use(self.made[key], every)

    def eventually(self, key: str, every: str = "month", **counts: int) -> Use:
        """What is counted of a key, once it is that."""

        def settled() -> Use | None:
            use = self.use(key, every)
            return use if all(getattr(use, name) == count for name, count in counts.items()) else None

        found = wait_until(settled, what=lambda: (self.use(key, every), counts))
        assert found is not None
        return found


@contextmanager
def serving(folder: Path, settings: dict[str, Any]) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`countersign serve` as a process: its address ('' where it ended before it listened) and itself."""
    config = folder / "countersign.yaml"
    config.write_text(yaml.safe_dump(settings | {"port": 0}))
    command = [sys.executable, "-c", "import countersign, sys; sys.exit(countersign.main())", "serve"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("COUNTERSIGN_")}
    process = subprocess.Popen([*command, "--config", str(config)], stderr=subprocess.PIPE, text=True, env=environ)
    assert process.stderr is not None
    try:
        listening = next((line for line in process.stderr if '"listening"' in line), "")
        yield (yaml.safe_load(listening)["url"] if listening else "", process)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.fixture
def make_door(backend: FakeBackend, valkey: Valkey) -> Iterator[Callable[..., Door]]:
    """Proxies that know an admin key of their settings besides those in Redis."""
    with ExitStack() as stack:
        store = stack.enter_context(valkey.client())
        store.flushall()

        def make(count: int = 1, **sections: Any) -> Door:
            sections.setdefault("keys", [{"name": "root", "sha256": hash_key("sk-root"), "admin": True}])
            settings = settings_for(backend.url, **sections)
            proxies = [stack.enter_context(RunningProxy(settings, valkey.url)) for _ in range(count)]
            limits = httpx.Limits(max_connections=200)
            clients = [
                stack.enter_context(httpx.Client(base_url=each.url, timeout=PATIENCE, limits=limits))
                for each in proxies
            ]
            return Door(backend, store, proxies, clients)

        yield make


@pytest.fixture
def door(make_door: Callable[..., Door]) -> Door:
    """One proxy."""
    return make_door()
