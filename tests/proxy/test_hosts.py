"""Without keys only this machine is served: by a name of its own, and to no web page from elsewhere."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable

import pytest

from policies.errors import AuthenticationFailed
from policies.settings import hash_key
from proxy.api.auth import Keys, names_this_machine
from proxy.services import header_map
from tests.proxy.conftest import Rig
from tests.support import wire
from tests.support.waiting import PATIENCE
from verifier_pool.link.queue import PREFIX

HERE = [
    *("127.0.0.1", "127.9.9.9", "127.0.0.1.", "[::1]", "[0:0:0:0:0:0:0:1]", "[::ffff:127.0.0.1]", "[::FFFF:7f00:1]"),
    *("localhost", "LocalHost", "localhost.", "app.localhost", "a.B.localhost.", "my_app-2.localhost"),
]
ELSEWHERE = [
    *("", ".", ":", "evil.example", "10.0.0.7", "0.0.0.0", "[::]", "[::ffff:10.0.0.7]", "192.168.0.1", "[fe80::1]"),
    *("localhost.evil.example", "127.0.0.1.evil.example", "localhost.localdomain", "notlocalhost", "local", "host"),
    *("localhost..", ".localhost", "a..localhost", "-.localhost", "127.0.0.1..", "evil.example/.localhost"),
    *("127.1", "2130706433", "0x7f.0.0.1", "0177.0.0.1", "127.0.0.1.5", "::1", "[::1", "::1]", "[127.0.0.1]"),
    *("[localhost]", "[::1].", "[::1].evil.example", "[::1%lo]", "[]", "localhost@evil.example", "x@localhost"),
    *(
        "localhost, evil.example",
        "localhost evil.example",
        "localhost\\evil",
        "localhost#",
        "localhost?",
        "localh\xf6st",
    ),
    *("\xa0localhost", "*.localhost", "http://localhost"),
]


@pytest.mark.parametrize("port", ["", ":", ":80", ":65535"])
def test_names_of_this_machine(port: str) -> None:
    assert [name for name in HERE if not names_this_machine(f"{name}{port}".encode())] == []
    assert [name for name in ELSEWHERE if names_this_machine(f"{name}{port}".encode("latin-1"))] == []
    assert names_this_machine(f" \tlocalhost{port} ".encode())


@pytest.mark.parametrize(
    "port", [":x", ":65536", ":123456", ":80:80", ":-1", ":+1", ": 80", ":80.evil.example", ":80/"]
)
def test_ports_that_are_none(port: str) -> None:
    assert [name for name in HERE if names_this_machine(f"{name}{port}".encode())] == []


ENDPOINTS = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/m"),
    ("GET", "/v1/verifications/x"),
    ("GET", "/v1/backends"),
    ("GET", "/v1/backends/b1/standing"),
    ("POST", "/v1/backends/b1/standing"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
]
ASKED = json.dumps({"model": "m", "messages": [], "prompt": "x", "action": "quarantine", "why": "x"}).encode()
REFUSED_HEADERS = [
    ["host:"],
    ["host: evil.example"],
    ["host: evil.example:8000", "origin: http://evil.example:8000"],
    ["host: localhost", "origin: http://evil.example"],
    ["host: localhost", "origin: null"],
    ["host: localhost", "origin:"],
    ["host: localhost", "origin: http://localhost", "origin: http://evil.example"],
]


def _raw(rig: Rig, method: str, path: str, headers: list[str], version: str = "1.1") -> bytes:
    """The whole answer to a request with these headers and no others of its own."""
    more = ["content-type: application/json", f"content-length: {len(ASKED)}", "connection: close"]
    head = "\r\n".join([f"{method} {path} HTTP/{version}", *headers, *more])
    with socket.create_connection(("127.0.0.1", rig.proxy.port), timeout=PATIENCE) as client:
        client.sendall(head.encode() + b"\r\n\r\n" + ASKED)
        parts = []
        while data := client.recv(65536):
            parts.append(data)
    return b"".join(parts)


def test_a_page_whose_name_leads_here_is_refused_everywhere(rig: Rig) -> None:
    rig.proxy.services.backends.all[0].rest(0)
    for method, path in ENDPOINTS:
        for version in ("1.0", "1.1"):
            for headers in REFUSED_HEADERS:
                answer = _raw(rig, method, path, headers, version)
                assert answer.split(b" ")[1] == b"401", (method, path, headers)
                error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
                assert (error["code"], error["message"]) == (
                    "invalid_api_key",
                    "no valid API key came with the request",
                )
    assert rig.backend.requests == []
    assert rig.redis.keys(PREFIX + "standing*") == []


@pytest.mark.parametrize(
    "headers",
    [
        ["host: localhost"],
        ["host: [::1]:8000"],
        ["Host: LOCALHOST.:8000", "Origin: HTTP://127.0.0.1:3000"],
        ["host: 127.0.0.1", "origin: https://app.localhost"],
        ["host: 127.0.0.1", "origin: http://[::1]:3000"],
    ],
)
def test_this_machine_is_let_in_everywhere(rig: Rig, headers: list[str]) -> None:
    rig.backend.script = [wire.whole(wire.BODY)]
    for version in ("1.0", "1.1"):
        for method, path in ENDPOINTS:
            assert _raw(rig, method, path, headers, version).split(b" ")[1] != b"401", (method, path)
    assert len(rig.backend.requests) >= 2


@pytest.mark.parametrize(
    "origin",
    [
        *("null", "", "localhost", "//localhost", "http:localhost", "http:///localhost", "file://", "file://localhost"),
        *("chrome-extension://localhost", "http://", "http://evil.example", "http://localhost/", "http://localhost/x"),
        *(
            "http://localhost http://evil.example",
            "http://localhost@evil.example",
            "http://10.0.0.7",
            "xhttp://localhost",
        ),
    ],
)
def test_origins_elsewhere(origin: str) -> None:
    with pytest.raises(AuthenticationFailed):
        Keys(()).client({b"host": b"localhost", b"origin": origin.encode()}, ("127.0.0.1", 1))


def test_what_is_thought_of_backends_is_on_no_page_for_others(rig: Rig) -> None:
    assert b"countersign_backend" in _raw(rig, "GET", "/metrics", ["host: localhost"])
    for headers in REFUSED_HEADERS:
        answer = _raw(rig, "GET", "/metrics", headers)
        assert answer.split(b" ")[1] == b"200"
        assert b"countersign_backend" not in answer


def test_with_keys_names_do_not_matter(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(keys=[{"name": "ann", "sha256": hash_key("sk-ann")}])
    for headers in REFUSED_HEADERS:
        answer = _raw(rig, "GET", "/v1/models", [*headers, "authorization: Bearer sk-ann"])
        assert answer.split(b" ")[1] == b"200"


def test_repeated_headers() -> None:
    raw = [(b"a", b"1"), (b"host", b"x"), (b"a", b"2"), (b"host", b"y"), (b"origin", b"z")]
    assert header_map(raw) == {b"a": b"1", b"host": b"x, y", b"origin": b"z"}
