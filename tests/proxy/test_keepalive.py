"""Comments while a client waits: in a buffered answer, in an inline wait, and across backends."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from policies.settings import hash_key
from tests.proxy.conftest import Rig
from tests.support import wire
from tests.support.fake_backend import Close, FakeBackend

QUICK = {"relay": {"keepalive": 0.1}}


def _said(body: bytes) -> bytes:
    return b"".join(
        event + b"\n\n" for event in body.split(b"\n\n") if event and not event.startswith(b": countersign-ping")
    )


def test_a_buffered_answer(make_rig: Callable[..., Rig], backend: FakeBackend) -> None:
    buffered = {"name": "b1", "url": backend.url, "model": "m", "routed_experts": "buffer"}
    plain, kept = make_rig(backends=[buffered]), make_rig(backends=[buffered], **QUICK)
    backend.script = [0.5, wire.whole(wire.BODY)]
    expected = plain.chat(stream=True)
    assert expected.content.endswith(wire.DONE)
    response = kept.chat(stream=True)
    assert response.headers["content-type"] == expected.headers["content-type"]
    assert response.content.startswith(b": countersign-ping\n\n")
    assert _said(response.content) == expected.content
    (evidence,) = kept.recorded(response.headers["x-countersign-id"])
    assert evidence.complete  # type: ignore[union-attr]
    backend.script = [0.3, wire.whole(wire.BODY)[:-30], Close()]
    response = kept.chat(stream=True)
    assert b'"error"' in response.content
    assert b"[DONE]" not in response.content


def test_an_inline_wait(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(**QUICK)
    rig.backend.script = wire.stream()
    with rig.worker("pass", hash_key(""), delay=0.5):
        response = rig.chat(stream=True, headers={"x-countersign-mode": "inline"})
    before, _, after = response.content.partition(b": countersign ")
    assert b": countersign-ping\n\n" in before
    assert after.endswith(wire.DONE)


@pytest.mark.parametrize("silence", [0.0, 0.4])
def test_once_a_comment_went_out_nobody_else_is_asked(
    make_rig: Callable[..., Rig], second: FakeBackend, silence: float
) -> None:
    # Without a silence none is to go out, also on a machine that stands still for a while.
    rig = make_rig(second.url, **(QUICK if silence else {"relay": {"keepalive": 30.0}}))
    rig.stand("b2", "suspect")
    rig.stand("b1", "trusted")
    rig.backend.script = [silence, wire.whole(b'{"error": {"message": "busy", "code": 503}}', 503)]
    second.script = wire.stream()
    responses = [rig.chat(stream=True) for _ in range(3)]
    first = [response for response in responses if b"busy" in response.content]
    if silence:
        assert first
        for response in first:
            assert response.status_code == 200
            assert rig.recorded(response.headers["x-countersign-id"])
    else:
        assert not first
        assert all(response.content.endswith(wire.DONE) for response in responses)
