"""The admin API and changed settings of `countersign serve` as a process."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.proxy.admin.conftest import BOSS, KEYS
from tests.proxy.test_serve import Serve, Start, start
from tests.support.fake_backend import FakeBackend
from tests.support.waiting import wait_until

__all__ = ["start"]


def admin_url(running: Serve) -> str:
    """Where its admin API listens, once it does."""

    def found() -> str:
        told = [json.loads(line) for line in [*running.lines] if line.startswith("{")]
        return next((each["url"] for each in told if each["message"] == "the admin API listens"), "")

    return wait_until(found, what=lambda: "".join(running.lines))


def run(config: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command with the same settings."""
    command = [sys.executable, "-m", "countersign", *arguments, "--config", str(config)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_it_listens_follows_and_outlives_sighup(start: Start, backend: FakeBackend, tmp_path: Path) -> None:
    tree: dict[str, Any] = {
        "models": {"m": {}},
        "backends": [{"name": "b", "url": backend.url, "model": "m"}],
        "admin": {"port": 0, "keys": KEYS, "watch_seconds": 0},
    }
    running = start("a", **tree)
    running.ready()
    admin = httpx.Client(base_url=admin_url(running), headers=BOSS, timeout=30)
    assert admin.get("/admin/backends").json()["data"][0]["id"] == "b"
    assert httpx.get(f"{running.url}/v1/backends").status_code == 404
    config = tmp_path / "settings-a" / "countersign.yaml"
    tree = yaml.safe_load(config.read_text())
    tree["backends"].append({"name": "c", "url": backend.url, "model": "m"})
    config.write_text(yaml.safe_dump(tree))
    running.process.send_signal(signal.SIGHUP)
    wait_until(lambda: len(admin.get("/admin/backends").json()["data"]) == 2)
    added = run(config, "backends", "add", "d", "--set", f"url={backend.url}", "--set", "model=m")
    assert (added.returncode, added.stdout) == (0, "d: added\n")
    wait_until(lambda: len(admin.get("/admin/backends").json()["data"]) == 3)
    tree["port"] = 1
    config.write_text(yaml.safe_dump(tree))
    reloaded = run(config, "reload")
    assert reloaded.returncode == 0, reloaded.stderr
    assert "current; hold only after a restart: port" in reloaded.stdout
    (first, *_) = [json.loads(line) for line in run(config, "audit", "--json").stdout.splitlines()]
    assert first["action"] == "settings.reload"
    assert first["actor"].startswith("cli:")
    admin.close()
    running.process.send_signal(signal.SIGTERM)
    assert running.wait() in (0, -signal.SIGTERM)
    lines = [json.loads(line) for line in running.lines if line.startswith("{")]
    assert "ak-boss" not in str(lines)
    assert [each["audit"]["action"] for each in lines if "audit" in each][:2] == ["settings.reload", "backend.add"]


def test_a_port_in_use_and_an_open_door_are_said_at_once(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = start("a", admin={"port": port})
        assert refused.wait() == 1
    assert f"port {port} on 127.0.0.1 is in use" in "".join(refused.lines)
    refused = start("b", admin={"port": port, "host": "0.0.0.0"})
    assert refused.wait() == 3
    assert "setting 'admin'" in "".join(refused.lines)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_without_keys_this_machine_is_let_in(start: Start, host: str) -> None:
    running = start("a", admin={"port": 0, "host": host})
    running.ready()
    url = admin_url(running)
    assert url.startswith(f"http://[{host}]:" if ":" in host else f"http://{host}:")
    assert httpx.get(f"{url}/admin/settings").json()["this"]["state"] == "current"
    refused = httpx.get(f"{url}/admin/settings", headers={"host": "evil.example"})
    assert refused.status_code == 401
