"""Answers that break their reader leave a record all the same, as their backend's doing."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from policies.evidence import Evidence
from tests.proxy.conftest import CHAT, Rig
from tests.support import wire
from tests.support.fake_backend import PeerCloses
from tests.support.waiting import wait_until


def _frame(text: bytes, **fields: Any) -> bytes:
    """A chunk of the answer with other fields of its choice."""
    chunk = json.loads(text.removeprefix(b"data: "))
    chunk["choices"][0].update(fields)
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


HEADER = b"-" * 9900 + b"1\n"
EXPERTS = base64.b64encode(b"\x93NUMPY\x01\x00" + len(HEADER).to_bytes(2, "little") + HEADER).decode()
LONG = wire.CONTENT[0].replace(b'"logprob": -0.1', b'"logprob": -' + b"9" * 400, 1)


def _evidence(rig: Rig, id: str) -> Evidence:
    recorded = rig.recorded(id)
    assert isinstance(recorded, list), recorded
    return recorded[0]


def test_experts_that_only_a_parser_of_python_reads(rig: Rig) -> None:
    rig.backend.script = wire.stream([*wire.FRAMES[:4], _frame(wire.FINISH, routed_experts=EXPERTS), *wire.FRAMES[5:]])
    answer = rig.chat(stream=True)
    assert answer.content.endswith(wire.DONE)
    evidence = _evidence(rig, answer.headers["x-countersign-id"])
    assert evidence.faults == ("bad_routed_experts",)
    assert evidence.text == "One two three"


@pytest.mark.parametrize("frames", [[*wire.FRAMES[:4], LONG, *wire.FRAMES[4:]], [*wire.FRAMES[:5], LONG, wire.DONE]])
def test_a_logprob_of_hundreds_of_digits(rig: Rig, frames: list[bytes]) -> None:
    rig.backend.script = wire.stream(frames)
    answer = rig.chat(stream=True)
    assert answer.content.endswith(wire.DONE)
    evidence = _evidence(rig, answer.headers["x-countersign-id"])
    # Behind its end nothing of a choice may come.
    assert set(evidence.faults) - {"odd_answer"} == {"bad_logprobs"}
    assert len(evidence.output_ids) == 4
    (backend,) = rig.proxy.services.backends.all
    assert backend.breaker.failures == 0


@pytest.mark.parametrize("broken", [False, True])
def test_a_client_that_leaves_before_it_is_read(rig: Rig, monkeypatch: pytest.MonkeyPatch, broken: bool) -> None:
    """Even where the tap itself could not be closed."""
    if broken:

        def close(*_: object) -> bytes:
            raise ValueError("broken")

        monkeypatch.setattr("proxy.tap.stream.StreamTap.close", close)
    rig.backend.script = [wire.SSE_HEAD, *map(wire.chunk, [*wire.FRAMES[:4], LONG]), PeerCloses()]
    with rig.http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as answer:
        seen = b""
        for piece in answer.iter_raw():
            seen += piece
            if seen.count(b"One") == 2:
                break
    evidence = _evidence(rig, answer.headers["x-countersign-id"])
    assert set(evidence.faults) == ({"bad_logprobs"} if broken else {"bad_logprobs", "client_left"})
    assert len(evidence.output_ids) == 4
    assert not evidence.complete
    wait_until(lambda: rig.proxy.drain.in_flight == 0)


def test_what_came_is_checked_whatever_breaks_after_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that finds a way to break the proxy is not rid of what it has said."""

    def mask(*_: object, **__: object) -> bytes:
        raise TypeError("broken")

    monkeypatch.setattr("proxy.relay.secret.Secret.mask", mask)
    rig.backend.script = wire.stream()
    answer = rig.chat(stream=True)
    assert b"internal_error" in answer.content
    evidence = _evidence(rig, answer.headers["x-countersign-id"])
    assert evidence.text == "One two three"
    assert len(evidence.output_ids) == 3
