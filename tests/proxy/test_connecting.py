"""A backend that does not even take a connection: its own time-out, and the next one is asked."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.proxy.conftest import Rig
from tests.support import wire


@pytest.fixture
def deaf() -> Iterator[str]:
    """URL of a port whose queue is full: the kernel drops what wants to connect."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for _ in range(4):
            filling = stack.enter_context(socket.socket())
            filling.setblocking(False)
            filling.connect_ex(listening.getsockname())
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_its_own_time_out(make_rig: Callable[..., Rig], deaf: str) -> None:
    rig = make_rig(timeouts={"connect": 0.4}, backends=[{"name": "b1", "url": deaf, "model": "m"}])
    started = time.monotonic()
    response = rig.chat(stream=True)
    assert time.monotonic() - started > 0.3
    assert (response.status_code, response.json()["error"]["code"]) == (503, "backend_unavailable")
    assert response.headers["retry-after"] == "1"
    assert rig.verdict(response.headers["x-countersign-id"])["reasons"] == ["no_answer"]


def test_the_next_one_is_asked(make_rig: Callable[..., Rig], deaf: str) -> None:
    # The other one has so long, too.
    rig = make_rig(deaf, timeouts={"connect": 2.0}, relay={"retries": 0})
    rig.backend.script = [wire.whole(wire.BODY)]
    assert {rig.chat().status_code for _ in range(3)} == {200}
    assert len(rig.backend.requests) == 3
