"""When verdicts are announced, as the benchmarks hear it from a real Valkey."""

from __future__ import annotations

from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as GoneError

from benchmarks.announced import Announced
from policies.errors import StoreUnavailable
from tests.support.waiting import PATIENCE
from verifier_pool.link.queue import VERDICTS


async def test_each_announcement_is_taken_once_with_its_time(valkey: str) -> None:
    async with Announced(valkey) as announced:
        assert not await announced.news(0.01)
        with Redis.from_url(valkey) as store:
            for id in ("a", "b"):
                store.publish(VERDICTS, id)
        found: dict[str, float] = {}
        while len(found) < 2:
            assert await announced.news(PATIENCE)
            found |= announced.taken()
        assert found["a"] <= found["b"]
        assert announced.taken() == {}


async def test_a_store_that_is_gone_is_told_to_whoever_asks(valkey: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def gone(**how: Any) -> None:
        raise GoneError("gone")

    async with Announced(valkey) as announced:
        monkeypatch.setattr(announced._channel, "get_message", gone)
        with Redis.from_url(valkey) as store:
            store.publish(VERDICTS, "a")
        with pytest.raises(StoreUnavailable, match="can no longer be heard"):
            await _until_told(announced)


async def _until_told(announced: Announced) -> None:
    while await announced.news(PATIENCE):
        announced.taken()
