"""Forged tokens among true ones: cheats that bend a claim at a token or two, and honest answers with wild tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import _forged, betting, hazard, margin, selection
from policies.checks import Check, Result
from policies.evidence import Evidence, Replay
from policies.profile import Profile, ProfileKey, Row, fit
from tests.policies import recorded

KEY = ProfileKey("smollm2", recorded.CPU, "bf16", recorded.REFERENCE)
SINGLE = recorded.replayed("single")
BATCH = recorded.replayed("batch")
GREEDY = next(pair for pair in SINGLE if pair[0].sampling.temperature == 0 and len(pair[0].output_ids) == 40)
SAMPLED = next(pair for pair in SINGLE if pair[0].sampling.temperature > 0 and len(pair[0].output_ids) == 40)
PROFILE = fit([row for pair in SINGLE for row in margin.calibration_rows(*pair, arm="single")], KEY)

Pair = tuple[Evidence, Replay]


def judged(pair: Pair, profile: Profile | None = PROFILE, **options: Any) -> Check:
    return margin.check(*pair, profile, eos_token_ids=(recorded.EOS,), **options)


def cut(pair: Pair, at: int, logprob: float) -> Pair:
    """The answer ends at `at` by a token to which the reference gives `logprob`, and the claim lets it win."""
    answer, replay = pair
    rows = slice(at + 1)
    ids, logprobs = replay.ids[rows].copy(), replay.logprobs[rows].copy()
    others = ids[at] != recorded.EOS
    ids[at], logprobs[at] = np.where(others, ids[at], -1), np.where(others, logprobs[at], -np.inf)
    # The token that was there stands among the others.
    ids[at, -1], logprobs[at, -1] = ids[at, 0], logprobs[at, 0]
    ids[at, 0], logprobs[at, 0] = recorded.EOS, logprob
    output = np.ascontiguousarray(ids[:, 0])
    cheat = dataclasses.replace(answer, output_ids=output, claim_ids=ids, claim_logprobs=logprobs, finish_reason="stop")
    cheated = dataclasses.replace(replay, ids=ids, logprobs=logprobs)
    claim = logprobs.copy()
    claim[:, 0] += margin.measure(cheat, cheated, eos_token_ids=(recorded.EOS,)).margin + 1e-3
    return dataclasses.replace(cheat, claim_logprobs=np.minimum(claim, 0)), cheated


def wild(pair: Pair, places: list[int], nats: float = 40.0) -> Pair:
    """The reference gives these tokens `nats` less than they need to win."""
    answer, replay = pair
    logprobs = replay.logprobs.copy()
    logprobs[places, 0] -= nats
    return answer, dataclasses.replace(replay, logprobs=logprobs)


@pytest.mark.parametrize("pair", [*SINGLE, *BATCH])
def test_honest_answers_hold_nothing_forged(pair: Pair) -> None:
    check = judged(pair)
    assert check.result is not Result.REJECT
    assert check.metrics["absurd"] == check.metrics["forged"] == 0
    levels = [check.metrics[name] for name in ("too_early", "too_long")]
    assert all(level is None or level > 1e-2 for level in levels)


@pytest.mark.parametrize("pair", [GREEDY, SAMPLED])
@pytest.mark.parametrize("at", [5, 20, 38])
def test_an_early_stop_with_a_bent_claim_is_caught_at_any_length(pair: Pair, at: int) -> None:
    cheat = cut(pair, at, -20.0)
    assert selection.check(cheat[0], eos_token_ids=(recorded.EOS,)).result is not Result.REJECT
    check = judged(cheat)
    assert check.result is Result.REJECT
    assert check.reason.startswith("stopped_early")
    assert check.level is not None
    assert check.level <= _forged.REJECT_LEVEL
    assert check.metrics["forged"] == 1
    # Whatever the reference might have been asked for.
    claimed = dataclasses.replace(cheat[1], form="ids")
    assert judged((cheat[0], claimed)).result is Result.REJECT


def test_an_early_stop_is_caught_without_a_seed_or_known_noise() -> None:
    cheat, replay = cut(SAMPLED, 20, -25.0)
    for changes in ({"speculative": True}, {"sampling": dataclasses.replace(cheat.sampling, seed=None)}):
        check = judged((dataclasses.replace(cheat, **changes), replay))
        assert check.result is Result.REJECT
        assert check.reason.startswith("stopped_early")
        assert check.metrics["absurd"] is None
    assert judged((cheat, replay), contradicted=True).result is Result.REJECT
    # The noise is the client's choice: in law nothing can be said.
    asked = dataclasses.replace(cheat.sampling, client_seed=True)
    chosen = dataclasses.replace(cheat, sampling=asked, speculative=True)
    assert judged((chosen, replay)).result is Result.INCONCLUSIVE


def test_a_plausible_end_is_no_early_stop() -> None:
    for pair in (GREEDY, SAMPLED):
        at = 20
        likely = float(pair[1].logprobs[at].max()) - 0.1
        cheat = cut(pair, at, likely)
        lead = float(margin.measure(*cheat, eos_token_ids=(recorded.EOS,)).lead[-1])
        assert (judged(cheat).result is Result.REJECT) is (lead > _forged.STOPPED)
    ended = dataclasses.replace(cut(GREEDY, 20, -20.0)[0], complete=False)
    assert judged((ended, cut(GREEDY, 20, -20.0)[1])).result is not Result.REJECT


@pytest.mark.parametrize("changes", [{"ignore_eos": True}, {"grammar": True}, {"repetition_penalty": 1.2}])
def test_the_request_may_excuse_an_end(changes: dict[str, Any]) -> None:
    cheat, replay = cut(SAMPLED, 20, -25.0)
    asked = dataclasses.replace(cheat, sampling=dataclasses.replace(cheat.sampling, **changes))
    assert judged((asked, replay)).result is not Result.REJECT


@pytest.mark.parametrize("pair", [GREEDY, SAMPLED])
def test_one_wild_token_is_told_and_two_reject(pair: Pair) -> None:
    one, two, three = (judged(wild(pair, places)) for places in ([7], [7, 19], [7, 19, 30]))
    assert one.metrics["absurd"] == 1
    assert one.result is not Result.REJECT
    for check, count in ((two, 2), (three, 3)):
        assert check.metrics["absurd"] == count
        assert check.result is Result.REJECT
        assert check.reason.startswith("forged_tokens")
        assert check.level is not None
    assert two.level is not None
    assert three.level is not None
    assert three.level < two.level < 1e-4


def test_a_level_never_rises_with_what_is_forged() -> None:
    levels = [judged(wild(SAMPLED, list(range(2, 2 + count)))).level for count in range(2, 12)]
    known = [level for level in levels if level is not None]
    assert len(known) == len(levels)
    assert known == sorted(known, reverse=True)


def test_models_that_spike_are_left_alone() -> None:
    two, early = wild(SAMPLED, [7, 19]), cut(SAMPLED, 20, -25.0)
    experts = np.zeros((1, 1, 1), np.int16)
    for pair in (two, early):
        for check in (
            judged(pair, experts=True),
            judged((dataclasses.replace(pair[0], routed_experts=experts), pair[1])),
            judged((pair[0], dataclasses.replace(pair[1], routed_experts=experts))),
        ):
            assert not check.reason.startswith(("forged", "stopped"))
            assert check.metrics["forged"] == 0
    # A model with experts that nobody declared shows in its calibration.
    rows = [row for pair in SINGLE for row in margin.calibration_rows(*wild(pair, [3]), arm="single")]
    spiky = fit(rows, KEY)
    assert _forged.spiky(spiky, margin.NAME)
    assert not _forged.spiky(PROFILE, margin.NAME)
    for pair in (two, early):
        check = judged(pair, spiky)
        assert check.result is not Result.REJECT
        assert check.metrics["forged"] is None


def test_nothing_rejects_where_the_reference_is_not_the_one_to_compare_with() -> None:
    early = cut(SAMPLED, 20, -25.0)
    other = dataclasses.replace(early[1], reference="another")
    unmeasured = fit([Row("distance", "full", "a", 0.8, 16, 0.1 + i / 99, f"r{i}", 40) for i in range(12)], KEY)
    for check in (judged(early, None), judged((early[0], other)), judged(early, unmeasured)):
        assert check.result is Result.INCONCLUSIVE
        assert check.metrics["forged"] is None
        assert check.metrics["too_early"] is not None


def test_forged_answers_add_up() -> None:
    caught, clean = judged(cut(SAMPLED, 20, -25.0)).metrics, judged(SAMPLED).metrics
    assert betting.first_over(margin.forged_evidence([caught] * 5), 1e-6) == 3
    unheard = margin.forged_evidence([caught, {}, {"forged": None}, caught])
    assert unheard[0] == unheard[1] == unheard[2] < unheard[3]
    assert (np.diff(margin.forged_evidence([clean] * 500)) < 0).all()
    # As often as honest answers may be rejected, it does not grow.
    assert margin.forged_evidence([caught] + [clean] * 410)[-1] < np.log(1e3)
    assert margin.forged_evidence([]).shape == (0,)
    assert margin.forged_evidence([{}, {}]).tolist() == [0.0, 0.0]


def padded(pair: Pair, places: list[int], chance: float) -> Pair:
    """At these places the reference would have ended the answer with probability `chance`."""
    answer, replay = pair
    logprobs, ids = replay.logprobs.copy(), replay.ids.copy()
    for at in places:
        logprobs[at] += np.float32(np.log1p(-chance))
        ids[at, -1], logprobs[at, -1] = recorded.EOS, np.log(chance)
    return answer, dataclasses.replace(replay, ids=ids, logprobs=logprobs)


def test_going_on_after_many_ends_is_caught_and_after_one_is_not() -> None:
    once = judged(padded(SAMPLED, [11], 1 - 1e-9))
    assert once.metrics["too_long"] is not None
    assert once.metrics["too_long"] > 1e-2
    assert not once.reason.startswith("went_on")
    answer, replay = padded(SAMPLED, list(range(10, 30)), 0.999)
    often = judged((dataclasses.replace(answer, speculative=True), replay))
    assert often.result is Result.REJECT
    assert often.reason.startswith("went_on")
    assert often.level is not None
    assert often.level <= _forged.REJECT_LEVEL


def test_cuts_of_the_request_excuse_what_drift_may_have_cut() -> None:
    early, replay = cut(SAMPLED, 20, -25.0)
    for limits in ({"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.3}, {"top_k": 1}):
        asked = dataclasses.replace(early, sampling=dataclasses.replace(early.sampling, **limits))
        found = hazard.from_replay(asked, replay, (recorded.EOS,))
        assert found is not None
        assert 0 < found.too_early < 1e-6
        # An end at 40 % beside another token may have been cut by the backend.
        some, long = padded(SAMPLED, list(range(10, 30)), 0.4)
        asked = dataclasses.replace(some, sampling=dataclasses.replace(some.sampling, **limits))
        found = hazard.from_replay(asked, long, (recorded.EOS,))
        assert found is not None
        assert found.too_long == 1.0


@given(st.floats(-60, -0.1), st.floats(0, 5), st.floats(0.05, 2))
@settings(max_examples=40, deadline=None)
def test_a_less_likely_end_never_has_a_higher_level(logprob: float, less: float, temperature: float) -> None:
    answer, replay = cut(SAMPLED, 20, logprob)
    answer = dataclasses.replace(answer, sampling=dataclasses.replace(answer.sampling, temperature=temperature))
    lowered = replay.logprobs.copy()
    lowered[20, 0] -= less
    before = hazard.from_replay(answer, replay, (recorded.EOS,))
    after = hazard.from_replay(answer, dataclasses.replace(replay, logprobs=lowered), (recorded.EOS,))
    assert before is not None
    assert after is not None
    assert after.too_early <= before.too_early * (1 + 1e-6)
