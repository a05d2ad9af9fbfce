"""Cases 52 to 60: headers, codings and sizes."""

from __future__ import annotations

import contextlib
import gzip
import json
import select
import threading
import zlib

import pytest

from tests.fidelity.frames import BODIES, BODY, DONE, FINISH, ONE, PATHS, ROLE, STREAMS, TWO, script
from tests.fidelity.gateway import BACKEND_KEY, CHAT, MESSAGES, Gateway
from tests.fidelity.meaning import assert_same, events
from tests.support import wire
from tests.support.fake_backend import Close, FakeBackend, Until

GZIP = 16 + zlib.MAX_WBITS


@pytest.mark.cases(52)
@pytest.mark.parametrize("name", ["x-request-id", "request-id"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_request_ids_go_in_and_out(gateway: Gateway, upstream: FakeBackend, path: str, stream: bool, name: str) -> None:
    upstream.script = script(STREAMS[path]) if stream else [wire.whole(BODIES[path])]
    answer = gateway.ask(path, {name: "mine-7"}, stream=stream)
    assert upstream.last.headers[name.encode()] == b"mine-7"
    assert answer.all(name) == ["mine-7"]


@pytest.mark.cases(52)
@pytest.mark.parametrize("name", ["x-request-id", "request-id"])
def test_the_upstreams_request_id_comes_back(gateway: Gateway, upstream: FakeBackend, name: str) -> None:
    upstream.script = [wire.whole(BODY, 200, "application/json", f"{name}: theirs")]
    assert gateway.ask().all(name) == ["theirs"]
    upstream.script = [wire.whole(BODY)]
    assert gateway.ask().header("x-request-id")


@pytest.mark.cases(52)
def test_errors_name_the_request_too(gateway: Gateway, upstream: FakeBackend) -> None:
    upstream.script = [Close()]
    named = {"x-request-id": "mine-8"}
    wrong = [gateway.ask(headers=named)]
    if gateway.ours:
        wrong += [gateway.ask(headers=named, raw=b"{"), gateway.ask(headers=named, model="nobody")]
    assert [answer.all("x-request-id") for answer in wrong] == [["mine-8"]] * len(wrong)


@pytest.mark.cases(53)
@pytest.mark.feature("client keys")
@pytest.mark.parametrize("path", PATHS)
def test_keys_stay_on_their_side(gateway: Gateway, upstream: FakeBackend, path: str) -> None:
    upstream.script = [wire.whole(BODIES[path])]
    ways = [{}, {"x-api-key": gateway.key}, {"api-key": gateway.key, "x-goog-api-key": gateway.key}]
    for headers in ways:
        answer = gateway.ask(path, headers)
        assert answer.status == 200
        assert gateway.key.encode() not in upstream.last.raw_headers + upstream.last.body
    if gateway.ours:
        assert upstream.last.headers[b"authorization"] == f"Bearer {BACKEND_KEY}".encode()


@pytest.mark.cases(53)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", PATHS)
def test_a_backend_that_repeats_its_key(gateway: Gateway, upstream: FakeBackend, path: str, stream: bool) -> None:
    if not gateway.ours:
        pytest.skip("only of this proxy it is known what key the upstream got")
    said = f'{{"debug":"{BACKEND_KEY}",'.encode()
    echo = f"x-echo: {BACKEND_KEY}"
    if stream:
        events = [event.replace(b"{", said, 1) for event in (b": " + BACKEND_KEY.encode() + b"\n\n", *STREAMS[path])]
        head = wire.SSE_HEAD.replace(b"\r\n\r\n", f"\r\n{echo}\r\n\r\n".encode())
        upstream.script = [head, *script(events)[1:]]
    else:
        upstream.script = [wire.whole(BODIES[path].replace(b"{", said, 1), 200, "application/json", echo)]
    answer = gateway.ask(path, stream=stream)
    assert answer.status == 200
    assert BACKEND_KEY not in str(answer.headers)
    assert BACKEND_KEY.encode() not in answer.body
    assert b"***" in answer.body


@pytest.mark.cases(54)
def test_what_is_between_client_and_proxy_stays_there(gateway: Gateway, upstream: FakeBackend) -> None:
    upstream.script = [wire.whole(BODY)]
    private = {
        "proxy-authorization": "Basic cHJpdmF0ZQ==",
        "cookie": "session=private",
        "connection": "close, x-private",
        "x-private": "private",
        "keep-alive": "timeout=private",
        "te": "trailers",
        "x-forwarded-for": "10.0.0.1",
    }
    if gateway.ours:
        private |= {"x-countersign-mode": "async", "x-data-parallel-rank": "3"}
    assert gateway.ask(headers=private).status == 200
    names = set(upstream.last.headers)
    assert not names & {name.encode() for name in private if name not in ("connection", "x-forwarded-for")}
    assert b"private" not in upstream.last.raw_headers


@pytest.mark.cases(54)
def test_what_is_between_proxy_and_upstream_stays_there(gateway: Gateway, upstream: FakeBackend) -> None:
    upstream.script = [
        wire.whole(
            BODY,
            200,
            "application/json",
            "connection: keep-alive, x-private",
            "x-private: 1",
            "keep-alive: timeout=5",
            "set-cookie: a=b",
            "proxy-authenticate: Basic",
            "upgrade: h2c",
            "x-kept: yes",
        )
    ]
    answer = gateway.ask()
    names = {name for name, _ in answer.headers}
    assert not names & {"x-private", "keep-alive", "set-cookie", "proxy-authenticate", "upgrade"}
    assert answer.header("x-kept") == "yes" or not gateway.ours


@pytest.mark.cases(55)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("coding", ["identity", "gzip", "deflate"])
def test_length_and_coding_are_those_of_the_bytes(
    gateway: Gateway, upstream: FakeBackend, path: str, coding: str
) -> None:
    body = BODIES[path]
    packed = {"identity": body, "gzip": gzip.compress(body), "deflate": zlib.compress(body)}[coding]
    upstream.script = [wire.whole(packed, 200, "application/json", f"content-encoding: {coding}")]
    answer = gateway.ask(path)
    assert answer.whole
    assert len(answer.all("content-length") + answer.all("transfer-encoding")) == 1
    if answer.header("content-length"):
        assert int(answer.header("content-length")) == len(answer.body)
    coded = answer.header("content-encoding")
    shown = answer.body
    if coded in ("gzip", "deflate"):
        shown = zlib.decompress(shown, GZIP if coded == "gzip" else zlib.MAX_WBITS)
    assert_same(shown, body)


@pytest.mark.cases(56)
@pytest.mark.feature("reads streams")
@pytest.mark.parametrize("path", PATHS)
def test_no_compression_is_asked_for(gateway: Gateway, upstream: FakeBackend, path: str) -> None:
    upstream.script = script(STREAMS[path])
    gateway.ask(path, {"accept-encoding": "gzip, br, zstd"}, stream=True)
    assert upstream.last.headers.get(b"accept-encoding", b"identity") == b"identity"


@pytest.mark.cases(56)
@pytest.mark.parametrize("path", PATHS)
def test_a_compressed_stream_comes_event_by_event(gateway: Gateway, upstream: FakeBackend, path: str) -> None:
    squeeze = zlib.compressobj(wbits=GZIP)
    frames = STREAMS[path]
    seen = threading.Event()
    packed = [wire.chunk(squeeze.compress(frame) + squeeze.flush(zlib.Z_SYNC_FLUSH)) for frame in frames]
    head = wire.head(200, "text/event-stream", "transfer-encoding: chunked", "content-encoding: gzip")
    end = [wire.chunk(squeeze.flush()), wire.LAST_CHUNK]
    upstream.script = [head, *packed[:2], Until(seen), *packed[2:], *end]
    with gateway.call(path, stream=True) as call:
        coded = call.head().header("content-encoding") not in ("", "identity")
        assert not (coded and gateway.ours)
        expand = zlib.decompressobj(wbits=GZIP)
        shown = b""
        for piece in call.pieces():
            shown += expand.decompress(piece) if coded else piece
            if len(events(shown)) >= 2:
                seen.set()
    assert seen.is_set()
    assert_same(shown, b"".join(frames))


@pytest.mark.cases(57)
@pytest.mark.parametrize("path", PATHS)
def test_a_stream_has_one_framing(gateway: Gateway, upstream: FakeBackend, path: str) -> None:
    for steps in (
        script(STREAMS[path]),
        [wire.whole(b"".join(STREAMS[path]), 200, "text/event-stream")],
    ):
        upstream.script = steps
        answer = gateway.ask(path, stream=True)
        assert answer.all("content-length") == []
        assert answer.all("transfer-encoding") == ["chunked"]
        assert answer.header("content-type").startswith("text/event-stream")
        assert_same(answer.body, b"".join(STREAMS[path]))


@pytest.mark.cases(58)
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("size", [7_000, 1_500_000])
def test_a_large_request_arrives_whole_and_once(
    gateway: Gateway, upstream: FakeBackend, size: int, chunked: bool
) -> None:
    raw = gateway.body(x_padding="héllo " * (size // 7))
    upstream.script = [wire.whole(BODY)]
    if chunked:
        with gateway.call(CHAT, {"transfer-encoding": "chunked"}, raw=b"") as call:
            for at in range(0, len(raw), 10_000):
                call.send(wire.chunk(raw[at : at + 10_000]))
            call.send(wire.LAST_CHUNK)
            answer = call.answer()
    else:
        answer = gateway.ask(raw=raw)
    assert_same(answer.body, BODY)
    assert len(upstream.requests) == 1
    padding = raw[raw.index(b'"x_padding"') + 12 : -1].strip()
    if padding not in upstream.last.body:
        assert_same(json.dumps(json.loads(upstream.last.body)["x_padding"]).encode(), padding)


@pytest.mark.cases(59)
@pytest.mark.feature("body limit")
def test_a_request_that_is_too_large_is_not_read(gateway: Gateway, upstream: FakeBackend) -> None:
    with gateway.call(CHAT, {"content-length": str(10 * 1024**3)}, raw=b'{"model": "') as call:
        answer = call.head()
        for _ in call.pieces():
            if answer.body.endswith(b"}"):
                break
    assert answer.status == 413
    assert {"message", "type", "param", "code"} <= answer.json()["error"].keys()
    assert upstream.requests == []


@pytest.mark.cases(59)
@pytest.mark.feature("body limit")
def test_a_request_that_grows_too_large_is_not_read_on(gateway: Gateway, upstream: FakeBackend) -> None:
    sent = 0
    with gateway.call(CHAT, {"transfer-encoding": "chunked"}, raw=b"") as call:
        # A client that listens while it sends.
        with contextlib.suppress(OSError):
            while sent < 200 * 1024**2 and not select.select([call.socket], [], [], 0)[0]:
                call.send(wire.chunk(b" " * 1024**2))
                sent += 1024**2
        answer = call.head()
        for _ in call.pieces():
            if answer.body.endswith(b"}"):
                break
    assert answer.status == 413
    assert "error" in answer.json()
    assert sent < 150 * 1024**2
    assert upstream.requests == []


@pytest.mark.cases(60)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("path", PATHS)
def test_one_server_one_date_one_type(gateway: Gateway, upstream: FakeBackend, path: str, stream: bool) -> None:
    extra = ("server: uvicorn", "date: Mon, 01 Jan 2024 00:00:00 GMT")
    kind = "text/event-stream; charset=utf-8" if stream else "application/json"
    body = b"".join(STREAMS[path]) if stream else BODIES[path]
    upstream.script = [wire.whole(body, 200, kind, *extra)]
    answer = gateway.ask(path, stream=stream)
    assert len(answer.all("server")) <= 1
    assert len(answer.all("date")) == 1
    assert [value.partition(";")[0] for value in answer.all("content-type")] == [kind.partition(";")[0]]
    assert answer.header("content-type") == kind or not gateway.ours
    assert_same(answer.body, body)


@pytest.mark.cases(60)
def test_errors_of_the_gateway_are_json(gateway: Gateway, upstream: FakeBackend) -> None:
    upstream.script = [wire.whole(b'{"error":{"message":"no","type":"NotFoundError"}}', 404)]
    for answer in (gateway.ask(raw=b"{"), gateway.ask(model="nobody"), gateway.ask("/v1/nothing")):
        assert len(answer.all("date")) == 1
        assert len(answer.all("server")) <= 1
        if answer.body[:1] == b"{":
            assert answer.all("content-type") == ["application/json"]
        if gateway.ours:
            assert 400 <= answer.status < 500
            assert {"message", "type"} <= answer.json()["error"].keys()
    assert upstream.requests == [] or not gateway.ours


@pytest.mark.cases(57)
def test_a_stream_until_the_connection_closes(gateway: Gateway, upstream: FakeBackend) -> None:
    frames = (ROLE, ONE, TWO, FINISH, DONE)
    upstream.script = lambda request: [wire.head(200, "text/event-stream", "connection: close"), *frames, Close()]
    assert_same(gateway.ask(stream=True).body, b"".join(frames))
