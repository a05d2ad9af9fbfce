"""Clients that do not take what is sent to them: given up after a while, on record as clients that left."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy.backends.backend import Backend
from proxy.relay.downlink import Downlink
from tests.proxy.conftest import CHAT, Rig
from tests.proxy.test_serve import Serve
from tests.support import wire
from tests.support.fake_backend import FakeBackend, PeerCloses, Script
from tests.support.valkey import Valkey
from tests.support.waiting import PATIENCE, TRIES, until, wait_until
from verifier_pool.link.queue import OPEN

CHAT_PATH = "/v1/chat/completions"
_FRAME = wire.chunk(wire.CONTENT[0].replace(b"One", b"x" * 8000))
_ENDLESS: Script = [wire.SSE_HEAD, wire.chunk(wire.ROLE), *[_FRAME] * 4000]
_LARGE = wire.whole(wire.BODY.replace(b"One two three", b"x" * 8_000_000))
_RESPONSES = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"%s"}\n\n'
_PASSED: Script = [wire.SSE_HEAD, *[wire.chunk(_RESPONSES % (b"x" * 2000))] * 8000]
_COMMENTS: Script = [wire.SSE_HEAD, *[wire.chunk(b": " + b"x" * 4000 + b"\n\n")] * 4000]
_NEVER = 3600.0


@contextlib.contextmanager
def _client(rig: Rig) -> Iterator[socket.socket]:
    with _to(rig.proxy.port) as client:
        yield client


@contextlib.contextmanager
def _to(port: int) -> Iterator[socket.socket]:
    """A connection with hardly any room for what it does not read."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(10)
        client.connect(("127.0.0.1", port))
        yield client


def _ask(client: socket.socket, path: str = CHAT_PATH, **fields: Any) -> None:
    body = json.dumps(CHAT | fields).encode()
    client.sendall(b"POST %s HTTP/1.1\r\nhost: localhost\r\n" % path.encode())
    client.sendall(b"content-length: %d\r\n\r\n%s" % (len(body), body))


def _is_cut(client: socket.socket, timeout: float = PATIENCE) -> bool:
    """Whether the proxy has let go of the connection; reads nothing of what it sent."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            client.send(b"\r\n")
        except OSError:
            return True
        time.sleep(0.02)
    return False


def _b1(rig: Rig) -> Backend:
    return rig.proxy.services.backends.all[0]


def _free(rig: Rig) -> bool:
    return rig.proxy.drain.in_flight == 0 and not any(each.outstanding for each in rig.proxy.services.backends.all)


TIMES = {"total": {"total": 1.5, "client": _NEVER}, "client": {"client": 0.6}}


@pytest.mark.parametrize("which", TIMES)
def test_a_stream_that_nobody_takes(make_rig: Callable[..., Rig], which: str) -> None:
    rig = make_rig(timeouts=TIMES[which])
    rig.backend.script = _ENDLESS
    rig.redis.delete(OPEN)
    with _client(rig) as client:
        began = time.monotonic()
        _ask(client, stream=True)
        wait_until(lambda: rig.open_ids())
        (id,) = rig.open_ids()
        wait_until(lambda: _free(rig))
        assert time.monotonic() - began > 0.5
        assert rig.backend.last.peer_closed.wait(PATIENCE)
        evidence = rig.evidence(id)
        assert "client_left" in evidence.faults
        assert not evidence.complete
        assert not any("upstream" in fault for fault in evidence.faults)
        with contextlib.suppress(OSError):
            got = b""
            while part := client.recv(65536):
                got += part
            assert not got.endswith(wire.LAST_CHUNK)
            assert b'"error"' not in got


@pytest.mark.parametrize("which", TIMES)
def test_it_says_nothing_of_the_backend(make_rig: Callable[..., Rig], which: str) -> None:
    breaker = {"failures": 1, "open_seconds": 60}
    for _ in range(TRIES):
        rig = make_rig(timeouts=TIMES[which], breaker=breaker)
        rig.backend.script = _ENDLESS
        for _ in range(3):
            with _client(rig) as client:
                _ask(client, stream=True)
                wait_until(lambda rig=rig: rig.proxy.drain.in_flight)  # type: ignore[misc]
                wait_until(lambda rig=rig: _free(rig))  # type: ignore[misc]
        if not _b1(rig).breaker.failures:
            break
    rig.backend.script = wire.stream()
    assert rig.chat(stream=True).content.endswith(wire.DONE)


@pytest.mark.parametrize("which", TIMES)
@pytest.mark.parametrize(
    ("path", "script", "fields"),
    [
        ("/v1/responses", _PASSED, {"input": "x", "stream": True}),
        (CHAT_PATH, _COMMENTS, {"stream": True}),
        (CHAT_PATH, [_LARGE], {}),
        (CHAT_PATH, [wire.whole(b'{"error": {"message": "%s"}}' % (b"x" * 60_000), 400)], {}),
    ],
    ids=["passed through", "comments", "whole", "error"],
)
def test_whatever_it_is(
    make_rig: Callable[..., Rig], which: str, path: str, script: Script, fields: dict[str, Any]
) -> None:
    for _ in range(TRIES):
        rig = make_rig(timeouts=TIMES[which] | {"first_byte": 0.3}, relay={"keepalive": 0.1}, breaker={"failures": 1})
        rig.backend.reset()
        rig.backend.script = script
        with _client(rig) as client:
            _ask(client, path, **fields)
            wait_until(lambda rig=rig: rig.backend.requests)  # type: ignore[misc]
            wait_until(lambda rig=rig: _free(rig))  # type: ignore[misc]
        # Where the machine stands still, the backend is silent before the client is.
        if not _b1(rig).breaker.failures:
            break
    rig.backend.script = [wire.whole(wire.BODY)]
    assert rig.chat().status_code == 200


def test_a_whole_answer_is_not_kept_for_ever(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(timeouts={"client": 0.5})
    rig.backend.script = [_LARGE]
    with _client(rig) as client:
        _ask(client)
        wait_until(lambda: rig.backend.requests)
        assert _is_cut(client)


def test_answers_in_a_row_that_nobody_takes(make_rig: Callable[..., Rig]) -> None:
    """Nothing of it is on the way to a backend: refusals, and waits for a verification."""
    rig = make_rig(timeouts={"client": 0.5})
    with _client(rig) as client, contextlib.suppress(OSError):
        client.settimeout(0.5)
        for _ in range(20_000):
            client.sendall(b"GET /v1/verifications/%s?wait=0.1 HTTP/1.1\r\nhost: localhost\r\n\r\n" % (b"0" * 32))
    with _client(rig) as client:
        with contextlib.suppress(OSError):
            client.settimeout(PATIENCE)
            for _ in range(20_000):
                client.sendall(b"GET /nothing HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert _is_cut(client)
    wait_until(lambda: _free(rig))


def test_one_that_takes_little_is_left_alone(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(timeouts={"client": 0.5})
    rig.backend.script = [_LARGE]
    with _client(rig) as client:
        _ask(client)
        got = 0
        began = time.monotonic()
        while time.monotonic() - began < 2:
            got += len(client.recv(32768))
            time.sleep(0.01)
        while got < 8_000_000:
            part = client.recv(1 << 20)
            assert part
            got += len(part)


def test_one_that_takes_a_stream_in_gulps_is_left_alone(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(timeouts={"client": 0.6})
    rig.backend.script = [wire.SSE_HEAD, wire.chunk(wire.ROLE), *[_FRAME] * 500, *wire.stream()[2:]]
    with _client(rig) as client:
        _ask(client, stream=True)
        got = b""
        began = time.monotonic()
        while not got.endswith(wire.LAST_CHUNK):
            if time.monotonic() - began < 3:
                time.sleep(0.25)
            for _ in range(20):
                part = client.recv(65536)
                assert part
                got += part
                if got.endswith(wire.LAST_CHUNK):
                    break
        assert wire.DONE in got


def test_little_is_not_enough_for_longer_than_the_total(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(timeouts={"total": 1.0})
    rig.backend.script = _ENDLESS
    with _client(rig) as client:
        _ask(client, stream=True)
        wait_until(lambda: rig.backend.requests)
        began = time.monotonic()
        while not _free(rig):
            client.recv(256)
            time.sleep(0.01)
            assert time.monotonic() - began < PATIENCE
        assert rig.backend.last.peer_closed.wait(PATIENCE)


def test_whose_time_it_was(make_rig: Callable[..., Rig]) -> None:
    """The total is over while the backend is read; most of it was the client's."""
    rig = make_rig(timeouts={"total": 8.0})
    rig.backend.script = [wire.SSE_HEAD, wire.chunk(wire.ROLE), *[_FRAME] * 500, 30.0]
    rig.redis.delete(OPEN)
    with _client(rig) as client:
        _ask(client, stream=True)
        wait_until(lambda: rig.open_ids())
        (id,) = rig.open_ids()
        time.sleep(7.2)
        client.settimeout(0.2)
        with contextlib.suppress(OSError):
            while client.recv(1 << 20):
                pass
        wait_until(lambda: _free(rig))
    evidence = rig.evidence(id)
    assert evidence.faults == ("client_left",)


@pytest.mark.parametrize("how", ["silence", "a line without end"])
def test_a_backend_that_broke_off_does_not_wait_with_its_client(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    rig = make_rig(timeouts={"idle": 0.2}, bounds={"line_bytes": 10_000})
    write = Downlink.write

    async def slow(self: Downlink, data: bytes, *, last: bool = False) -> None:
        if last:
            await until(rig.backend.last.peer_closed.is_set)
        await write(self, data, last=last)

    monkeypatch.setattr(Downlink, "write", slow)
    more = [] if how == "silence" else [wire.chunk(b"data: " + b"x" * 20_000)]
    rig.backend.script = [wire.SSE_HEAD, *map(wire.chunk, wire.FRAMES[:3]), *more, PeerCloses()]
    answer = rig.chat(stream=True)
    assert b'data: {"error":' in answer.content
    assert wire.DONE not in answer.content


def test_the_queue_is_a_part_of_the_total(make_rig: Callable[..., Rig], backend: FakeBackend) -> None:
    one = {"name": "b1", "url": backend.url, "model": "m", "served_model": "served", "max_concurrency": 1}
    rig = make_rig(timeouts={"total": 0.8}, backends=[one], routing={"queue": 5, "queue_seconds": 300})
    backend.script = [PeerCloses()]
    with _client(rig) as first:
        _ask(first)
        wait_until(lambda: _b1(rig).outstanding)
        time.sleep(0.4)
        response = rig.chat()
        assert response.status_code in (503, 504)


@pytest.mark.parametrize("which", TIMES)
def test_a_drain_without_a_limit_ends(backend: FakeBackend, valkey: Valkey, tmp_path: Path, which: str) -> None:
    settings = {
        "port": 0,
        "redis_url": valkey.url,
        "models": {"m": {"vocab_size": 1000}},
        "backends": [{"name": "b", "url": backend.url, "model": "m", "served_model": "served"}],
        "timeouts": TIMES[which],
    }
    backend.script = _ENDLESS
    serving = Serve(tmp_path, settings)
    try:
        serving.ready()
        with _to(int(serving.url.rpartition(":")[2])) as client:
            _ask(client, stream=True)
            wait_until(lambda: backend.requests)
            serving.process.send_signal(signal.SIGTERM)
            assert serving.wait() == 0
        assert not any("Traceback" in line for line in serving.lines)
    finally:
        serving.process.kill()
        serving.process.wait()
        assert serving.process.stderr is not None
        serving.process.stderr.close()


def test_a_key_gets_its_place_back(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(timeouts={"client": 0.5}, limits={"concurrency": 1})
    asked: list[int] = []
    while asked[-1:] != [429]:
        assert len(asked) < TRIES
        rig.backend.reset()
        rig.backend.script = _ENDLESS
        with _client(rig) as client:
            _ask(client, stream=True)
            wait_until(lambda: rig.backend.requests)
            rig.backend.script = [wire.whole(wire.BODY)]
            # In time, unless the machine stands still meanwhile.
            asked.append(rig.chat().status_code)
            wait_until(lambda: _free(rig))
    wait_until(lambda: rig.chat().status_code == 200)
