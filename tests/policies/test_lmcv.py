"""LMCV's columns and summaries: its published rows, a plain reading of its formulas, and what must always hold."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import lmcv
from policies.evidence import Evidence, Replay, Sampling
from policies.lmcv import columns, spikes, summary
from policies.lmcv.divergence import LN2, overlap
from tests.policies.recorded import replayed

FOLDER = Path(__file__).parents[1] / "data" / "lmcv"
List = dict[int, float]


def published(name: str) -> list[dict[str, str]]:
    with (FOLDER / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def arrays(lists: list[List]) -> tuple[np.ndarray, np.ndarray]:
    width = max([len(each) for each in lists] + [1])
    ids, logprobs = np.full((len(lists), width), -1, np.int64), np.full((len(lists), width), -np.inf)
    for row, each in enumerate(lists):
        ids[row, : len(each)], logprobs[row, : len(each)] = list(each), list(each.values())
    return ids, logprobs


def plainly(worker: List, verifier: List) -> dict[str, float]:
    """The formulas once more, one dictionary at a time."""

    def vector(ids: list[int], values: List) -> list[float] | None:
        logits = [values.get(id, -100.0) for id in ids]
        if not logits or not math.isfinite(max(logits)):
            return None
        weights = [math.exp(value - max(logits)) for value in logits]
        return [weight / sum(weights) for weight in weights]

    def js(p: list[float] | None, q: list[float] | None) -> float:
        if p is None or q is None:
            return math.nan
        middle = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
        halves = [
            sum(a * math.log(a / m) for a, m in zip(side, middle, strict=True) if a > 0 and m > 0) for side in (p, q)
        ]
        return 0.5 * sum(halves)

    def cosine(p: list[float] | None, q: list[float] | None) -> float:
        if p is None or q is None:
            return math.nan
        return sum(a * b for a, b in zip(p, q, strict=True)) / (math.hypot(*p) * math.hypot(*q))

    union, common = sorted(worker.keys() | verifier.keys()), sorted(worker.keys() & verifier.keys())
    of_union = vector(union, worker), vector(union, verifier)
    of_common = vector(common, worker), vector(common, verifier)
    return {
        "common": len(common),
        "union": len(union),
        "missing": len(worker.keys() - verifier.keys()),
        "extra": len(verifier.keys() - worker.keys()),
        "union_js": js(*of_union),
        "common_js": js(*of_common),
        "union_cosine": cosine(*of_union),
        "common_cosine": cosine(*of_common),
    }


lists = st.dictionaries(st.integers(0, 12), st.floats(-60, 0) | st.just(-math.inf), max_size=9)


@given(st.lists(st.tuples(lists, lists), min_size=1, max_size=4))
def test_columns_agree_with_a_plain_reading_of_the_formulas(pairs: list[tuple[List, List]]) -> None:
    found = overlap(*arrays([worker for worker, _ in pairs]), *arrays([verifier for _, verifier in pairs]))
    for row, (worker, verifier) in enumerate(pairs):
        for name, value in plainly(worker, verifier).items():
            assert getattr(found, name)[row] == pytest.approx(value, abs=1e-12, nan_ok=True), name


@given(lists, lists, st.randoms(use_true_random=False))
def test_divergence_is_bounded_symmetric_and_blind_to_order(worker: List, verifier: List, random: object) -> None:
    there, back = (
        overlap(*arrays([first]), *arrays([second])) for first, second in ((worker, verifier), (verifier, worker))
    )
    assert there.union_js == pytest.approx(back.union_js, abs=1e-12, nan_ok=True)
    assert (there.missing, there.union) == (back.extra, back.union)
    for value in (there.union_js[0], there.common_js[0]):
        assert math.isnan(value) or 0 <= value <= LN2
    shuffled = list(worker.items())
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    again = overlap(*arrays([dict(shuffled)]), *arrays([verifier]))
    assert again.union_js == pytest.approx(there.union_js, abs=1e-12, nan_ok=True)
    itself = overlap(*arrays([worker]), *arrays([worker]))
    assert math.isnan(itself.union_js[0]) or itself.union_js[0] == pytest.approx(0, abs=1e-12)


def test_a_long_comparison_goes_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    ids, logprobs = rng.integers(0, 40, (30, 21)), rng.normal(-4, 2, (30, 21))
    whole = overlap(ids, logprobs, ids[::-1], logprobs[::-1])
    monkeypatch.setattr("policies.lmcv.divergence._BLOCK", 1000)
    pieces = overlap(ids, logprobs, ids[::-1], logprobs[::-1])
    np.testing.assert_array_equal(whole.union_js, pieces.union_js)


def test_no_verifier_entry_keeps_a_finite_divergence_and_no_overlap() -> None:
    claim = np.array([[5, 6, 7], [8, 9, 1]], np.int64), np.log([[0.6, 0.3, 0.1], [0.9, 0.05, 0.05]])
    served = np.array([5, 8])
    worker = columns.listing(served, *claim)
    found = columns.rows(served, worker, columns.listing(served, claim[0][:1], claim[1][:1]), input_token_count=4)
    assert np.isnan(found.verifier_selected_logprob).tolist() == [False, True]
    assert found.topk_jaccard.tolist() == [1, 0]
    assert 0 < found.union_js_divergence[1] < LN2
    metrics = lmcv.summarise(found)
    assert (metrics["count"], metrics["finite_count"], metrics["missing_selected_count"]) == (2, 1, 1)
    assert (metrics["missing_compared_count"], metrics["missing_evidence_count"]) == (1, 0)


def test_evidence_a_worker_left_out_or_swapped_is_missing_not_skipped() -> None:
    ids, logprobs = np.array([[5, 6], [8, 9], [3, 2]], np.int64), np.log([[0.6, 0.3], [0.9, 0.05], [0.5, 0.4]])
    served = np.array([5, 7, 3, 4])
    found = columns.rows(
        served,
        columns.listing(served, ids, logprobs),
        columns.listing(served, served[:, None], np.full((4, 1), -0.1)),
        input_token_count=1,
    )
    assert np.isnan(found.worker_selected_logprob).tolist() == [False, True, False, True]
    metrics = lmcv.summarise(found)
    assert (metrics["count"], metrics["missing_evidence_count"], metrics["missing_selected_count"]) == (4, 2, 0)


def test_minus_infinity_as_vllm_writes_it_counts_but_never_enters_a_mean() -> None:
    ids = np.array([[5, 6], [5, 6]], np.int64)
    served = np.array([5, 5])
    worker = columns.listing(served, ids, np.array([[-9999.0, -0.1], [-0.2, -1.8]]))
    verifier = columns.listing(served, ids, np.array([[-3.0, -0.1], [-0.3, -1.5]]))
    metrics = lmcv.summarise(columns.rows(served, worker, verifier, input_token_count=1))
    assert (metrics["count"], metrics["finite_count"], metrics["missing_compared_count"]) == (2, 1, 1)
    assert metrics["mean_abs_logprob_diff"] == pytest.approx(0.1)


def test_ranks_come_from_logprobs_not_places_and_ties_change_nothing() -> None:
    served = np.array([9, 9, 9])
    ids = np.array([[9, 1, 2], [9, 1, 2], [9, 1, 2]], np.int64)
    worker = columns.listing(served, ids, np.array([[-3.0, -1.0, -2.0], [-1.0, -1.0, -2.0], [-1.5, -1.0, -2.0]]))
    assert worker.ranks.tolist() == [3, 1, 2]
    assert worker.beyond.tolist() == [True, False, False]
    verifier = columns.listing(served, ids, np.array([[-4.0, -1.0, -2.0], [-1.0, -1.1, -2.0], [-0.5, -1.0, -2.0]]))
    delta = columns.rows(served, worker, verifier, input_token_count=1).rank_delta_verifier_minus_worker
    assert np.isnan(delta[0])
    assert delta[1:].tolist() == [0, -1]


def test_derived_columns_of_the_published_rows_follow_from_the_others() -> None:
    rows = published("qwen3.6_35b_bf16_tokens.csv")
    assert tuple(rows[0]) == lmcv.CSV_COLUMNS
    assert len(rows) == 53
    for row in rows:
        value = {name: float(row[name]) for name in columns.NUMERIC_COLUMNS}
        difference = value["verifier_selected_logprob"] - value["worker_selected_logprob"]
        assert value["logprob_diff_verifier_minus_worker"] == difference
        assert value["abs_logprob_diff"] == abs(difference)
        delta = value["verifier_selected_rank"] - value["worker_selected_rank"]
        assert value["rank_delta_verifier_minus_worker"] == delta
        sides = value["missing_from_verifier_count"], value["extra_in_verifier_count"]
        assert value["union_top_count"] == value["common_top_count"] + sum(sides)
        assert value["topk_jaccard"] == value["common_top_count"] / value["union_top_count"]
        assert 0 <= value["union_js_divergence"] <= LN2
        # 32 alternatives, and the emitted token where it is not one of them.
        assert value["common_top_count"] + sides[0] == 32
        assert value["common_top_count"] + sides[1] == 32 + (value["verifier_selected_rank"] > 32)


def test_quantiles_and_empty_sets() -> None:
    assert summary.quantiles(np.array([3.0]), (0.99,)) == [3.0]
    assert summary.quantiles(np.arange(5, dtype=np.float64), (0.9,)) == [pytest.approx(3.6)]
    nothing = lmcv.summarise(lmcv.concatenate([]))
    assert nothing["count"] == nothing["finite_count"] == 0
    assert math.isnan(nothing["mean_abs_logprob_diff"])
    assert math.isnan(nothing["rank_delta_nonzero_rate"])
    assert lmcv.fixed_point({"x": 0.0123456789, "y": math.nan}) == {"x_fp_1e6": 12346, "y_fp_1e6": None}


def test_bucket_edges() -> None:
    lengths = np.array([1, 128, 129, 512, 513, 2048, 8192, 8193, 16384, 16385.0])
    expected = ["00000-00128"] * 2 + ["00129-00512"] * 2 + ["00513-02048"] * 2
    expected += ["02049-08192"] + ["08193-16384"] * 2 + ["16385+"]
    assert lmcv.input_buckets(lengths).tolist() == expected
    depths = lmcv.depth_buckets(np.array([0, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256.0])).tolist()
    expected = ["000-016"] * 2 + ["017-032"] * 2 + ["033-064"] * 2 + ["065-128"] * 2 + ["129-256"] * 2 + ["257+"]
    assert depths == expected


def test_grouped_summaries_partition_the_rows() -> None:
    rows = lmcv.concatenate([lmcv.compare(claim, replay) for claim, replay in replayed("single")])
    groups = lmcv.grouped(rows, lmcv.depth_buckets(rows.depth))
    assert list(groups) == ["000-016", "017-032", "033-064"]
    assert sum(group["count"] for group in groups.values()) == len(rows)


@pytest.mark.parametrize("kind", ["single", "batch", "fp8"])
def test_recorded_answers_have_every_metric(kind: str) -> None:
    for claim, replay in replayed(kind):
        metrics = lmcv.sample_metrics(claim, replay)
        assert metrics["count"] == metrics["finite_count"] == len(claim.output_ids)
        assert 0 <= metrics["topk_jaccard_min"] <= metrics["topk_jaccard_mean"] <= 1
        assert 0 <= metrics["bad_window_rate_w5"] <= 1
    fp8 = np.mean([lmcv.sample_metrics(*pair)["mean_abs_logprob_diff"] for pair in replayed("fp8")])
    honest = np.mean([lmcv.sample_metrics(*pair)["mean_abs_logprob_diff"] for pair in replayed("batch")])
    assert fp8 > 2 * honest


def test_a_replay_of_claimed_ids_only_has_no_ranks_and_no_overlap() -> None:
    claim, full = replayed("batch")[0]
    replay = Replay(claim.claim_ids, claim.claim_logprobs - np.float32(0.01), form="ids")
    metrics = lmcv.sample_metrics(claim, replay)
    assert metrics["mean_abs_logprob_diff"] == pytest.approx(0.01, abs=1e-6)
    for name in ("rank_delta_nonzero_rate", "topk_jaccard_mean", "union_js_p99"):
        assert math.isnan(metrics[name])
    # Claimed ids that stand after the reference's own list are not part of it.
    wide = Replay(
        np.concatenate([full.ids, claim.claim_ids], axis=1),
        np.concatenate([full.logprobs, claim.claim_logprobs], axis=1),
        own=full.ids.shape[1],
    )
    assert lmcv.sample_metrics(claim, wide) == pytest.approx(lmcv.sample_metrics(claim, full), nan_ok=True)


def test_a_generation_without_anything_has_counts_and_no_numbers() -> None:
    nothing = Evidence(id="0" * 32, endpoint="chat", backend="b", model="m", sampling=Sampling())
    replay = Replay(np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32))
    assert lmcv.sample_metrics(nothing, replay)["count"] == 0
    withheld = Evidence(
        id="0" * 32,
        endpoint="chat",
        backend="b",
        model="m",
        sampling=Sampling(),
        output_ids=np.arange(3, dtype=np.int32),
    )
    replay = Replay(np.arange(3, dtype=np.int32)[:, None], np.full((3, 1), -1, np.float32))
    assert lmcv.sample_metrics(withheld, replay)["missing_evidence_count"] == 3


def test_windows_and_runs() -> None:
    difference = np.array([0, 0.2, 0.3, 0.01, 5, 6, 0.1, 2])
    assert spikes.window_medians(difference, 3).tolist() == [0.2, 0.2, 0.3, 5, 5, 2]
    assert spikes.window_medians(difference, 9).size == 0
    assert spikes.bad_window_rate([difference, difference[:2]], 3, 0.25) == pytest.approx(4 / 6)
    assert spikes.run_lengths(spikes.spikes(difference)).tolist() == [2, 1]
    assert math.isnan(spikes.bad_window_rate([], 5))
    assert spikes.window_threshold([difference], 3, 0.5) == pytest.approx(1.15)
    overlap = spikes.location_overlap([np.array([1, 1, 0, 0], bool), np.array([1, 0, 1, 0], bool)])
    assert overlap == {2: pytest.approx(1 / 3)}
    found = spikes.summary([difference, difference[:2]])
    assert found["spike_rate"] == pytest.approx(0.3)
    assert (found["spike_runs"], found["spike_run_longest"], found["spike_runs_single_rate"]) == (2, 2, 0.5)


@given(st.lists(st.booleans(), max_size=40))
def test_runs_add_up(flags: list[bool]) -> None:
    lengths = spikes.run_lengths(np.array(flags, np.bool_))
    assert lengths.sum() == sum(flags)
    assert len(lengths) == "".join(" x"[flag] for flag in flags).split().__len__()
