"""Answers that are HTTP, and that no vLLM gives."""

from __future__ import annotations

from tests.proxy.conftest import Rig
from tests.proxy.raw import WHOLE, Wire
from tests.support import wire
from tests.support.fake_backend import Close


def test_no_content_has_no_length(rig: Rig) -> None:
    rig.backend.script = [b"HTTP/1.1 204 X\r\n\r\n"]
    with Wire(rig) as client:
        client.send([WHOLE])
        head, _, body = client.rest().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 204 ")
    assert b"content-length" not in head.lower()
    assert b"transfer-encoding" not in head.lower()
    assert body == b""


def test_a_request_that_has_arrived_is_not_sent_again(rig: Rig) -> None:
    """On a kept-alive connection a head came, only an informational one, and then its end."""
    rig.backend.script = [wire.whole(wire.BODY)]
    assert rig.chat().status_code == 200
    rig.backend.script = [b"HTTP/1.1 103 Early Hints\r\n\r\n", 0.05, Close()]
    assert rig.chat().status_code == 502
    assert len(rig.backend.requests) == 2
    assert len({each.connection for each in rig.backend.requests}) == 1
