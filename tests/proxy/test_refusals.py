"""Requests that the backend refuses with a status 4xx: what the client gets, and who is to blame."""

from __future__ import annotations

from typing import cast

import httpx
import msgspec
import pytest

from policies.unit import Unit
from tests.proxy.conftest import CHAT, Rig
from tests.support import wire
from tests.support.fake_backend import Close, PeerCloses, Step
from tests.support.waiting import PATIENCE, wait_until
from verifier_pool.link.queue import units_key


def _last_unit(rig: Rig) -> Unit:
    """What the last response that nobody checked says about its backend."""
    (told,) = cast("list[bytes]", rig.redis.lrange(units_key("b1"), -1, -1))
    return msgspec.json.decode(told, type=Unit)


@pytest.mark.parametrize(
    ("status", "reason"),
    [(status, "client_error") for status in (400, 401, 404, 413, 418, 422, 499)]
    + [(status, "no_answer") for status in (408, 429)],
)
def test_client_errors_keep_status_body_and_retry_after(rig: Rig, status: int, reason: str) -> None:
    rig.backend.script = [wire.whole(b'{"error": {"message": "no"}}', status, "application/json", "retry-after: 7")]
    response = rig.chat(stream=True)
    assert response.status_code == status
    assert response.content == b'{"error": {"message": "no"}}'
    assert response.headers["retry-after"] == "7"
    verdict = rig.verdict(response.headers["x-countersign-id"])
    assert (verdict["verdict"], verdict["reasons"]) == ("unverified", [reason])
    unit = _last_unit(rig)
    blame = "request" if reason == "client_error" else "backend"
    assert (unit.id, unit.undecided, unit.blame) == (verdict["id"], reason, blame)


@pytest.mark.parametrize(
    "rest",
    [
        [wire.head(400, "application/json", "content-length: 99"), b'{"err', Close()],
        [wire.whole(b"no", 400, "application/json", "content-encoding: br")],
        [wire.whole(b"x" * 2_000_000, 400, "text/plain")],
    ],
    ids=["torn", "compressed", "long"],
)
def test_a_refusal_that_the_client_does_not_get_is_none(rig: Rig, rest: list[Step]) -> None:
    rig.backend.script = rest
    response = rig.chat()
    assert response.status_code == 502
    assert rig.verdict(response.headers["x-countersign-id"])["reasons"] == ["no_answer"]
    assert (_last_unit(rig).undecided, _last_unit(rig).blame) == ("no_answer", "backend")


def test_a_client_that_leaves_a_refusal_blames_nobody(rig: Rig) -> None:
    rig.redis.delete(units_key("b1"))
    rig.backend.script = [wire.head(400, "application/json", "content-length: 99"), b'{"err', PeerCloses()]
    with pytest.raises(httpx.ReadTimeout):
        rig.http.post("/v1/chat/completions", json=CHAT, timeout=1.0)
    assert rig.backend.last.peer_closed.wait(PATIENCE)
    wait_until(lambda: rig.redis.llen(units_key("b1")))
    assert (_last_unit(rig).undecided, _last_unit(rig).blame) == ("client_error", "request")
    assert rig.redis.llen(units_key("b1")) == 1
    assert _last_unit(rig).id not in rig.open_ids()
