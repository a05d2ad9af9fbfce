"""The recorder's own room: bounded, shared among backends, and given back."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.room import Body, Holding, Overloaded, Part, Room


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 60), st.booleans()), max_size=200))
def test_never_over_its_bounds(steps: list[tuple[str, int, bool]]) -> None:
    room = Room(10, 100)
    held: list[tuple[str, int]] = []
    for backend, size, leaves in steps:
        if leaves and held:
            room.leave(*held.pop())
        elif room.take(backend, size):
            held.append((backend, size))
        assert len(held) <= 10
        assert sum(size for _, size in held) <= 100
    while held:
        room.leave(*held.pop())
    assert room.take("a", 100)


def test_one_backend_does_not_crowd_out_another() -> None:
    room = Room(100, 10**9)
    for _ in range(10):
        assert room.take("honest", 1)
    flood = sum(room.take("flood", 1) for _ in range(10_000))
    assert 25 <= flood <= 60
    assert all(room.take("honest", 1) for _ in range(10))


def test_large_answers_do_not_crowd_out_small_ones() -> None:
    room = Room(10**6, 1000)
    assert room.take("honest", 1)
    while room.take("flood", 100):
        pass
    assert sum(room.take("honest", 1) for _ in range(100)) == 100


def test_what_is_shed_is_left_to_chance() -> None:
    """Nobody can tell from the order which answer goes unchecked."""
    shed: Counter[int] = Counter()
    for _ in range(200):
        room = Room(20, 10**9)
        shed.update(n for n in range(20) if not room.take("b", 1))
    assert not any(shed[n] for n in range(10))
    assert all(0 < shed[n] < 200 for n in range(12, 18))


def test_from_many_threads() -> None:
    room = Room(50, 10**9)
    taken: list[bool] = []
    threads = [threading.Thread(target=lambda: taken.extend(room.take("b", 1) for _ in range(500))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 25 <= sum(taken) <= 50
    for _ in range(sum(taken)):
        room.leave("b", 1)
    assert all(room.take("b", 1) for _ in range(25))


STEPS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.integers(0, 700)), max_size=80)


@settings(deadline=None)
@given(STEPS, st.lists(st.tuples(st.sampled_from("xyz"), st.integers(0, 400)), max_size=20))
def test_who_holds_less_than_an_even_share_never_gives_way(
    answers: list[tuple[str, int, int]], bodies: list[tuple[str, int]]
) -> None:
    """Everything is within its bound, and all of it is given back."""
    holding = Holding(1000)
    parts: dict[tuple[str, int], Part] = {}
    keys: list[Body] = []

    def held() -> dict[str, int]:
        found: dict[str, int] = {}
        for (backend, _), part in parts.items():
            found[backend] = found.get(backend, 0) + part.held
        return found

    def check(before: dict[str, int]) -> None:
        """Of what was held then."""
        gone = [place for place, part in parts.items() if part.given_up]
        even = (1000 - sum(body.held for body in keys)) / max(len(before), 1)
        assert all(before[backend] > even for backend, _ in gone)
        for place in gone:
            del parts[place]

    for step in range(max(len(answers), len(bodies))):
        if step < len(bodies):
            key, size = bodies[step]
            before = held()
            body = holding.body(key).__enter__()
            if body.fits(size):
                keys.append(body)
            else:
                body.__exit__()
            check(before)
        if step < len(answers):
            backend, number, size = answers[step]
            if (backend, number) not in parts:
                parts[backend, number] = holding.answer(backend).__enter__()
            part = parts[backend, number]
            before = held()
            before[backend] += size - part.held
            with suppress(Overloaded):
                part.weigh(size)
            check(before)
        assert sum(body.held for body in keys) <= 500
        assert holding.held == sum(part.held for part in parts.values()) + sum(body.held for body in keys) <= 1000
        assert holding.shares == len(parts) + len(keys)
    for share in (*parts.values(), *keys):
        share.__exit__()
    assert (holding.held, holding.shares, holding.keys, holding.backends) == (0, 0, {}, {})


def test_the_largest_of_whoever_holds_the_most_gives_way() -> None:
    holding = Holding(1000)
    hostile = [holding.answer("hostile").__enter__() for _ in range(40)]
    for part in hostile:
        with suppress(Overloaded):
            part.weigh(100)
    hostile = [part for part in hostile if not part.given_up]
    assert sum(part.held for part in hostile) <= 1000
    with holding.answer("honest") as first, holding.answer("honest") as second, holding.answer("small") as small:
        first.weigh(300)
        second.weigh(30)
        small.weigh(333)
        assert holding.backends["hostile"].held <= 337
        with pytest.raises(Overloaded, match="too much") as refused:
            first.weigh(900)
        assert (refused.value.error_code, refused.value.status, refused.value.retry_after) == ("overloaded", 503, 1.0)
        with pytest.raises(Overloaded):
            first.weigh(1)
        second.weigh(40)
        assert (first.held, second.held, small.held) == (0, 40, 333)
    assert set(holding.backends) == {"hostile"}


def test_who_takes_no_more_stays() -> None:
    holding = Holding(1000)
    with holding.body("a") as large, holding.body("b") as small:
        assert large.fits(250)
        assert small.fits(125)
        assert large.fits(250)
        assert not small.fits(126)
        assert small.fits(100)
        assert not large.fits(251)
    assert holding.held == 0


def test_bodies_of_one_key_are_one_and_answers_give_way_to_them() -> None:
    holding = Holding(1000)
    with holding.body("key") as first, holding.body("key") as second, holding.answer("b") as answer:
        answer.weigh(990)
        assert first.fits(10)
        assert not answer.given_up
        assert first.fits(100)
        assert answer.given_up
        assert second.fits(150)
        assert not first.fits(101)
        assert first.fits(100)
    assert (holding.held, holding.shares, holding.keys, holding.backends) == (0, 0, {}, {})


async def test_one_that_has_to_give_way_is_interrupted() -> None:
    """Whatever it waits for; one that is cancelled by somebody else at the same time stays cancelled."""
    holding = Holding(1000)
    waiting = [asyncio.Event() for _ in range(3)]

    async def hold(size: int, began: asyncio.Event) -> None:
        async with holding.answer("hostile") as part:
            part.weigh(size)
            began.set()
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(hold(size, began)) for size, began in zip((300, 301, 302), waiting, strict=True)]
    for began in waiting:
        await began.wait()
    async with holding.answer("honest") as part:
        part.weigh(390)
        with pytest.raises(Overloaded):
            await tasks[2]
        assert tasks[2].cancelling() == 0
        part.weigh(500)
        tasks[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[1]
        assert not tasks[0].done()
        with pytest.raises(Overloaded):
            part.weigh(1001)
    tasks[0].cancel()
    await asyncio.wait(tasks)
    assert (holding.held, holding.backends) == (0, {})
