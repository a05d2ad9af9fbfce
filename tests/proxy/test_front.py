"""What a client may send: heads, bodies and JSON within bounds, each refusal in OpenAI's shape, over real sockets."""

from __future__ import annotations

import gzip
import json
import time
from typing import Any

import pytest

from tests.proxy.conftest import Rig
from tests.proxy.raw import BODY, CLOSE, HOST, POST, WHOLE, MakeRig, Wire, ask, error_of, length, memory, works
from tests.support import wire
from tests.support.waiting import wait_until


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ([b"nonsense\r\n\r\n"], "bad_http"),
        ([b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"], "bad_http"),  # TLS
        ([b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"], "bad_http"),
        ([b"GET /healthz HTTP/9.9\r\n", HOST, b"\r\n"], "bad_http"),
        ([b"GET /healthz HTTP/2.0\r\n", HOST, b"\r\n"], "bad_http"),
        ([POST, HOST, b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"], "bad_http"),
        ([POST, HOST, b"content-length: 5\r\ncontent-length: 6\r\n\r\nabcde"], "bad_http"),
        ([POST, HOST, b"content-length: 5\r\ncontent-length: 5\r\n\r\nabcde"], "bad_http"),
        ([POST, HOST, b"content-length: -1\r\n\r\n"], "bad_http"),
        ([POST, HOST, b"content-length: 99999999999999999999999\r\n\r\n"], "bad_http"),
        ([POST, HOST, b"transfer-encoding: chunked\r\n\r\nzz\r\n"], "bad_http"),
        ([POST, HOST, b"x-a: b\x00c\r\n\r\n"], "bad_http"),
        ([POST, HOST, b"x-\x00a: c\r\n\r\n"], "bad_http"),
        ([POST, HOST, b"x-a: b\r\n c\r\n\r\n"], "bad_http"),  # folded
        ([POST, HOST, b"x a: b\r\n\r\n"], "bad_http"),
        ([b"GET /\xff\xfe HTTP/1.1\r\n", HOST, b"\r\n"], "bad_http"),
        ([b"CONNECT evil:443 HTTP/1.1\r\n", HOST, b"\r\n"], "bad_http"),
        ([b"GET /healthz HTTP/1.1\r\n\r\n"], "bad_host"),
        ([b"GET /healthz HTTP/1.1\r\n", HOST, b"HOST: evil.example\r\n\r\n"], "bad_host"),
        ([b"GET /healthz HTTP/1.1\r\n", HOST, HOST, b"\r\n"], "bad_host"),
    ],
)
def test_what_is_no_request_of_one_meaning(shared: Rig, parts: list[bytes], code: str) -> None:
    status, error = ask(shared, *parts)
    assert (status, error["code"], error["type"]) == (400, code, "invalid_request_error")
    assert shared.backend.requests == []
    works(shared)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nothing", 404), ("GET", "/v1/chat/completions", 405), ("DELETE", "/v1/models", 405)],
)
def test_paths_and_methods(rig: Rig, method: str, path: str, status: int) -> None:
    found, _ = ask(rig, f"{method} {path} HTTP/1.1\r\n".encode(), HOST, CLOSE, b"\r\n")
    assert found == status


@pytest.mark.parametrize("many", [1, 7, 100_000])
def test_an_endless_header(rig: Rig, many: int) -> None:
    before = memory()
    parts = (b"x" * many for _ in range(40_000_000 // many if many > 10 else 100_000))
    status, error = ask(rig, POST, HOST, b"x-a: ", *([b"".join(parts)] if many < 10 else parts))
    assert (status, error["code"]) == (431, "headers_too_large")
    assert memory() - before < 64_000_000
    works(rig)


def test_a_million_headers(rig: Rig) -> None:
    status, error = ask(rig, POST, HOST, b"a:\r\n" * 1_000_000)
    assert (status, error["code"]) == (431, "headers_too_large")


def test_headers_up_to_the_bounds_are_read(make_rig: MakeRig) -> None:
    rig = make_rig(bounds={"headers": 20, "head_bytes": 4096, "url_bytes": 1000})
    start = b"GET /healthz HTTP/1.1\r\n" + HOST + CLOSE
    with Wire(rig) as client:
        client.send([start, b"x-a: b\r\n" * 18, b"\r\n"])
        assert client.rest().startswith(b"HTTP/1.1 200 ")
    assert ask(rig, start, b"x-a: b\r\n" * 19, b"\r\n")[0] == 431
    assert ask(rig, start, b"x-a: " + b"b" * 4100, b"\r\n\r\n")[0] == 431
    long = b"GET /healthz?" + b"a" * 980
    with Wire(rig) as client:
        client.send([long, b" HTTP/1.1\r\n", HOST, CLOSE, b"\r\n"])
        assert client.rest().startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("cut", [1, 1000, 100_000])
def test_an_endless_url(rig: Rig, cut: int) -> None:
    parts = [b"a" * cut] * (10_000_000 // cut) if cut > 1 else [b"a" * 100_000]
    status, error = ask(rig, b"GET /", *parts)
    assert (status, error["code"]) == (414, "uri_too_long")
    works(rig)


def test_a_head_that_trickles(make_rig: MakeRig) -> None:
    rig = make_rig(bounds={"head_seconds": 0.5})
    start = time.monotonic()
    with Wire(rig) as client:
        client.send([POST])
        for _ in range(4):
            client.send([b"x-a: b\r\n"])
            time.sleep(0.1)
        status, error = error_of(client.rest())
    assert (status, error["code"]) == (408, "request_timeout")
    assert time.monotonic() - start > 0.4


def test_a_head_that_comes_in_pieces_in_time(rig: Rig) -> None:
    rig.backend.script = [wire.whole(wire.BODY)]
    with Wire(rig) as client:
        for at in range(0, len(WHOLE), 9):
            client.send([WHOLE[at : at + 9]])
        assert client.rest().startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("start", [b"", length(b"x" * 100), b"transfer-encoding: chunked\r\n"])
def test_a_body_that_never_comes(make_rig: MakeRig, start: bytes) -> None:
    rig = make_rig(bounds={"body_seconds": 0.4})
    if not start:
        status, error = ask(rig, POST, HOST, CLOSE, b"\r\n")
        assert status == 400
        return
    status, error = ask(rig, POST, HOST, CLOSE, start, b"\r\n")
    assert (status, error["code"]) == (408, "request_timeout")
    assert rig.backend.requests == []
    works(rig)


@pytest.mark.parametrize(
    "coding", [b"gzip", b"x-gzip", b"deflate", b"br", b"zstd", b"gzip, identity", b"identity\r\ncontent-encoding: gzip"]
)
def test_compressed_bodies(rig: Rig, coding: bytes) -> None:
    body = gzip.compress(b" " * 10_000_000)
    status, error = ask(rig, POST, HOST, CLOSE, length(body), b"content-encoding: " + coding + b"\r\n\r\n", body)
    assert (status, error["code"]) == (415, "unsupported_encoding")


@pytest.mark.parametrize("codings", [b"gzip, chunked", b"chunked, chunked", b"chunked\r\ntransfer-encoding: chunked"])
def test_transfer_codings(rig: Rig, codings: bytes) -> None:
    status, error = ask(rig, POST, HOST, CLOSE, b"transfer-encoding: " + codings + b"\r\n\r\n5\r\nabcde\r\n0\r\n\r\n")
    assert (status, error["type"]) in ((501, "invalid_request_error"), (400, "invalid_request_error"))
    assert rig.backend.requests == []


def test_bodies_over_the_limit_are_not_read_to_their_end(make_rig: MakeRig) -> None:
    rig = make_rig(bounds={"request_bytes": 1000})
    before = memory()
    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    sent = [b"transfer-encoding: chunked\r\n\r\n", *([chunk] * 100)]
    assert ask(rig, POST, HOST, CLOSE, *sent)[1]["code"] == "request_too_large"
    assert ask(rig, POST, HOST, CLOSE, b"content-length: 999999999999\r\n\r\n")[0] == 413
    assert ask(rig, POST, HOST, CLOSE, length(b"x" * 1001), b"\r\n", b"x" * 1001)[0] == 413
    assert memory() - before < 16_000_000


def test_trailers_change_nothing_and_cost_nothing(rig: Rig) -> None:
    rig.backend.script = [wire.whole(wire.BODY)]
    chunked = b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n" % (len(BODY), BODY)
    trailers = b"x-countersign-mode: nonsense\r\nauthorization: Bearer x\r\nhost: evil.example\r\n"
    with Wire(rig) as client:
        client.send([POST, HOST, CLOSE, chunked, trailers, b"\r\n"])
        assert client.rest().startswith(b"HTTP/1.1 200 ")


def test_pipelined_requests_are_answered_in_order_and_garbage_behind_them_ends_it(rig: Rig) -> None:
    rig.backend.script = [wire.whole(wire.BODY)]
    keep = POST + HOST + length() + b"\r\n" + BODY
    with Wire(rig) as client:
        client.send([keep + b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n" + WHOLE])
        answers = client.rest()
    assert answers.count(b"HTTP/1.1 200 ") == 3
    assert answers.index(b"chat.completion") < answers.index(b'"ok"')
    rig.backend.script = [0.2, wire.whole(wire.BODY)]
    with Wire(rig) as client:
        client.send([keep + b"\x00garbage\r\n\r\n"])
        answers = client.rest()
    assert answers.startswith(b"HTTP/1.1 200 ")
    assert answers.count(b"HTTP/1.1 ") == 1
    assert json.loads(answers.partition(b"\r\n\r\n")[2])["object"] == "chat.completion"


def test_upgrades_are_not_taken_up(rig: Rig) -> None:
    rig.backend.script = [wire.whole(wire.BODY)]
    for wanted in (b"h2c", b"websocket"):
        upgrade = b"connection: upgrade, close\r\nupgrade: " + wanted + b"\r\n"
        with Wire(rig) as client:
            client.send([b"GET /healthz HTTP/1.1\r\n", HOST, upgrade, b"\r\n"])
            assert client.rest().startswith(b"HTTP/1.1 200 ")
        assert ask(rig, POST, HOST, upgrade, length(), b"\r\n", BODY)[0] == 400


def test_connections_over_the_limit(make_rig: MakeRig) -> None:
    rig = make_rig(bounds={"connections": 3})
    rig.http.close()
    clients = [Wire(rig) for _ in range(3)]
    for one in clients:
        one.send([b"GET /healthz HTTP/1.1\r\n", HOST, b"\r\n"])
        assert one.socket.recv(65536).startswith(b"HTTP/1.1 200 ")
    with Wire(rig) as client:
        status, error = error_of(client.rest())
    assert (status, error["code"]) == (503, "too_many_connections")
    for one in clients:
        one.socket.close()

    def taken() -> bool:
        with Wire(rig) as client:
            client.send([b"GET /healthz HTTP/1.1\r\n", HOST, CLOSE, b"\r\n"])
            return client.rest().startswith(b"HTTP/1.1 200 ")

    wait_until(taken)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"[" * 100_000, 400, "json_too_deep"),
        (b'{"a":' * 5_000 + b"1" + b"}" * 5_000, 400, "json_too_deep"),
        (b'{"model":"m","a":' + b"[" * 128 + b"]" * 128 + b"}", 400, "json_too_deep"),
        (b'{"model":"m","a":[' + b"[]," * 3_000_000 + b"1]}", 413, "request_too_large"),
        (b'{"model":"m","n":' + b"9" * 5_000 + b"}", 400, None),
        (b'{"model":"m","n":5000}', 400, "too_many"),
        (b'{"model":"m","n":1e300}', 400, "too_many"),
        (b'{"model":"m","n":"99999"}', 400, "too_many"),
        (b'{"model":"m","temperature":NaN}', 400, None),
        (b'{"model":"m","model":"m"}', 400, None),
        (b'{"model":"m","\\u006dodel":"m"}', 400, None),
        (b'{"model":"m","messages":[{"role":"user","role":"user"}]}', 400, None),
        (b'{"model":"m","a":"\xff"}', 400, None),
        (b'{"model":"m","a":"\x00"}', 400, None),
        (b'\xef\xbb\xbf{"model":"m"}', 400, None),
        ('{"model":"m"}'.encode("utf-16"), 400, None),
        (b'{"model":["m"]}', 400, None),
        (b'{"model":"m","stop":[' + b'"a",' * 300 + b'"b"]}', 400, "too_many"),
        (json.dumps({"model": "m", "logit_bias": {str(n): 1 for n in range(300_000)}}).encode(), 400, "too_many"),
        (json.dumps({"model": "m", "allowed_token_ids": list(range(300_000))}).encode(), 400, "too_many"),
        (b"", 400, None),
    ],
    ids=range(21),
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_json_within_bounds(shared: Rig, path: str, body: bytes, status: int, code: str | None) -> None:
    response = shared.http.post(path, content=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code)
    assert shared.backend.requests == []


def test_prompts_count_as_choices(rig: Rig) -> None:
    response = rig.http.post("/v1/completions", json={"model": "m", "prompt": ["a"] * 100, "n": 100})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "n"
    many = rig.http.post("/v1/completions", json={"model": "m", "prompt": ["a"] * 5000})
    assert many.json()["error"]["param"] == "prompt"


def test_deep_and_large_within_bounds_passes(rig: Rig) -> None:
    rig.backend.script = [wire.whole(wire.BODY)]
    deep: Any = "}]" * 1000
    for _ in range(120):
        deep = [deep]
    assert rig.chat(padding=deep, text="[" * 100_000 + "\\" * 7 + '"' * 9 + "," * 3_000_000).status_code == 200
