"""Recorded answers become evidence, cheats are made of them, and the committed tables come from the committed rows."""

from __future__ import annotations

import gzip
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.detection import attacks, command, curves, judging, report, tables
from benchmarks.detection.evidence import Answer, load, recorded_names
from benchmarks.detection.prompts import CALIBRATION_PROMPTS, LONG_PROMPTS, PROMPTS
from benchmarks.detection.rows import CSV, ROWS, append_rows, broken, judged, read_rows
from benchmarks.detection.variants import VARIANTS
from benchmarks.harness import metadata
from benchmarks.questions import CALIBRATION, DEMO
from policies import margin, selection
from policies.checks import Result
from policies.errors import CountersignError
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


def test_rows_survive_the_file_and_a_kill(tmp_path: Path) -> None:
    path = tmp_path / ROWS
    append_rows(path, [{"arm": "a", "tokens": 12, "score": 1 / 8, "reason": "x: y, z", "gone": None}])
    whole = path.read_bytes()
    append_rows(path, [{"arm": "b", "tokens": np.int64(0), "far": np.float32(1 / 3), "odd": math.inf}])
    first = {"arm": "a", "tokens": 12, "score": 0.125, "reason": "x: y, z"}
    second = {"arm": "b", "tokens": 0, "far": pytest.approx(1 / 3, abs=1e-6), "odd": math.inf}
    assert read_rows(path) == [first, second]
    torn = path.read_bytes()[:-3]
    path.write_bytes(torn)
    assert read_rows(path) == [first]
    append_rows(path, [{"arm": "c"}])
    assert read_rows(path) == [first, {"arm": "c"}]
    for damage in (whole + b"no part of it", gzip.compress(b"[1]\n"), gzip.compress(b"{")):
        path.write_bytes(damage)
        with pytest.raises(CountersignError, match="is damaged"):
            read_rows(path)


@pytest.fixture(scope="module")
def committed() -> list[judging.Row]:
    return read_rows(RESULTS / ROWS)


def test_the_committed_tables_come_from_the_committed_rows(tmp_path: Path) -> None:
    for name in (ROWS, "metadata.json"):
        shutil.copy(RESULTS / name, tmp_path / name)
    assert command.main(["--output", str(tmp_path), "--no-plots"]) == 0
    made = [*tmp_path.iterdir()]
    assert {path.name for path in made} >= {report.SUMMARY, report.POWER_CSV, report.ROC_CSV}
    assert gzip.decompress((tmp_path / CSV).read_bytes()) == gzip.decompress((RESULTS / CSV).read_bytes())
    drawn = [line for line in (RESULTS / report.SUMMARY).read_text().splitlines(True) if line.startswith("![")]
    for path in made:
        committed = (RESULTS / path.name).read_text() if path.suffix != ".gz" else ""
        for line in drawn:
            committed = committed.replace(line + "\n", "")
        assert path.suffix == ".gz" or path.read_text() == committed, path.name


def lines_of(page: Path) -> list[dict[str, str]]:
    """Every line of every table of a page, by its head."""
    found = []
    for table in re.findall(r"^\|.*(?:\n\|.*)+", page.read_text(), re.MULTILINE):
        head, _, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
        found += [dict(zip(head, line, strict=True)) for line in lines]
    return found


def test_the_page_on_all_of_it_quotes_the_tables_that_are_made_of_rows() -> None:
    made = [line for name in ("h200", "cpu", "cpu-variants") for line in lines_of(RESULTS.parent / name / "summary.md")]
    quoted = lines_of(RESULTS.parent.with_suffix(".md"))
    assert len(quoted) > 80
    assert [line for line in quoted if not any(line.items() <= other.items() for other in made)] == []


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


Judged = tuple[str, int]


@pytest.fixture
def judgements(monkeypatch: pytest.MonkeyPatch) -> list[Judged]:
    """What was judged so far, of arms and answers; a judgement here says nothing but that."""
    found: list[Judged] = []

    def row(arm: attacks.Arm, number: int, answer: Answer, profile: object) -> judging.Row:
        found.append((arm.name, number))
        return judging._place(arm, number, answer)

    monkeypatch.setattr(judging, "row", row)
    monkeypatch.setattr(command, "calibrate", lambda *given, **more: judging.Profiles(PROFILE, None))
    monkeypatch.setattr(command, "remake", lambda *given, **more: ("", 0))
    return found


def test_judging_goes_on_where_it_was(
    folder: Path,
    tmp_path: Path,
    judgements: list[Judged],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fine, last = judging.row, ("fp8 spoofed", 3)

    def killed(arm: attacks.Arm, number: int, answer: Answer, profile: Any) -> judging.Row:
        if (arm.name, number) == last and last not in judgements:
            judgements.append(last)
            raise KeyboardInterrupt
        return fine(arm, number, answer, profile)

    monkeypatch.setattr(judging, "row", killed)
    run = ["--recordings", str(folder), "--output", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        command.main(run)
    arms_before = list(dict.fromkeys(name for name, _ in judgements))[:-1]
    assert list(tables.by_arm(read_rows(tmp_path / ROWS))) == arms_before
    assert command.main([*run, "--dry-run"]) == 0
    assert f"of which {len(arms_before)} are measured already" in capsys.readouterr().out
    assert command.main(run) == 0
    rows = read_rows(tmp_path / ROWS)
    assert judgements.count(("eager-64", 0)) == 1
    assert judgements.count(("fp8 spoofed", 0)) == 2
    assert len(rows) == len({(row["arm"], row["answer"]) for row in rows}) == len(set(judgements))
    known = metadata.read(tmp_path / metadata.FILE)
    assert [run["arguments"]["recordings"] for run in known["runs"]] == [folder.name] * 2
    assert all(run.keys() >= {"machine", "load_before", "busy", "calibration"} for run in known["runs"])


def test_an_answer_that_cannot_be_judged_is_a_row_and_the_rest_goes_on(
    folder: Path, tmp_path: Path, judgements: list[Judged], monkeypatch: pytest.MonkeyPatch
) -> None:
    fine, odd = judging.row, ("fp8", 2)

    def unsteady(arm: attacks.Arm, number: int, answer: Answer, profile: Any) -> judging.Row:
        found = fine(arm, number, answer, profile)
        if (arm.name, number) == odd and judgements.count(odd) == 1:
            raise ValueError(f"no such file: {tmp_path}/odd")
        return found

    monkeypatch.setattr(judging, "row", unsteady)
    run = ["--recordings", str(folder), "--output", str(tmp_path)]
    assert command.main(run) == 0
    (lost,) = broken(read_rows(tmp_path / ROWS))
    assert (lost["arm"], lost["answer"], lost["error"]) == (*odd, "ValueError: no such file: odd")
    before = len(judgements)
    assert command.main(run) == 0
    assert judgements[before:] == [odd], "what was judged is not judged again"
    rows = read_rows(tmp_path / ROWS)
    assert broken(rows) == []
    assert len(judged(rows)) == len(rows) - 1


def test_errors_are_in_the_report_and_in_the_csv(tmp_path: Path, committed: list[judging.Row]) -> None:
    shutil.copy(RESULTS / "metadata.json", tmp_path / "metadata.json")
    few = [row for name in ("eager-64", "fp8") for row in tables.by_arm(committed)[name][:20]]
    lost = {"arm": "fp8", "kind": "cheat", "answer": 99, "temperature": 0, "tokens": 3, "error": "ValueError: odd"}
    append_rows(tmp_path / ROWS, [*few, lost])
    assert command.main(["--output", str(tmp_path), "--no-plots"]) == 1
    assert "- fp8, answer 99: ValueError: odd" in (tmp_path / report.SUMMARY).read_text()
    assert "40 judgements" in (tmp_path / report.SUMMARY).read_text()
    assert gzip.decompress((tmp_path / CSV).read_bytes()).decode().count("ValueError: odd") == 1


def test_a_dry_run_without_recordings_says_what_the_report_is_made_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--dry-run", "--output", str(RESULTS)]) == 0
    assert "| eager-64 | 288 |" in capsys.readouterr().out
    assert command.main(["--dry-run", "--output", str(tmp_path / "none")]) == 0
    assert "nothing is judged" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()


def test_no_honest_variant_was_rejected_and_every_cheat_is_known(committed: list[judging.Row]) -> None:
    groups = tables.by_arm(committed)
    assert {name.split(" ")[0] for name in groups} <= VARIANTS.keys() | {"hot", "cached", "second-pass"}
    for name, rows in groups.items():
        if rows[0]["kind"] == "honest":
            assert not judging.caught(rows), name
