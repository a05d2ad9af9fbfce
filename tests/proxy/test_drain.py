"""The end of a drain, and other answers that end in the middle: who is cut, when, and what is said of it."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from policies import codec
from tests.proxy.conftest import CHAT, Rig
from tests.proxy.test_serve import Serve
from tests.support import wire
from tests.support.fake_backend import Close, FakeBackend, PeerCloses, Step, Until
from tests.support.valkey import Valkey
from tests.support.waiting import PATIENCE, wait_until
from verifier_pool.link.queue import OPEN, evidence_key, verdict_key

SECONDS = 1.0
BEGUN: list[Step] = [wire.SSE_HEAD, *map(wire.chunk, wire.FRAMES[:3])]
ENDLESS: list[Step] = [wire.SSE_HEAD, wire.chunk(wire.ROLE), *[wire.chunk(wire.CONTENT[0] * 20)] * 20_000]

Start = Callable[..., Serve]


@pytest.fixture
def start(tmp_path: Path, backend: FakeBackend, valkey: Valkey) -> Iterator[Start]:
    """Makes one, with these arguments, that has `backend` and an empty Valkey."""
    with valkey.client() as client:
        client.flushall()
    settings = {
        "port": 0,
        "redis_url": valkey.url,
        "models": {"m": {"vocab_size": 1000}},
        "backends": [{"name": "b", "url": backend.url, "model": "m", "served_model": "served"}],
        "health": {"interval": 0},
    }
    with contextlib.ExitStack() as stack:

        def run(*arguments: str) -> Serve:
            running = Serve(tmp_path, settings, *arguments)
            assert running.process.stderr is not None
            stack.callback(running.process.stderr.close)
            stack.callback(running.process.wait)
            stack.callback(running.process.kill)
            running.ready()
            return running

        yield run


@pytest.fixture
def serving(start: Start) -> Serve:
    """One that gives running answers a second."""
    return start("--drain", f"{SECONDS:g}")


@contextmanager
def _asking(
    port: int, *, body: bytes | None = None, more: bytes = b"", times: int = 1, **fields: Any
) -> Iterator[socket.socket]:
    """A client that has asked, and reads nothing."""
    whole = json.dumps(CHAT | fields).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n%scontent-length: %d\r\n\r\n"
    head %= (more if times > 1 else more + b"connection: close\r\n", len(whole))
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(PATIENCE)
        client.connect(("127.0.0.1", port))
        client.sendall((head + (whole if body is None else body)) * times)
        yield client


def _port(serving: Serve) -> int:
    return int(serving.url.rpartition(":")[2])


def _rest(client: socket.socket) -> bytes:
    parts = []
    try:
        while part := client.recv(65536):
            parts.append(part)
    except ConnectionError:
        pass
    return b"".join(parts)


def _told(serving: Serve) -> list[dict[str, Any]]:
    """What it logged, all of it: nothing of it is an error."""
    told = [json.loads(line) for line in serving.lines if line.startswith("{")]
    assert len(told) == len(serving.lines), serving.lines
    assert not [each for each in told if each["level"] in ("error", "critical")], told
    return told


def _records(valkey: Valkey) -> list[bytes]:
    """Keys of evidence and verdicts."""
    with valkey.client() as client:
        return [*client.scan_iter(evidence_key("*")), *client.scan_iter(verdict_key("*"))]


def _record(valkey: Valkey) -> Any:
    """Evidence or verdict of the only answer there was."""
    (key,) = _records(valkey)
    with valkey.client() as client:
        data: Any = client.get(key)
        return codec.unpack(data)[0] if b"evidence" in key else orjson.loads(data)


def test_a_stream_is_cut_when_its_seconds_are_over(serving: Serve, backend: FakeBackend, valkey: Valkey) -> None:
    backend.script = [*BEGUN, PeerCloses()]
    with _asking(_port(serving), stream=True) as client:
        got = b""
        while b" two" not in got:
            got += client.recv(65536)
        began = time.monotonic()
        serving.process.send_signal(signal.SIGTERM)
        got += _rest(client)
        took = time.monotonic() - began
        assert serving.wait() == 0
    assert took >= SECONDS
    assert not got.endswith(wire.LAST_CHUNK)
    assert b"[DONE]" not in got
    assert backend.last.peer_closed.wait(PATIENCE)
    evidence = _record(valkey)
    assert (evidence.faults, evidence.complete) == (("proxy_stopped",), False)
    assert list(evidence.output_ids) == [11, 12]
    told = _told(serving)
    assert [each["answers"] for each in told if "broken off" in each["message"]] == [1]
    assert [each["status"] for each in told if each["message"] == "served"] == [503]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [[PeerCloses()], [wire.head(), PeerCloses()]], ids=["silent", "after the head"])
def test_whoever_has_nothing_yet_is_told(
    serving: Serve, backend: FakeBackend, valkey: Valkey, script: list[Step], stream: bool
) -> None:
    backend.script = script
    with _asking(_port(serving), stream=stream) as client:
        wait_until(lambda: backend.requests)
        serving.process.send_signal(signal.SIGTERM)
        got = _rest(client)
        assert serving.wait() == 0
    head, _, body = got.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after" in head.lower()
    assert json.loads(body)["error"]["code"] == "draining"
    assert backend.last.peer_closed.wait(PATIENCE)
    record = _record(valkey)
    if len(script) == 1:
        assert (record["verdict"], record["reasons"]) == ("unverified", ["proxy_stopped"])
    else:
        assert "proxy_stopped" in record.faults
    _told(serving)


def test_a_client_that_does_not_read_is_cut_too(serving: Serve, backend: FakeBackend, valkey: Valkey) -> None:
    backend.script = ENDLESS
    with _asking(_port(serving), stream=True):
        wait_until(lambda: backend.requests)
        began = time.monotonic()
        serving.process.send_signal(signal.SIGTERM)
        assert serving.wait() == 0
        assert time.monotonic() - began >= SECONDS
    assert "proxy_stopped" in _record(valkey).faults
    _told(serving)


def test_a_whole_answer_that_is_out_may_be_taken_until_then(start: Start, backend: FakeBackend) -> None:
    """Nothing of it is under way in the proxy any more but its bytes."""
    serving = start("--drain", f"{PATIENCE:g}")
    backend.script = [wire.whole(wire.BODY.replace(b"One two three", b"x" * 16_000_000))]
    with _asking(_port(serving)) as client:
        assert client.recv(1)
        time.sleep(0.2)
        serving.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert len(_rest(client)) > 16_000_000
        assert serving.wait() == 0
    _told(serving)


def test_a_body_that_is_still_sent_is_not_waited_for(serving: Serve, backend: FakeBackend) -> None:
    with _asking(_port(serving), body=b'{"model"') as client:
        time.sleep(0.2)
        serving.process.send_signal(signal.SIGTERM)
        _rest(client)
        assert serving.wait() == 0
    assert not backend.requests
    _told(serving)


def test_one_that_ends_in_time_ends_well(start: Start, backend: FakeBackend) -> None:
    serving = start("--drain", f"{PATIENCE:g}")
    go = threading.Event()
    backend.script = [*BEGUN, Until(go), *wire.stream()[4:]]
    with _asking(_port(serving), stream=True) as client:
        assert client.recv(1)
        serving.process.send_signal(signal.SIGTERM)
        go.set()
        assert _rest(client).endswith(wire.LAST_CHUNK)
        assert serving.wait() == 0
    assert not [each for each in _told(serving) if "broken off" in each["message"]]


@pytest.mark.parametrize("times", [2, 5])
@pytest.mark.parametrize("stream", [False, True])
def test_requests_in_a_row_whose_client_leaves(rig: Rig, stream: bool, times: int) -> None:
    """The one that is served is not the newest of its connection; its backend is let go at once all the same."""
    rig.backend.script = [*BEGUN, PeerCloses()] if stream else [PeerCloses()]
    with _asking(rig.proxy.port, stream=stream, times=times):
        wait_until(lambda: rig.backend.requests)
        wait_until(lambda: not stream or len(rig.backend.last.sent) == len(BEGUN))
    assert rig.backend.last.peer_closed.wait(PATIENCE)
    wait_until(lambda: rig.proxy.drain.in_flight == 0)
    assert len(rig.backend.requests) == 1


def _bite(client: socket.socket) -> bytes:
    """Wait a little, and then take everything."""
    time.sleep(1.5)
    return _rest(client)


@pytest.mark.parametrize(
    "script",
    [ENDLESS, [*BEGUN, Close()], [*BEGUN, Close(reset=True)], [*BEGUN, b"zz\r\n"], [*BEGUN, PeerCloses()]],
    ids=["slow client", "closed", "reset", "nonsense", "silence"],
)
def test_what_is_cut_is_no_error_of_ours(
    make_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture, script: list[Step]
) -> None:
    """Nor does it ever look as if it were whole."""
    rig = make_rig(timeouts={"total": 1.0, "idle": 0.5})
    rig.redis.delete(OPEN)
    rig.backend.script = script
    with caplog.at_level(logging.INFO), _asking(rig.proxy.port, stream=True) as client:
        got = _bite(client)
        wait_until(lambda: rig.proxy.drain.in_flight == 0)
    assert b"[DONE]" not in got
    assert not got.endswith(wire.LAST_CHUNK) or b'data: {"error"' in got
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses"])
def test_nor_what_is_cut_of_others(make_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture, path: str) -> None:
    rig = make_rig(timeouts={"idle": 0.5})
    rig.backend.script = [wire.head(200, "application/octet-stream", "transfer-encoding: chunked"), wire.chunk(b"x")]
    rig.backend.script = [*rig.backend.script, Close()]
    with caplog.at_level(logging.INFO):
        with contextlib.suppress(httpx.RemoteProtocolError):
            rig.http.post(path, json={"model": "m", "input": "x"})
        wait_until(lambda: rig.proxy.drain.in_flight == 0)
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_waits_for_its_verdict_goes_without(
    serving: Serve, backend: FakeBackend, valkey: Valkey, stream: bool
) -> None:
    backend.script = wire.stream() if stream else [wire.whole(wire.BODY)]
    with _asking(_port(serving), more=b"x-countersign-mode: inline\r\n", stream=stream) as client:
        wait_until(lambda: _records(valkey))
        serving.process.send_signal(signal.SIGTERM)
        got = _rest(client)
        assert serving.wait() == 0
    assert got.startswith(b"HTTP/1.1 200 ")
    assert b'"pending"' in got
    assert got.endswith(wire.LAST_CHUNK) if stream else json.loads(got.partition(b"\r\n\r\n")[2])
    _told(serving)


def test_after_a_second_signal_no_time_is_left(start: Start, backend: FakeBackend, valkey: Valkey) -> None:
    backend.script = [*BEGUN, PeerCloses()]
    patient = start()
    with _asking(_port(patient), stream=True) as client:
        got = b""
        while b" two" not in got:
            got += client.recv(65536)
        patient.process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{patient.url}/readyz").status_code == 503)
        patient.process.send_signal(signal.SIGTERM)
        assert not _rest(client).endswith(wire.LAST_CHUNK)
        assert patient.wait() == 0
    assert _record(valkey).faults == ("proxy_stopped",)
    _told(patient)
