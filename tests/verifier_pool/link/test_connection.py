"""A whole generation over every kind of Redis, and what becomes of URLs that are none."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest

from policies.errors import SettingsError
from policies.settings import Settings
from tests.proxy.conftest import CHAT
from tests.support import redises, wire
from tests.support.black_hole import BlackHole
from tests.support.fake_backend import FakeBackend
from tests.support.redises import Place
from tests.support.running import RunningProxy, settings_for
from tests.support.waiting import PATIENCE
from verifier_pool.link.connection import connect, connect_async
from verifier_pool.link.queue import PREFIX, evidence_key
from verifier_pool.link.redis_url import parse

ROOT = Path(__file__).resolve().parents[3]
KINDS: dict[str, Callable[[Path], AbstractContextManager[Place]]] = {
    "password": redises.plain,
    "user": redises.user,
    "unix": redises.unix,
    "tls": redises.secure,
    "sentinel": redises.behind_sentinel,
    "tls-sentinel": redises.behind_secure_sentinel,
    "cluster": redises.cluster,
    "tls-cluster": redises.secure_cluster,
}


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for a Unix socket."""
    with TemporaryDirectory(prefix="cs-") as name:
        yield Path(name)


@contextlib.contextmanager
def worker(folder: Path, url: str) -> Iterator[None]:
    config = folder / "countersign.yaml"
    config.write_text(f"redis_url: {url!r}\nmodels: {{m: {{vocab_size: 1000}}}}\n")
    with (folder / "worker.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "verifier_pool.worker", "--config", str(config)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stderr=log,
        )
    try:
        redises.wait_until(lambda: "ready: taking verifications" in (folder / "worker.log").read_text())
        yield
        assert process.poll() is None, (folder / "worker.log").read_text()
    finally:
        process.terminate()
        process.wait(PATIENCE)


@contextlib.contextmanager
def proxy(url: str, **more: object) -> Iterator[tuple[FakeBackend, httpx.Client]]:
    with FakeBackend() as backend:
        backend.script = [wire.whole(wire.BODY)]
        settings: Settings = settings_for(backend.url, **more)
        with RunningProxy(settings, url) as running, httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
            yield backend, http


def verified(http: httpx.Client) -> bool:
    """Whether an answer is verified by now. On a busy machine connections take longer than a request waits for them."""
    return bool(ask(http).headers.get("x-countersign-verdict", "unverified") != "unverified")


def ask(http: httpx.Client, mode: str = "inline") -> httpx.Response:
    return http.post("/v1/chat/completions", json=CHAT, headers={"x-countersign-mode": mode})


def verdict(http: httpx.Client, id: str, seconds: float = PATIENCE) -> str:
    deadline = time.monotonic() + seconds
    while True:
        found = http.get(f"/v1/verifications/{id}")
        if found.status_code == 200 and found.json()["status"] == "done":
            return str(found.json()["verdict"])
        assert time.monotonic() < deadline, found.text
        time.sleep(0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_a_generation_gets_its_verdict(folder: Path, kind: str) -> None:
    with KINDS[kind](folder) as place, worker(folder, place.url), proxy(place.url) as (_, http):
        redises.wait_until(lambda: verified(http))
        answer = ask(http)
        assert answer.status_code == 200
        assert answer.headers["x-countersign-verdict"] != "unverified", answer.text
        assert verdict(http, answer.headers["x-countersign-id"]) == answer.headers["x-countersign-verdict"]
        assert "password" not in (folder / "worker.log").read_text()


@pytest.mark.parametrize("kind", ["sentinel", "cluster"])
def test_what_was_accepted_survives_its_master(folder: Path, kind: str) -> None:
    with KINDS[kind](folder) as place, connect(place.url, timeout=2) as client:
        with proxy(place.url, durability={"replicas": 1, "timeout": 10.0}) as (_, http):
            id = ask(http, "async").headers["x-countersign-id"]
            redises.wait_until(lambda: client.exists(evidence_key(id)))
        place.fail()
        redises.wait_until(lambda: client.set(PREFIX + "probe", b"", ex=9))
        with worker(folder, place.url), proxy(place.url) as (_, http):
            assert verdict(http, id) != "unverified"
            assert ask(http).headers["x-countersign-verdict"] != "unverified"


@pytest.mark.parametrize("kind", ["sentinel", "cluster"])
def test_whoever_says_where_to_go_may_be_gone_without_a_word(folder: Path, kind: str) -> None:
    """Two of three take no connection and refuse none; the third is asked before a request has waited too long."""
    with KINDS[kind](folder) as place, BlackHole() as first, BlackHole() as second:
        holes = ",".join(each.url.removeprefix("http://") for each in (first, second))
        user, _, hosts = place.url.partition("@")
        with proxy(f"{user}@{holes},{hosts}") as (_, http):
            assert "x-countersign-verdict" not in ask(http, "async").headers


@pytest.mark.parametrize("kind", ["sentinel", "tls-sentinel", "cluster"])
def test_proxy_and_worker_follow_the_master(folder: Path, kind: str) -> None:
    with KINDS[kind](folder) as place, worker(folder, place.url), proxy(place.url) as (_, http):
        redises.wait_until(lambda: verified(http))
        place.fail()
        during = ask(http, "async")
        assert during.status_code == 200
        redises.wait_until(lambda: verified(http))
        # Said to be unverified or not, it ends with one verdict.
        assert verdict(http, during.headers["x-countersign-id"])


@pytest.mark.parametrize(
    "url",
    [
        "http://host",
        "redis+sentinel://host",
        "redis+sentinel://host/name/x",
        "redis+sentinel://host/name/1/2",
        "redis+sentinel:///name",
        "redis+sentinel://host:port/name",
        "redis+sentinel://a,,b/name",
        "unix+sentinel://host/name",
        "redis+cluster://host/1",
        "redis+cluster://host?db=1",
        "redis+cluster://",
        "redis+ring://host",
        "redis://host:port",
        "redis://host?decode_responses=1",
        "redis://host?nonsense=1",
        "redis://host?sentinel_password=x",
        "redis+cluster://host?nonsense=1",
        "redis+sentinel://host/name?nonsense=1",
        "redis://host?socket_timeout=soon",
        "rediss://host?ssl_ca_certs=/nowhere/ca.pem",
        "rediss://host?ssl_cert_reqs=sometimes",
        "rediss+cluster://host?ssl_cert_reqs=sometimes",
        "",
    ],
)
@pytest.mark.parametrize("how", [connect, connect_async])
def test_what_is_no_url_names_the_setting_and_no_password(url: str, how: Callable[[str], object]) -> None:
    secret = url.replace("://", "://me:pa55word@", 1)
    with pytest.raises(SettingsError) as caught:
        how(secret)
    assert caught.value.key == "redis_url"
    assert "pa55word" not in str(caught.value)
    assert caught.value.__context__ is None or caught.value.__suppress_context__


def test_urls_taken_apart() -> None:
    found = parse(
        "rediss+sentinel://me:p%40ss@a:1,b,[::1]:3/main/4?ssl_check_hostname=no&sentinel_password=w&protocol=2"
    )
    assert found.hosts == (("a", 1), ("b", 26379), ("::1", 3))
    assert (found.kind, found.name, found.tls) == ("sentinel", "main", True)
    assert found.options == {
        "username": "me",
        "password": "p@ss",
        "db": 4,
        "ssl_check_hostname": False,
        "protocol": 2,
    }
    asked = found.client(2.0)
    assert (asked["password"], asked["ssl"], asked["ssl_check_hostname"]) == ("w", True, False)
    assert "username" not in asked
    one = parse("redis+cluster://:pw@a,b:7000/")
    assert (one.hosts, one.tls, one.client(1.0)["password"]) == ((("a", 6379), ("b", 7000)), False, "pw")
