"""The record of one response: what it hands to the recorder, and how much that is said to be."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from policies.evidence import Sampling
from policies.settings import BackendSettings, TimeoutSettings
from proxy.generation import Generation
from proxy.relay.clock import Clock
from proxy.relay.record import Record
from proxy.services import Services
from proxy.tap.types import Asked, Prepared

HELD = 1000
BODY = b"{" + b" " * 500 + b"}"


@pytest.mark.parametrize(("sent", "bodies"), [(BODY, len(BODY)), (b"{}", len(BODY) + 2)], ids=["as it came", "another"])
async def test_room_is_asked_for_the_requests_bodies_too(sent: bytes, bodies: int) -> None:
    asked: list[int] = []
    recorder = SimpleNamespace(finished=lambda generation, evidence, size, *more: asked.append(size))
    store = SimpleNamespace(open=_nothing)
    services = cast("Services", SimpleNamespace(recorder=recorder, store=store))
    generation = Generation("a" * 32, owner="o", endpoint="chat", model="m", mode="off", stream=False)
    record = Record(services, generation, Clock(TimeoutSettings()), BODY)
    record.open(BackendSettings(name="b", url="http://127.0.0.1:1/v1", model="m"), stream=False)
    await record.acknowledged()
    record.listen(cast("Any", SimpleNamespace(held=HELD)), _prepared(sent))
    record.evidence()
    assert asked == [HELD + bodies]


@pytest.mark.parametrize("rounds", [0, 3])
async def test_no_answer_goes_on_without_its_intent(rounds: int) -> None:
    """Where that is not for want of Redis."""

    async def broken(_: object) -> None:
        raise ValueError("no intent")

    services = cast("Services", SimpleNamespace(store=SimpleNamespace(open=broken)))
    generation = Generation("a" * 32, owner="o", endpoint="chat", model="m", mode="off", stream=False)
    record = Record(services, generation, Clock(TimeoutSettings()), BODY)
    record.open(BackendSettings(name="b", url="http://127.0.0.1:1/v1", model="m"), stream=False)
    for _ in range(rounds):
        await asyncio.sleep(0)
    with pytest.raises(ValueError, match="no intent"):
        await record.acknowledged()


async def _nothing(_: object) -> None:
    return None


def _prepared(body: bytes) -> Prepared:
    return Prepared(
        endpoint="chat", body=body, asked=Asked(), sampling=Sampling(), upstream_stream=False, prompts=1, n=1,
        served_model="m", ids_as_tokens=True, media=False,
    )  # fmt: skip
