"""What happens when every backend is at its limit."""

from __future__ import annotations

import asyncio
import random

import pytest

from policies.errors import BackendUnavailable
from proxy.backends.turn import Turn
from tests.proxy.backends.fleet import QUARANTINED, Fleet

SOON = {"queue_seconds": 0.05}


async def _waiting(fleet: Fleet, **more: str) -> asyncio.Task[Turn | None]:
    task = asyncio.create_task(fleet.route(**more).take())
    await asyncio.sleep(0)
    return task


async def _take(fleet: Fleet) -> Turn:
    turn = await fleet.route().take()
    assert turn is not None
    return turn


async def test_first_come_first_served() -> None:
    fleet = Fleet(1, 1)
    turn = await _take(fleet)
    waiting = [await _waiting(fleet) for _ in range(5)]
    for task in waiting:
        assert not task.done()
        turn.close()
        got = await task
        assert got is not None
        turn = got
        assert fleet.all[0].outstanding == 1
    turn.close()
    assert fleet.all[0].outstanding == 0
    assert not fleet.group.waiting


async def test_nobody_overtakes() -> None:
    fleet = Fleet(1, 1)
    turn = await _take(fleet)
    first = await _waiting(fleet)
    turn.close()
    # The place is given before anybody can see it free.
    second = await _waiting(fleet)
    assert not second.done()
    got = await first
    assert got is not None
    got.close()
    assert await second is not None


async def test_a_full_queue_and_none_at_all() -> None:
    for places in (0, 3):
        fleet = Fleet(2, 1, routing={"queue": places} | SOON)
        [await _take(fleet) for _ in range(2)]
        waiting = [await _waiting(fleet) for _ in range(places)]
        with pytest.raises(BackendUnavailable) as raised:
            await fleet.route().take()
        assert raised.value.status == 503
        assert raised.value.retry_after == 1
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(result, BackendUnavailable) for result in results)
        assert not fleet.group.waiting


async def test_who_leaves_the_queue_takes_nothing_along() -> None:
    fleet = Fleet(1, 1)
    turn = await _take(fleet)
    tasks = [await _waiting(fleet) for _ in range(3)]
    tasks[0].cancel()
    await asyncio.sleep(0)
    turn.close()
    # It has the place already, and its client leaves in that moment.
    tasks[1].cancel()
    got = await tasks[2]
    assert got is not None
    assert fleet.all[0].outstanding == 1
    got.close()
    assert (fleet.all[0].outstanding, len(fleet.group.waiting)) == (0, 0)


async def test_a_hint_waits_for_its_own() -> None:
    fleet = Fleet(2, 1)
    turns = {turn.backend.name: turn for turn in [await _take(fleet), await _take(fleet)]}
    hinted = await _waiting(fleet, hint="b1")
    anybody = await _waiting(fleet)
    turns["b2"].close()
    got = await anybody
    assert got is not None
    assert got.backend.name == "b2"
    assert not hinted.done()
    turns["b1"].close()
    got = await hinted
    assert got is not None
    assert got.backend.name == "b1"


async def test_while_a_hint_waits_others_pass() -> None:
    fleet = Fleet(2, 1)
    first = await fleet.route(hint="b1").take()
    assert first is not None
    hinted = await _waiting(fleet, hint="b1")
    other = await _take(fleet)
    assert other.backend.name == "b2"
    assert not hinted.done()
    first.close()
    assert await hinted is not None


async def test_one_that_comes_back_serves_those_who_wait() -> None:
    fleet = Fleet(2, 1)
    fleet.all[1].standing = QUARANTINED
    await _take(fleet)
    waiting = await _waiting(fleet)
    fleet.all[1].standing = fleet.backends.new
    got = await waiting
    assert got is not None
    assert got.backend.name == "b2"


async def test_one_that_is_back_by_itself_serves_those_who_wait_first() -> None:
    fleet = Fleet(2, 1)
    fleet.fail(fleet.all[1], "unreachable")
    await _take(fleet)
    waiting = await _waiting(fleet)
    fleet.clock.now += 60
    late = await _waiting(fleet)
    got = await waiting
    assert got is not None
    assert got.backend.name == "b2"
    assert not late.done()
    late.cancel()


async def test_nobody_waits_for_a_last_resort_that_is_free_but_for_the_well_one() -> None:
    """A busy backend is worth waiting for while the free one fails."""
    fleet = Fleet(2, [1, 0])
    fleet.fail(fleet.all[1], "status")
    turn = await fleet.route(hint="b1").take()
    assert turn is not None
    waiting = await _waiting(fleet)
    assert not waiting.done()
    turn.close()
    got = await waiting
    assert got is not None
    assert got.backend.name == "b1"


async def test_nobody_waits_for_one_that_is_gone() -> None:
    fleet = Fleet(2, 1)
    fleet.fail(fleet.all[0], "unreachable")
    fleet.fail(fleet.all[1], "timeout")
    with pytest.raises(BackendUnavailable) as raised:
        await fleet.route().take()
    assert raised.value.retry_after is not None
    assert 1 <= raised.value.retry_after <= 2


async def test_what_is_waited_is_known() -> None:
    fleet = Fleet(1, 1, routing=SOON)
    await _take(fleet)
    route = fleet.route()
    task = asyncio.create_task(route.take())
    await asyncio.sleep(0)
    fleet.clock.now += 3
    with pytest.raises(BackendUnavailable):
        await task
    assert route.waited == 3


@pytest.mark.parametrize("seed", range(5))
async def test_no_place_is_lost(seed: int) -> None:
    """Requests that come, wait, leave and end in any order leave every place free in the end."""
    chance = random.Random(seed)
    fleet = Fleet(3, [1, 2, 3], routing={"queue": 20, "queue_seconds": 0.02})
    served = 0

    async def request() -> None:
        nonlocal served
        await asyncio.sleep(chance.random() * 0.2)
        hint = chance.choice([None, None, "b1"])
        turn = await fleet.route(hint=hint).take()
        assert turn is not None
        with turn:
            assert turn.backend.outstanding <= turn.backend.settings.max_concurrency
            await asyncio.sleep(chance.random() * 0.01)
            served += 1

    tasks = [asyncio.create_task(request()) for _ in range(400)]
    for task in tasks[::3]:
        asyncio.get_running_loop().call_later(chance.random() * 0.3, task.cancel)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(item, BackendUnavailable | asyncio.CancelledError | None) for item in results)
    assert served > 20
    assert [backend.outstanding for backend in fleet.all] == [0, 0, 0]
    assert not fleet.group.waiting
