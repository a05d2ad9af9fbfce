from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.evidence import Replay
from tests.verifier_pool.toy import VOCAB, answer, rows
from verifier_pool.reference.canary import (
    AGREEMENT,
    CUT,
    STUDY_SECONDS,
    WANTED_SECONDS,
    Canary,
    Known,
    agrees,
    gap,
    spoiled,
)

VOCABULARY = np.arange(VOCAB, dtype=np.int32)


def known(salt: int = 0) -> Known:
    evidence = answer(salt=salt)
    return Known(evidence.prompt_ids, evidence.output_ids, evidence.claim_ids, evidence.claim_logprobs)


def replayed(request: Any, salt: int = 0, kernels: int = 0) -> Replay:
    previous = [int(request.prompt_ids[-1]), *request.output_ids[:-1]]
    return Replay(*rows(previous, request.output_ids, salt, kernels), request.form)


def test_a_sound_reference_holds_both() -> None:
    good = known()
    bad = spoiled(good, VOCABULARY)
    for each in (good, bad):
        assert each.holds(replayed(each.request()))
        assert each.holds(replayed(each.request(), kernels=3))
    assert not good.holds(replayed(good.request(), salt=1))
    # Who agrees with anything is caught by the bad one.
    echo = Replay(bad.ids, bad.logprobs)
    assert not bad.holds(echo)


def test_a_canary_looks_like_any_replay() -> None:
    for each in (known(), spoiled(known(), VOCABULARY)):
        request = each.request("ids")
        assert (request.endpoint, request.request, request.choice, request.form) == ("completions", b"", 0, "ids")
        assert request.candidate_ids is not None
        assert np.array_equal(request.candidate_ids[:, 0], request.output_ids)


def test_only_what_both_name_counts() -> None:
    ids = np.array([[1, 2, -1], [3, 4, 5]], np.int32)
    logprobs = np.array([[-1, -2, -np.inf], [-1, -2, -3]], np.float32)
    other = Replay(np.array([[1, 9], [3, 5]], np.int32), np.array([[-1.1, -5], [-1, -3.2]], np.float32))
    assert gap(ids, logprobs, other) == pytest.approx((0.1 + 0 + 0.2) / 3, abs=1e-6)


@pytest.mark.parametrize(
    ("theirs", "apart"),
    [(-np.inf, CUT), (np.nan, CUT), (-900.0, CUT), (-1.0 - AGREEMENT / 2, AGREEMENT / 2)],
)
def test_one_entry_is_never_further_than_the_cut(theirs: float, apart: float) -> None:
    one = np.array([[7]], np.int32)
    assert gap(one, np.array([[-1]], np.float32), Replay(one, np.array([[theirs]], np.float32))) == pytest.approx(apart)


def test_both_impossible_is_the_same() -> None:
    one, never = np.array([[7]], np.int32), np.array([[-np.inf]], np.float32)
    assert gap(one, never, Replay(one, never)) == 0


@pytest.mark.parametrize("ids", [[[8], [2]], [[7]], []])
def test_a_replay_of_something_else_agrees_with_nothing(ids: Any) -> None:
    claim = np.array([[7], [2]], np.int32)
    array = np.array(ids, np.int32).reshape(-1, 1)
    other = Replay(array, np.full(array.shape, -1, np.float32))
    assert not agrees(claim, np.full((2, 1), -1, np.float32), other)


@given(st.lists(st.floats(-0.2, 0.2), min_size=1, max_size=20))
def test_noise_agrees_and_a_shift_beyond_it_does_not(noise: list[float]) -> None:
    ids = np.arange(len(noise), dtype=np.int32)[:, None]
    claimed = np.full((len(noise), 1), -2, np.float32)
    near = Replay(ids, (claimed[:, 0] + np.array(noise, np.float32))[:, None])
    assert agrees(ids, claimed, near)
    assert not agrees(ids, claimed, Replay(ids, near.logprobs - 0.6))


def test_good_and_bad_in_both_forms() -> None:
    canary = Canary(10)
    good, bad = known(), spoiled(known(), VOCABULARY)
    canary.learn([good, bad])
    assert canary.due(0)
    requests = canary.requests()
    seen = [(np.array_equal(request.output_ids, good.output_ids), request.form) for request in requests]
    assert seen == [(True, "full"), (True, "ids"), (False, "full"), (False, "ids")]
    assert canary.judge([replayed(request) for request in requests]) is True


@pytest.mark.parametrize("wrong", range(4))
def test_one_wrong_answer_is_enough(wrong: int) -> None:
    canary = Canary(10)
    good, bad = known(), spoiled(known(), VOCABULARY)
    canary.learn([good, bad])
    assert canary.due(0)
    replays: list[Replay | None] = [replayed(request) for request in canary.requests()]
    replays[wrong] = replayed(good.request(), salt=1) if wrong < 2 else Replay(bad.ids, bad.logprobs)
    others = [at for at in range(4) if at != wrong]
    replays[others[0]] = None
    assert canary.judge(replays) is False


@pytest.mark.parametrize("came", [[], [None], [None, None]])
def test_what_never_came_back_says_nothing_about_the_numbers(came: list[None]) -> None:
    canary = Canary(10)
    canary.learn([known()])
    for replays in (came, [replayed(known().request()), *came]):
        canary.requests()
        assert canary.judge(replays) is None


def test_one_is_out_at_a_time_and_not_too_often() -> None:
    canary = Canary(10)
    canary.learn([known()])
    assert canary.due(100)
    assert not canary.due(101)
    requests = canary.requests()
    assert not canary.due(500)
    assert canary.judge([replayed(request, salt=1) for request in requests]) is False
    assert canary.due(500)
    canary.requests()
    canary.judge([None, None])
    assert not canary.due(509)
    assert canary.due(510)


def test_who_waits_for_one_gets_it_sooner_but_not_at_any_rate() -> None:
    canary = Canary(10)
    canary.learn([known()])
    assert canary.due(100, wanted=True)
    assert not canary.due(100, wanted=True)
    assert not canary.due(100.9, wanted=True)
    assert canary.due(100 + WANTED_SECONDS, wanted=True)
    assert not canary.due(105)
    often = Canary(0.1)
    often.learn([known()])
    assert often.due(1, wanted=True)
    assert often.due(1.2, wanted=True)


def test_never() -> None:
    canary = Canary(0, lambda: pytest.fail("asked"))
    canary.learn([known()])
    assert not canary.due(1e9)
    assert not canary.due(1e9, wanted=True)
    assert not canary.possible


def test_what_is_not_known_yet_is_found_out_when_it_is_due() -> None:
    asked: list[int] = []
    canary = Canary(60, lambda: asked.append(1))
    assert not asked
    assert not canary.due(5)
    assert not canary.due(6)
    assert len(asked) == 1
    # Finding out costs more than a canary.
    assert not canary.due(6.5 + WANTED_SECONDS, wanted=True)
    assert len(asked) == 1
    assert not canary.due(5 + STUDY_SECONDS, wanted=True)
    assert len(asked) == 2
    assert canary.possible
    canary.learn([known()])
    assert canary.due(90)
    assert len(asked) == 2


def test_there_may_be_none() -> None:
    canary = Canary(10, lambda: canary.give_up())
    assert canary.possible
    assert not canary.due(5)
    assert not canary.possible
    assert not canary.due(500)
