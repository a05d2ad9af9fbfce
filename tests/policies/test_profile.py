"""Profiles: fitting, bands, prediction bounds and JSON."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import distance, profile
from policies.errors import CountersignError, ProfileError
from policies.profile import Null, Profile, ProfileKey, fit, tail
from tests.policies import recorded

KEY = ProfileKey("m", "vllm-0.32-v2", "bf16", "ref")


def row(value: float, *, temperature: float = 0.0, drift_tokens: int = 40, arm: str = "") -> dict[str, Any]:
    return {
        "temperature": temperature,
        "tokens": 64,
        "drift_tokens": drift_tokens,
        "drift_topk": value,
        "union_js": None,
        "arm": arm,
    }


def values(n: int, centre: float = -3.0, sd: float = 0.3, seed: int = 0) -> list[float]:
    return [float(value) for value in np.exp(np.random.default_rng(seed).normal(centre, sd, n))]


def test_fit_stores_quantiles_with_counts_and_the_logs() -> None:
    measured = values(30)
    fitted = fit([row(value) for value in measured], KEY, created=12.5)
    (arm,) = fitted.arms
    assert (arm.label, arm.temperature, arm.tokens) == ("", 0, 32)
    null = arm.nulls["drift_topk"]
    logs = np.log(np.array(measured) + profile.FLOOR)
    assert null.n == 30
    assert null.mean == pytest.approx(logs.mean())
    assert null.sd == pytest.approx(logs.std(ddof=1))
    assert null.quantiles["0.99"] == pytest.approx(np.quantile(measured, 0.99))
    assert null.quantiles["1.0"] == max(measured)
    assert (fitted.responses, fitted.still, fitted.tokens, fitted.created) == (30, 0, 30 * 64, 12.5)


def test_real_measurements_go_in_as_they_are() -> None:
    rows = [
        {**distance.measure(answer, replay), "temperature": answer.sampling.temperature}
        for answer, replay in recorded.replayed("single")
    ]
    fitted = fit(rows, KEY)
    assert {arm.temperature for arm in fitted.arms} == {0, 2}
    assert all({"abs_mean", "union_js", "drift_topk"} <= arm.nulls.keys() for arm in fitted.arms)


def test_prefix_rows_count_a_response_once() -> None:
    pairs = recorded.replayed("single")
    fitted = fit([row for pair in pairs for row in distance.calibration_rows(*pair)], KEY)
    assert fitted.responses == len(pairs)
    assert fitted.tokens == sum(len(answer.output_ids) for answer, _ in pairs)
    assert {arm.tokens for arm in fitted.arms} == {16, 32}


def test_a_calibration_without_drift_says_so() -> None:
    rows = [row for pair in recorded.replayed("batch") * 5 for row in distance.calibration_rows(*pair)]
    with pytest.raises(ProfileError, match="less drift"):
        fit(rows, KEY)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [row(0.1)] * 7,
        [{"temperature": 0.0, "tokens": 5}],
        [row(0.1, temperature=math.nan)],
        [row(0.1, temperature=-1.0)],
        [row(0.1, drift_tokens=-1)],
        [{**row(0.1), "drift_tokens": "16"}],
        [{**row(0.1), "tokens": True}],
    ],
)
def test_too_little_or_unusable_rows_raise(rows: list[Any]) -> None:
    with pytest.raises(ProfileError):
        fit(rows, KEY)
    assert issubclass(ProfileError, CountersignError)


@pytest.mark.parametrize(
    ("temperature", "band"), [(0, 0), (0.01, 1), (0.5, 1), (0.7, 2), (1, 2), (1.2, 3), (1.5, 3), (2, 4)]
)
def test_temperature_bands(temperature: float, band: int) -> None:
    assert profile.temperature_band(temperature) == band


@pytest.mark.parametrize(
    ("positions", "band"), [(0, 0), (15, 0), (16, 16), (31, 16), (32, 32), (63, 32), (64, 64), (1000, 512)]
)
def test_length_bands(positions: int, band: int) -> None:
    assert profile.length_band(positions) == band


def test_matching_takes_the_longest_band_filled_per_label() -> None:
    rows = [
        row(0.1, drift_tokens=length, arm=arm, temperature=temperature)
        for length in (16, 32)
        for arm in ("single", "batch")
        for temperature in (0.0, 0.8)
        for _ in range(8)
    ]
    fitted = fit(rows, KEY)

    def found(temperature: float, positions: int) -> set[tuple[str, int, int]]:
        return {(arm.label, arm.temperature, arm.tokens) for arm in fitted.matching(temperature, positions)}

    assert found(0, 16) == {("single", 0, 16), ("batch", 0, 16)}
    assert found(0.7, 200) == {("single", 2, 32), ("batch", 2, 32)}
    assert found(0.3, 40) == {(label, band, 32) for label in ("single", "batch") for band in (0, 2)}
    assert found(0, 15) == set()
    assert found(1.2, 40) == set()
    assert found(0, 32 * profile.LONGEST_REACH) != set()
    assert found(0, 32 * profile.LONGEST_REACH + 1) == set()


def test_tail_keeps_its_level_on_honest_responses() -> None:
    # 12 responses fitted, one more drawn: under the null the tail is uniform.
    rng = np.random.default_rng(4)
    tails = []
    for _ in range(4000):
        logs = rng.normal(-3, 0.4, 13)
        null = Null(12, float(logs[:12].mean()), float(logs[:12].std(ddof=1)), {})
        tails.append(tail(null, float(np.exp(logs[12]))))
    for level in (0.5, 0.1, 0.01):
        assert np.mean(np.array(tails) < level) == pytest.approx(level, abs=4 * math.sqrt(level / 4000))


@given(st.floats(0, 1e9), st.floats(0, 1e9), st.integers(2, 500), st.floats(0, 3))
def test_tail_falls_with_the_value(low: float, high: float, n: int, sd: float) -> None:
    low, high = sorted((low, high))
    null = Null(n, -3.0, sd, {})
    assert 0 <= tail(null, high) <= tail(null, low) <= 1


def test_tail_of_nothing_accuses_nobody() -> None:
    assert tail(Null(9, -3.0, 0.0, {}), math.nan) == 1
    assert tail(Null(9, -3.0, 0.0, {}), 0.0) == pytest.approx(1)
    # Responses that agree to the last digit still allow for some spread.
    assert tail(Null(9, -3.0, 0.0, {}), math.exp(-3.0) * 1.01) > 0.3


def test_a_metric_that_never_moved_accuses_nobody() -> None:
    # Two machines may agree on every list of candidates throughout a calibration; one swap later is no cheat.
    measured = [{**row(value), "drift_jaccard": 0.0, "drift_omitted": 0.0} for value in values(24)]
    (arm,) = fit(measured, KEY).arms
    assert set(arm.nulls) == {"drift_topk"}


@pytest.mark.parametrize("later", [1e-6, 1e-5, 1e-4, 5e-4])
def test_amounts_far_below_what_matters_are_alike(later: float) -> None:
    # A peaked model leaves out next to nothing; one flat stretch leaves out more, and is honest all the same.
    tiny = np.random.default_rng(3).uniform(0, 1e-7, 24)
    measured = [{**row(value), "drift_omitted": float(t)} for value, t in zip(values(24), tiny, strict=True)]
    (arm,) = fit(measured, KEY).arms
    assert tail(arm.nulls["drift_omitted"], later) > distance.REJECT_LEVEL


FITTED = fit([row(value, arm=arm) for arm in ("a", "b") for value in values(9)], KEY, created=3.25)


def test_json_round_trip() -> None:
    text = FITTED.to_json()
    assert Profile.from_json(text) == FITTED
    assert Profile.from_json(text.encode()).to_json() == text
    assert json.loads(text)["key"]["model"] == "m"


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
        edited(["version"], 2),
        edited(["arms"], []),
        edited(["surprise"], 1),
        edited(["key", "top_k"], "20"),
        edited(["arms", 0, "tokens"], 3),
        edited(["arms", 0, "temperature"], 9),
        edited(["arms", 0, "nulls", "drift_topk", "n"], 1),
        edited(["arms", 0, "nulls", "drift_topk", "sd"], -1),
        edited(["arms", 0, "nulls", "drift_topk", "sd"], math.nan),
        edited(["arms", 0, "nulls", "drift_topk", "floor"], 0.0),
    ],
)
def test_malformed_profiles_raise(text: str | bytes) -> None:
    with pytest.raises(ProfileError):
        Profile.from_json(text)


@given(st.integers(0, len(FITTED.to_json())), st.text(max_size=4), st.integers(0, 5))
def test_damaged_profiles_raise_or_read(at: int, new: str, cut: int) -> None:
    text = FITTED.to_json()
    with contextlib.suppress(ProfileError):
        Profile.from_json(text[:at] + new + text[at + cut :])
