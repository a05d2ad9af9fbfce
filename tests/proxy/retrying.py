"""What tests of the policy `retry` share: two or three backends, and who rejects whose answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx

from policies.settings import hash_key
from tests.proxy.conftest import Rig
from tests.support import wire
from tests.support.fake_backend import FakeBackend

INLINE = {"x-countersign-mode": "inline"}
RETRY = {"on_reject": "retry"}
OTHER = wire.BODY.replace(b"One two three", b"Uno due tre")
NO_TURNS = {"suspect_share": 0}
NOBODY = hash_key("")
FIRST_BAD = {"b1": "reject", "b2": "pass", "b3": "pass"}
ALL_BAD = {"b1": "reject", "b2": "reject", "b3": "reject"}

Pair = Callable[..., Rig]


def pair_of(make_rig: Callable[..., Rig], second: FakeBackend) -> Pair:
    """Makes a rig with two or more backends; all but `b1` are suspects without a turn, so `b1` is asked first."""

    def make(*more_urls: str, **sections: Any) -> Rig:
        rig = make_rig(second.url, *more_urls, **{"verification": RETRY, "standing": NO_TURNS} | sections)
        rig.backend.script, second.script = [wire.whole(wire.BODY)], [wire.whole(OTHER)]
        for name in ["b2"] + ["b3"] * len(more_urls):
            rig.stand(name, "suspect")
        return rig

    return make


def error_of(response: httpx.Response) -> dict[str, Any]:
    """Its error, which is a whole one."""
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error
