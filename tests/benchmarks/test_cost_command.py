"""The command line: what it takes, what it refuses and how it says so."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

import countersign
from benchmarks.cost.command import chosen_arms, main, parser
from benchmarks.cost.engine import reference_settings
from benchmarks.cost.plan import ARMS, LOAD_ARMS, VERIFIERS, WORKER
from benchmarks.cost.rows import GRID, LOAD
from benchmarks.cost.run import measure
from policies.errors import CountersignError
from tests.benchmarks.cost_results import write_rows

WHOLE = [
    *("--max-model-len", "--tensor-parallel-size", "--max-logprobs", "--top-k", "--repeats", "--worker-repeats"),
    *("--load-repeats", "--pool-workers", "--pool-repeats", "--warmup", "--seed", "--max-total-tokens"),
]
NUMBERS = ["--gpu-memory-utilization", "--pool-seconds", "--time-limit"]
LENGTHS = ["--input-lengths", "--output-lengths"]


def _refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("option", [*WHOLE, *NUMBERS, *LENGTHS])
@pytest.mark.parametrize("value", ["-3", "a", "", "nan", "inf", "1.5x", "-0.5", "1e400"])
def test_bad_values_are_refused_in_plain_words(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = _refused([f"{option}={value}"], capsys)
    assert f"argument {option}: expected " in said
    assert said.endswith(f"not {value!r}")
    assert "literal" not in said
    assert "invalid" not in said


@pytest.mark.parametrize("option", WHOLE + LENGTHS)
def test_whole_numbers_are_whole(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "1.5" in _refused([option, "1.5"], capsys)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--input-lengths", "128 0"),
        ("--input-lengths", "128 -1"),
        ("--repeats", "0"),
        ("--gpu-memory-utilization", "1.1"),
        ("--gpu-memory-utilization", "0"),
        ("--pool-seconds", "0"),
        ("--engine", "[1]"),
        ("--engine", "{"),
        ("--load", "many"),
        ("--load", ""),
        ("--load", "2x-1/3"),
        ("--arms", "fast"),
    ],
)
def test_values_out_of_range_are_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"argument {option}: " in _refused([option, value], capsys)


def test_good_values() -> None:
    given = parser().parse_args(
        [
            "--warmup",
            "0",
            "--seed",
            "0",
            "--time-limit",
            "0",
            "--load",
            "2x8/1 2x8/1 1x1/1",
            "--output-lengths",
            "1,+16",
        ]
    )
    assert (given.warmup, given.seed, given.time_limit, given.output_lengths) == (0, 0, 0.0, [1, 16])
    assert [load.name for load in given.load] == ["2x8/1", "1x1/1"]


@pytest.mark.parametrize("how", ["--report", "--report-only"])
def test_a_report_of_nothing_is_refused(how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "file").write_text("")
    for name in ("none", "other", "file"):
        folder = str(tmp_path / name)
        arguments = [how, folder] if how == "--report" else [how, "--output-dir", folder]
        assert countersign.main(["bench", "cost", *arguments]) == 1
        assert "holds no rows" in capsys.readouterr().err
    assert list((tmp_path / "other").iterdir()) == []
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("name", [GRID, LOAD, "metadata.json"])
def test_a_damaged_folder_is_named(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path)
    (tmp_path / name).write_text("{}\n")
    assert countersign.main(["bench", "cost", "--report", str(tmp_path), "--no-plots"]) == 1
    assert name in capsys.readouterr().err


def test_what_cannot_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path)
    (tmp_path / "summary.md").mkdir()
    assert countersign.main(["bench", "cost", "--report", str(tmp_path), "--no-plots"]) == 1
    assert "summary.md" in capsys.readouterr().err
    target = str(tmp_path / GRID)
    assert countersign.main(["bench", "cost", "--model", "shape:tiny", "--output-dir", target]) == 1
    assert GRID in capsys.readouterr().err


def test_a_model_is_needed() -> None:
    with pytest.raises(CountersignError, match="--model"):
        main([])


@pytest.mark.parametrize("arms", [ARMS, LOAD_ARMS, ("ids", "ids")])
def test_skipping_reaches_grid_and_loads(arms: tuple[str, ...]) -> None:
    def left(*options: str) -> set[str]:
        return set(chosen_arms(parser().parse_args([*options]), arms))

    assert left() == set(arms)
    assert left("--skip-worker") == set(arms) & set(VERIFIERS)
    assert left("--skip-verifier") == set(arms) - set(VERIFIERS)
    assert left("--skip-worker", "--skip-verifier") == set()


def test_skipping_changes_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def measured(options: Namespace, arms: list[str], began: str, load: float) -> bool:
        seen.append((arms, options.load_arms))
        return True

    monkeypatch.setattr("benchmarks.cost.run.measure", measured)
    given = ["--model", "m", "--load", "--no-plots", "--output-dir", str(tmp_path)]
    assert main([*given, "--skip-worker"]) == main([*given, "--skip-verifier"]) == 0
    assert seen == [(list(VERIFIERS), list(VERIFIERS)), ([WORKER], ["plain", WORKER])]


@pytest.mark.parametrize(
    "more",
    [
        ["--skip-worker", "--skip-verifier", "--load"],
        ["--arms"],
        ["--max-total-tokens", "5"],
        ["--pool", "--arms"],
        ["--pool", "--load", "--skip-worker"],
        ["--max-model-len", "100"],
        ["--model", "none/such"],
        ["--model", "shape:none"],
    ],
)
def test_what_cannot_be_measured_is_said_before_an_engine_starts(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(name: str) -> str:
        raise OSError(f"no {name}")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    monkeypatch.setattr("benchmarks.cost.run._engine_part", lambda *_: pytest.fail("an engine was started"))
    with pytest.raises(CountersignError, match=r"--|nothing is left"):
        main(["--model", "shape:tiny", "--output-dir", str(tmp_path), "--no-plots", *more])
    assert not (tmp_path / "metadata.json").exists()


def test_a_name_of_the_hub_is_a_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name: str(snapshot))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "made"))
    seen: list[Any] = []

    def engine(*given: Any) -> bool:
        seen.append(given[2])
        return True

    monkeypatch.setattr("benchmarks.cost.run._engine_part", engine)
    options = parser().parse_args(["--model", "Org/Name-1B", "--output-dir", str(tmp_path)])
    for _ in range(2):
        measure(options, ["ids"], "2026-11-30 00:00 UTC")
    path = Path(str(seen[1].path))
    assert path.name == "Name-1B"
    assert path.resolve() == snapshot.resolve()
    assert '"model": "Name-1B"' in (tmp_path / "metadata.json").read_text()


def test_cells_left_out_ask_for_no_room() -> None:
    options = parser().parse_args(["--model", "m", "--max-total-tokens", "600", "--output-lengths", "1 16"])
    assert reference_settings(options, "m").engine["max_model_len"] == 529
    options = parser().parse_args(["--model", "m", "--arms", "--max-model-len", "64"])
    assert reference_settings(options, "m").engine["max_model_len"] == 64
