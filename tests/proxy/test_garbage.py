"""What a request leaves is freed with it: garbage is looked for seldom (`proxy.serve`), as that stops every stream."""

from __future__ import annotations

import gc
import json
import socket
from collections import Counter
from collections.abc import Iterator

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from proxy.generation import Generation
from proxy.protocol import BoundedProtocol
from proxy.relay import direct
from proxy.relay.answer import Answer
from proxy.relay.attempt import Attempt
from proxy.relay.clock import Clock, Limit
from proxy.relay.downlink import Downlink
from proxy.relay.exchange import Exchange
from proxy.relay.record import Record
from proxy.relay.through import Through
from proxy.tap.guarded import Guarded
from proxy.tap.types import Prepared
from tests.proxy.conftest import CHAT, Rig
from tests.proxy.test_through import CONTENT
from tests.support import wire
from tests.support.fake_backend import Close, Step
from tests.support.waiting import PATIENCE, wait_until

_OF_A_REQUEST = (
    *(Answer, Attempt, Clock, Downlink, Exchange, Generation, Guarded, Limit, Prepared, Record, Through),
    direct.Exchange,
    RequestResponseCycle,
)
_TIMES = 5
_BEGINNING: list[Step] = [wire.SSE_HEAD, *map(wire.chunk, (wire.ROLE, *CONTENT))]
_WHOLE: list[Step] = [wire.whole(wire.BODY)]
_STREAM: list[Step] = [*_BEGINNING, *map(wire.chunk, (wire.FINISH, wire.USAGE, wire.DONE)), wire.LAST_CHUNK]
_REFUSED: list[Step] = [b"HTTP/1.1 422 No\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"]
_BROKEN: list[Step] = [*_BEGINNING, Close(reset=True)]
_NONE: list[Step] = [Close(reset=True)]


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _alive(*kinds: type) -> Counter[str]:
    return Counter(type(each).__name__ for each in gc.get_objects() if issubclass(type(each), kinds))


def _ask(rig: Rig, *, stream: bool, leaves: bool = False) -> None:
    """On a connection of its own, several times where nobody closes it."""
    body = json.dumps(CHAT | {"stream": stream}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
    with socket.create_connection(("127.0.0.1", rig.proxy.port), timeout=PATIENCE) as client:
        for _ in range(_TIMES):
            client.sendall(head + body)
            if leaves:
                client.recv(1)
                return
            _read(client)


def _read(client: socket.socket) -> None:
    """One answer."""
    got = b""
    while b"\r\n\r\n" not in got:
        got += client.recv(65536)
    head, _, got = got.partition(b"\r\n\r\n")
    lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    size = int(lines.get(b"content-length", -1))
    while len(got) < size if size >= 0 else not got.endswith(b"0\r\n\r\n"):
        data = client.recv(65536)
        assert data
        got += data


@pytest.mark.parametrize(
    ("script", "stream", "leaves"),
    [
        (_WHOLE, False, False),
        (_STREAM, True, False),
        (_REFUSED, True, False),
        (_BROKEN, True, False),
        (_NONE, False, False),
        (_BEGINNING, True, True),
    ],
    ids=["whole", "stream", "refused", "broken off", "no answer", "client leaves"],
)
def test_nothing_of_a_request_waits_for_garbage_to_be_collected(
    rig: Rig, uncollected: None, script: list[Step], stream: bool, leaves: bool
) -> None:
    rig.backend.script = script
    before = _alive(BoundedProtocol)
    _ask(rig, stream=stream, leaves=leaves)
    # What was recorded last is known to the recorder until there is more to record.
    wait_until(lambda: max(_alive(*_OF_A_REQUEST).values(), default=0) <= 1, what=lambda: _alive(*_OF_A_REQUEST))
    wait_until(lambda: _alive(BoundedProtocol) <= before, what=lambda: _alive(BoundedProtocol))
