"""Evidence bundles and reports over HTTP: whole, for whom they are, and for nobody else."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import orjson
import pytest

from policies import bundle, jws
from policies.examination import Examination, Outcome, examine
from policies.settings import hash_key
from proxy.api import evidence
from tests.proxy.conftest import Rig
from tests.support import wire
from tests.support.running import settings_for
from tests.verifier_pool.rig import Pool
from verifier_pool import context
from verifier_pool.link.queue import PREFIX, evidence_key
from verifier_pool.link.sealing import Sealer, is_sealed
from verifier_pool.store import Store

NAMES: dict[str, dict[str, Any]] = {
    "ann": {},
    "bob": {},
    "shy": {"evidence": "none"},
    "auditor": {"evidence": "all"},
    "admin": {"admin": True},
}
KEYS = [{"name": name, "sha256": hash_key(f"sk-{name}"), **more} for name, more in NAMES.items()]


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer sk-{name}"}


@contextmanager
def working(rig: Rig, **sections: Any) -> Iterator[None]:
    """A real worker decides, in a thread of this process."""
    stop, settings = threading.Event(), settings_for(rig.backend.url, **sections)
    store = Store(rig.redis, verdict_ttl=600, sealer=Sealer.of(settings.storage))
    context.use(context.Context(settings, store, {}, b"secret"))
    thread = Pool(rig.redis, settings, stop=stop).start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        context.use(None)


def answered(rig: Rig, name: str = "ann", **fields: Any) -> str:
    """Id of an answer that has its verdict."""
    rig.backend.script = wire.stream() if fields.get("stream") else [wire.whole(wire.BODY)]
    answer = rig.chat(headers=bearer(name), **fields).raise_for_status()
    id = answer.headers["x-countersign-id"]
    found = rig.http.get(f"/v1/verifications/{id}?wait=60", headers=bearer(name)).raise_for_status().json()
    assert found["status"] == "done"
    return str(id)


def ask(rig: Rig, id: str, name: str = "ann", what: str = "evidence") -> httpx.Response:
    return rig.http.get(f"/v1/verifications/{id}/{what}?wait=60", headers=bearer(name))


def examined(rig: Rig, data: bytes) -> Examination:
    keys = rig.http.get("/.well-known/countersign-keys.json").raise_for_status().json()
    return examine(data, jws.keys_in(keys))


@pytest.mark.parametrize("stream", [False, True])
def test_a_bundle_shows_what_was_judged(make_rig: Callable[..., Rig], stream: bool) -> None:
    rig = make_rig(keys=KEYS)
    with working(rig):
        id = answered(rig, stream=stream)
    response = ask(rig, id).raise_for_status()
    assert response.headers["content-type"] == bundle.MEDIA_TYPE
    assert response.headers["content-disposition"] == f'attachment; filename="{id}.countersign"'
    assert response.headers["cache-control"] == "no-store"
    found = examined(rig, response.content)
    assert found.outcome is Outcome.VERIFIED, found.faults
    assert found.receipt is not None
    assert found.receipt.verification == rig.http.get(f"/v1/verifications/{id}", headers=bearer("ann")).json()
    assert (found.choices[0].request, found.choices[0].owner) == (rig.backend.last.body, "")
    asked = orjson.loads(found.choices[0].asked)
    assert asked["model"] == "m"
    assert "seed" not in asked
    assert "request" not in {each.about for each in found.faults}
    assert ask(rig, id).content == response.content, "the same file, as long as no head of the log is signed"
    report = ask(rig, id, what="report").raise_for_status()
    assert report.headers["content-type"] == "text/html; charset=utf-8"
    policy = report.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "frame-ancestors 'none'" in policy
    assert "sandbox" in policy
    assert id in report.text


@pytest.mark.parametrize(
    "fields",
    [{}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}, {"seed": 7, "temperature": 0}],
    ids=["whole", "stream", "usage", "seed"],
)
def test_the_clients_own_bytes_are_held_against_it(make_rig: Callable[..., Rig], fields: dict[str, Any]) -> None:
    rig = make_rig(keys=KEYS)
    with working(rig):
        rig.backend.script = wire.stream() if fields.get("stream") else [wire.whole(wire.BODY)]
        answer = rig.chat(headers=bearer("ann"), **fields).raise_for_status()
        data = ask(rig, answer.headers["x-countersign-id"]).raise_for_status().content
    keys = jws.keys_in(rig.http.get("/.well-known/countersign-keys.json").raise_for_status().json())
    found = examine(data, keys, request=answer.request.content, answer=answer.content)
    assert found.outcome is Outcome.VERIFIED, found.faults
    (words,) = (each.words for each in found.findings if each.about == "answer")
    assert "it says what that answer says" in words
    assert "sampling" in {each.about for each in found.findings}


def test_who_may_read_it(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(keys=KEYS)
    with working(rig):
        id, other = answered(rig), answered(rig, "shy")
    for what in ("evidence", "report"):
        assert {name: ask(rig, id, name, what).status_code for name in NAMES} == {
            "ann": 200,
            "bob": 404,
            "shy": 403,
            "auditor": 200,
            "admin": 200,
        }
        assert ask(rig, other, "shy", what).status_code == 403
        assert ask(rig, id, "bob", what).content == ask(rig, "0" * 32, "bob", what).content
        assert ask(rig, "0" * 32, "admin", what).status_code == 404
        assert rig.http.get(f"/v1/verifications/{id}/{what}").status_code == 401


def test_what_there_is_no_evidence_of(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(keys=KEYS)

    def code(id: str) -> str:
        response = ask(rig, id)
        assert response.status_code == 404
        return str(response.json()["error"]["code"])

    rig.backend.script = [wire.whole(b'{"object":"list","data":[]}')]
    unverified = rig.http.post("/v1/embeddings", json={"model": "m", "input": "x"}, headers=bearer("ann"))
    assert code(unverified.headers["x-countersign-id"]) == "no_evidence"
    rig.backend.script = [wire.whole(wire.BODY)]
    pending = rig.chat(headers=bearer("ann")).headers["x-countersign-id"]
    response = rig.http.get(f"/v1/verifications/{pending}/evidence", headers=bearer("ann"))
    assert (response.status_code, response.json()["error"]["code"]) == (404, "evidence_pending")
    with working(rig):
        id, expired = answered(rig), answered(rig)
    for key in rig.redis.scan_iter(f"{PREFIX}case:{id}:*"):
        rig.redis.delete(key)
    rig.redis.delete(evidence_key(expired))
    assert (code(id), code(expired)) == ("no_evidence", "no_evidence")


def test_what_is_not_to_be_kept_is_not(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(keys=KEYS, storage={"retain": "none"})
    with working(rig):
        id = answered(rig)
    assert ask(rig, id).json()["error"]["code"] == "no_evidence"
    assert list(rig.redis.scan_iter(f"{PREFIX}case:{id}:*")) == []


def test_encrypted_at_rest(make_rig: Callable[..., Rig]) -> None:
    storage = {"encryption_keys": base64.b64encode(bytes(32)).decode()}
    rig = make_rig(keys=KEYS, storage=storage)
    with working(rig, storage=storage):
        id = answered(rig)
    (key,) = rig.redis.scan_iter(f"{PREFIX}case:{id}:*")
    stored = rig.redis.get(key)
    assert isinstance(stored, bytes)
    assert is_sealed(stored)
    assert examined(rig, ask(rig, id).raise_for_status().content).outcome is Outcome.VERIFIED


def test_too_large_for_a_bundle(make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(keys=KEYS)
    with working(rig):
        id = answered(rig)
    monkeypatch.setattr(evidence, "MOST_SHOWN", 100)
    assert ask(rig, id).status_code == 200
    assert orjson.loads(ask(rig, id, what="report").content)["error"]["code"] == "evidence_too_large"
    monkeypatch.setattr(bundle, "MAX_BYTES", 100)
    assert orjson.loads(ask(rig, id).content)["error"]["code"] == "evidence_too_large"
