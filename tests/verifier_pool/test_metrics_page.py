"""A worker's page: who gets it, who does not, and what it costs to be rude to it."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.demo.processes import free_ports
from policies.errors import SettingsError
from policies.settings import MetricsSettings, Settings
from tests.support.waiting import PATIENCE
from verifier_pool import metrics_page
from verifier_pool.link.exposition import CONTENT_TYPE
from verifier_pool.link.meters import Meters
from verifier_pool.metrics_page import Page, shown
from verifier_pool.sheets import Sheet

TOKEN = "t" * 20
BEARER = {"authorization": f"Bearer {TOKEN}"}


def rules(**given: object) -> MetricsSettings:
    return MetricsSettings.model_validate({"port": 0, "token": TOKEN} | given)


@contextmanager
def page(settings: MetricsSettings | None = None) -> Iterator[tuple[Page, Meters]]:
    meters = Meters()
    meters.counter("c", "1", "Things").add(2)
    shown = Page(settings or rules(), meters.read)
    try:
        yield shown, meters
    finally:
        shown.close()


def get(page: Page, path: str = "/metrics", **headers: str) -> httpx.Response:
    return httpx.get(f"http://127.0.0.1:{page.port}{path}", headers=headers, timeout=PATIENCE, trust_env=False)


def test_whoever_has_the_token_reads_it() -> None:
    with page() as (server, meters):
        answer = get(server, authorization=f"bearer {TOKEN}")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == CONTENT_TYPE
        (family,) = text_string_to_metric_families(answer.text)
        assert family.samples[0].value == 2
        meters.gauge("g", "1", "").set(1)
        assert "g 1.0" in get(server, "/metrics?x=1", **BEARER).text


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": TOKEN}, {"authorization": f"Basic {TOKEN}"}, {"authorization": f"Bearer {TOKEN}x"}],
)
def test_nobody_else_does(headers: dict[str, str]) -> None:
    with page() as (server, _):
        answer = get(server, **headers)
        assert (answer.status_code, answer.content) == (401, b"")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "python" not in answer.headers["server"].lower()
        assert get(server, "/", **BEARER).status_code == 404
        assert httpx.post(f"http://127.0.0.1:{server.port}/metrics", trust_env=False).status_code == 501


def test_without_a_token_it_is_for_this_machine_alone() -> None:
    with page(rules(token=None)) as (server, _):
        assert get(server).status_code == 200
    with pytest.raises(ValueError, match="token is needed"):
        rules(token=None, host="0.0.0.0")
    with pytest.raises(ValueError, match="at least 16"):
        rules(token="short")


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=r"metrics\.port.*a free port") as error, _shown(port=port):
            pass
        assert error.value.exit_code == 3


def test_silent_readers_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_page._Handler, "timeout", 0.5)
    before = threading.active_count()
    with page() as (server, _):
        silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(metrics_page._AT_ONCE - 1)]
        assert get(server, **BEARER).status_code == 200
        silent += [socket.create_connection(("127.0.0.1", server.port)) for _ in range(20)]
        assert threading.active_count() < before + 2 * metrics_page._AT_ONCE
        for each in silent:
            with contextlib.closing(each), contextlib.suppress(ConnectionError):
                each.settimeout(10)
                assert each.recv(1) == b""
        assert get(server, **BEARER).status_code == 200


def test_a_child_shows_nothing_itself() -> None:
    sheet = Sheet()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        # Its parent has the port.
        with _shown(sheet.fd, port=taken.getsockname()[1]):
            pass
    names = {family.name for family in sheet.read()}
    assert {"countersign.jobs", "process.cpu.time"} <= names
    sheet.close()


def test_it_says_what_the_process_is() -> None:
    (port,) = free_ports(1)
    with _shown(port=port):
        text = httpx.get(f"http://127.0.0.1:{port}/metrics", headers=BEARER, trust_env=False).text
    assert re.search(r'countersign_build\{process="worker"(,version="[^"]+")?\} 1\.0', text)
    (started,) = re.findall(r"(?m)^process_start_time_seconds (\S+)", text)
    assert abs(float(started) - time.time()) < 600


def _shown(sheet: int | None = None, **metrics: object) -> contextlib.AbstractContextManager[None]:
    return shown(Settings(metrics=rules(**metrics)), "worker", sheet)
