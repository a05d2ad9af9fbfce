"""The client against proxies that lie: about receipts, about the log, to one and not to another."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from countersign import client as module
from countersign.client import (
    ApiFailed,
    Client,
    ForkedLog,
    ReceiptError,
    TwoReceipts,
    verify_receipt,
)
from policies import head, jws, receipt
from policies.receipt import Facts
from policies.verification import public, unverified
from tests.policies.receipt_vectors import path, proof, tree

LOG = "5f" * 16


class Proxy:
    """As much of a proxy as the client sees, with a log that can be tampered with; asked by `client()`."""

    def __init__(self) -> None:
        self.key = jws.new_key()
        self.published = [self.key]
        self.log = LOG
        self.tokens: dict[str, str] = {}
        self.verifications: dict[str, dict[str, Any]] = {}
        self.leaves: list[bytes] = []
        self.clock = 1000.0
        self.asked: list[str] = []
        self.pending = 0
        self.fails: dict[str, httpx.Response] = {}
        self.unproven = 0

    def client(self, **more: Any) -> Client:
        return Client("http://proxy/", "sk-key", http=httpx.Client(transport=httpx.MockTransport(self._answer)), **more)

    def add(self, number: int, request: bytes = b"asked", served: bytes = b"served", reason: str = "x") -> str:
        """A response with its receipt, in place of one that it had; returns its id."""
        id = f"{number:032x}"
        facts = Facts(request=receipt.digest(request), served=receipt.digest(served))
        self.verifications[id] = unverified(id, reason, None, 5.0)
        said = receipt.statement(self.verifications[id], facts, 6.0)
        self.tokens[id] = jws.sign(receipt.encode(said), self.key, receipt.KIND)
        self.leaves.append(receipt.leaf_of(self.tokens[id]))
        return id

    def head(self) -> str:
        self.clock += 1
        said = head.encode(self.log, len(self.leaves), tree(self.leaves), self.clock)
        return jws.sign(said, self.key, head.KIND)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.path)
        if request.url.path in self.fails:
            return self.fails[request.url.path]
        if request.url.path == "/.well-known/countersign-keys.json":
            return httpx.Response(200, json=jws.jwk_set(map(jws.public_bytes, self.published)))
        assert request.headers["authorization"] == "Bearer sk-key"
        query = {name: int(value) for name, value in request.url.params.items() if value.isdigit()}
        match request.url.path.split("/")[2:]:
            case ["log", "head"]:
                return httpx.Response(200, json={"head": self.head()}) if self.leaves else missing("empty_log")
            case ["log", "consistency"]:
                first, second = query["first"], query["second"]
                if not 0 < first <= second <= len(self.leaves):
                    return missing("not_found")
                shown = [each.hex() for each in proof(first, self.leaves[:second])]
                return httpx.Response(200, json={"proof": shown})
            case ["verifications", id, "receipt"] if id in self.tokens:
                self.unproven -= 1
                log = {"index": 0, "head": None, "proof": None} if self.unproven >= 0 else self.shown(id)
                return httpx.Response(200, json={"receipt": self.tokens[id], "log": log})
            case ["verifications", id] if id in self.tokens:
                self.pending -= 1
                found = public(self.verifications[id])
                return httpx.Response(200, json=found if self.pending < 0 else found | {"status": "pending"})
        return missing("not_found")

    def shown(self, id: str) -> dict[str, Any]:
        index = self.leaves.index(receipt.leaf_of(self.tokens[id]))
        return {"index": index, "head": self.head(), "proof": [each.hex() for each in path(index, self.leaves)]}


def missing(code: str) -> httpx.Response:
    return httpx.Response(404, json={"error": {"message": "no", "type": "x", "param": None, "code": code}})


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Proxy:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    return Proxy()


def test_a_receipt_is_checked_and_the_log_pinned(proxy: Proxy, tmp_path: Path) -> None:
    pins = tmp_path / "pins"
    with proxy.client(pins=pins) as client:
        assert client.watch() is None
        for number in range(6):
            found = client.receipt(proxy.add(number), request=b"asked", served=b"served")
            assert (found.verdict, found.id) == ("unverified", f"{number:032x}")
            assert client.head is not None
            assert client.head.size == number + 1
    assert stat.S_IMODE(pins.stat().st_mode) == 0o600
    again = proxy.client(pins=pins)
    assert again.head == client.head
    proxy.add(6)
    assert again.watch() is again.head
    assert again.head is not None
    assert again.head.size == 7
    assert proxy.asked.count("/.well-known/countersign-keys.json") == 2  # once in each client


def test_a_verdict_is_awaited(proxy: Proxy) -> None:
    id = proxy.add(0)
    proxy.pending = 3
    assert proxy.client().verification(id)["verdict"] == "unverified"
    proxy.pending = 10**9
    with pytest.raises(TimeoutError, match="no verdict"):
        proxy.client().verification(id, wait=0.0)
    with pytest.raises(ApiFailed, match="404 not_found") as caught:
        proxy.client().receipt("f" * 32)
    assert (caught.value.status, caught.value.code) == (404, "not_found")


def test_a_proof_is_awaited(proxy: Proxy) -> None:
    id = proxy.add(0)
    proxy.unproven = 3
    assert proxy.client().receipt(id).id == id
    proxy.unproven = 10**9
    with pytest.raises(ReceiptError, match="none that is proven"):
        proxy.client().receipt(id)


@pytest.mark.parametrize("given", [{"request": b"other"}, {"served": b"other"}])
def test_it_is_about_these_very_bytes(proxy: Proxy, given: dict[str, bytes]) -> None:
    with pytest.raises(ReceiptError, match="has another hash"):
        proxy.client().receipt(proxy.add(0), **given)  # type: ignore[arg-type]


def test_another_receipt_is_refused(proxy: Proxy) -> None:
    first, second = proxy.add(0), proxy.add(1)
    proxy.tokens[first] = proxy.tokens[second]
    with pytest.raises(ReceiptError, match="is about"):
        proxy.client().receipt(first)


@pytest.mark.parametrize(
    "changed", [{"verdict": "pass"}, {"reasons": []}, {"backend": "b"}, {"more": 1}, {"created": None}]
)
def test_a_verification_that_is_not_the_receipts_is_refused(proxy: Proxy, changed: dict[str, Any]) -> None:
    id = proxy.add(0)
    proxy.verifications[id] |= changed
    with pytest.raises(ReceiptError, match="of another verification"):
        proxy.client().receipt(id)


def test_numbers_beyond_doubles_are_the_receipts(proxy: Proxy) -> None:
    id = proxy.add(0)
    large = {"created": 1e300, "decided": -0.0, "tokens": 2**60 + 1}
    proxy.verifications[id] |= large
    said = receipt.statement(proxy.verifications[id], Facts(), 6.0)
    proxy.tokens[id] = jws.sign(receipt.encode(said), proxy.key, receipt.KIND)
    proxy.leaves[0] = receipt.leaf_of(proxy.tokens[id])
    assert proxy.client().receipt(id).id == id


@pytest.mark.parametrize("again", [False, True])
def test_a_second_receipt_of_one_response_convicts(proxy: Proxy, again: bool, tmp_path: Path) -> None:
    """The log only grows, and each receipt is in it: what gives it away is that there was one."""
    pins = tmp_path / "pins" if again else None
    client = proxy.client(pins=pins)
    for number in range(5):
        seen = client.receipt(proxy.add(number))
    proxy.add(4, reason="y")
    proxy.add(5)
    for _ in range(2):
        with pytest.raises(TwoReceipts, match="two receipts of") as caught:
            (proxy.client(pins=pins) if again else client).receipt(seen.id)
        assert caught.value.leaf == seen.leaf.hex()
        second = verify_receipt(caught.value.token, client.keys())
        assert (second.id, second.verification["reasons"], seen.verification["reasons"]) == (seen.id, ["y"], ["x"])
    assert client.receipt(f"{3:032x}")
    assert client.receipt(f"{5:032x}")


def test_receipts_that_are_remembered_are_bounded(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "MOST_LEAVES", 2)
    client = proxy.client(pins=tmp_path / "pins")
    for number in range(4):
        client.receipt(proxy.add(number))
    assert list(json.loads((tmp_path / "pins").read_text())["leaves"]) == [f"{2:032x}", f"{3:032x}"]


def test_pins_without_receipts_are_read(proxy: Proxy, tmp_path: Path) -> None:
    pins = tmp_path / "pins"
    proxy.client(pins=pins).receipt(proxy.add(0))
    said = json.loads(pins.read_text())
    del said["leaves"]
    pins.write_text(json.dumps(said))
    assert proxy.client(pins=pins).receipt(f"{0:032x}")
    wrong: list[Any] = [[1], 5, {"x": "y"}, {"0" * 32: 5}, None]
    for damaged in wrong:
        pins.write_text(json.dumps(said | {"leaves": damaged}))
        with pytest.raises(ReceiptError, match="holds no pins"):
            proxy.client(pins=pins)


def test_a_receipt_that_is_not_in_the_log_is_refused(proxy: Proxy) -> None:
    id = proxy.add(0)
    proxy.add(1)
    log = proxy.shown(id)
    for changed in (
        log | {"index": 1},
        log | {"proof": []},
        log | {"proof": None},
        log | {"index": None},
        log | {"index": True},
        log | {"head": None},
        log | {"proof": ["xy"]},
        None,
    ):
        answer = httpx.Response(200, json={"receipt": proxy.tokens[id], "log": changed})
        proxy.fails[f"/v1/verifications/{id}/receipt"] = answer
        with pytest.raises(ReceiptError):
            proxy.client().receipt(id)


def test_only_trusted_keys_will_do(proxy: Proxy) -> None:
    id, other = proxy.add(0), jws.public_bytes(jws.new_key())
    with pytest.raises(ReceiptError, match="not among those that are trusted"):
        proxy.client(keys={jws.kid_of(other): other}).receipt(id)
    mine = jws.public_bytes(proxy.key)
    assert proxy.client(keys={jws.kid_of(mine): mine}).receipt(id)
    assert "/.well-known/countersign-keys.json" not in proxy.asked


def test_keys_may_be_rotated(proxy: Proxy, tmp_path: Path) -> None:
    client = proxy.client(pins=tmp_path / "pins")
    client.receipt(proxy.add(0))
    old, proxy.key = proxy.key, jws.new_key()
    proxy.published = [proxy.key, old]
    client.receipt(proxy.add(1))
    client.receipt(f"{0:032x}")  # by the old one
    proxy.published = [proxy.key]
    assert proxy.client(pins=tmp_path / "pins").watch() is not None


def _drop(proxy: Proxy) -> None:
    del proxy.leaves[2]


def _cut(proxy: Proxy) -> None:
    del proxy.leaves[-1]


def _rewrite(proxy: Proxy) -> None:
    proxy.leaves[2] = receipt.leaf_of("another")


def _rewrite_and_go_on(proxy: Proxy) -> None:
    _rewrite(proxy)
    for number in range(10, 15):
        proxy.add(number)


def _insert(proxy: Proxy) -> None:
    proxy.leaves.insert(0, receipt.leaf_of("another"))


def _empty(proxy: Proxy) -> None:
    proxy.leaves.clear()


def _begin_another(proxy: Proxy) -> None:
    proxy.log = "0" * 32


@pytest.mark.parametrize("tamper", [_drop, _cut, _rewrite, _rewrite_and_go_on, _insert, _empty, _begin_another])
def test_a_log_that_was_tampered_with_is_found_out(proxy: Proxy, tamper: Any, tmp_path: Path) -> None:
    client = proxy.client(pins=tmp_path / "pins")
    for number in range(5):
        proxy.add(number)
    before = client.watch()
    assert before is not None
    tamper(proxy)
    with pytest.raises(ForkedLog) as caught:
        client.watch()
    assert caught.value.before == before.token
    # Both heads are signed: whoever is shown them need not believe the client.
    if caught.value.after:
        after = head.verify_head(caught.value.after, client.keys())
        assert (after.size, after.log) == (len(proxy.leaves), proxy.log)
    # And what was seen stays pinned, in this process and the next.
    assert client.head is before
    with pytest.raises(ForkedLog):
        proxy.client(pins=tmp_path / "pins").watch()


def test_a_log_shown_differently_to_two_is_found_out_by_comparing(proxy: Proxy) -> None:
    mine, theirs = proxy.client(), proxy.client()
    for number in range(3):
        proxy.add(number)
    mine.watch()
    _rewrite(proxy)
    seen = theirs.watch()
    assert seen is not None
    with pytest.raises(ForkedLog, match="different hashes"):
        head.follow(mine.head, seen)


def test_trouble_is_no_accusation(proxy: Proxy) -> None:
    client = proxy.client()
    for number in range(3):
        proxy.add(number)
    client.watch()
    proxy.add(3)
    for status in (500, 503, 429, 401):
        proxy.fails["/v1/log/consistency"] = httpx.Response(status, content=b"<html>")
        with pytest.raises(ApiFailed, match=str(status)):
            client.watch()
    proxy.fails.clear()
    assert client.watch() is client.head


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"{", b"\xff", b"[" * 100_000, b'{"head": 5}', b"{}"])
def test_garbage_is_refused(proxy: Proxy, body: bytes) -> None:
    proxy.fails["/v1/log/head"] = httpx.Response(200, content=body)
    with pytest.raises((ReceiptError, ApiFailed)):
        proxy.client().watch()
    proxy.fails["/.well-known/countersign-keys.json"] = httpx.Response(200, content=body)
    with pytest.raises((ReceiptError, ApiFailed)):
        proxy.client().receipt(proxy.add(0))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"keys": {"keys": []}, "head": "x"}', '{"keys": 5, "head": null}']
)
def test_pins_that_are_damaged_are_no_pins(proxy: Proxy, text: str, tmp_path: Path) -> None:
    (tmp_path / "pins").write_text(text)
    with pytest.raises(ReceiptError):
        proxy.client(pins=tmp_path / "pins")


def test_it_needs_none_of_what_serves_and_verifies() -> None:
    """It is for other people's apps, which may have an rq of their own with keys of its own."""
    code = """
import os, sys
import rq
import countersign.client
assert "RQ_KEY_PREFIX" not in os.environ
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"proxy", "verifier_pool", "benchmarks", "aiohttp"}))
"""
    # The verifier pool, which other tests import, sets it.
    environ = {name: value for name, value in os.environ.items() if name != "RQ_KEY_PREFIX"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("\n", "")
