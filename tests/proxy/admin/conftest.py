"""A proxy with an admin API, its settings in a file that tests rewrite, and a fake backend behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
import yaml

from policies.settings import hash_key, parse_settings
from proxy.following import Following
from tests.proxy.conftest import CHAT
from tests.support import wire
from tests.support.fake_backend import FakeBackend
from tests.support.running import RunningProxy
from tests.support.valkey import Valkey
from tests.support.waiting import PATIENCE, wait_until
from verifier_pool.link.settings_file import SettingsFile

KEYS = [
    {"name": "boss", "sha256": hash_key("ak-boss")},
    {"name": "eye", "sha256": hash_key("ak-eye"), "read_only": True},
]
BOSS, EYE = ({"authorization": f"Bearer ak-{name}"} for name in ("boss", "eye"))


class House:
    """A proxy that follows a file.

    Attributes:
        admin, http: clients of its admin API, as `boss`, and of its public port.
        tree: what its settings file says.
    """

    def __init__(self, stack: ExitStack, path: Path, tree: dict[str, Any], valkey: Valkey) -> None:
        self.path, self.tree = path, tree
        self.write(tree)
        self._file = SettingsFile(path)
        settings = parse_settings(self._file.take().text, {})
        self.proxy = stack.enter_context(RunningProxy(settings, valkey.url, self._file))
        self.admin = stack.enter_context(httpx.Client(base_url=self.proxy.admin_url, timeout=PATIENCE, headers=BOSS))
        self.http = stack.enter_context(httpx.Client(base_url=self.proxy.url, timeout=PATIENCE))
        self.redis: redis.Redis = stack.enter_context(valkey.client())

    @property
    def following(self) -> Following:
        """What it is told."""
        following: Following = self.proxy.app.state.following
        return following

    def refused(self) -> dict[str, str]:
        """Why the settings file cannot be used, once it is found so."""
        return wait_until(lambda: self.following.said.error or {})

    def write(self, tree: dict[str, Any] | str) -> None:
        """Another file in the place of the old one, as editors and package managers do it."""
        new = self.path.with_name("new.yaml")
        new.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree))
        new.replace(self.path)

    def change(self, **sections: Any) -> None:
        """Other sections in the file."""
        self.tree = self.tree | sections
        self.write(self.tree)

    def get(self, path: str) -> Any:
        """What the admin API says."""
        found = self.admin.get(path)
        assert found.status_code == 200, found.text
        return found.json()

    def backend(self, name: str = "b1") -> dict[str, Any]:
        """A backend as the admin API shows it."""
        found: dict[str, Any] = self.get(f"/admin/backends/{name}")
        return found

    def names(self) -> list[str]:
        """Backends that this proxy routes among."""
        return [backend.name for backend in self.proxy.services.backends.all]

    def chat(self, **fields: Any) -> httpx.Response:
        """POST a chat request."""
        return self.http.post("/v1/chat/completions", json=CHAT | fields)

    def audit(self, **wanted: str) -> list[dict[str, Any]]:
        """Entries of the audit log, the latest first."""
        found = self.admin.get("/admin/audit", params=wanted)
        entries: list[dict[str, Any]] = found.json()["data"]
        return entries


def tree_of(*urls: str, **sections: Any) -> dict[str, Any]:
    """Settings with a model `m` and a backend per URL."""
    backends = [
        {"name": f"b{n}", "url": url, "model": "m", "served_model": "served", "runtime": "vllm-0.32-v2"}
        for n, url in enumerate(urls, 1)
    ]
    admin = {"port": 0, "keys": KEYS, "watch_seconds": 0.05}
    base = {"models": {"m": {"vocab_size": 1000}}, "backends": backends, "health": {"interval": 0}, "admin": admin}
    return base | sections


@pytest.fixture(autouse=True)
def _empty(valkey: Valkey) -> None:
    with valkey.client() as client:
        client.flushall()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis and the file are looked at twenty times a second."""
    monkeypatch.setattr("proxy.following.EVERY", 0.05)


@pytest.fixture
def open_house(backend: FakeBackend, valkey: Valkey, tmp_path: Path) -> Iterator[Callable[..., House]]:
    """Makes a house with settings of the test's own."""
    with ExitStack() as stack:
        count = 0

        def make(*more_urls: str, **sections: Any) -> House:
            nonlocal count
            count += 1
            folder = tmp_path / str(count)
            folder.mkdir()
            return House(stack, folder / "countersign.yaml", tree_of(backend.url, *more_urls, **sections), valkey)

        yield make


@pytest.fixture
def house(open_house: Callable[..., House], backend: FakeBackend) -> House:
    """One with the defaults, whose backend answers."""
    backend.script = [wire.whole(wire.BODY)]
    return open_house()


def eventually(found: Callable[[], Any]) -> None:
    """Wait until it is true."""
    wait_until(found)
