from __future__ import annotations

import contextlib
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.subscription import is_public
from tests.support.waiting import PATIENCE
from tests.verifier_pool.receiver import Receiver, listening, status
from verifier_pool import delivery
from verifier_pool.delivery import Reach

ANYWHERE = Reach(anywhere=True)

PRIVATE = [
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
    "255.255.255.255", "192.0.2.1", "198.18.0.1", "192.88.99.1", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1",
    "fd00:ec2::254", "ff02::1", "fec0::1", "2001:db8::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
    "::ffff:169.254.169.254", "::127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "2001:0:1::1",
    "::ffff:0:127.0.0.1", "64:ff9b:1::a00:1", "192.0.0.8", "3fff::1", "5f00::1", "4000::1",
    "168.63.129.16", "::ffff:168.63.129.16",
]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_that_are_not_the_internet(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "::ffff:1.1.1.1"])
def test_addresses_that_are(address: str) -> None:
    assert is_public(address)


@given(st.ip_addresses(v=4, network="10.0.0.0/8") | st.ip_addresses(v=4, network="100.64.0.0/10"))
def test_no_spelling_of_a_private_address_passes(address: object) -> None:
    assert not is_public(str(address))
    assert not is_public(f"::ffff:{address}")


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1/", "http://localhost:1/", "http://0x7f000001:1/", "http://2130706433:1/",
        "http://0177.0.0.1:1/", "http://[::1]:1/", "http://[::ffff:127.0.0.1]:1/", "http://169.254.169.254/latest",
        "https://10.0.0.1/",
    ],
)  # fmt: skip
def test_the_guard_holds_for_every_spelling(url: str) -> None:
    outcome = delivery.post(url, {}, b"{}", now=0)
    assert outcome.error in ("blocked_address", "unreachable")
    assert not outcome.delivered


@pytest.mark.parametrize("host", ["a..b", "a" * 70 + ".com", "-", "x:99999", "%00", "\u0130.example"])
def test_a_host_that_is_no_name_is_unreachable(host: str) -> None:
    assert delivery.post(f"https://{host}/", {}, b"{}", now=0).error == "unreachable"


def test_the_guard_lets_nothing_through(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(Receiver(status(200))) as receiver:
        assert delivery.post(receiver.url, {}, b"{}", now=0).error == "blocked_address"
        assert receiver.requests == []


def test_one_private_address_among_public_ones_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def two(*_: object, **__: object) -> list[object]:
        return [(0, 0, 0, "", ("1.1.1.1", 443)), (0, 0, 0, "", ("127.0.0.1", 443))]

    monkeypatch.setattr("socket.getaddrinfo", two)
    assert delivery.post("https://rebind.test/", {}, b"{}", now=0).error == "blocked_address"


def test_the_checked_address_is_the_one_connected_to() -> None:
    with listening(Receiver(status(204))) as receiver:
        port = receiver.url.rsplit(":", 1)[1].split("/")[0]
        outcome = delivery.post(f"http://localhost:{port}/hook", {"x-a": "b"}, b"{}", reach=ANYWHERE, now=0)
        assert outcome.delivered
        headers, body = receiver.requests[0]
        assert (headers["host"], headers["x-a"], body) == (f"localhost:{port}", "b", b"{}")


def test_redirects_are_not_followed() -> None:
    with listening(Receiver(status(302, location="http://127.0.0.1:1/"))) as receiver:
        outcome = delivery.post(receiver.url, {}, b"{}", reach=ANYWHERE, now=0)
        assert (outcome.status, outcome.delivered) == (302, False)
        assert len(receiver.requests) == 1


def test_retry_after_in_seconds_and_as_a_date() -> None:
    date = "Sun, 06 Nov 1994 08:49:37 GMT"
    answers = [status(429, retry_after=value) for value in ("7", date, "soon", "-1", "9" * 400)]
    with listening(Receiver(*answers)) as receiver:
        waits = [delivery.post(receiver.url, {}, b"", reach=ANYWHERE, now=784_111_770).retry_after for _ in range(4)]
        assert waits == [7.0, 7.0, None, None]


def test_a_receiver_that_answers_for_ever_is_cut() -> None:
    sent = [0]

    def endless(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while sent[0] < 1000 * delivery.MAX_RESPONSE_BYTES:
            handler.wfile.write(b"x" * 65536)
            sent[0] += 65536

    with listening(Receiver(endless)) as receiver:
        assert delivery.post(receiver.url, {}, b"{}", reach=ANYWHERE, now=0).delivered
    assert sent[0] < 1000 * delivery.MAX_RESPONSE_BYTES


def test_a_receiver_that_drips_its_headers_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "TIMEOUT_SECONDS", 0.6)

    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.0 200 OK\r\n")
        for _ in range(1000):
            handler.wfile.write(b"x")
            handler.wfile.flush()
            time.sleep(0.05)

    with listening(Receiver(drip)) as receiver:
        assert delivery.post(receiver.url, {}, b"{}", reach=ANYWHERE, now=0).error == "timeout"


def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/"
        assert delivery.post(url, {}, b"{}", reach=ANYWHERE, now=0).error == "unreachable"
    assert delivery.post("http://", {}, b"{}", reach=ANYWHERE, now=0).error == "unreachable"


def test_tls_asks_for_the_name_not_the_address() -> None:
    hello: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            connection, _ = server.accept()
            with connection:
                hello.append(connection.recv(4096))

        thread = threading.Thread(target=accept)
        thread.start()
        url = f"https://localhost:{server.getsockname()[1]}/"
        assert delivery.post(url, {}, b"{}", reach=ANYWHERE, now=0).error == "unreachable"
        thread.join()
    assert b"localhost" in hello[0]


@pytest.mark.parametrize(
    ("scheme", "address", "reached"),
    [
        ("http", "127.0.0.1", True),
        ("https", "127.0.0.1", True),
        ("https", "::ffff:127.0.0.1", True),
        ("https", "10.0.0.1", False),
        ("https", "1.1.1.1", True),
        ("http", "1.1.1.1", False),
    ],
)
def test_a_network_of_the_operators_may_be_reached_and_no_other(scheme: str, address: str, reached: bool) -> None:
    reach, url = Reach(networks=("127.0.0.0/8",)), httpx.URL(f"{scheme}://name.test/")
    with contextlib.nullcontext() if reached else pytest.raises(delivery.BlockedAddress):
        reach.check(url, [address])


def test_other_ports_are_blocked_before_anything_is_sent() -> None:
    with listening(Receiver(status(200))) as receiver:
        reach = Reach(networks=("127.0.0.0/8",), ports=(443,))
        assert delivery.post(receiver.url, {}, b"{}", reach=reach, now=0).error == "blocked_address"
        assert receiver.requests == []


def test_a_name_that_changes_its_mind_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address that was checked is connected to: a second answer of the resolver would lead elsewhere."""
    asked, real = list[str](), socket.getaddrinfo

    def rebinding(host: str, *more: Any, **named: Any) -> Any:
        if host != "rebind.test":
            return real(host, *more, **named)
        asked.append(host)
        return real("127.0.0.1" if len(asked) == 1 else "127.0.0.2", *more, **named)

    monkeypatch.setattr("socket.getaddrinfo", rebinding)
    with listening(Receiver(status(200))) as receiver:
        port = receiver.url.rsplit(":", 1)[1].split("/")[0]
        reach = Reach(networks=("127.0.0.1/32",))
        assert delivery.post(f"http://rebind.test:{port}/", {}, b"{}", reach=reach, now=0).delivered
        assert receiver.requests[0][0]["host"] == f"rebind.test:{port}"
        assert delivery.post(f"http://rebind.test:{port}/", {}, b"{}", reach=reach, now=0).error == "blocked_address"
    assert len(asked) == 2


def test_a_resolver_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "TIMEOUT_SECONDS", 0.2)
    over = threading.Event()
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: over.wait(PATIENCE))
    try:
        assert delivery.post("https://slow.test/", {}, b"{}", now=0).error == "timeout"
        assert not over.is_set()
    finally:
        over.set()


@pytest.mark.parametrize("answer", [b"", b"\0" * 999, b"HTTP/9.9 what\r\n\r\n", b"HTTP/1.1 200", b"220 smtp\r\n"])
def test_garbage_is_no_answer(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=accept)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        assert delivery.post(url, {}, b"{}", reach=ANYWHERE, now=0).error == "unreachable"
        thread.join()
