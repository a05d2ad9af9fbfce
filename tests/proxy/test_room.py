"""The recorder's own room: bounded, shared among backends, and given back."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.errors import UpstreamFailed
from proxy.room import Holding, Room, Share


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


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 300)), max_size=60))
def test_unfinished_answers_are_within_their_bound(steps: list[tuple[int, int]]) -> None:
    """Whoever comes later may still have something. All of it is given back."""
    holding = Holding(500)
    open_: dict[int, Share] = {}
    sizes: dict[int, int] = {}
    for who, size in steps:
        share = open_.get(who)
        if share is None:
            share = open_[who] = holding.share().__enter__()
        try:
            share.weigh(size)
            sizes[who] = size
        except UpstreamFailed:
            others = holding.held - size
            assert size > sizes.get(who, 0)
            assert 2 * size > 500 - others
            open_.pop(who).__exit__()
            sizes.pop(who, None)
        assert holding.held == sum(sizes.values())
        assert holding.shares == len(open_)
        assert holding.held <= 499
    for share in open_.values():
        share.__exit__()
    assert (holding.held, holding.shares) == (0, 0)


def test_who_takes_no_more_stays() -> None:
    holding = Holding(1000)
    with holding.share() as large, holding.share() as small:
        large.weigh(500)
        small.weigh(250)
        large.weigh(500)
        with pytest.raises(UpstreamFailed, match="too much") as refused:
            small.weigh(251)
        assert refused.value.error_code == "overloaded"
        small.weigh(100)
        with pytest.raises(UpstreamFailed, match="too much"):
            large.weigh(501)
    assert holding.held == 0


def test_shares_of_one_name_are_one() -> None:
    holding = Holding(1000)
    with holding.share("key") as first, holding.share("key") as second, holding.share() as answer:
        assert holding.shares == 2
        assert first.fits(200)
        assert second.fits(300)
        assert answer.fits(250)
        assert not first.fits(201)
        assert first.fits(100)
        assert second.fits(275)
        assert not second.fits(300)
    assert (holding.held, holding.shares, holding.holders) == (0, 0, {})
