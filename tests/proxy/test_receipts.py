"""Receipts over HTTP: hashes of what really went where, proofs, the log, and who may see what."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from policies import jws, merkle
from policies.errors import StoreUnavailable
from policies.head import follow, verify_head, verify_inclusion
from policies.receipt import NOTHING, Receipt, digest, seed_commitment, verify_receipt
from policies.served import compare_served
from policies.settings import ReceiptSettings, hash_key
from policies.verification import unverified
from tests.proxy.conftest import Rig
from tests.support import wire
from tests.support.fake_backend import Close, FakeBackend, Received, Step, Until
from tests.support.redises import wait_until
from tests.support.running import settings_for
from tests.support.waiting import PATIENCE
from tests.verifier_pool.rig import Pool
from verifier_pool import context
from verifier_pool.link.queue import evidence_key, verdict_key
from verifier_pool.link.receipts import LAST, Settler
from verifier_pool.link.signing import RECEIPT_KEYS, Signer
from verifier_pool.store import Store

KEYS = [{"name": "ann", "sha256": hash_key("sk-ann")}, {"name": "bob", "sha256": hash_key("sk-bob")}]
ANN, BOB = ({"authorization": f"Bearer sk-{name}"} for name in ("ann", "bob"))
SEED = jws.key_text(bytes([7]) * 32)
LIST = wire.whole(b'{"object":"list","data":[]}')


@pytest.fixture
def make(make_rig: Callable[..., Rig]) -> Callable[..., Rig]:
    """Makes rigs whose Redis is empty."""

    def made(**sections: Any) -> Rig:
        rig = make_rig(**sections)
        rig.redis.flushall()
        return rig

    return made


@contextmanager
def working(rig: Rig) -> Iterator[None]:
    """A real worker decides, in a thread of this process."""
    stop, settings = threading.Event(), settings_for(rig.backend.url)
    context.use(context.Context(settings, Store(rig.redis, verdict_ttl=600), {}, b"secret"))
    thread = Pool(rig.redis, settings, stop=stop).start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        context.use(None)


def embed(rig: Rig, headers: dict[str, str] | None = None) -> httpx.Response:
    """An answer that is on record at once, unverified."""
    rig.backend.script = [LIST]
    return rig.http.post("/v1/embeddings", json={"model": "m", "input": "x"}, headers=headers).raise_for_status()


def published(rig: Rig) -> dict[str, bytes]:
    return jws.keys_in(rig.http.get("/.well-known/countersign-keys.json").raise_for_status().json())


def receipt_of(rig: Rig, answer: httpx.Response, headers: dict[str, str] | None = None) -> Receipt:
    """The receipt of an answer, checked with what the proxy publishes."""
    id = answer.headers["x-countersign-id"]
    found = rig.http.get(f"/v1/verifications/{id}/receipt?wait=60", headers=headers).raise_for_status().json()
    keys = published(rig)
    assert (found["id"], found["object"]) == (id, "receipt")
    receipt = verify_receipt(found["receipt"], keys, id=id, request=answer.request.content)
    head = verify_head(found["log"]["head"], keys)
    path = [bytes.fromhex(each) for each in found["log"]["proof"]]
    verify_inclusion(head, receipt.leaf, found["log"]["index"], path)
    return receipt


def test_what_has_no_evidence_has_a_receipt_too(make: Callable[..., Rig]) -> None:
    rig = make()
    answer = embed(rig)
    found = receipt_of(rig, answer)
    assert (found.verdict, found.verification["reasons"]) == ("unverified", ["endpoint"])
    assert (found.statement["declared"]["backend"], found.statement["declared"]["model"]) == ("b1", "m")
    assert found.hashes["sent"] == digest(rig.backend.last.body)
    assert found.hashes["served"] == digest(answer.content)
    assert (found.hashes["evidence"], found.statement["seed"]) == (None, None)


@pytest.mark.parametrize("mode", ["async", "inline"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_judged(make: Callable[..., Rig], mode: str, stream: bool) -> None:
    rig = make()
    rig.backend.script = wire.stream() if stream else [wire.whole(wire.BODY)]
    with working(rig):
        answer = rig.chat(headers={"x-countersign-mode": mode}, stream=stream)
        found = receipt_of(rig, answer)
    id = found.id
    assert found.verification == rig.http.get(f"/v1/verifications/{id}").json()
    evidence = rig.evidence(id)
    assert found.hashes["sent"] == digest(rig.backend.last.body)
    assert found.hashes["evidence"] == digest(rig.redis.get(evidence_key(id)))  # type: ignore[arg-type]
    assert found.hashes["replay"] is not None
    assert found.statement["seed"] == seed_commitment(id, [evidence.sampling.seed])
    assert str(evidence.sampling.seed) not in str(found.statement)
    assert found.statement["times"] == {
        "first_token": evidence.first_token_seconds,
        "total": evidence.total_seconds,
    }
    compare_served(found, answer.content)
    assert (b"countersign" in answer.content) == (mode == "inline")


async def _unavailable(*_: object) -> None:
    raise StoreUnavailable("away")


@pytest.mark.parametrize(("stream", "content"), [(False, "short"), (True, "x" * 600_000)])
@pytest.mark.parametrize(
    ("broken", "does", "reason"),
    [
        ("proxy.room.Room.take", lambda *_: False, "backlog"),
        ("proxy.room.Backlog.admits", lambda *_: False, "backlog"),
        ("proxy.store.Store.open", _unavailable, "store_unavailable"),
        ("proxy.recorder._packed", lambda *_: 1 / 0, "internal_error"),
        ("proxy.recorder.Recorder._store", lambda *_: 1 / 0, "internal_error"),
    ],
)
def test_what_was_served_is_named_although_it_is_not_judged(
    make: Callable[..., Rig],
    monkeypatch: pytest.MonkeyPatch,
    stream: bool,
    content: str,
    broken: str,
    does: Any,
    reason: str,
) -> None:
    rig = make()
    rig.backend.script = wire.stream() if stream else [wire.whole(wire.BODY)]
    monkeypatch.setattr(broken, does)
    answer = rig.chat(messages=[{"role": "user", "content": content}], stream=stream)
    wait_until(lambda: rig.redis.exists(verdict_key(answer.headers["x-countersign-id"])))
    found = receipt_of(rig, answer)
    assert found.verification["reasons"] == [reason]
    assert found.hashes["sent"] == digest(rig.backend.last.body)
    compare_served(found, answer.content)


def test_large_requests_are_hashed_too(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.backend.script = [wire.whole(b"{}", 400)]
    answer = rig.chat(messages=[{"role": "user", "content": "x" * 600_000}])
    found = receipt_of(rig, answer)
    assert found.verification["reasons"] == ["client_error"]
    assert found.hashes["sent"] == digest(rig.backend.last.body)
    assert found.hashes["served"] == digest(answer.content)


def test_an_answer_that_took_anothers_place_says_so(make_rig: Callable[..., Rig], second: FakeBackend) -> None:
    rig = make_rig(second.url)
    rig.redis.flushall()
    asked: list[Received] = []

    def script(request: Received) -> list[Step]:
        asked.append(request)
        return [Close()] if len(asked) == 1 else [wire.whole(wire.BODY)]

    rig.backend.script = second.script = script
    with working(rig):
        found = receipt_of(rig, rig.chat().raise_for_status())
    before = found.statement["instead_of"]
    keys = published(rig)
    first = verify_receipt(rig.http.get(f"/v1/verifications/{before}/receipt").json()["receipt"], keys, id=before)
    assert first.verification["reasons"] == ["no_answer"]
    assert (first.statement["instead_of"], first.hashes["served"]) == (None, None)
    assert first.hashes["request"] == found.hashes["request"]
    assert [first.hashes["sent"], found.hashes["sent"]] == [digest(each.body) for each in asked]
    assert first.statement["declared"]["backend"] != found.statement["declared"]["backend"]


def test_nobody_sees_the_receipt_of_another(make: Callable[..., Rig]) -> None:
    rig = make(keys=KEYS)
    answer = embed(rig, ANN)
    path = f"/v1/verifications/{answer.headers['x-countersign-id']}/receipt"
    receipt_of(rig, answer, ANN)
    assert rig.http.get(path).status_code == 401
    theirs, none = rig.http.get(path, headers=BOB), rig.http.get("/v1/verifications/x/receipt", headers=BOB)
    assert (theirs.status_code, theirs.content) == (404, none.content)


def test_there_is_none_before_the_verdict(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.backend.script = [wire.whole(wire.BODY)]
    id = rig.chat().headers["x-countersign-id"]
    answer = rig.http.get(f"/v1/verifications/{id}/receipt")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "receipt_pending")
    rig.evidence(id)
    rig.decide(id, "pass", hash_key(""))  # as an older version does
    answer = rig.http.get(f"/v1/verifications/{id}/receipt")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_receipt")


def test_the_log_is_for_clients_unless_it_is_public(make: Callable[..., Rig]) -> None:
    rig = make(keys=KEYS)
    receipt_of(rig, embed(rig, ANN), ANN)
    paths = ("head", "proof?index=0&size=1", "consistency?first=0&second=0", "entries?start=0&end=0")
    for path in paths:
        assert rig.http.get(f"/v1/log/{path}").status_code == 401
        assert rig.http.get(f"/v1/log/{path}", headers=BOB).status_code in (200, 404)
    assert rig.http.get("/.well-known/countersign-keys.json").status_code == 200
    open_to_all = make(keys=KEYS, receipts={"public_log": True})
    for path in paths:
        assert open_to_all.http.get(f"/v1/log/{path}").status_code in (200, 404)


def test_the_log_over_http(make: Callable[..., Rig]) -> None:
    rig = make()
    empty = rig.http.get("/v1/log/head")
    assert (empty.status_code, empty.json()["error"]["code"]) == (404, "empty_log")
    pinned, receipts = None, []
    for size in range(1, 6):
        receipts.append(receipt_of(rig, embed(rig)))
        found = rig.http.get(f"/v1/log/head?covering={size}").json()
        head = verify_head(found["head"], published(rig))
        assert (head.size, found["size"]) == (size, size)
        first = pinned.size if pinned else 0
        path = rig.http.get(f"/v1/log/consistency?first={first}&second={size}").json()["proof"]
        pinned = follow(pinned, head, [bytes.fromhex(each) for each in path])
    leaves = rig.http.get("/v1/log/entries?start=0&end=5").json()
    assert leaves["leaves"] == [receipt.leaf.hex() for receipt in receipts]
    assert pinned is not None
    assert merkle.root([receipt.leaf for receipt in receipts]) == pinned.root
    for index, receipt in enumerate(receipts):
        shown = rig.http.get(f"/v1/log/proof?index={index}&size=5").json()
        assert shown["leaf"] == receipt.leaf.hex()
        verify_inclusion(pinned, receipt.leaf, index, [bytes.fromhex(each) for each in shown["proof"]])


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("head?covering=2", 404),
        ("head?covering=-1", 422),
        ("proof?index=1&size=1", 404),
        ("proof?index=0&size=2", 404),
        ("proof?index=0", 422),
        ("proof?index=x&size=1", 422),
        (f"proof?index=0&size={2**53}", 422),
        ("consistency?first=1&second=0", 404),
        ("consistency?first=0&second=2", 404),
        ("entries?start=0&end=9", 404),
        ("entries?start=2&end=1", 404),
        ("entries?start=0", 422),
    ],
)
def test_what_is_not_there(rig: Rig, path: str, status: int) -> None:
    rig.redis.flushall()
    receipt_of(rig, embed(rig))
    answer = rig.http.get(f"/v1/log/{path}")
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_the_operators_keys_sign_whatever_is_in_redis(make: Callable[..., Rig]) -> None:
    rig = make(receipts={"signing_keys": SEED})
    key = jws.public_bytes(jws.key_from(jws.key_bytes(SEED)))
    answer = embed(rig)
    assert published(rig) == {jws.kid_of(key): key}
    assert receipt_of(rig, answer).kid == jws.kid_of(key)
    assert not rig.redis.exists(RECEIPT_KEYS)


def test_keys_are_published_for_caches(rig: Rig) -> None:
    answer = rig.http.get("/.well-known/countersign-keys.json")
    assert answer.headers["content-type"] == "application/jwk-set+json"
    assert answer.headers["cache-control"] == "public, max-age=60"
    (key,) = answer.json()["keys"]
    assert set(key) == {"kty", "crv", "x", "kid", "use", "alg"}


def test_a_damaged_log_and_one_out_of_reach_are_our_trouble(make: Callable[..., Rig]) -> None:
    rig = make()
    id = receipt_of(rig, embed(rig)).id
    rig.verdict(embed(rig).headers["x-countersign-id"])
    rig.redis.delete(LAST)
    answer = rig.http.get("/v1/log/head?covering=2")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
    assert rig.http.get(f"/v1/verifications/{id}/receipt").status_code == 200


@pytest.mark.parametrize("status", [200, 400])
def test_an_answer_in_a_stream_that_was_kept_alive_is_hashed_as_it_came(make: Callable[..., Rig], status: int) -> None:
    rig = make(relay={"keepalive": 0.05})
    pinged = threading.Event()
    error = b'{"error": {"message": "no", "type": "x", "param": null, "code": null}}'
    steps = wire.stream() if status == 200 else [wire.whole(error, status)]
    rig.backend.script = [Until(pinged), *steps]
    with working(rig):
        request = rig.http.build_request(
            "POST", "/v1/chat/completions", json={"model": "m", "stream": True, "messages": [{"role": "user"}]}
        )
        answer = rig.http.send(request, stream=True)
        got = b""
        for piece in answer.iter_raw():
            got += piece
            if b": countersign-ping" in got:
                pinged.set()
        found = receipt_of(rig, answer)
    assert got.startswith(b": countersign-ping\n\n")
    compare_served(found, got)


def test_keys_that_nobody_is_told_of_are_counted(make: Callable[..., Rig]) -> None:
    rig = make(receipts={"signing_keys": SEED, "head_seconds": 0.05})
    page = rig.proxy.services.metrics.page
    assert b"countersign_receipts_unpublished_keys 0" in page()
    other = ReceiptSettings.model_validate({"signing_keys": jws.key_text(bytes([8]) * 32)})
    verification = unverified("e" * 32, "backlog", None, 1.0)
    Settler(rig.redis, Signer(rig.redis, other)).settle(verification, None, NOTHING, 100, webhook=False)
    wait_until(lambda: b"countersign_receipts_unpublished_keys 1" in page())


def test_who_waits_for_bundles_keeps_nobody_from_receipts(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make()
    answer = embed(rig)
    found, over, begun = receipt_of(rig, answer), threading.Event(), threading.Semaphore(0)

    def slow(*_: Any) -> bytes:
        begun.release()
        over.wait(PATIENCE)
        return b""

    monkeypatch.setattr("proxy.api.evidence.bundle_of", slow)
    path = f"/v1/verifications/{found.id}/evidence"
    asking = [threading.Thread(target=rig.http.get, args=[path]) for _ in range(6)]
    for each in asking:
        each.start()
    try:
        assert begun.acquire(timeout=PATIENCE)
        assert receipt_of(rig, answer).token == found.token
    finally:
        over.set()
        for each in asking:
            each.join()
