"""Backends whose settings change, or that go and come back, while requests are under way at them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from policies.errors import BackendUnavailable
from policies.settings import Settings
from proxy.backends.backend import Backend
from proxy.backends.pool import Backends
from proxy.backends.turn import Turn
from tests.proxy.backends.fleet import Clock
from tests.support.running import settings_for


class Changing:
    """Backends of one model whose settings a test changes."""

    def __init__(self, *names: str) -> None:
        self.entries: dict[str, dict[str, Any]] = {
            name: {"name": name, "url": f"http://{name}", "model": "m"} for name in names
        }
        self.clock = Clock()
        self.backends = Backends(self._settings(), random.Random(7), self.clock)

    def _settings(self) -> Settings:
        return settings_for(backends=list(self.entries.values()), breaker={"failures": 3, "open_seconds": 2})

    def change(self, name: str, **fields: Any) -> None:
        """Other settings for one."""
        self.entries[name] = {**self.entries[name], **fields}
        self.backends.renew(self._settings())

    def away(self, name: str) -> None:
        """Take one away and bring it back."""
        entry = self.entries.pop(name)
        self.backends.renew(self._settings())
        assert self.backends.named(name) is None
        self.entries[name] = entry
        self.backends.renew(self._settings())

    def named(self, name: str) -> Backend:
        """One as it is now."""
        found = self.backends.named(name)
        assert found is not None
        return found

    async def take(self) -> Turn:
        """A request's place."""
        turn = await self.backends.route("m").take()
        assert turn is not None
        return turn

    async def taken(self, count: int) -> list[str]:
        """Who takes so many requests, one after the other, each of which ends well."""
        names = []
        for _ in range(count):
            turn = await self.take()
            names.append(turn.backend.name)
            turn.began()
            turn.finished()
            turn.close()
        return names


async def test_what_fails_at_the_one_before_speaks_against_the_one_after() -> None:
    both = Changing("a", "b")
    turns = [await both.take() for _ in range(16)]
    both.change("a", max_concurrency=100)
    assert "a" in await both.taken(2)
    for turn in turns:
        if turn.backend.name == "a":
            turn.failed("broken")
        turn.close()
    assert (both.named("a").breaker.state, both.named("a").outstanding) == ("open", 0)
    assert set(await both.taken(40)) == {"b"}
    failure = both.named("a").failure
    assert failure is not None
    assert failure.kind == "broken"


@pytest.mark.parametrize("changes", [1, 3])
async def test_one_that_is_tried_out_meanwhile_is_back_when_that_ends_well(changes: int) -> None:
    one = Changing("a")
    for _ in range(3):
        turn = await one.take()
        turn.failed("unreachable")
        turn.close()
    assert one.named("a").breaker.state == "open"
    one.clock.now += 10
    trying = await one.take()
    for n in range(changes):
        one.change("a", max_concurrency=100 + n)
    with pytest.raises(BackendUnavailable):
        await one.take()
    trying.began()
    trying.finished()
    trying.close()
    assert one.named("a").breaker.state == "closed"
    assert await one.taken(3) == ["a"] * 3


async def test_one_that_is_tried_out_and_left_without_a_word_may_be_tried_again() -> None:
    one = Changing("a")
    for _ in range(3):
        turn = await one.take()
        turn.failed("unreachable")
        turn.close()
    one.clock.now += 10
    trying = await one.take()
    one.change("a", max_concurrency=100)
    with pytest.raises(BackendUnavailable):
        await one.take()
    trying.close()
    assert await one.taken(1) == ["a"]


@pytest.mark.parametrize("how", ["busy", "unreachable"])
async def test_the_one_after_rests_when_the_one_before_is_told_to(how: str) -> None:
    both = Changing("a", "b")
    turns = [await both.take() for _ in range(2)]
    both.change("a", max_concurrency=100)
    both.change("a", max_concurrency=101)
    (turn,) = (turn for turn in turns if turn.backend.name == "a")
    if how == "busy":
        turn.answered(429, [(b"retry-after", b"5")])
    else:
        turn.failed("unreachable")
    for each in turns:
        each.close()
    assert set(await both.taken(10)) == {"b"}
    both.clock.now += 5.1
    assert set(await both.taken(10)) == {"a", "b"}


async def test_another_address_has_a_health_of_its_own() -> None:
    both = Changing("a", "b")
    turns = [await both.take() for _ in range(16)]
    both.change("a", url="http://elsewhere")
    for turn in turns:
        turn.failed("broken")
        turn.close()
    assert (both.named("a").breaker.state, both.named("a").failure) == ("closed", None)
    assert (both.named("a").outstanding, both.named("b").outstanding) == (0, 0)
    assert set(await both.taken(10)) == {"a"}


async def test_one_that_was_away_has_the_requests_and_the_health_that_it_had() -> None:
    both = Changing("a", "b")
    both.change("a", max_concurrency=2)
    turns = [await both.take() for _ in range(4)]
    both.away("a")
    assert (both.named("a").outstanding, both.named("a").full) == (2, True)
    assert set(await both.taken(10)) == {"b"}
    for turn in turns:
        if turn.backend.name == "a":
            turn.failed("unreachable")
    extra = both.named("a").enter()
    both.named("a").failed(extra, "unreachable")
    assert both.named("a").breaker.state == "open"
    both.away("a")
    both.entries["a"]["max_concurrency"] = 3
    both.away("a")
    assert both.named("a").breaker.state == "open"
    assert both.named("a").outstanding == 3
    for turn in turns:
        turn.close()
    assert both.named("a").outstanding == 1


async def test_not_every_one_that_is_gone_is_remembered() -> None:
    one = Changing("a")
    turn = await one.take()
    entry = one.entries.pop("a")
    for n in range(300):
        one.entries = {f"n{n}": {**entry, "name": f"n{n}"}}
        one.backends.renew(one._settings())
    assert len(one.backends._gone) == 101
    one.entries["a"] = entry
    one.backends.renew(one._settings())
    assert one.named("a").outstanding == 1
    turn.close()


async def test_one_that_had_its_chance_gets_no_other_by_changing() -> None:
    both = Changing("a", "b")
    route = both.backends.route("m")
    first = await route.take()
    assert first is not None
    both.change(first.backend.name, max_concurrency=9)
    second = await route.take()
    assert second is not None
    assert {first.backend.name, second.backend.name} == {"a", "b"}
    assert not route.another
    assert await route.take() is None
    without = both.backends.route("m", without=first.backend)
    assert await without.take() is not None
    assert not without.another
