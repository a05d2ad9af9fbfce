"""The seeded margin on the replay: what it is, what honest answers show, and the liars only it can catch."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import betting, distance, margin, noise, selection
from policies._calibrated import forms
from policies.checks import Result
from policies.evidence import Evidence, Replay, Sampling
from policies.profile import Profile, ProfileKey, fit
from policies.thinking import Tags
from tests.policies import recorded

KEY = ProfileKey("smollm2", recorded.CPU, "bf16", recorded.REFERENCE)
SINGLE = recorded.replayed("single")
BATCH = recorded.replayed("batch")
FP8 = recorded.replayed("fp8")


def calibrated(pairs: tuple[tuple[Evidence, Replay], ...]) -> Profile:
    return fit([row for pair in pairs for row in margin.calibration_rows(*pair, arm="single")], KEY)


PROFILE = calibrated(SINGLE)


def honest_replay(answer: Evidence, drift: float = 0.0) -> Replay:
    """A reference that computes what the claim says, but for `drift` nats of noise in every logit."""
    logprobs = answer.claim_logprobs.astype(np.float64)
    logprobs = logprobs + np.random.default_rng(3).normal(0, drift, logprobs.shape) if drift else logprobs
    return Replay(answer.claim_ids, np.minimum(logprobs, 0).astype(np.float32), reference=recorded.REFERENCE)


def bent(answer: Evidence, replay: Replay) -> Evidence:
    """The claim of a liar who served these tokens: the reference's own logprobs, raised where the token would lose."""
    margins = margin.measure(answer, replay).margin
    logprobs = replay.logprobs.copy()
    logprobs[:, 0] = np.minimum(logprobs[:, 0] + margins + 1e-3, 0)
    return dataclasses.replace(answer, claim_ids=replay.ids, claim_logprobs=logprobs)


@pytest.mark.parametrize("pair", [SINGLE[0], SINGLE[30], FP8[0], FP8[6]])
def test_margins_are_the_formula_token_by_token(pair: tuple[Evidence, Replay]) -> None:
    answer, replay = pair
    temperature, seed = answer.sampling.temperature, answer.sampling.seed
    found = margin.measure(answer, replay)
    assert seed is not None
    gumbel = noise.gumbel(recorded.CPU, seed, len(answer.prompt_ids), replay.ids)
    assert gumbel is not None
    for j in range(len(answer.output_ids)):
        scores = [
            float(logprob) + (temperature * float(g) if temperature else 0.0)
            for id, logprob, g in zip(replay.ids[j], replay.logprobs[j], gumbel[j], strict=True)
            if id >= 0
        ]
        assert found.margin[j] == pytest.approx(max(scores) - scores[0], abs=1e-9)
    weights = np.minimum(found.margin / 0.5, 1) ** 2
    assert found.weights() == pytest.approx(weights)
    ordered = np.sort(weights)
    ordered[-1] = ordered[-2]
    check = margin.check(answer, replay, None)
    assert check.metrics["score"] == pytest.approx(ordered.mean())
    assert check.reason.startswith("no_profile")


def test_honest_answers_pass_whichever_half_calibrates() -> None:
    for half in (0, 1):
        profile = calibrated(SINGLE[half::2])
        checks = [margin.check(*pair, profile) for pair in (*SINGLE[1 - half :: 2], *BATCH)]
        assert all(check.result is not Result.REJECT for check in checks)
        assert sum(check.result is Result.PASS for check in checks) >= len(checks) - 1


def test_one_left_out_is_never_rejected() -> None:
    for out in range(len(SINGLE)):
        profile = calibrated(SINGLE[:out] + SINGLE[out + 1 :])
        assert margin.check(*SINGLE[out], profile).result is not Result.REJECT


def test_a_spoofed_and_bent_claim_is_caught_by_margin_alone() -> None:
    profile = fit(
        [row for pair in SINGLE for check in (distance, margin) for row in check.calibration_rows(*pair)],
        KEY,
    )
    found = []
    for answer, replay in FP8:
        liar = bent(answer, replay)
        assert selection.check(liar).result is Result.PASS
        assert distance.check(liar, replay, profile).result is not Result.REJECT
        found.append(margin.check(liar, replay, profile))
    # Forty tokens show two to five events: most say a little, and together they are certain.
    assert sum(check.result is Result.REJECT for check in found) >= 2
    assert sum(int(check.metrics["exceeds"] or 0) for check in found) >= 6
    evidence = betting.calibrated(
        [bool(check.metrics["exceeds"]) for check in found],
        [int(check.metrics["n_least"] or 0) for check in found],
        int(found[0].metrics["groups"] or 0),
    )
    assert evidence[-1] > math.log(500)


def test_an_omitted_rival_shows_in_the_full_form_alone() -> None:
    seen = 0
    for answer, replay in FP8:
        margins = margin.measure(answer, replay).margin
        liar = bent(answer, replay)
        ids, logprobs = liar.claim_ids.copy(), liar.claim_logprobs.copy()
        temperature = answer.sampling.temperature
        gumbel = noise.gumbel(recorded.CPU, answer.sampling.seed or 0, len(answer.prompt_ids), replay.ids)
        assert gumbel is not None
        race = np.where(replay.ids >= 0, replay.logprobs + temperature * gumbel, -np.inf)
        for row in np.flatnonzero(margins > 0):
            # Every rival is dropped; the true next ones take their places, out of the reference's sight.
            beating = np.flatnonzero(race[row, 1:] > race[row, 0]) + 1
            ids[row, beating] = 40_000 + np.arange(len(beating))
            logprobs[row, beating] = logprobs[row][ids[row] >= 0].min() - 0.1
        liar = dataclasses.replace(liar, claim_ids=ids, claim_logprobs=logprobs)
        full, few = (margin.check(liar, view, PROFILE) for view in forms(liar, replay))
        assert full.metrics["omitted_rivals"] == int((margins > margin.RIVAL_MARGIN).sum())
        assert few.metrics["omitted_rivals"] == few.metrics["losing"] == 0
        assert few.result is Result.INCONCLUSIVE
        assert few.reason.startswith("ids_form")
        seen += int(full.metrics["exceeds"] or 0)
    assert seen >= 6


def test_another_temperature_or_seed_than_asked_for_is_caught() -> None:
    sampled = [pair for pair in SINGLE if pair[0].sampling.temperature > 0]

    def results(**changes: Any) -> list[Result]:
        asked = [
            dataclasses.replace(answer, sampling=dataclasses.replace(answer.sampling, **changes))
            for answer, _ in sampled
        ]
        return [
            margin.check(answer, replay, PROFILE).result for answer, (_, replay) in zip(asked, sampled, strict=True)
        ]

    assert results(temperature=0.6).count(Result.PASS) <= len(sampled) / 3
    assert results(seed=7).count(Result.REJECT) == len(sampled)


def test_one_wild_token_does_not_convict() -> None:
    for answer, replay in SINGLE[:8]:
        logprobs = replay.logprobs.copy()
        logprobs[7, 0] -= 25
        check = margin.check(answer, dataclasses.replace(replay, logprobs=logprobs), PROFILE)
        assert float(check.metrics["worst_margin"] or 0) > 10
        assert check.result is not Result.REJECT


def test_cuts_never_make_a_true_replay_lose() -> None:
    everything = [*recorded.truncated(), *recorded.gpu_limits().values(), *recorded.gpu("T1")[:4]]
    for answer in everything:
        found = margin.measure(answer, honest_replay(answer))
        assert found.margin.max() < 2e-3, answer.sampling


@pytest.mark.parametrize("drift", [0.02, 0.05])
def test_drift_across_a_cut_is_no_margin(drift: float) -> None:
    found = [margin.measure(answer, honest_replay(answer, drift)) for answer in recorded.gpu_limits().values()]
    margins = np.concatenate([each.margin for each in found])
    assert np.isfinite(margins).all()
    assert margins.max() < 8 * drift


def test_a_token_that_the_cuts_forbid_counts_in_full() -> None:
    answer, replay = next(pair for pair in SINGLE if pair[0].sampling.temperature > 0)
    for limits in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        asked = dataclasses.replace(answer.sampling, **limits)
        found = margin.measure(dataclasses.replace(answer, sampling=asked), replay)
        far = replay.logprobs[:, 0] < replay.logprobs.max(axis=1) - 0.5
        assert np.isinf(found.margin[far]).all() or "top_p" in limits
        assert np.isfinite(found.margin[replay.logprobs[:, 0] == replay.logprobs.max(axis=1)]).all()


@pytest.mark.parametrize(
    ("changes", "code", "by_request"),
    [
        ({"runtime": "vllm-9"}, "unknown_runtime", False),
        ({"sampling": Sampling(temperature=0.8)}, "no_seed", False),
        ({"sampling": Sampling(temperature=0.8, seed=-1)}, "no_seed", False),
        ({"speculative": True}, "speculative", False),
        ({"sampling": Sampling(temperature=math.nan, seed=1)}, "bad_temperature", False),
        ({"sampling": Sampling(temperature=0.8, seed=1, repetition_penalty=1.2)}, "not_replayed", True),
        ({"sampling": Sampling(temperature=0.8, seed=1, grammar=True)}, "grammar", True),
        ({"precision": "fp8"}, "profile_mismatch: precision", False),
        ({"engine": "vllm 0.33"}, "profile_mismatch: engine", False),
    ],
)
def test_what_cannot_be_raced_is_inconclusive(changes: dict[str, Any], code: str, by_request: bool) -> None:
    answer, replay = next(pair for pair in SINGLE if pair[0].sampling.temperature > 0)
    check = margin.check(dataclasses.replace(answer, **changes), replay, PROFILE)
    assert check.result is Result.INCONCLUSIVE
    assert check.reason.startswith(code)
    assert check.by_request is by_request


def test_a_contradicted_runtime_is_not_raced() -> None:
    sampled, greedy = (next(p for p in FP8 if (p[0].sampling.temperature > 0) is hot) for hot in (True, False))
    check = margin.check(*sampled, PROFILE, contradicted=True)
    assert check.result is Result.INCONCLUSIVE
    assert check.reason.startswith("runtime_changed")
    assert not margin.check(*greedy, PROFILE, contradicted=True).reason.startswith("runtime_changed")


def test_speculative_decoding_is_raced_at_zero() -> None:
    answer, replay = next(pair for pair in SINGLE if pair[0].sampling.temperature == 0)
    assert margin.check(dataclasses.replace(answer, speculative=True), replay, PROFILE).result is Result.PASS


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.5])
def test_a_reference_that_failed_accuses_nobody(value: float) -> None:
    answer, replay = SINGLE[0]
    logprobs = replay.logprobs.copy()
    logprobs[7] = value
    check = margin.check(answer, dataclasses.replace(replay, logprobs=logprobs), PROFILE)
    assert check.reason.startswith("bad_replay")


def test_logit_bias_is_raced() -> None:
    answer, replay = next(pair for pair in SINGLE if pair[0].sampling.temperature > 0)
    token = int(replay.ids[5, 1])
    biased = dataclasses.replace(answer.sampling, logit_bias=((token, 50.0),))
    found = margin.measure(dataclasses.replace(answer, sampling=biased), replay)
    assert found.margin[5] > 20


@given(
    st.floats(0.05, 2),
    st.integers(0, 30),
    st.floats(0.1, 1),
    st.floats(0, 0.9),
    st.integers(-(2**63), 2**63 - 1),
)
@settings(max_examples=60)
def test_a_worse_token_never_has_a_smaller_margin(
    temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    answer, replay = SINGLE[1]
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    asked = dataclasses.replace(answer, sampling=sampling)
    logprobs = replay.logprobs.copy()
    logprobs[:, 0] -= 0.3
    before, after = (margin.measure(asked, Replay(replay.ids, values)) for values in (replay.logprobs, logprobs))
    if not (top_k > 0 or top_p < 1 or min_p > 0):
        assert (after.margin >= before.margin - 1e-9).all()
    assert not np.isnan(before.margin).any()
    assert (before.weights() >= 0).all()
    assert (before.weights() <= 1).all()


def test_a_budget_keeps_no_answer_from_being_compared() -> None:
    answer, replay = next(pair for pair in SINGLE if len(pair[0].output_ids) >= 40)
    opening, closing, word = 49_001, 49_002, 49_003
    tags = Tags(frozenset({opening}), frozenset({closing}))
    asked = dataclasses.replace(answer, prompt_ids=np.concatenate([answer.prompt_ids[:-1], [opening]]).astype(np.int32))

    def found(budget: int, words: int = 0, **options: Any) -> Any:
        output, ids, logprobs = asked.output_ids.copy(), replay.ids.copy(), replay.logprobs.copy()
        if words:
            output[20 : 20 + words] = [word] * (words - 1) + [closing]
            ids[20 : 20 + words, 0] = output[20 : 20 + words]
            logprobs[20 : 20 + words, 0] = -25
        request = b'{"thinking_token_budget": %d}' % budget
        evidence = dataclasses.replace(asked, request=request, output_ids=output)
        return margin.check(evidence, dataclasses.replace(replay, ids=ids, logprobs=logprobs), PROFILE, **options)

    assert found(100_000) == found(-1)
    assert found(100_000, tags=tags).result is Result.PASS
    forced = found(20, 1, tags=tags)
    assert (forced.result, forced.metrics["absurd"]) == (Result.PASS, 0)
    words = found(20, 3, tags=tags)
    assert (words.result, words.by_request, words.reason[:14]) == (Result.INCONCLUSIVE, False, "forced_unclear")
    assert found(24, 3, tags=tags).result is Result.REJECT
    assert found(20).reason.startswith("forced_unclear")
    assert not found(20).by_request
