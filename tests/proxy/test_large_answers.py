"""What is done with all bytes of a large answer at once is not done on the event loop, where others would wait."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from policies.settings import hash_key
from proxy.relay import inline
from proxy.relay.record import Record
from proxy.tap.base import LARGE
from tests.proxy.conftest import Rig
from tests.support import wire
from tests.support.fake_backend import Step

INLINE = {"x-countersign-mode": "inline"}
SMALL_BODY = wire.whole(wire.BODY)
LARGE_BODY = wire.whole(wire.BODY.replace(b"One two three", b"x" * 2 * LARGE))
LARGE_FRAME = wire.CONTENT[0].replace(b'"One"', json.dumps("x" * 2 * LARGE).encode())


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> dict[bool, set[str]]:
    """Names of the threads that hashed, or added a verdict to, what is large or not."""
    found: dict[bool, set[str]] = {True: set(), False: set()}
    show, add = Record.show, inline.add_verdict

    def shown(self: Record, data: bytes) -> None:
        found[len(data) > LARGE].add(threading.current_thread().name)
        show(self, data)

    def added(body: bytes, verification: dict[str, Any]) -> bytes | None:
        found[len(body) > LARGE].add(threading.current_thread().name)
        return add(body, verification)

    monkeypatch.setattr(Record, "show", shown)
    monkeypatch.setattr(inline, "add_verdict", added)
    return found


@pytest.mark.parametrize("kind", ["whole", "inline", "stream", "error"])
def test_large_answers_take_a_thread(rig: Rig, threads: dict[bool, set[str]], kind: str) -> None:
    refusal = b'{"error": {"message": "%b"}}'
    scripts: dict[str, tuple[list[Step], list[Step]]] = {
        "stream": (
            [*wire.stream()],
            [wire.SSE_HEAD, *map(wire.chunk, [wire.ROLE, LARGE_FRAME, *wire.FRAMES[2:]]), wire.LAST_CHUNK],
        ),
        "error": ([wire.whole(refusal % b"", 400)], [wire.whole(refusal % (b"x" * 2 * LARGE), 400)]),
    }
    small, large = scripts.get(kind, ([SMALL_BODY], [LARGE_BODY]))
    headers = INLINE if kind == "inline" else None
    with rig.worker("pass", hash_key("")):
        for script in (small, large):
            rig.backend.script = script
            answer = rig.chat(headers=headers, stream=kind == "stream")
            assert answer.status_code == (400 if kind == "error" else 200)
            assert kind != "inline" or answer.json()["countersign"]["verdict"] == "pass"
    assert len(answer.content) > 2 * LARGE
    assert threads[False]
    assert threads[True]
    assert threads[True].isdisjoint(threads[False])
