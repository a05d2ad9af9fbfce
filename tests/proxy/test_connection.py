"""What a client may send beside heads and bodies, how long it may take, and how much may wait on one connection."""

from __future__ import annotations

import json
import threading
import time

import pytest

from proxy import serve
from tests.proxy.conftest import Rig
from tests.proxy.raw import BODY, CLOSE, HOST, POST, MakeRig, Wire, error_of, length, memory, works
from tests.support import wire
from tests.support.waiting import PATIENCE, TRIES

CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
WHOLE_CHUNKED = CHUNKED + b"%x\r\n%s\r\n0\r\n" % (len(BODY), BODY)


@pytest.mark.parametrize("rest", [b"0\r\nx: ", b"0\r\n", b"5;a=", WHOLE_CHUNKED.removeprefix(CHUNKED) + b"x: "])
def test_trailers_and_extensions_without_end(rig: Rig, rest: bytes) -> None:
    before = memory()
    with Wire(rig) as client:
        client.send([POST, HOST, CHUNKED, rest])
        client.send([b"a" * 100_000] * 300)
        status, error = error_of(client.rest())
    assert (status, error["code"]) == (431, "headers_too_large")
    assert memory() - before < 16_000_000
    assert rig.backend.requests == []
    works(rig)


@pytest.mark.parametrize("rest", [b"0\r\nx: ", b"0\r\n", b"5;a=", b"0\r\n" + b"a: b\r\n" * 20_000])
@pytest.mark.parametrize("path", ["/nope", "/healthz", "/v1/models"])
def test_what_follows_an_answer_without_end(rig: Rig, path: str, rest: bytes) -> None:
    before = memory()
    with Wire(rig) as client:
        client.send([f"POST {path} HTTP/1.1\r\n".encode(), HOST, CHUNKED])
        answer = client.answer()
        client.send([rest])
        client.send([b"a" * 100_000] * 100)
        assert client.rest() == b""
    assert answer.startswith(b"HTTP/1.1 40")
    assert memory() - before < 16_000_000
    works(rig)


def test_trailers_and_extensions_up_to_the_bound(make_rig: MakeRig) -> None:
    rig = make_rig(bounds={"head_bytes": 4096})
    rig.backend.script = [wire.whole(wire.BODY)] * 2
    pieces = b"".join(b"1;%s\r\n%c\r\n" % (b"a" * 3000, byte) for byte in BODY)
    with Wire(rig) as client:
        client.send([POST, HOST, CLOSE, CHUNKED, pieces, b"0\r\nx: ", b"a" * 3000, b"\r\n\r\n"])
        assert client.rest().startswith(b"HTTP/1.1 200 ")


def test_a_bad_body_behind_its_answer(rig: Rig) -> None:
    with Wire(rig) as client:
        client.send([b"POST /nope HTTP/1.1\r\n", HOST, CHUNKED, b"5\r\na"])
        assert client.answer().startswith(b"HTTP/1.1 404 ")
        client.send([b"aaaa\r\nzz\r\n"])
        assert client.rest() == b""


def test_a_body_that_trickles_behind_its_answer(make_rig: MakeRig) -> None:
    rig = make_rig(bounds={"head_seconds": 0.5})
    for start in (b"content-length: 1000000\r\n\r\na", CHUNKED + b"5\r\na"):
        begun = time.monotonic()
        with Wire(rig) as client:
            client.send([b"POST /nope HTTP/1.1\r\n", HOST, start])
            assert client.answer().startswith(b"HTTP/1.1 404 ")
            for _ in range(4):
                client.send([b"a"])
                time.sleep(0.1)
            assert client.rest() == b""
        assert time.monotonic() - begun > 0.4


def test_a_connection_is_kept_for_whoever_ends_its_body_behind_the_answer(make_rig: MakeRig) -> None:
    rig = make_rig(bounds={"head_seconds": 1.0})

    def kept() -> bool:
        with Wire(rig) as client:
            client.send([b"POST /nope HTTP/1.1\r\n", HOST, length(), b"\r\n", BODY[:5]])
            assert client.answer().startswith(b"HTTP/1.1 404 ")
            client.send([BODY[5:]])
            time.sleep(1.5)
            client.send([b"GET /healthz HTTP/1.1\r\n", HOST, CLOSE, b"\r\n"])
            return client.rest().startswith(b"HTTP/1.1 200 ")

    # Its end comes in time, unless the machine stands still meanwhile.
    assert any(kept() for _ in range(TRIES))


def _read_to_the_end(client: Wire, closed: threading.Event) -> None:
    client.rest()
    closed.set()


def test_blank_lines_keep_no_connection(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_KEEP_ALIVE_SECONDS", 0.6)
    rig = make_rig()
    for start in (b"", b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n"):
        with Wire(rig) as client:
            client.send([start])
            begun = time.monotonic()
            closed = threading.Event()
            reading = threading.Thread(target=_read_to_the_end, args=(client, closed))
            reading.start()
            while not closed.wait(0.1):
                client.send([b"\r\n"])
                assert time.monotonic() - begun < PATIENCE
            reading.join()
            assert time.monotonic() - begun > 0.4


@pytest.mark.parametrize("unfinished", [b"", b"POST /nope HTTP/1.1\r\n" + HOST + CHUNKED + b"5\r\na"])
def test_no_more_requests_wait_than_a_few(rig: Rig, unfinished: bytes) -> None:
    rig.backend.script = [0.3, wire.whole(wire.BODY)]
    before = memory()
    with Wire(rig) as client:
        client.send([POST, HOST, length(), b"\r\n", BODY])
        client.send([b"GET /healthz HTTP/1.1\r\n", HOST, b"\r\n"] * 20)
        client.send([unfinished or (b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n") * 20_000])
        client.send([b"aaaa\r\nzz\r\n"])
        answers = client.rest()
    assert answers.startswith(b"HTTP/1.1 200 ")
    assert answers.index(b"chat.completion") < answers.index(b'"ok"')
    heads = answers.count(b"HTTP/1.1 2") + answers.count(b"HTTP/1.1 4")
    assert answers.count(b"HTTP/1.1 200 ") == heads - 1
    assert (heads == 22) if unfinished else (20 < heads < 100)
    assert answers.endswith(b"}}")
    assert json.loads(answers.rpartition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    assert memory() - before < 32_000_000
