"""Recorded answers become evidence, cheats are made of them, and the committed tables come from the committed rows."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.detection import attacks, command, curves, judging, report, tables
from benchmarks.detection.evidence import load, recorded_names
from benchmarks.detection.prompts import CALIBRATION_PROMPTS, LONG_PROMPTS, PROMPTS
from benchmarks.detection.rows import ROWS, read_rows, write_rows
from benchmarks.detection.variants import VARIANTS
from benchmarks.questions import CALIBRATION, DEMO
from policies import margin, selection
from policies.checks import Result
from tests.policies import recorded
from tests.policies.test_margin import PROFILE

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "detection" / "h200"
PAD = 65_535


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real answers in the recordings' layout; the reference and the cheat's prefill agree with every claim."""
    path = tmp_path_factory.mktemp("recordings")
    answers = [answer for setting in ("T0", "T07", "T1") for answer in recorded.gpu(setting)[:4]]
    ids = np.concatenate([answer.claim_ids for answer in answers])
    logprobs = np.concatenate([answer.claim_logprobs for answer in answers])
    narrow = np.where(ids < 0, PAD, ids).astype(np.uint16)
    arrays: dict[str, Any] = {
        "prompt": np.concatenate([answer.prompt_ids for answer in answers]).astype(np.uint16),
        "prompt_tokens": np.array([len(answer.prompt_ids) for answer in answers], np.int32),
        "tokens": np.array([len(answer.output_ids) for answer in answers], np.int32),
        "temperature": np.array([answer.sampling.temperature for answer in answers], np.float32),
        "seed": np.array([answer.sampling.seed or 0 for answer in answers], np.int64),
        "stopped": np.array([answer.finish_reason == "stop" for answer in answers]),
        "ids": narrow,
        "logprobs": logprobs,
    }
    for name in ("eager-64", "fp8"):
        np.savez(path / f"{name}.answers.npz", **arrays)
        np.savez(path / f"{name}.replay.npz", ids=narrow, logprobs=logprobs, claimed=logprobs)
        wide = np.pad(narrow, ((0, 0), (0, 1)), constant_values=PAD)
        np.savez(path / f"{name}.spoof.npz", ids=wide, logprobs=np.pad(logprobs, ((0, 0), (0, 1)), constant_values=-25))
    return path


def arms(folder: Path) -> dict[str, attacks.Arm]:
    found = attacks.arms(folder, recorded_names(folder), runtime=recorded.GPU, engine="")
    return {arm.name: arm for arm in found}


def test_recordings_come_back_as_evidence(folder: Path) -> None:
    loaded = load(folder, "eager-64", runtime=recorded.GPU)
    for answer, original in zip(loaded, recorded.gpu("T0")[:4], strict=False):
        assert np.array_equal(answer.evidence.claim_ids, original.claim_ids)
        assert np.array_equal(answer.evidence.prompt_ids, original.prompt_ids)
        assert answer.replay is not None
        assert (answer.replay.own, answer.replay.form) == (21, "full")
    assert all(selection.check(answer.evidence).metrics["violations"] == 0 for answer in loaded)


def test_cheats_made_of_recordings_do_what_they_say(folder: Path) -> None:
    found = arms(folder)
    assert next(iter(found)) == "eager-64"
    for name in ("hot", "cached"):
        assert all(answer.evidence.sampling.temperature > 0 for answer in found[name].answers)
        results = [selection.check(answer.evidence).result for answer in found[name].answers]
        assert results.count(Result.REJECT) > len(results) / 2, name
    # Here the cheap model is the true one, so there is nothing to bend and nothing to leave out.
    plain, bent = found["fp8 spoofed"], found["fp8 spoofed, bent"]
    for one, other in zip(plain.answers, bent.answers, strict=True):
        assert np.array_equal(one.evidence.claim_ids, other.evidence.claim_ids)


def test_bending_and_omitting_let_other_tokens_pass_selection(folder: Path) -> None:
    seeded = {arm.name: arm for arm in attacks._relabelled(load(folder, "fp8", runtime=recorded.GPU))}["cached"]
    for change in (attacks._bent, attacks._omitted):
        for answer in seeded.answers:
            before = selection.check(answer.evidence).metrics["violations"]
            changed = attacks._with(answer, change)
            after = selection.check(changed.evidence).metrics["violations"]
            assert int(after or 0) < int(before or 0)
            # The replay is not the cheat's to bend.
            assert answer.replay is not None
            assert margin.measure(changed.evidence, answer.replay).weights().mean() > 0


def test_prompts_of_different_purposes_do_not_overlap() -> None:
    purposes = [PROMPTS, LONG_PROMPTS, CALIBRATION_PROMPTS, DEMO, CALIBRATION]
    assert len({prompt for prompts in purposes for prompt in prompts}) == sum(map(len, purposes))


def test_rows_survive_the_file(tmp_path: Path) -> None:
    rows = [{"arm": "a", "tokens": 12, "score": 0.125, "reason": "x: y, z", "gone": None}, {"arm": "b", "tokens": 0}]
    write_rows(tmp_path / "rows.csv.gz", rows)
    back = read_rows(tmp_path / "rows.csv.gz")
    assert back[0] == rows[0]
    assert (back[1]["tokens"], back[1]["score"]) == (0, None)


@pytest.fixture(scope="module")
def committed() -> list[judging.Row]:
    return read_rows(RESULTS / ROWS)


def test_the_committed_tables_come_from_the_committed_rows(tmp_path: Path) -> None:
    for name in (ROWS, "metadata.json"):
        shutil.copy(RESULTS / name, tmp_path / name)
    assert command.main(["--output", str(tmp_path), "--no-plots"]) == 0
    made = [*tmp_path.iterdir()]
    assert {path.name for path in made} >= {report.SUMMARY, report.POWER_CSV, report.ROC_CSV}
    drawn = [line for line in (RESULTS / report.SUMMARY).read_text().splitlines(True) if line.startswith("![")]
    for path in made:
        committed = (RESULTS / path.name).read_text() if path.suffix != ".gz" else ""
        for line in drawn:
            committed = committed.replace(line + "\n", "")
        assert path.suffix == ".gz" or path.read_text() == committed, path.name


def test_curves_of_scores_that_are_known() -> None:
    null = [{"distance @128": value, "tokens": 128} for value in (0.1, 0.2, 0.3, 0.4)]
    far = [{"distance @128": value, "tokens": 128} for value in (0.35, 0.5, 0.6, None)]
    curve = curves.roc(null, far, "distance")
    assert curve is not None
    assert (curve.honest, curve.cheats) == (4, 3)
    assert curve.area == pytest.approx(11 / 12)
    assert curve.at(0.01) == pytest.approx(2 / 3)
    assert curve.at(0.25) == 1.0
    same = curves.roc(null, null, "distance")
    assert same is not None
    assert same.area == pytest.approx(0.5)
    assert curves.roc(null, [{"tokens": 12}], "margin") is None


def test_evidence_over_tokens(committed: list[judging.Row]) -> None:
    groups = tables.by_arm(committed)
    caught, honest = (curves.paths(groups[name], orders=5) for name in ("fp8 spoofed", "eager-64"))
    assert 200 < (caught.needed(0.5) or 0) <= (caught.needed(0.99) or 0) < 3000
    assert honest.needed(0.01) is None
    assert honest.evidence.max() < 6
    assert caught.power(np.array([16.0, 3000.0])).tolist() == [0.0, 1.0]


def test_judging_goes_on_arm_by_arm(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[str] = []

    def judge(arm: attacks.Arm, profiles: object) -> list[judging.Row]:
        judged.append(arm.name)
        if arm.name == "fp8 spoofed" and judged.count(arm.name) == 1:
            raise KeyboardInterrupt
        return [{"arm": arm.name, "kind": arm.kind, "tokens": 3, "temperature": 0}]

    monkeypatch.setattr(command, "judge", judge)
    monkeypatch.setattr(command, "calibrate", lambda *given, **more: judging.Profiles(PROFILE, None))
    monkeypatch.setattr(command, "remake", lambda *given, **more: "")
    run = ["--recordings", str(folder), "--output", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        command.main(run)
    assert command.main([*run, "--dry-run"]) == 0
    before = len(read_rows(tmp_path / ROWS))
    assert command.main(run) == 0
    assert before == judged.index("fp8 spoofed")
    assert judged.count("eager-64") == 1
    assert judged.count("fp8 spoofed") == 2
    assert len(read_rows(tmp_path / ROWS)) == len(set(judged))


def test_no_honest_variant_was_rejected_and_every_cheat_is_known(committed: list[judging.Row]) -> None:
    groups = tables.by_arm(committed)
    assert {name.split(" ")[0] for name in groups} <= VARIANTS.keys() | {"hot", "cached", "second-pass"}
    for name, rows in groups.items():
        if rows[0]["kind"] == "honest":
            assert not judging.caught(rows), name
