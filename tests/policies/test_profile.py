"""Profiles: fitting, bands, p-values, spreads, bets, JSON, and that honest answers are left alone."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import _cells, profile
from policies._calibrated import REJECT_TAIL
from policies.errors import CountersignError, ProfileError
from policies.profile import Placement, Profile, ProfileKey, Row, fit

KEY = ProfileKey("m", "vllm-0.32-v2", "bf16", "ref", engine="vllm 0.32")


def row(score: float, name: str = "", **changes: Any) -> Row:
    fields: dict[str, Any] = {
        "check": "distance",
        "form": "full",
        "arm": "single",
        "temperature": 0.0,
        "length": 64,
        "tokens": 64,
    }
    return Row(score=score, response=name, **(fields | changes))


def rows(n: int, *, centre: float = 0.06, sd: float = 0.1, seed: int = 0, **changes: Any) -> list[Row]:
    scores = centre * np.random.default_rng(seed).lognormal(0, sd, n)
    return [row(float(score), f"{seed}-{index}", **changes) for index, score in enumerate(scores)]


def judged(
    fitted: Profile,
    score: float,
    *,
    check: str = "distance",
    form: str = "full",
    temperature: float = 0.0,
    length: int = 64,
) -> Placement:
    place = fitted.judge(check, form=form, temperature=temperature, length=length, score=score)
    assert place is not None
    return place


def rejects(place: Placement) -> bool:
    return place.exceeds and place.tail is not None and place.tail <= REJECT_TAIL


FITTED = fit([*rows(30), *rows(12, seed=1, arm="batch8"), *rows(20, seed=2, temperature=0.8)], KEY, created=12.5)


def test_a_cell_keeps_its_scores_and_where_they_lie() -> None:
    (cell,) = fit(rows(30), KEY).cells
    scores = sorted(each.score for each in rows(30))
    assert cell.scores == pytest.approx(scores, rel=1e-5)
    assert (cell.check, cell.form, cell.label, cell.temperature, cell.length) == ("distance", "full", "single", 0, 64)
    assert cell.mu0 == pytest.approx(1 - profile.DELTA ** (1 / 30))
    assert cell.floor == pytest.approx(np.mean(scores), rel=1e-5)
    logs = np.log(np.array(cell.scores) + cell.floor)
    assert cell.spread == _cells.Spread(float(logs.mean()), max(float(logs.std(ddof=1)), 0.05), 30)
    assert (FITTED.responses, FITTED.tokens, FITTED.created) == (62, 62 * 64, 12.5)


def test_p_is_the_rank_among_calibrated_scores_of_the_most_lenient_cell() -> None:
    place = judged(FITTED, 0.2)
    assert (place.p, place.n, place.label) == (1 / 13, 12, "batch8")
    assert place.beyond
    assert place.exceeds
    assert place.n_least == 12
    middle = judged(FITTED, 0.06)
    assert middle.p > 0.2
    assert not middle.beyond
    assert middle.bet == 0
    assert middle.plausible == middle.p


def test_bets_grow_from_nothing_at_the_largest_calibrated_score_to_one() -> None:
    usual = judged(FITTED, 0.06).usual
    bets = [judged(FITTED, usual * factor).bet for factor in (0.9, 1.0, 1.1, 1.3, 2.0)]
    assert bets[:2] == [0.0, 0.0]
    assert bets == sorted(bets)
    assert bets[-1] == 1
    assert not judged(FITTED, usual * 1.1).exceeds


def test_the_same_response_counts_once_with_its_largest_score() -> None:
    fitted = fit([row(0.05 + 0.001 * (k % 8) + 0.0001 * (k > 7), str(k % 8)) for k in range(16)], KEY)
    assert fitted.cells[0].n == fitted.responses == 8
    assert fitted.cells[0].scores[0] == pytest.approx(0.0501)


def test_short_drift_counts_and_says_nothing_of_the_spread() -> None:
    fitted = fit([*rows(20, length=16), *(row(0.001, f"s{k}", length=3) for k in range(20))], KEY)
    (cell,) = fitted.cells
    assert cell.n == 40
    assert cell.spread is not None
    assert cell.spread.n == 20
    assert rejects(judged(fitted, 0.3, length=16))


def test_arms_temperatures_and_lengths_are_apart() -> None:
    fitted = fit([*rows(9), *rows(9, length=16, arm="b"), *rows(9, temperature=0.8), *rows(7, arm="few")], KEY)
    assert {(c.label, c.temperature, c.length) for c in fitted.cells} == {
        ("single", 0, 64),
        ("b", 0, 16),
        ("single", 2, 64),
    }


def test_the_longest_band_that_is_filled_speaks_up_to_eight_times_its_length() -> None:
    fitted = fit([*rows(9, length=16), *rows(9, centre=0.05, length=64, seed=1)], KEY)
    for length, reach in ((16, True), (63, True), (64, True), (512, True), (513, False), (15, False)):
        found = fitted.judge("distance", form="full", temperature=0.0, length=length, score=0.1)
        assert (found is not None) is reach


@pytest.mark.parametrize(
    ("temperature", "known"), [(0.0, True), (0.4, True), (0.8, True), (1.0, True), (1.01, False), (2.0, False)]
)
def test_temperatures_between_calibrated_ones_have_both_neighbours(temperature: float, known: bool) -> None:
    found = FITTED.judge("distance", form="full", temperature=temperature, length=64, score=0.06)
    assert (found is not None) is known
    if temperature == 0.4:
        assert judged(FITTED, 0.2, temperature=0.4).n_least == 12


def test_another_check_or_form_is_not_judged() -> None:
    assert FITTED.judge("margin", form="full", temperature=0.0, length=64, score=0.1) is None
    assert FITTED.judge("distance", form="ids", temperature=0.0, length=64, score=0.1) is None


def test_engines_that_agree_bit_for_bit_reject_nothing() -> None:
    fitted = fit([row(0.0, str(k)) for k in range(40)], KEY)
    place = judged(fitted, 5.0)
    assert (place.tail, place.bet, place.exceeds) == (None, 0.0, False)
    assert place.plausible == 0
    assert judged(fitted, 0.0).plausible == 1


def test_what_never_drifts_under_one_load_is_judged_by_how_it_drifts_under_another() -> None:
    still = [row(0.0, f"s{k}", arm="batch8", temperature=0.8) for k in range(20)]
    fitted = fit([*rows(20), *still], KEY)
    honest = judged(fitted, 0.07, temperature=0.8)
    assert not rejects(honest)
    assert rejects(judged(fitted, 0.4, temperature=0.8))


def test_sums_of_few_events_have_a_wide_spread_however_few_are_seen() -> None:
    scores = [0.0] * 20 + [0.001, 0.002, 0.001]
    fitted = fit([row(score, str(k), check="margin") for k, score in enumerate(scores)], KEY)
    assert not rejects(judged(fitted, 0.006, check="margin"))
    assert rejects(judged(fitted, 0.2, check="margin"))


@pytest.mark.parametrize("n", [8, 12, 24, 60])
def test_honest_responses_are_rejected_far_more_rarely_than_the_level_says(n: int) -> None:
    rng = np.random.default_rng(n)
    found = 0
    for seed in range(40):
        fitted = fit(rows(n, seed=seed), KEY)
        found += sum(rejects(judged(fitted, float(score))) for score in 0.06 * rng.lognormal(0, 0.1, 100))
    assert found == 0


def test_one_in_n_plus_one_honest_responses_lies_beyond_a_calibration() -> None:
    rng = np.random.default_rng(1)
    beyond = [judged(fit(rows(19, seed=seed), KEY), float(0.06 * rng.lognormal(0, 0.1))).beyond for seed in range(600)]
    assert np.mean(beyond) == pytest.approx(1 / 20, abs=0.03)


@given(st.floats(0, 10), st.floats(0, 10))
def test_a_larger_score_is_never_more_plausible(first: float, second: float) -> None:
    low, high = sorted((first, second))
    near, far = judged(FITTED, low), judged(FITTED, high)
    assert far.p <= near.p
    assert (far.tail or 0) <= (near.tail or 0) + 1e-12
    assert far.bet >= near.bet
    assert far.exceeds >= near.exceeds


def test_too_few_responses_or_unusable_rows_raise() -> None:
    with pytest.raises(ProfileError, match="has 8 responses"):
        fit(rows(7), KEY)
    for broken in (row(math.nan), row(-1.0), row(math.inf), row(0.1, length=-1), row(0.1, temperature=-0.5)):
        with pytest.raises(ProfileError, match="cannot be used"):
            fit([broken], KEY)
    assert issubclass(ProfileError, CountersignError)


def test_json_comes_back_as_it_was_and_stays_the_same() -> None:
    text = FITTED.to_json()
    assert Profile.from_json(text) == FITTED
    assert Profile.from_json(text.encode()).to_json() == text


def test_an_old_profile_says_what_to_do() -> None:
    old = {"key": {}, "arms": [], "responses": 1, "still": 0, "tokens": 1, "version": 1}
    with pytest.raises(ProfileError, match="calibrate again"):
        Profile.from_json(json.dumps(old))


def edited(path: list[Any], value: Any) -> str:
    tree = json.loads(FITTED.to_json())
    node = tree
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
    return json.dumps(tree)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "null",
        "\ud800",
        b"\xff",
        edited(["version"], 3),
        edited(["cells"], []),
        edited(["delta"], 0),
        edited(["surprise"], 1),
        edited(["key", "top_k"], "20"),
        edited(["cells", 0, "length"], 3),
        edited(["cells", 0, "temperature"], 9),
        edited(["cells", 0, "scores"], [0.1]),
        edited(["cells", 0, "scores"], [0.2, 0.1]),
        edited(["cells", 0, "scores"], [-0.2, 0.1]),
        edited(["cells", 0, "mu0"], 1.5),
        edited(["cells", 0, "floor"], 0.0),
        edited(["cells", 0, "spread", "sd"], 0),
        edited(["cells", 0, "spread", "n"], 1),
    ],
)
def test_malformed_profiles_raise(text: str | bytes) -> None:
    with pytest.raises(ProfileError):
        Profile.from_json(text)


@given(st.integers(0, len(FITTED.to_json())), st.text(max_size=4), st.integers(0, 5))
@settings(max_examples=60)
def test_damaged_profiles_raise_or_read(at: int, new: str, cut: int) -> None:
    text = FITTED.to_json()
    with contextlib.suppress(ProfileError):
        Profile.from_json(text[:at] + new + text[at + cut :])
