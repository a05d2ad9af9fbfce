"""Consistent hashing with bounded loads."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.backends.rendezvous import choose, hash_of, points_of, scores, share

NAMES = st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=12), min_size=1, max_size=12, unique=True)
KEYS = st.integers(0, 2**64 - 1)


def _first(names: list[str], key: int) -> str:
    return names[choose(points_of(names), key, [0] * len(names), 1.25)]


@given(NAMES, KEYS, st.data())
def test_who_leaves_moves_its_own_keys_and_no_others(names: list[str], key: int, data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(names))
    rest = [name for name in names if name != gone]
    first = _first(names, key)
    if rest and first != gone:
        assert _first(rest, key) == first


@given(NAMES, KEYS)
def test_their_order_does_not_matter(names: list[str], key: int) -> None:
    assert _first(names[::-1], key) == _first(names, key)


def test_the_same_everywhere() -> None:
    """Proxies of one release agree, on whatever machine: these were computed once."""
    assert hash_of(b"one") == 0x34F2DDAA8B7615C9
    assert "".join(_first(["a", "b", "c"], hash_of(b"%d" % n)) for n in range(24)) == "aaacaabaaaaabccacbaccaac"


@pytest.mark.parametrize("count", [2, 3, 10, 50])
def test_keys_spread_evenly_and_so_do_those_of_one_that_left(count: int) -> None:
    names, total = [f"b{n}" for n in range(count)], 4000
    points = points_of(names)
    keys = [hash_of(b"%d" % n) for n in range(total)]
    first = Counter(int(scores(points, key).argmax()) for key in keys)
    spread = 5 * (total / count) ** 0.5
    assert all(abs(first[n] - total / count) < spread for n in range(count))
    if count > 2:
        mine = [key for key in keys if int(scores(points, key).argmax()) == 0]
        heirs = Counter(int(scores(points[1:], key).argmax()) for key in mine)
        expected = len(mine) / (count - 1)
        assert all(abs(heirs[n] - expected) < 5 * expected**0.5 + 2 for n in range(count - 1))


def test_each_bit_of_a_key_matters() -> None:
    points = points_of(["a", "b"])
    changed = [
        sum(
            (scores(points, key) ^ scores(points, key ^ (1 << bit))).tolist()[0].bit_count() for key in range(0, 999, 9)
        )
        for bit in range(64)
    ]
    assert all(abs(bits / 111 - 32) < 3 for bits in changed)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=20), KEYS, st.floats(1, 4))
def test_nobody_gets_more_than_the_bound(loads: list[int], key: int, bound: float) -> None:
    points = points_of([str(n) for n in range(len(loads))])
    at = choose(points, key, loads, bound)
    most = share(sum(loads) + 1, len(loads), bound)
    assert loads[at] + 1 <= most
    better = scores(points, key) > scores(points, key)[at]
    assert all(loads[n] >= most for n in np.flatnonzero(better))


@given(st.integers(1, 9), st.integers(1, 300), st.floats(1, 2), st.data())
def test_a_history_within_the_bound(backends: int, requests: int, bound: float, data: st.DataObject) -> None:
    """Requests of one hot key that come and never end: each is within the bound when it is let in."""
    points = points_of([str(n) for n in range(backends)])
    loads = [0] * backends
    key = data.draw(KEYS)
    for n in range(1, requests + 1):
        loads[choose(points, key, loads, bound)] += 1
        assert max(loads) <= share(n, backends, bound)
    assert sum(loads) == requests
