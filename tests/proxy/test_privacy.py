"""What the proxy leaves of prompts and answers, by key and by key of encryption."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from policies.settings import Settings, hash_key, keeps
from tests.proxy.conftest import Rig
from tests.support import wire
from tests.support.waiting import wait_until
from verifier_pool import worker
from verifier_pool.link.queue import content_keys, evidence_key
from verifier_pool.link.sealing import is_sealed, new_key
from verifier_pool.roles import Roles

CANARY = "a canary that nobody else says"


def decided(rig: Rig, settings: Settings, key: str) -> tuple[dict[str, Any], bytes]:
    """An answer to this key: its verification, and its evidence as it lay in Redis before that."""
    rig.backend.script = [wire.whole(wire.BODY)]
    asked = [{"role": "user", "content": CANARY}]
    answer = rig.chat({"authorization": f"Bearer {key}"}, messages=asked)
    assert answer.status_code == 200
    id = answer.headers["x-countersign-id"]
    stored = wait_until(lambda: rig.redis.get(evidence_key(id)))
    url = f"redis://127.0.0.1:{rig.redis.connection_pool.connection_kwargs['port']}"
    worker.run(settings.model_copy(update={"redis_url": url}), threading.Event(), Roles(replay=False), burst=True)
    headers = {"authorization": f"Bearer {key}"}
    found = rig.http.get(f"/v1/verifications/{id}?wait=60", headers=headers).json()
    assert found["status"] == "done"
    return found, cast(bytes, stored)


def sections(**storage: str) -> dict[str, object]:
    keys = [{"name": name, "sha256": hash_key(f"sk-{name}"), "retain": name} for name in ("none", "rejects", "all")]
    return {"keys": [*keys, {"name": "unsaid", "sha256": hash_key("sk-unsaid")}], "storage": storage}


@pytest.mark.parametrize(
    ("key", "default"), [("none", "all"), ("rejects", "all"), ("all", "none"), ("unsaid", "all"), ("unsaid", "none")]
)
def test_a_key_says_what_is_kept(make_rig: Callable[..., Rig], key: str, default: str) -> None:
    rig = make_rig(**sections(retain=default))
    found, _ = decided(rig, rig.proxy.services.settings, f"sk-{key}")
    kept = keeps(default if key == "unsaid" else key, found["verdict"])
    assert any(rig.redis.exists(each) for each in content_keys(found["id"])) == kept
    assert bool(rig.redis.keys(f"*case:{found['id']}*")) == kept


def test_evidence_is_sealed_where_there_is_a_key(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(**sections(encryption_keys=new_key()))
    found, stored = decided(rig, rig.proxy.services.settings, "sk-all")
    id = found["id"]
    assert is_sealed(stored)
    assert is_sealed(cast(bytes, rig.redis.get(evidence_key(id))))
    for key in cast("list[bytes]", rig.redis.keys(f"*{id}*")):
        if rig.redis.type(key) == b"string":
            assert CANARY.encode() not in cast(bytes, rig.redis.get(key))
