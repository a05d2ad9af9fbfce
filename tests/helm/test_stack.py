"""The pod of `helm test`, against a running stack."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml

from benchmarks.demo.processes import Children
from policies.settings import hash_key
from tests.helm.rendered import Release, Values, container
from tests.support import wire
from tests.support.fake_backend import Close, FakeBackend
from tests.support.running import RunningProxy, settings_for
from tests.support.valkey import Valkey

APP, ADMIN = ({"authorization": f"Bearer {name}"} for name in ("app-key", "admin-key"))
INLINE = APP | {"x-countersign-mode": "inline"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "count"}], "stream": True}


@dataclass(frozen=True)
class Stack:
    proxy: RunningProxy
    backend: FakeBackend

    @property
    def url(self) -> str:
        return self.proxy.url


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A store, a backend that streams a well-formed answer, the proxy, and a CPU worker."""
    folder = tmp_path_factory.mktemp("stack")
    keys: list[Values] = [
        {"name": "app", "sha256": hash_key("app-key")},
        {"name": "admin", "sha256": hash_key("admin-key"), "admin": True},
    ]
    with Valkey() as valkey, FakeBackend(wire.stream()) as backend, Children(folder) as children:
        settings = settings_for(backend.url, keys=keys, audit={"rate": 0.0})
        config = folder / "countersign.yaml"
        config.write_text(yaml.safe_dump(settings.model_dump(mode="json", exclude_none=True, exclude={"keys"})))
        command = [sys.executable, "-m", "countersign", "worker", "--only", "verify"]
        environ = {"COUNTERSIGN_CONFIG": str(config), "COUNTERSIGN_REDIS_URL": valkey.url}
        children.start("worker", command, environ)
        with RunningProxy(settings, valkey.url) as proxy:
            yield Stack(proxy, backend)


def run(chart: helm.Chart, url: str, key: str | None, **test: Any) -> subprocess.CompletedProcess[str]:
    """The pod of `helm test`, on this machine."""
    values: Values = {
        "settings": {"models": {"m": {}}},
        "test": {"waitSeconds": 30, **({"existingSecret": "key"} if key else {}), **test},
    }
    spec = container(Release(chart, values).pods()["countersign-test-stream"])
    environ = {variable["name"]: variable.get("value", key) for variable in spec["env"]}
    environ |= {"BASE_URL": url, "PATH": os.environ["PATH"]}
    assert spec["command"][0] == "python3"
    # As in the image: nothing but Python itself.
    command = [sys.executable, "-I", *spec["command"][1:]]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, cwd=Path("/"))


def test_a_streamed_request_gets_an_accepted_verdict(chart: helm.Chart, stack: Stack) -> None:
    first = run(chart, stack.url, "app-key", verdicts=["pass", "unaudited", "inconclusive", "reject"])
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout.startswith("ready\n")
    word = first.stdout.split("verdict ")[1].split()[0]
    assert word != "unverified"
    others = [verdict for verdict in ("pass", "unaudited", "inconclusive", "reject") if verdict != word]
    second = run(chart, stack.url, "app-key", verdicts=others)
    assert second.returncode == 1
    assert "not among the accepted" in second.stderr


def test_without_a_key_it_asks_for_readiness_alone(chart: helm.Chart, stack: Stack) -> None:
    done = run(chart, stack.url, None)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ready\n", "")


@pytest.mark.parametrize(("key", "said"), [("wrong-key", "401"), ("app-key", "404")])
def test_what_is_refused_is_said(chart: helm.Chart, stack: Stack, key: str, said: str) -> None:
    done = run(chart, stack.url if said == "401" else stack.url + "/elsewhere", key)
    assert done.returncode == 1
    assert said in done.stderr
    assert key not in done.stderr + done.stdout


def test_a_stream_that_breaks_off_fails(chart: helm.Chart, stack: Stack) -> None:
    with Valkey() as valkey, FakeBackend([*wire.stream(wire.FRAMES[:-3])[:-1], Close()]) as broken:
        keys = [{"name": "app", "sha256": hash_key("app-key")}]
        with RunningProxy(settings_for(broken.url, keys=keys), valkey.url) as proxy:
            done = run(chart, proxy.url, "app-key")
    assert done.returncode == 1
    assert "the stream broke off after" in done.stderr
    assert "Traceback" not in done.stderr


def test_nobody_there_is_said_in_time(chart: helm.Chart) -> None:
    done = run(chart, "http://127.0.0.1:9", "app-key", waitSeconds=10)
    assert done.returncode == 1
    assert "/readyz" in done.stderr
