"""LMCV's rules: its committed verdicts, both 8B rules, the 27B rule, legality, routing and calibration."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import lmcv
from policies.evidence import Replay
from policies.lmcv import calibration, legality, moe, verdicts
from policies.lmcv.rules import JACCARD, JS99, MEAN, P50, P90, P95, P99, RANK
from tests.policies.test_lmcv import published

PRESET = lmcv.POLICIES["qwen3-8b-bf16-4090-v1"]
REPORT = lmcv.POLICIES["qwen3-8b-bf16-report"]
FP8 = lmcv.POLICIES["qwen3.8-27b-fp8-report"]

GOOD = {
    "count": 128.0,
    "finite_count": 128.0,
    "missing_selected_count": 0.0,
    "missing_compared_count": 0.0,
    P50: 0.00001,
    MEAN: 0.005,
    P90: 0.02,
    P95: 0.05,
    P99: 0.1,
    RANK: 0.005,
    JACCARD: 0.97,
    "topk_jaccard_p05": 0.9,
    "union_js_p95": 0.001,
    JS99: 0.003,
}


def metrics_of(row: dict[str, str]) -> dict[str, float]:
    words = {"group", "verdict", "reason", "accept_failures", "reject_hits"}
    return {name: float(value) for name, value in row.items() if name not in words}


def test_every_committed_verdict_failure_and_hit_is_reproduced() -> None:
    rows = published("qwen3_8b_bf16_sample_decisions.csv")
    assert len(rows) == 53
    for row in rows:
        found = lmcv.verdict(metrics_of(row), PRESET, k=32)
        assert found.verdict == row["verdict"], row["group"]
        assert "; ".join(found.accept_failures) == row["accept_failures"]
        assert "; ".join(found.reject_hits) == row["reject_hits"]
        assert found.notes == ()


def test_the_report_rule_is_stricter_on_the_same_rows() -> None:
    rows = published("qwen3_8b_bf16_sample_decisions.csv")
    words = [lmcv.verdict(metrics_of(row), REPORT, k=32).verdict for row in rows]
    assert (words.count("PASS"), words.count("INCONCLUSIVE"), words.count("REJECT")) == (48, 5, 0)


def test_failures_and_hits_keep_the_documented_order() -> None:
    bad = GOOD | {MEAN: 1.0, P95: 2.0, P99: 3.0, RANK: 0.5, JACCARD: 0.1, JS99: 0.6, "missing_selected_count": 1.0}
    found = lmcv.verdict(bad, PRESET, k=32)
    expected = ("missing_selected_count", MEAN, P95, P99, RANK, JACCARD, JS99)
    assert (found.verdict, found.accept_failures, found.reject_hits) == ("REJECT", expected, expected)


@pytest.mark.parametrize("policy", lmcv.POLICIES.values(), ids=lambda policy: policy.name)
def test_bounds_themselves_pass_and_do_not_reject(policy: lmcv.Policy) -> None:
    at_accept = GOOD | {bound.metric: bound.threshold for bound in policy.accept}
    assert lmcv.verdict(at_accept, policy, k=policy.k).verdict == policy.pass_word
    at_reject = GOOD | {bound.metric: bound.threshold for bound in policy.reject}
    assert lmcv.verdict(at_reject, policy, k=policy.k).verdict == "INCONCLUSIVE"
    for bound in policy.reject:
        beyond = math.nextafter(bound.threshold, math.inf if bound.op == ">" else -math.inf)
        found = lmcv.verdict(GOOD | {bound.metric: beyond}, policy, k=policy.k)
        assert (found.verdict, found.reject_hits) == ("REJECT", (bound.metric,))


@pytest.mark.parametrize("policy", lmcv.POLICIES.values(), ids=lambda policy: policy.name)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_fails_a_pass_and_never_rejects(policy: lmcv.Policy, value: float) -> None:
    for bound in policy.accept:
        found = lmcv.verdict(GOOD | {bound.metric: value}, policy, k=policy.k)
        assert (found.verdict, found.accept_failures) == ("INCONCLUSIVE", (bound.metric,))
    empty = {"count": 128.0, "finite_count": 128.0}
    assert lmcv.verdict(empty, policy).verdict == "INCONCLUSIVE"


def test_another_k_is_said_in_the_result() -> None:
    assert lmcv.verdict(GOOD, REPORT, k=20).notes[0].startswith("k_differs")
    assert lmcv.verdict(GOOD, FP8, k=20).notes == ()
    assert lmcv.verdict(GOOD, FP8).notes[0].startswith("k_unknown")
    assert (REPORT.k, PRESET.k, FP8.k) == (32, 32, 20)


def test_too_short_is_inconclusive() -> None:
    awful = GOOD | {MEAN: 9.0}
    assert lmcv.verdict(awful | {"count": 63.0, "finite_count": 63.0}, PRESET, k=32).verdict == "INCONCLUSIVE"
    assert lmcv.verdict(awful | {"count": 64.0, "finite_count": 64.0}, PRESET, k=32).verdict == "REJECT"
    assert lmcv.verdict(awful | {"finite_count": 5.0}, REPORT, k=32).verdict == "INCONCLUSIVE"
    assert lmcv.verdict(awful | {"finite_count": 6.0}, REPORT, k=32).verdict == "REJECT"


def test_withheld_evidence_rejects_at_any_length() -> None:
    found = lmcv.verdict(GOOD | {"count": 3.0, "missing_evidence_count": 1.0}, PRESET, k=32)
    assert (found.verdict, found.reject_hits) == ("REJECT", ("missing_evidence_count",))
    assert lmcv.batch_verdict(GOOD | {"missing_evidence_count": 1.0}, [], PRESET, k=32).verdict == "REJECT"


@pytest.mark.parametrize(
    ("changes", "branch"),
    [
        ({JACCARD: 0.75, JS99: 0.09, P99: 0.32, P95: 0.3}, "awq_a"),
        ({JACCARD: 0.79, JS99: 0.09, P99: 9.0, P95: 0.3}, "awq_a"),
        ({JACCARD: 0.80, JS99: 0.11, P95: 1.63, P99: 2.0}, "awq_b"),
        ({JACCARD: 0.81, JS99: 0.16, P95: 2.0, P99: 2.0}, "awq_c"),
    ],
)
def test_branches_of_the_27b_rule(changes: dict[str, float], branch: str) -> None:
    found = lmcv.verdict(GOOD | {MEAN: 0.1} | changes, FP8, k=20)
    assert (found.verdict, found.reject_hits) == ("REJECT", (branch,))


@pytest.mark.parametrize(
    "changes",
    [
        {JACCARD: 0.75, JS99: 0.09, P99: 0.33},
        {JACCARD: 0.75, JS99: 0.09, P99: 0.2},
        {JACCARD: 0.87, JS99: 0.09, P99: 0.3},
        {JACCARD: 0.80, JS99: 0.11, P95: 1.64},
        {JACCARD: 0.81, JS99: 0.17},
        {JACCARD: 0.75, JS99: math.nan, P99: 0.3},
    ],
)
def test_outside_the_branches_the_27b_rule_is_undecided(changes: dict[str, float]) -> None:
    assert lmcv.verdict(GOOD | {MEAN: 0.1} | changes, FP8, k=20).verdict == "INCONCLUSIVE"


def batch(changes: dict[str, float] | None = None, words: list[str] | None = None) -> lmcv.BatchDecision:
    overall = GOOD | {"count": 1280.0, "finite_count": 1280.0} | (changes or {})
    return lmcv.batch_verdict(overall, words or ["PASS_PROVISIONAL"] * 10, PRESET, k=32)


def test_batches() -> None:
    assert batch().verdict == "PASS_STRICT"
    assert batch().passed
    for name, value in ((P50, 0.00011), (P90, 0.061), ("topk_jaccard_p05", 0.81), ("union_js_p95", 0.0041), (P95, 0.1)):
        found = batch({name: value})
        assert found.verdict == "INCONCLUSIVE", name
        assert [check.metric for check in found.accept_checks if not check.passed] == [name]
    found = batch({MEAN: 0.021})
    assert (found.verdict, [check.metric for check in found.reject_checks if check.passed]) == ("REJECT", [MEAN])
    assert batch({"count": 511.0}).verdict == "INCONCLUSIVE"
    assert batch(words=["PASS_PROVISIONAL"] * 3).verdict == "INCONCLUSIVE"
    assert batch(words=["PASS_PROVISIONAL"] * 9 + ["INCONCLUSIVE"]).verdict == "PASS_STRICT"
    assert batch(words=["PASS_PROVISIONAL"] * 8 + ["INCONCLUSIVE"] * 2).verdict == "INCONCLUSIVE"
    assert batch(words=["PASS_PROVISIONAL"] * 49 + ["REJECT"]).verdict == "PASS_STRICT"
    assert batch(words=["PASS_PROVISIONAL"] * 9 + ["REJECT"]).verdict == "INCONCLUSIVE"
    assert batch().sample_verdict_counts == {"PASS_PROVISIONAL": 10, "REJECT": 0, "INCONCLUSIVE": 0}
    assert lmcv.batch_verdict(GOOD, ["PASS"] * 10, REPORT, k=32).verdict == "INCONCLUSIVE"


def test_the_published_batches_come_out_as_published() -> None:
    """Totals of runs 8B_001, fp8_003, awq_002 and 7B_002 of the parameter report, 200 samples each."""
    names = (MEAN, P50, P90, P95, P99, RANK, JACCARD, "topk_jaccard_p05", "union_js_p95", JS99)
    runs = {
        "bf16": (0.008511, 1.0005e-5, 0.026156, 0.049856, 0.101925, 0.006055, 0.968556, 0.882353, 0.001032, 0.002717),
        "fp8": (0.029025, 0.000145, 0.079441, 0.135100, 0.312511, 0.018984, 0.899532, 0.729730, 0.007518, 0.022863),
        "awq": (0.079944, 0.000639, 0.211595, 0.388427, 1.133490, 0.049453, 0.792892, 0.560976, 0.045118, 0.143801),
        "7b": (0.570281, 0.041329, 1.803961, 2.893933, 5.829146, 0.195156, 0.409895, 0.207547, 0.477591, 0.627882),
    }
    counts = {"bf16": (191, 8, 1), "fp8": (10, 51, 139), "awq": (0, 0, 200), "7b": (0, 0, 200)}
    base = {"count": 25600.0, "finite_count": 25600.0, "missing_selected_count": 0.0}
    words = {
        run: ["PASS_PROVISIONAL"] * counts[run][0] + ["INCONCLUSIVE"] * counts[run][1] + ["REJECT"] * counts[run][2]
        for run in runs
    }
    found = {
        run: lmcv.batch_verdict(base | dict(zip(names, values, strict=True)), words[run], PRESET, k=32).verdict
        for run, values in runs.items()
    }
    assert found == {"bf16": "PASS_STRICT", "fp8": "REJECT", "awq": "REJECT", "7b": "REJECT"}


def test_legality() -> None:
    rank, selected = np.array([1, 2, 3, 30, np.nan]), np.array([-0.1, -1.0, -1.1, -9, np.nan])
    kth = np.full(5, -1.0)
    assert legality.codes(rank, selected, kth, 2, 20).tolist() == [0, 0, 1, 2, 2]
    assert legality.codes(rank, selected, kth, 2, 20, tolerance=0.0).tolist() == [0, 0, 2, 2, 2]
    assert legality.codes(rank, selected, kth, 0, 20).tolist() == [0] * 5
    assert legality.codes(rank, selected, kth, 40, 20).tolist() == [0, 0, 0, 0, 1]


def test_legality_of_a_replay() -> None:
    ids = np.array([[5, 1, 2, -1], [5, 1, 2, 3], [1, 5, 2, -1]], np.int32)
    logprobs = np.array([[-0.5, -1, -2, -np.inf], [-7, -1, -1.5, -2], [-1, -1, -2, -np.inf]], np.float32)
    replay = Replay(ids, logprobs)
    assert legality.of_replay(replay, 1).tolist() == [0, 2, 0]
    assert legality.of_replay(replay, 3).tolist() == [0, 2, 0]
    assert legality.of_replay(Replay(ids, logprobs, form="ids"), 1).tolist() == [1, 1, 1]
    # Claimed ids after the reference's own three columns have no say.
    wide = np.array([[5, 1, 2, 9]], np.int32), np.array([[-2, -1, -3, -0.5]], np.float32)
    assert legality.of_replay(Replay(*wide, own=3), 2).tolist() == [0]


def test_isolated_illegal_tokens_are_tolerated_in_mixtures_only() -> None:
    one = np.zeros(200, np.int8)
    one[50] = legality.ILLEGAL
    assert (legality.verdict(one, "dense"), legality.verdict(one, "moe")) == ("reject", "uncertain")
    one[51] = legality.ILLEGAL
    assert legality.verdict(one, "moe") == "reject"
    short = np.zeros(99, np.int8)
    short[3] = legality.ILLEGAL
    assert legality.verdict(short, "moe") == "reject"
    short[3] = legality.UNCERTAIN
    assert (legality.verdict(short), legality.verdict(short[5:])) == ("uncertain", "pass")


def layer_zero() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows = published("moe_layer0_fp8_vs_fp8.csv")
    columns = ("compared_entries", "entry_mismatch_count", "compared_tokens")
    entries, mismatches, tokens = (np.array([int(row[name]) for row in rows]) for name in columns)
    rates = np.array([float(row["entry_mismatch_rate"]) for row in rows])
    np.testing.assert_allclose(mismatches / entries, rates)
    assert (entries == tokens * 8).all()
    return entries, mismatches, tokens


def test_published_fp8_routes_are_accepted_in_any_five() -> None:
    entries, mismatches, tokens = layer_zero()
    found = moe.acceptance_rate(entries, mismatches, tokens, moe.THRESHOLDS["fp8"])
    assert found["accepted"] == 1.0
    assert 0.030 < found["lowest"] < found["highest"] < 0.070
    assert moe.decide(entries, mismatches, tokens, moe.THRESHOLDS["fp8"]) == "accept"


def test_the_routing_rule_in_its_order() -> None:
    entries, tokens = np.full(5, 1016), np.full(5, 127)
    bad = np.full(5, 115)
    assert moe.decide(entries[:4], bad[:4], tokens[:4], 0.08) == "insufficient_samples"
    assert moe.decide(np.full(5, 800), bad, np.full(5, 100), 0.08) == "insufficient_tokens"
    assert moe.decide(entries, bad, tokens, 0.08) == "reject"
    good = np.full(5, 50)
    assert moe.decide(entries, good, tokens, 0.08) == "accept"
    assert moe.decide(entries, good, tokens, 0.08, illegal=1, uncertain=1) == "reject"
    assert moe.decide(entries, good, tokens, 0.08, uncertain=1) == "uncertain"
    # Weighted by entries, not a mean of rates.
    assert moe.weighted_mismatch(np.array([10, 90]), np.array([10, 0])) == 0.1
    assert math.isnan(moe.weighted_mismatch(np.array([0]), np.array([0])))
    assert moe.decide(np.full(5, 1000), np.full(5, 80), np.full(5, 125), 0.08) == "accept"


def test_attribution_by_two_references() -> None:
    assert moe.attribute("accept", "reject") == "bf16"
    assert moe.attribute("reject", "accept") == "fp8"
    assert moe.attribute("reject", "reject") == "unknown"
    assert moe.attribute("accept", "accept") == "ambiguous"
    assert moe.attribute("accept", "insufficient_tokens") == "unknown"


def test_route_counts() -> None:
    ours = np.array([[[1, 2], [3, 4]], [[5, 6], [-1, -1]], [[7, 8], [9, 9]]])
    theirs = np.array([[[2, 1], [3, 4]], [[5, 7], [1, 2]], [[7, 8], [9, 9]]])
    found = moe.compare_routes(ours, theirs)
    assert (found.entries, found.entry_mismatches) == (10, 3)
    assert (found.tokens, found.token_layers) == (3, 5)
    assert (found.token_layer_matches, found.token_layer_set_matches, found.token_matches) == (3, 4, 1)
    assert found.overlap_sum == pytest.approx(4.5)
    assert found.jaccard_sum == pytest.approx(4 + 1 / 3)
    assert moe.compare_routes(ours, theirs, sentinel=None).entries == 12
    with pytest.raises(ValueError, match="shapes"):
        moe.compare_routes(ours, theirs[:2])


@given(st.integers(5, 30), st.integers(0, 2**31))
def test_random_groups_hold_distinct_samples(samples: int, seed: int) -> None:
    groups = moe.random_groups(samples, 7, seed=seed)
    assert groups.shape == (7, 5)
    assert all(len(set(group)) == 5 for group in groups.tolist())
    assert groups.max() < samples


def many(rng: np.random.Generator, scale: float, count: int = 200) -> list[dict[str, float]]:
    noise = 1 + 0.1 * rng.standard_normal((count, 6))
    return [
        {
            "missing_compared_count": 0.0,
            MEAN: 0.01 * scale * row[0],
            P95: 0.05 * scale * row[1],
            P99: 0.1 * scale * row[2],
            RANK: 0.01 * scale * row[3],
            JS99: 0.003 * scale * row[4],
            JACCARD: 1 - 0.04 * scale * row[5],
            "count": 128.0,
            "finite_count": 128.0,
        }
        for row in noise
    ]


def test_self_calibration() -> None:
    base = many(np.random.default_rng(1), 1)
    policy = calibration.self_calibration(base, k=20)
    bounds = {bound.metric: bound.threshold for bound in policy.accept}
    rejects = {bound.metric: bound for bound in policy.reject}
    assert bounds[MEAN] == pytest.approx(np.quantile([row[MEAN] for row in base], 0.99) * 1.25)
    assert rejects[MEAN].threshold == pytest.approx(3 * bounds[MEAN])
    assert bounds[JACCARD] == pytest.approx(np.quantile([row[JACCARD] for row in base], 0.01) - 0.02)
    assert rejects[JACCARD].threshold == pytest.approx(bounds[JACCARD] / 3)
    assert (bounds["missing_compared_count"], rejects["missing_compared_count"].threshold) == (0, 1)
    assert {lmcv.verdict(row, policy, k=20).verdict for row in base} == {"PASS"}
    assert {lmcv.verdict(row, policy, k=20).verdict for row in many(np.random.default_rng(2), 9)} == {"REJECT"}


def test_base_against_challenger() -> None:
    base, other = many(np.random.default_rng(1), 1), many(np.random.default_rng(2), 3)
    policy, found = calibration.base_vs_challenger(base, other, k=32)
    assert [each.metric for each in found] == [MEAN, P95, P99, RANK, JS99, JACCARD]
    for each in found:
        assert each.gap > 0
        assert (each.detected, each.false_rejects) == (1, 0)
        assert (each.reject <= each.accept) if each.metric == JACCARD else (each.reject >= each.accept)
    assert {lmcv.verdict(row, policy, k=32).verdict for row in other} == {"REJECT"}
    assert sum(lmcv.verdict(row, policy, k=32).verdict == "PASS" for row in base) >= 190
    # Alike sets: the bound falls back to what rejects at most one in a hundred of the base.
    policy, found = calibration.base_vs_challenger(base, many(np.random.default_rng(3), 1), k=32)
    assert all(each.false_rejects <= 0.01 for each in found)


def test_calibration_needs_numbers() -> None:
    with pytest.raises(ValueError, match=MEAN):
        calibration.self_calibration([{MEAN: math.nan}], k=20)


def test_evaluate_never_looks_past_its_bounds() -> None:
    assert verdicts.evaluate({}, PRESET.reject) == ()
    assert len(verdicts.evaluate({}, PRESET.accept)) == 7
