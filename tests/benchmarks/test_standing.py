"""Honest backends on the boundary are accused no more often than promised; the arrays and the records agree."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.detection.rows import ROWS
from benchmarks.standing import command, evidence, fleet, honest, nulls, report
from benchmarks.standing.honest import Setting

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "standing"
DETECTION = command.RECORDED


@pytest.fixture(scope="module")
def settings() -> dict[str, Setting]:
    arms = evidence.recorded(DETECTION / "h200" / ROWS)
    live = evidence.live(DETECTION / "cpu" / "rows.jsonl")
    return {setting.name: setting for setting in honest.settings(command.honest_of(arms), live)}


def test_ten_thousand_honest_backends_that_fail_together() -> None:
    setting = Setting("together", "", nulls.dependent)
    rows = honest.simulate(setting, seed=[1], backends=10_000, units=200)
    assert [row["alpha"] for row in rows] == [0.01, 0.001]
    assert all(honest.kept(row) for row in rows)
    # The boundary is reached: a fleet that could not be accused at all would show nothing.
    assert rows[0]["accused"] > 0


@pytest.mark.parametrize(
    "name",
    [
        "boundary",
        "bursts",
        "schedule",
        "repeated prompts",
        "recorded, H200",
        "recorded, CPU",
        "recorded, tight",
        "lives",
        "framed",
    ],
)
def test_few_honest_backends_are_accused(settings: dict[str, Setting], name: str) -> None:
    rows = honest.simulate(settings[name], seed=[2], backends=600, units=250, compared=2)
    assert all(honest.kept(row) for row in rows), rows


def test_prompts_that_are_not_remembered_would_accuse(settings: dict[str, Setting]) -> None:
    row = honest.simulate(settings["repeated, no memory"], seed=[3], backends=300, units=400)[0]
    assert row["accused"] > row["bound"]


def test_colluders_suffice_without_corroboration_and_not_with_it(settings: dict[str, Setting]) -> None:
    row = honest.simulate(settings["framed"], seed=[4], backends=200, units=200)[0]
    assert row["accused"] == row["backends"]
    assert row["corroborated"] <= row["bound"]


def test_a_framed_record_is_suspect_and_says_why() -> None:
    batch = nulls.framed(np.random.default_rng(5), 12, 60)
    for backend in range(12):
        record, accused = fleet.folded(batch, backend, 1e-3)
        assert (record.state, accused) == ("suspect", 0), record.reasons


@pytest.mark.parametrize("name", ["boundary", "together", "bursts", "schedule", "repeated prompts", "lives"])
def test_arrays_and_records_have_the_same_evidence(settings: dict[str, Setting], name: str) -> None:
    setting = settings[name]
    batch = setting.scenario(np.random.default_rng(6), 24, 130)
    course = fleet.run(fleet.heard(batch), setting.life)
    source = batch if batch.adaptive is None else course.shown
    for backend in range(24):
        record, _ = fleet.folded(source, backend, 1e-3, life=setting.life)
        assert math.isclose(record.log_evidence, course.last[backend], rel_tol=1e-9, abs_tol=1e-9)
        if not setting.life:
            assert record.n == course.counted[backend]


def test_records_are_accused_when_the_arrays_say_so() -> None:
    """With evidence of one key in eight, and no colluders, exact checks alone accuse as soon as they suffice."""
    batch = nulls.independent(np.random.default_rng(7), 30, 40)
    batch.x[..., 3:] = np.nan
    batch.x[10:20, 20:, 0] = 1.0
    course = fleet.run(fleet.heard(batch))
    for backend in range(30):
        _, accused = fleet.folded(batch, backend, 1e-3)
        assert bool(accused) == (course.highest[backend] >= math.log(2 / 1e-3)), backend
    assert (course.highest[10:20] >= math.log(2 / 1e-3)).all()


@pytest.mark.parametrize("scenario", [nulls.independent, nulls.dependent, nulls.bursts, nulls.repeating])
def test_no_process_of_an_honest_backend_fails_more_often_than_its_null_allows(scenario: nulls.Scenario) -> None:
    batch = scenario(np.random.default_rng(8), 1200, 400)
    excess = (batch.x - batch.mu0).reshape(-1, 7)
    # Neighbours depend on each other, so the error is taken over backends.
    means = (batch.x - batch.mu0).mean(axis=1)
    assert (excess.mean(axis=0) <= 4 * means.std(axis=0) / math.sqrt(len(means))).all()


def test_the_bound_is_the_promised_one() -> None:
    assert honest.bound(0.01, 10_000) == pytest.approx(100 + 3 * math.sqrt(99))


def test_the_committed_tables_come_from_the_committed_rows_and_keep_the_promise() -> None:
    rows, cheats, rivals = (
        report.read(RESULTS / name) for name in (report.HONEST, report.CHEATS, report.RIVALS)
    )  # fmt: skip
    metadata = json.loads((RESULTS / report.METADATA).read_text())
    assert report.summary(rows, cheats, rivals, metadata) == (RESULTS / report.SUMMARY).read_text()
    assert {row["alpha"] for row in rows} == {0.01, 0.001}
    assert all(row["backends"] >= 10_000 and honest.kept(row) for row in rows)
