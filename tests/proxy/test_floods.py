"""Backends that flood: whoever else streams meanwhile does not wait for them.

How many seconds they would wait is the machine's affair, so nothing is timed. What the event loop does for a flood
between two of its rounds is counted, on a clock of the test's own; and another stream gets to its end while the flood
lasts, which ends only then.
"""

from __future__ import annotations

import itertools
import json
import queue
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from policies.settings import Settings
from proxy.relay import slices
from proxy.tap.stream import StreamTap
from proxy.tap.whole import WholeTap
from tests.support import wire
from tests.support.hostile import Hostile, kinds
from tests.support.running import RunningProxy
from tests.support.valkey import Valkey

EVENTS = 8
"""Of an honest stream. Each is sent when its client has the one before."""
STEP = 0.006
"""Seconds that pass on the clock of turns each time it is read: whoever looks has had its turn."""
PATIENCE = 120.0
CALLS = 500_000
"""Of functions, in one round. What a socket gives at once takes millions where events are small."""
SLICE = 8 * 1024
WHOLE = 64 * 1024
FLOODS = {
    "blank lines": 400_000,
    "comments": 400_000,
    "no json": 400_000,
    "data lines": 400_000,
    "empty choices": 1_000_000,
    "choices at once": 3_000_000,
    "NaN": 3_000_000,
    "fields": 10_000_000,
    "1xx": 400_000,
    "tiny chunks": 400_000,
    "gzip": 3_000,
    "whole gzip": 9_000,
}
"""Bytes that are more of a flood than a socket gives at once, by kind."""


FEEDS = {kind.feed.__code__ for kind in (StreamTap, WholeTap)}


class PingPong:
    """A backend whose next event waits until its client has had the last one; a context manager."""

    def __init__(self) -> None:
        self.got: queue.SimpleQueue[None] = queue.SimpleQueue()

    def __enter__(self) -> PingPong:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            with client, suppress(OSError, queue.Empty):
                client.recv(65536)
                client.sendall(wire.head(200, "text/event-stream", "connection: close") + wire.ROLE)
                for _ in range(EVENTS):
                    self.got.get(timeout=PATIENCE)
                    client.sendall(wire.CONTENT[0])
                client.sendall(wire.FINISH + wire.USAGE + wire.DONE)


class Rounds:
    """The most that the event loop of a proxy does between two of its rounds; a context manager.

    Attributes:
        calls: of Python and C functions.
        fed: bytes that taps got.
    """

    def __init__(self, proxy: RunningProxy) -> None:
        self.calls = self.fed = 0
        self._calls = self._fed = 0
        self._loop = proxy.services.store._tasks[0].get_loop()
        self._over = False
        self._ended = threading.Event()

    def __enter__(self) -> Rounds:
        self._loop.call_soon_threadsafe(self._begin)
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        assert self._ended.wait(PATIENCE)

    def _begin(self) -> None:
        sys.setprofile(self._called)
        self._round()

    def _round(self) -> None:
        self.calls, self.fed = max(self.calls, self._calls), max(self.fed, self._fed)
        self._calls = self._fed = 0
        if self._over:
            sys.setprofile(None)
            self._ended.set()
        else:
            self._loop.call_soon(self._round)

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        if event in ("call", "c_call"):
            self._calls += 1
            if event == "call" and frame.f_code in FEEDS:
                self._fed += len(frame.f_locals["data"])


@contextmanager
def _asking(proxy: RunningProxy, model: str) -> Iterator[socket.socket]:
    body = json.dumps({"model": model, "messages": [], "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE) as client:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        client.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        yield client


@contextmanager
def _flood(proxy: RunningProxy, hostile: Hostile, kind: str) -> Iterator[None]:
    """While this lasts, a client reads the flood, and the next one where one was cut off."""
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            hostile.parts = kinds()[kind]
            with _asking(proxy, "flood") as client:
                client.settimeout(0.1)
                for _ in iter(over.is_set, True):
                    with suppress(TimeoutError):
                        if not client.recv(1 << 20):
                            break

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(PATIENCE)
    assert not thread.is_alive()


def _honest(proxy: RunningProxy, backend: PingPong) -> bytes:
    """A stream whose every event comes before the next one is sent."""
    text, said = b"", 0
    with _asking(proxy, "honest") as client:
        while data := client.recv(65536):
            text += data
            events = text.count(b'"delta"')
            for _ in range(events - said):
                backend.got.put(None)
            said = events
    return text


@pytest.fixture(scope="module")
def hostile() -> Iterator[Hostile]:
    with Hostile(most=60_000_000) as backend:
        yield backend


@pytest.fixture(scope="module")
def backend() -> Iterator[PingPong]:
    with PingPong() as server:
        yield server


@pytest.fixture(scope="module")
def proxy(hostile: Hostile, backend: PingPong) -> Iterator[RunningProxy]:
    ticks = itertools.count()
    with Valkey() as valkey, pytest.MonkeyPatch.context() as patch:
        patch.setattr(slices, "time", SimpleNamespace(monotonic=lambda: STEP * next(ticks)))
        settings = {
            "models": {"honest": {"vocab_size": 1000}, "flood": {"vocab_size": 1000}},
            "backends": [
                {"name": "honest", "url": backend.url, "model": "honest", "served_model": "served"},
                {"name": "flood", "url": hostile.url, "model": "flood", "served_model": "served"},
            ],
            "timeouts": {"total": PATIENCE, "first_byte": PATIENCE, "idle": PATIENCE},
            "relay": {"retries": 0},
            "health": {"interval": 0},
            "breaker": {"failures": 1_000_000},
        }
        with RunningProxy(Settings.model_validate(settings), valkey.url) as running:
            yield running


@pytest.mark.parametrize("kind", FLOODS)
def test_a_round_of_the_loop_is_short_whatever_comes(
    proxy: RunningProxy, hostile: Hostile, backend: PingPong, kind: str
) -> None:
    hostile.ever = 0
    with _flood(proxy, hostile, kind), Rounds(proxy) as rounds:
        while hostile.ever < FLOODS[kind]:
            answer = _honest(proxy, backend)
            assert wire.DONE in answer
            assert answer.count(b'"content":"One"') + answer.count(b'"content": "One"') == EVENTS
    assert rounds.calls < CALLS
    # Two answers have their turns in one round: the flood and the honest stream; and a flood that is over by now.
    assert rounds.fed <= 3 * (WHOLE if kind == "whole gzip" else SLICE), rounds.fed
