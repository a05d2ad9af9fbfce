"""Distance metrics against a plain reimplementation, and the check on recorded honest and FP8 answers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from policies import distance
from policies._calibrated import forms
from policies._comparison import compare
from policies.checks import Result
from policies.evidence import MASKED, Evidence, Replay, Sampling
from policies.profile import Profile, ProfileKey, fit
from tests.policies import recorded

KEY = ProfileKey("smollm2", recorded.CPU, "bf16", recorded.REFERENCE)
SINGLE = recorded.replayed("single")
BATCH = recorded.replayed("batch")
FP8 = recorded.replayed("fp8")
EVEN, ODD = SINGLE[::2], SINGLE[1::2]


def calibrated(pairs: tuple[tuple[Evidence, Replay], ...], key: ProfileKey = KEY) -> Profile:
    return fit([row for pair in pairs for row in distance.calibration_rows(*pair, arm="single")], key, created=1.0)


PROFILE = calibrated(EVEN)


def listed(ids: Any, logprobs: Any) -> dict[int, float]:
    return {
        int(id): float(logprob)
        for id, logprob in zip(ids, logprobs, strict=True)
        if id >= 0 and math.isfinite(logprob) and logprob > MASKED
    }


def softmax(values: list[float]) -> list[float]:
    weights = [math.exp(value - max(values)) for value in values]
    return [weight / sum(weights) for weight in weights]


def js(worker: dict[int, float], verifier: dict[int, float]) -> float:
    union = sorted(worker.keys() | verifier.keys())
    p = softmax([worker.get(id, -100.0) for id in union])
    q = softmax([verifier.get(id, -100.0) for id in union])
    middle = [(a + b) / 2 for a, b in zip(p, q, strict=True)]

    def kl(values: list[float]) -> float:
        return sum(a * math.log(a / b) for a, b in zip(values, middle, strict=True) if a > 0)

    return kl(p) / 2 + kl(q) / 2


@pytest.mark.parametrize("pair", [*SINGLE[:2], BATCH[0], FP8[0]])
def test_metrics_are_the_formulas_token_by_token(pair: tuple[Evidence, Replay]) -> None:
    answer, replay = pair
    differences, jaccards, divergences, omitted, claimed, ranks = [], [], [], [], [], []
    for j in range(len(answer.output_ids)):
        worker = listed(answer.claim_ids[j], answer.claim_logprobs[j])
        verifier = listed(replay.ids[j], replay.logprobs[j])
        token = int(answer.output_ids[j])
        differences.append(abs(verifier[token] - worker[token]))
        jaccards.append(len(worker.keys() & verifier.keys()) / len(worker.keys() | verifier.keys()))
        divergences.append(js(worker, verifier))
        omitted.append(sum(math.exp(value) for id, value in verifier.items() if id not in worker))
        claimed.append(sum(math.exp(value) for id, value in verifier.items() if id in worker))
        depth = min(len(worker), len(verifier))
        rank, other = (min(1 + sum(v > d[token] for v in d.values()), depth) for d in (worker, verifier))
        ranks.append(rank != other)
    metrics = distance.measure(answer, replay)
    assert metrics["tokens"] == metrics["compared"] == len(answer.output_ids)
    assert metrics["abs_mean"] == pytest.approx(np.mean(differences))
    assert metrics["abs_p50"] == pytest.approx(np.quantile(differences, 0.5))
    assert metrics["abs_p95"] == pytest.approx(np.quantile(differences, 0.95))
    assert metrics["abs_p99"] == pytest.approx(np.quantile(differences, 0.99))
    assert metrics["abs_max"] == pytest.approx(max(differences))
    assert metrics["rank_change_rate"] == pytest.approx(np.mean(ranks))
    assert metrics["topk_jaccard"] == pytest.approx(np.mean(jaccards))
    assert metrics["union_js"] == pytest.approx(np.mean(divergences), abs=1e-9)
    assert metrics["union_js_p99"] == pytest.approx(np.quantile(divergences, 0.99), abs=1e-9)
    assert metrics["omitted_mass"] == pytest.approx(np.mean(omitted))
    assert metrics["claimed_mass"] == pytest.approx(np.mean(claimed))


def test_a_claim_that_is_the_replay_has_no_distance() -> None:
    answer, replay = SINGLE[0]
    mirrored = dataclasses.replace(answer, claim_ids=replay.ids, claim_logprobs=replay.logprobs)
    metrics = distance.measure(mirrored, replay)
    assert metrics["abs_max"] == metrics["union_js"] == metrics["rank_change_rate"] == metrics["omitted_mass"] == 0
    assert metrics["topk_jaccard"] == 1
    assert metrics["drift_tokens"] == 0
    check = distance.check(mirrored, replay, PROFILE)
    assert check.result is Result.PASS


def test_an_ids_replay_has_no_ranks_jaccard_or_omitted_mass() -> None:
    answer, _ = FP8[0]
    replay = Replay(answer.claim_ids, answer.claim_logprobs, form="ids", reference=recorded.REFERENCE)
    metrics = distance.measure(answer, replay)
    for name in ("rank_change_rate", "topk_jaccard", "omitted_mass"):
        assert metrics[name] is None
    assert metrics["abs_max"] == metrics["union_js"] == 0
    finite = np.where(np.isfinite(answer.claim_logprobs), np.exp(answer.claim_logprobs.astype(float)), 0)
    assert metrics["claimed_mass"] == pytest.approx(finite.sum(axis=1).mean())
    assert distance.check(answer, replay, PROFILE).result is Result.PASS


def with_claimed_columns(answer: Evidence, replay: Replay) -> Replay:
    """The replay as a reference gives it that also scores the claimed ids: those outside its own list follow it."""
    own = replay.ids.shape[1]
    known = (answer.claim_ids[:, :, None] == replay.ids[:, None, :]).any(axis=2)
    extra = np.where(known | (answer.claim_ids < 0), -1, answer.claim_ids).astype(np.int32)
    guess = np.where(extra >= 0, answer.claim_logprobs, -np.inf).astype(np.float32)
    return dataclasses.replace(
        replay,
        ids=np.concatenate([replay.ids, extra], axis=1),
        logprobs=np.concatenate([replay.logprobs, guess], axis=1),
        own=own,
    )


@pytest.mark.parametrize("pair", [SINGLE[0], FP8[0]])
def test_claimed_ids_beside_the_references_own_are_compared_but_change_no_list(pair: tuple[Evidence, Replay]) -> None:
    answer, replay = pair
    wider = with_claimed_columns(answer, replay)
    before, after = distance.measure(answer, replay), distance.measure(answer, wider)
    for name in ("topk_jaccard", "rank_change_rate", "omitted_mass", "union_js", "union_js_p99", "abs_mean"):
        assert after[name] == pytest.approx(before[name]), name
    assert after["unmatched"] == 0
    assert float(before["unmatched"] or 0) > 0
    assert float(after["claimed_mass"] or 0) > float(before["claimed_mass"] or 0)
    views = {view.form: view for view in forms(answer, wider)}
    assert distance.measure(answer, views["ids"])["unmatched"] == 0
    assert (np.isin(views["ids"].ids, answer.claim_ids) | (views["ids"].ids < 0)).all()


def test_inventing_ids_or_leaving_out_likely_ones_is_distance() -> None:
    answer, replay = ODD[0]
    for share in (4, 10):
        ids = answer.claim_ids.copy()
        # The likeliest others go, ids nobody lists take their places and their logprobs.
        ids[:, 1 : 1 + share] = np.where(ids[:, 1 : 1 + share] >= 0, ids[:, 1 : 1 + share] + 100_000, -1)
        check = distance.check(dataclasses.replace(answer, claim_ids=ids), replay, PROFILE)
        assert check.result is Result.REJECT
        assert float(check.metrics["omitted_mass"] or 0) > 0.1


def test_the_score_hardly_depends_on_how_peaked_a_position_is() -> None:
    peaks, apart = [], []
    for pair in SINGLE:
        comparison = compare(*pair)
        peaks.append(pair[1].logprobs.max(axis=1)[comparison.changed])
        apart.append(comparison.apart[comparison.changed])
    peak, value = np.concatenate(peaks), np.concatenate(apart)
    peaked, flat = value[peak > -0.05].mean(), value[peak < -1].mean()
    assert len(value[peak > -0.05]) > 50
    assert 0.8 < peaked / flat < 1.3


def test_one_wild_token_does_not_convict_a_short_answer() -> None:
    for answer, replay in SINGLE[:10]:
        logprobs = answer.claim_logprobs.copy()
        logprobs[3, 1:] -= np.arange(logprobs.shape[1] - 1)
        short = cut(dataclasses.replace(answer, claim_logprobs=logprobs), replay, 20)
        check = distance.check(*short, PROFILE)
        assert check.result is not Result.REJECT


def test_a_claim_moved_as_a_whole_is_seen() -> None:
    answer, replay = ODD[0]
    moved = dataclasses.replace(answer, claim_logprobs=answer.claim_logprobs - np.float32(1.0))
    assert distance.check(moved, replay, PROFILE).result is Result.REJECT


def test_one_left_out_is_never_rejected() -> None:
    rows = [distance.calibration_rows(*pair, arm="single") for pair in SINGLE]
    for out, pair in enumerate(SINGLE):
        profile = fit([row for k, each in enumerate(rows) if k != out for row in each], KEY)
        for view in forms(*pair):
            assert distance.check(pair[0], view, profile).result is not Result.REJECT


def test_forms_are_calibrated_apart() -> None:
    assert {cell.form for cell in PROFILE.cells} == {"full", "ids"}
    for answer, replay in FP8:
        for view in forms(answer, replay):
            assert distance.check(answer, view, PROFILE).result is Result.REJECT


def test_a_replay_of_a_disjoint_claim_diverges_as_far_as_it_can() -> None:
    answer, replay = SINGLE[0]
    ids = np.where(replay.ids >= 0, replay.ids + 100_000, replay.ids)
    far = dataclasses.replace(answer, claim_ids=ids)
    comparison = compare(far, replay)
    assert comparison.js == pytest.approx(math.log(2), abs=1e-3)
    assert (comparison.jaccard == 0).all()
    assert (comparison.claimed == 0).all()
    assert np.isnan(comparison.difference).all()
    assert comparison.changed.all()


def test_half_of_the_honest_answers_calibrate_and_the_other_half_passes() -> None:
    for fitted, held_out in ((EVEN, ODD), (ODD, EVEN)):
        profile = calibrated(fitted)
        checks = [distance.check(*pair, profile) for pair in (*held_out, *BATCH)]
        assert all(check.result is not Result.REJECT for check in checks)
        assert sum(check.result is Result.PASS for check in checks) >= len(checks) - 1


def test_fp8_rounded_weights_are_rejected_at_a_stated_level() -> None:
    for fitted in (EVEN, ODD):
        profile = calibrated(fitted)
        for pair in FP8:
            check = distance.check(*pair, profile)
            assert check.result is Result.REJECT, check
            assert check.reason.startswith("too_far: the drift")
            assert check.level == check.metrics["p"] == 1 / (1 + int(check.metrics["n"] or 0))
            assert float(check.metrics["tail"] or 0) < 1e-5
            assert check.metrics["bet"] == 1


def test_one_wild_token_does_not_decide() -> None:
    answer, replay = ODD[0]
    logprobs = answer.claim_logprobs.copy()
    logprobs[7, 0] -= 25
    check = distance.check(dataclasses.replace(answer, claim_logprobs=logprobs), replay, PROFILE)
    assert float(check.metrics["abs_max"] or 0) > 20
    assert check.result is not Result.REJECT


def test_lies_about_the_sampled_token_alone_are_seen() -> None:
    answer, replay = ODD[0]
    logprobs = answer.claim_logprobs.copy()
    logprobs[:, 0] -= 0.6
    check = distance.check(dataclasses.replace(answer, claim_logprobs=logprobs), replay, PROFILE)
    assert check.result is Result.REJECT


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"model": "other"}, "profile_mismatch: model"),
        ({"runtime": "vllm-0.32-v2"}, "profile_mismatch: runtime"),
        ({"precision": "fp8"}, "profile_mismatch: precision"),
        ({"engine": "vllm 0.33"}, "profile_mismatch: engine"),
        ({"sampling": Sampling(temperature=1.4)}, "outside_profile"),
        ({"sampling": Sampling(temperature=0.8, grammar=True)}, "grammar"),
    ],
)
def test_what_was_not_calibrated_is_inconclusive(changes: dict[str, Any], code: str) -> None:
    answer, replay = SINGLE[0]
    check = distance.check(dataclasses.replace(answer, **changes), replay, PROFILE)
    assert check.result is Result.INCONCLUSIVE
    assert check.reason.startswith(code)
    assert check.by_request == (code == "grammar")
    assert check.metrics["abs_mean"] is not None


def test_between_calibrated_temperatures_the_more_lenient_neighbour_judges() -> None:
    answer, replay = FP8[0]
    between = dataclasses.replace(answer, sampling=dataclasses.replace(answer.sampling, temperature=0.4))
    assert distance.check(between, replay, PROFILE).result is Result.REJECT


def test_another_reference_or_no_profile_is_inconclusive() -> None:
    answer, replay = SINGLE[0]
    assert distance.check(answer, replay, None).reason.startswith("no_profile")
    other = dataclasses.replace(replay, reference="other")
    assert distance.check(answer, other, PROFILE).reason.startswith("profile_mismatch: reference")


def cut(answer: Evidence, replay: Replay, tokens: int) -> tuple[Evidence, Replay]:
    return (
        dataclasses.replace(
            answer,
            output_ids=answer.output_ids[:tokens],
            claim_ids=answer.claim_ids[:tokens],
            claim_logprobs=answer.claim_logprobs[:tokens],
        ),
        dataclasses.replace(replay, ids=replay.ids[:tokens], logprobs=replay.logprobs[:tokens]),
    )


def test_under_sixteen_tokens_nothing_is_said_and_from_there_fp8_never_passes() -> None:
    for pair in FP8:
        short = distance.check(*cut(*pair, 15), PROFILE)
        assert short.result is Result.INCONCLUSIVE
        assert short.reason.startswith("too_short")
    caught = [distance.check(*cut(*pair, 16), PROFILE).result for pair in FP8]
    assert Result.PASS not in caught


def test_a_replay_of_other_tokens_is_inconclusive() -> None:
    answer, replay = SINGLE[0]
    ids = replay.ids.copy()
    ids[3, 0] += 1
    for bad in (
        dataclasses.replace(replay, ids=ids),
        dataclasses.replace(replay, ids=ids[:5], logprobs=replay.logprobs[:5]),
        dataclasses.replace(replay, logprobs=replay.logprobs[:5]),
        dataclasses.replace(replay, ids=ids[:0], logprobs=replay.logprobs[:0]),
    ):
        check = distance.check(answer, bad, PROFILE)
        assert check.result is Result.INCONCLUSIVE
        assert check.reason.startswith("bad_replay")


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf, 0.5, MASKED])
@pytest.mark.parametrize("rows", [slice(None), slice(7, 8)])
def test_a_reference_that_failed_accuses_nobody(value: float, rows: slice) -> None:
    answer, replay = SINGLE[0]
    logprobs = replay.logprobs.copy()
    logprobs[rows] = value
    check = distance.check(answer, dataclasses.replace(replay, logprobs=logprobs), PROFILE)
    assert check.result is Result.INCONCLUSIVE
    assert check.reason.startswith("bad_replay")


def test_tokens_without_a_claim_keep_a_response_from_passing() -> None:
    answer, replay = ODD[0]
    logprobs = answer.claim_logprobs.copy()
    logprobs[5, 0] = np.nan
    check = distance.check(dataclasses.replace(answer, claim_logprobs=logprobs), replay, PROFILE)
    assert check.result is Result.INCONCLUSIVE
    assert check.reason.startswith("not_compared")
    none = dataclasses.replace(
        answer, claim_ids=np.zeros((0, 21), np.int32), claim_logprobs=np.zeros((0, 21), np.float32)
    )
    assert distance.check(none, replay, PROFILE).reason.startswith("no_claim")
    empty = dataclasses.replace(none, output_ids=np.zeros(0, np.int32))
    assert distance.check(empty, replay, PROFILE).reason.startswith("no_tokens")


MATRIX = arrays.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=5).flatmap(
    lambda shape: st.tuples(
        arrays.arrays(np.int32, shape, elements=st.integers(-2, 6)),
        arrays.arrays(np.float32, shape, elements=st.floats(width=32)),
    )
)


@given(claim=MATRIX, replayed=MATRIX, output=st.integers(0, 6).flatmap(lambda n: arrays.arrays(np.int32, n)))
@settings(max_examples=100)
def test_garbage_never_crashes(claim: tuple[Any, Any], replayed: tuple[Any, Any], output: Any) -> None:
    answer = Evidence(
        "", "chat", "", "smollm2", Sampling(temperature=0.0), precision="bf16", runtime=recorded.CPU, output_ids=output
    )
    answer = dataclasses.replace(answer, claim_ids=claim[0], claim_logprobs=claim[1])
    replay = Replay(*replayed, reference=recorded.REFERENCE)
    metrics = distance.measure(answer, replay)
    assert all(value is None or math.isfinite(value) for value in metrics.values())
    assert distance.check(answer, replay, PROFILE).result is not Result.PASS


@given(
    wild=arrays.arrays(
        np.float32, (40, 21), elements=st.sampled_from([0.0, -0.1, 710.0, 3e38, -3e38, math.nan, math.inf, MASKED])
    )
)
@settings(max_examples=50)
def test_wild_claims_of_the_right_shape_never_crash_or_pass(wild: Any) -> None:
    answer, replay = SINGLE[0]
    check = distance.check(dataclasses.replace(answer, claim_logprobs=wild), replay, PROFILE)
    assert check.result is not Result.PASS
