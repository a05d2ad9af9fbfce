"""What a receipt says was served is what the client got, also where that is an error of the proxy's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from policies.receipt import Receipt, digest, verify_receipt
from policies.served import compare_served
from policies.settings import hash_key
from policies.withheld import stands_for
from tests.proxy.conftest import Rig
from tests.proxy.test_receipts import published, receipt_of, working
from tests.support import wire
from tests.support.fake_backend import Close, FakeBackend, Script, Step, Until

BEGUN: list[Step] = [wire.SSE_HEAD, *map(wire.chunk, wire.FRAMES[:3])]
HALF = wire.whole(wire.BODY)[:-40]
SHORT: dict[str, Any] = {"first_byte": 0.3, "idle": 0.3}


@pytest.fixture
def make(make_rig: Callable[..., Rig]) -> Callable[..., Rig]:
    """Makes rigs whose Redis is empty."""

    def made(*urls: str, **sections: Any) -> Rig:
        rig = make_rig(*urls, **sections)
        rig.redis.flushall()
        return rig

    return made


def served(rig: Rig, answer: httpx.Response) -> Receipt:
    """The receipt of what the client was told, held against every byte of it."""
    assert b'"error"' in answer.content
    with working(rig):
        found = receipt_of(rig, answer)
    compare_served(found, answer.content)
    assert b": countersign" in answer.content or found.hashes["served"] == digest(answer.content)
    return found


@pytest.mark.parametrize(
    ("stream", "status", "script"),
    [
        (False, 502, [Close()]),
        (True, 502, [Close()]),
        (False, 502, [HALF, Close()]),
        (False, 502, [wire.whole(b"", 302)]),
        (False, 502, [wire.head(200, "application/json", "content-encoding: gzip"), b"x", Close()]),
        (True, 502, [wire.SSE_HEAD, Close()]),
        (True, 200, [*BEGUN, Close()]),
        (True, 200, [*BEGUN, wire.chunk(b"data: {\n\n"), Close()]),
    ],
)
def test_a_backend_that_breaks(make: Callable[..., Rig], stream: bool, status: int, script: Script) -> None:
    rig = make()
    rig.backend.script = script
    answer = rig.chat(stream=stream)
    assert answer.status_code == status
    assert served(rig, answer).verdict != "pass"


@pytest.mark.parametrize("begun", [[], [HALF], [wire.SSE_HEAD], BEGUN], ids=["nothing", "half", "head", "stream"])
def test_a_backend_that_falls_silent(make: Callable[..., Rig], begun: list[Step]) -> None:
    rig, over = make(timeouts=SHORT), threading.Event()
    rig.backend.script = [*begun, Until(over)]
    try:
        answer = rig.chat(stream=begun != [HALF])
    finally:
        over.set()
    assert answer.status_code == (200 if begun == BEGUN else 504)
    served(rig, answer)


@pytest.mark.parametrize("stream", [False, True])
def test_a_backend_that_cannot_be_reached(make: Callable[..., Rig], stream: bool) -> None:
    rig = make(backends=[{"name": "b", "url": "http://127.0.0.1:1/v1", "model": "m"}])
    answer = rig.chat(stream=stream)
    assert answer.status_code == 503
    assert served(rig, answer).verification["reasons"] == ["no_answer"]


def test_an_error_after_a_comment(make: Callable[..., Rig]) -> None:
    rig, over = make(timeouts=SHORT, relay={"keepalive": 0.05}), threading.Event()
    rig.backend.script = [Until(over)]
    try:
        answer = rig.chat(stream=True)
    finally:
        over.set()
    assert answer.content.startswith(b": countersign-ping\n\n")
    served(rig, answer)


@pytest.mark.parametrize(
    ("stream", "broken"), [(False, "proxy.relay.whole.whole"), (True, "proxy.relay.streamed._end")]
)
def test_an_error_in_the_proxy(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, stream: bool, broken: str
) -> None:
    async def fails(*_: object, **__: object) -> None:
        raise RuntimeError

    rig = make()
    rig.backend.script = wire.stream() if stream else [wire.whole(wire.BODY)]
    monkeypatch.setattr(broken, fails)
    answer = rig.chat(stream=stream)
    assert b"internal_error" in answer.content
    served(rig, answer)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/messages"])
def test_an_error_of_an_endpoint_without_evidence(make: Callable[..., Rig], path: str) -> None:
    rig = make()
    rig.backend.script = [Close()]
    answer = rig.http.post(path, json={"model": "m", "input": "x", "messages": [], "max_tokens": 1})
    assert answer.status_code == 502
    served(rig, answer)


def test_only_the_last_of_several_tries_served_anything(make: Callable[..., Rig], second: FakeBackend) -> None:
    rig = make(second.url)
    rig.backend.script = second.script = [Close()]
    answer = rig.chat()
    last = served(rig, answer)
    before = last.statement["instead_of"]
    token = rig.http.get(f"/v1/verifications/{before}/receipt").json()["receipt"]
    first = verify_receipt(token, published(rig), id=before)
    assert (first.hashes["served"], first.statement["instead_of"]) == (None, None)


@pytest.mark.parametrize("policy", ["block", "retry"])
def test_what_takes_the_place_of_a_rejected_answer_names_it(
    make: Callable[..., Rig], second: FakeBackend, policy: str
) -> None:
    for urls in ((), (second.url,)):
        rig = make(*urls, verification={"on_reject": policy})
        rig.backend.script = second.script = [wire.whole(wire.BODY)]
        with rig.worker("reject", hash_key("")):
            answer = rig.chat(headers={"x-countersign-mode": "inline"})
        assert answer.status_code == 502
        assert stands_for(answer.headers["x-countersign-id"], answer.content)
        assert not stands_for("a" * 32, answer.content)
