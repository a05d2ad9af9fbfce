"""What is asked for, in which order, and what need not be asked again."""

from __future__ import annotations

import itertools
from argparse import ArgumentTypeError

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.overhead.asking import Asking
from benchmarks.overhead.cells import Cell, Lengths, cells, mixes
from benchmarks.overhead.steps import ARMS, DIRECT, Step, done, left, seconds, steps
from tests.benchmarks.overhead_rows import step

URLS = {"direct": "http://a:1", "plain": "http://b:2", "proxy": "http://c:3"}


def found_cells() -> list[Cell]:
    given = [mixes("32/64"), mixes("3*64/32+512/16")]
    return list(
        cells(given, closed=[1, 4], rates=[2.5], bursts=[8], requests=5, arrivals=9, repeats=2, first=0.02, gap=0.01)
    )


@pytest.mark.parametrize("text", ["", "64", "0/3", "3/0", "a/b", "0*3/4", "3/4+", "-1/4"])
def test_bad_mixes_are_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="PROMPT/ANSWER"):
        mixes(text)


@given(count=st.integers(1, 60), weight=st.integers(1, 9), seed=st.integers(0, 9))
def test_a_mix_is_drawn_by_its_weights(count: int, weight: int, seed: int) -> None:
    mix = mixes(f"{weight}*64/32+512/16")
    drawn = mix.drawn(np.random.default_rng(seed), count)
    assert len(drawn) == count
    assert abs(drawn.count(Lengths(64, 32)) - count * weight / (weight + 1)) <= 1


def test_loads() -> None:
    names = [cell.name for cell in found_cells()]
    assert names[:4] == ["closed 1 32/64", "closed 4 32/64", "poisson 2.5 32/64", "burst 8 32/64"]
    assert len(set(names)) == 8
    closed, many, poisson, burst = found_cells()[:4]
    assert (closed.requests, many.requests, poisson.requests, burst.requests) == (5, 20, 9, 8)
    assert burst.spread == pytest.approx(0.165)
    assert closed.seconds(0.02, 0.01) == pytest.approx(5 * 0.66)
    assert many.seconds(0.02, 0.01) == pytest.approx(5 * 0.66)
    offsets = poisson.offsets(np.random.default_rng(1))
    assert (np.diff(offsets) > 0).all()
    assert 0 <= burst.offsets(np.random.default_rng(1)).max() <= burst.spread


def test_every_arm_takes_every_cell_at_every_rate_in_an_order_of_its_own() -> None:
    planned = steps(found_cells(), ARMS, [0.0, 0.05, 1.0], rounds=2, seed=3)
    per_round = len(ARMS) * 3 * (6 + 2 * 2)
    assert len(planned) == len({each.key for each in planned}) == 2 * per_round
    assert planned == steps(found_cells(), ARMS, [0.0, 0.05, 1.0], rounds=2, seed=3)
    assert planned != steps(found_cells(), ARMS, [0.0, 0.05, 1.0], rounds=2, seed=4)
    rates = [each.audit for each in planned[:per_round]]
    assert sum(one != other for one, other in itertools.pairwise(rates)) == 2
    assert [each.arm for each in planned[:40]] != sorted(each.arm for each in planned[:40])


def test_what_has_a_row_is_not_taken_again() -> None:
    (cell,) = cells(
        [mixes("32/64")], closed=[4], rates=[], bursts=[], requests=5, arrivals=9, repeats=1, first=1, gap=1
    )
    planned = steps([cell], ARMS, [0.0], rounds=1, seed=1)
    rows = [step(DIRECT, 1), step("async", 1, error="gone")]
    assert Step(1, 0.0, DIRECT, cell) not in left(planned, done(rows))
    assert len(left(planned, done(rows))) == 3
    assert seconds([Step(2, 0.0, DIRECT, cell)], rows, 1, 1, 0.5) == 2.0
    assert seconds([Step(2, 0.0, "plain", cell)], rows, 1, 1, 0.5) == 5 * 65 + 0.5


def test_prompts_are_as_long_as_asked_and_never_twice_the_same() -> None:
    random = np.random.default_rng(1)
    asking = Asking("m", "completions", 5000, 0.7, "secret")
    targets = asking.targets("inline", URLS, [Lengths(40, 8)] * 3, random)
    bodies = [orjson.loads(target.body) for target in targets]
    for body in bodies:
        assert len(body["prompt"]) == 40
        assert 1000 <= min(body["prompt"]) <= max(body["prompt"]) < 5000
    assert len({tuple(body["prompt"]) for body in bodies}) == 3
    assert targets[0].url == "http://c:3/v1/completions"
    assert targets[0].headers == {"x-countersign-mode": "inline"}
    chat = Asking("m", key="secret").targets("direct", URLS, [Lengths(40, 8)] * 2, random)
    words = [orjson.loads(target.body)["messages"][0]["content"].split() for target in chat]
    assert all(40 <= len(each) <= 60 for each in words)
    assert words[0] != words[1]
    assert chat[0].headers == {"authorization": "Bearer secret"}
    counted = asking.targets("plain", URLS, [Lengths(4, 4)], random, counted=True)
    assert counted[0].headers == {"x-countersign-backend": "counted"}
    assert counted[0].url.startswith("http://b:2")
