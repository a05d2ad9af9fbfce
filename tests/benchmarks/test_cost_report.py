"""Summaries, tables and plots from rows; nothing is made up, and the same rows give the same files."""

from __future__ import annotations

import csv
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cost import report, summary
from benchmarks.cost.command import main, parser
from benchmarks.cost.plan import ARMS, LOAD_ARMS, WORKER, Task
from benchmarks.cost.plots import CURVES, DELAYS, HEAT
from benchmarks.cost.rows import GRID, LOAD, POOL, Rows, grid_row, read
from benchmarks.cost.summary import LMCV_COLUMNS, Times
from benchmarks.harness.metadata import read as load_metadata
from benchmarks.harness.rows import unplaced, write_csv
from policies.errors import CountersignError
from tests.benchmarks.cost_results import write_rows


@pytest.fixture
def results(tmp_path: Path) -> Path:
    write_rows(tmp_path)
    return tmp_path


def _csv(folder: Path) -> dict[tuple[int, int], dict[str, str]]:
    with (folder / "latency_summary.csv").open() as file:
        return {(int(row["input_len"]), int(row["output_len"])): row for row in csv.DictReader(file)}


def test_the_first_seventeen_columns_are_those_lmcv_published(results: Path) -> None:
    report.write(results, plots=False)
    header = (results / "latency_summary.csv").read_text().splitlines()[0].split(",")
    published = Path(summary.__file__).parent / "lmcv" / "qwen3_8b_rtx4090.csv"
    assert header[:17] == published.read_text().splitlines()[0].split(",") == list(LMCV_COLUMNS)
    assert len(set(header)) == len(header) > 17


def test_medians_ratios_and_quantiles(results: Path) -> None:
    report.write(results, plots=False)
    row = _csv(results)[128, 16]
    assert float(row["worker_total_median_s"]) == pytest.approx(1.6)
    assert float(row["worker_total_p90_s"]) == pytest.approx(1.6 + 0.8 * 0.01)
    assert float(row["verifier_total_median_s"]) == float(row["dicts_median_s"]) == pytest.approx(0.08)
    assert float(row["worker_over_verifier_median"]) == pytest.approx(20)
    assert float(row["worker_over_ids_median"]) == pytest.approx(80)
    assert float(row["worker_over_ids_low"]) < 80 < float(row["worker_over_ids_high"])
    assert float(row["worker_tok_per_s_median"]) == pytest.approx(10)
    assert float(row["verifier_tok_per_s_median"]) == pytest.approx(144 / 0.08)
    assert row["worker_ttft_median_s"] == row["worker_decode_median_s"] == "nan"
    assert row["ids_n"] == "3"


def test_one_run_has_no_interval_and_what_is_missing_is_empty(results: Path) -> None:
    report.write(results, plots=False)
    cells = _csv(results)
    long = cells[512, 2048]
    assert long["worker_n"] == long["ids_n"] == "1"
    assert float(long["worker_total_median_s"]) > 0
    assert long["worker_total_p10_s"] == long["ids_p90_s"] == long["worker_over_ids_low"] == ""
    failed = cells[128, 2048]  # its ids arm failed
    assert failed["ids_median_s"] == failed["worker_over_ids_median"] == ""
    assert failed["errors"] == "1"
    assert (512, 16) not in cells, "nobody measured it"
    text = (results / "summary.md").read_text()
    grid = next(part for part in text.split("\n\n") if part.startswith("| in \\ out | 16 | 2048 |"))
    assert "| 512 |  |" in grid


def test_intervals_need_three_runs() -> None:
    assert Times((1.0, 2.0)).interval is None
    assert Times((1.0, 2.0)).quantile(0.1) is None
    assert Times((2.0, 1.0, 3.0)).interval == (1.0, 3.0)
    assert Times().median is None
    assert Times().mean is None


def test_a_run_that_was_tried_again_counts_once(tmp_path: Path) -> None:
    rows = Rows(tmp_path / GRID)
    rows.append(grid_row(Task(8, 4, "ids", 0), None, error="x"))
    rows.append(grid_row(Task(8, 4, "ids", 0), 2.0))
    rows.append(grid_row(Task(8, 4, "ids", 1), None, error="x"))
    cells = summary.grid(rows)
    assert cells[8, 4]["ids"] == Times((2.0,), failed=1)


def test_the_page_shows_everything(results: Path) -> None:
    text, failed = report.write(results, plots=False)
    assert failed == 2  # one run of the grid, one of the loads
    for part in (
        "## Worker ÷ verifier",
        "LMCV, Qwen3-8B, RTX 4090",
        "LMCV, Qwen3-32B, H100 NVL",
        "| 128 | 0.819 |",  # their cell 128/1
        "## At load",
        "### 4x128/16 (4 requests, 576 tokens)",
        "| `ids` | 0.11 | 0.11–0.11 | 5,236 | 90.9% |",
        "## Through the whole pool",
        "| 4x128/16 | 0 | 100 of 100 |",
        "80.0%",
        "### CPU per verified generation, one core",
        "**all but the engine's own**",
        "### Delay below capacity",
        "### One at a time, end to end",
        "## Runs that failed",
        "- ids 128/2048: ReplayError: engine_failed",
        "NVIDIA H200",
    ):
        assert part in text, part
    assert "nan" not in text
    assert str(results) not in text


def test_reporting_again_changes_nothing(results: Path) -> None:
    report.write(results)
    files = sorted(path for path in results.iterdir() if path.is_file())
    assert {path.name for path in files} >= {
        "latency_raw.jsonl",
        "latency_raw.csv",
        "load_raw.csv",
        "pool_raw.csv",
        "latency_summary.csv",
        "summary.md",
        "metadata.json",
        "ratio_heatmap.png",
        "ratio_heatmap.svg",
        "cost_curves.png",
        "cost_curves.svg",
        "queue_delay.png",
        "queue_delay.svg",
    }
    before = {path.name: path.read_bytes() for path in files}
    assert before["ratio_heatmap.png"].startswith(b"\x89PNG")
    for path in files:
        if path.name not in (GRID, LOAD, POOL, "metadata.json"):
            path.unlink()
    report.write(results)
    assert {path.name: path.read_bytes() for path in files} == before


@pytest.mark.parametrize("name", [GRID, LOAD, POOL])
def test_every_row_is_a_line_of_csv_also_one_that_failed(name: str, results: Path) -> None:
    report.write(results, plots=False)
    rows = read(results / name)
    with (results / name).with_suffix(".csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["error"] for line in lines] == [row["error"] for row in rows]
    assert any(line["error"] for line in lines) or name == POOL
    if name == POOL:
        assert lines[1]["latency_s.p99"] == "0.08"
        assert lines[1]["cpu_s.verify"] == "0.5"


def test_report_of_a_folder_needs_no_engine(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--report", str(results), "--no-plots"]) == 1, "two rows hold errors"
    assert "## Worker ÷ verifier" in capsys.readouterr().out
    assert main(["--report-only", "--output-dir", str(results), "--no-plots"]) == 1


COMMITTED = Path(__file__).parents[2] / "benchmarks" / "results" / "cost"


def test_the_committed_page_and_table_come_from_the_committed_rows(tmp_path: Path) -> None:
    rows, load, pool = (read(COMMITTED / name) for name in (GRID, LOAD, POOL))
    cells = summary.grid(rows)
    summary.write_csv(tmp_path / "again.csv", cells)
    assert (tmp_path / "again.csv").read_bytes() == (COMMITTED / "latency_summary.csv").read_bytes()
    for name, each in ((GRID, rows), (LOAD, load), (POOL, pool)):
        write_csv(tmp_path / "again.csv", each)
        assert (tmp_path / "again.csv").read_bytes() == (COMMITTED / name).with_suffix(".csv").read_bytes()
    plots = [name for name in (HEAT, CURVES, DELAYS) if (COMMITTED / f"{name}.png").exists()]
    text = report.page(cells, rows, load, pool, load_metadata(COMMITTED / "metadata.json"), plots)
    assert text.encode() == (COMMITTED / "summary.md").read_bytes()


def test_the_committed_files_tell_no_folder() -> None:
    for path in COMMITTED.glob("*.json*"):
        for line in path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]:
            found = json.loads(line)
            assert unplaced(found) == found, path.name


def test_an_empty_folder_gives_an_empty_report(tmp_path: Path) -> None:
    text, failed = report.write(tmp_path)
    assert failed == 0
    assert text.startswith("# What verification costs")


def test_options_of_lmcv_have_their_meaning() -> None:
    given = parser().parse_args(
        shlex.split(
            "--model m --dtype bfloat16 --trust-remote-code --max-model-len 32768 --gpu-memory-utilization 0.95 "
            "--input-lengths '128 512' --output-lengths '1 16' --top-k 20 --warmup 2 --repeats 5 --seed 0 "
            "--max-total-tokens 9000 --skip-worker --skip-verifier --quantization fp8 --max-logprobs 20 "
            "--tensor-parallel-size 2 --gpu 0 --output-dir out"
        )
    )
    assert (given.input_lengths, given.output_lengths) == ([128, 512], [1, 16])
    assert (given.warmup, given.repeats, given.top_k) == (2, 5, 20)
    default = parser().parse_args([])
    assert default.input_lengths == [128, 512, 1024, 2048, 4096]
    assert default.output_lengths == [1, 16, 64, 256, 1024]
    assert default.resume
    assert default.arms == list(ARMS)
    assert default.load == []
    assert [load.name for load in parser().parse_args(["--load"]).load][:2] == ["64x128/1024", "128x512/256"]


def test_rows_of_different_engines_do_not_mix(tmp_path: Path) -> None:
    from benchmarks.cost.engine import reference_settings
    from benchmarks.cost.metadata import Metadata

    options = parser().parse_args(["--model", str(tmp_path), "--load"])
    path = tmp_path / "metadata.json"
    settings = reference_settings(options, str(tmp_path))
    Metadata(path, options, settings, "2026-11-30 00:00 UTC")
    Metadata(path, options, settings, "2026-11-30 01:00 UTC").end(3.0)
    known: dict[str, Any] = json.loads(path.read_text())
    assert len(known["runs"]) == 2
    assert known["runs"][1]["seconds"] == 3.0
    assert str(tmp_path) not in path.read_text()
    other = parser().parse_args(["--model", str(tmp_path), "--load", "--top-k", "5"])
    with pytest.raises(CountersignError, match="top_k"):
        Metadata(path, other, reference_settings(other, str(tmp_path)), "2026-11-30 02:00 UTC")


def test_no_folder_of_this_machine_is_told(tmp_path: Path) -> None:
    from benchmarks.cost.engine import reference_settings
    from benchmarks.cost.metadata import Metadata

    engine = {"tokenizer": str(tmp_path / "words"), "hf_overrides": {"a": [f"file://{tmp_path}/b", str(tmp_path)]}}
    for more in ([], ["--load-format", "dummy"]):
        given = ["--model", str(tmp_path / "model"), "--engine", json.dumps(engine), "--output-dir", str(tmp_path)]
        options = parser().parse_args([*given, *more])
        path = tmp_path / "metadata.json"
        Metadata(path, options, reference_settings(options, options.model), "2026-11-30 00:00 UTC")
        known = json.loads(path.read_text())
        assert str(tmp_path.parent) not in path.read_text()
        assert known["what"]["model"] == known["runs"][0]["arguments"]["model"] == "model"
        assert known["what"]["engine"]["tokenizer"] == "words"
        path.unlink()
    rows = Rows(tmp_path / "r.jsonl")
    rows.append(grid_row(Task(8, 4, "ids", 0), None, error=f"OSError: no '{tmp_path}/x.bin', see http://host/a/b, 1/2"))
    (row,) = rows
    assert row["error"] == "OSError: no 'x.bin', see http://host/a/b, 1/2"


def test_the_longest_sequence_fits_with_one_more_token(tmp_path: Path) -> None:
    from benchmarks.cost.engine import reference_settings

    options = parser().parse_args(["--model", "m", "--input-lengths", "64 128", "--output-lengths", "1 8"])
    assert reference_settings(options, "m").engine["max_model_len"] == 137
    options = parser().parse_args(["--model", "m", "--input-lengths", "8", "--output-lengths", "1", "--load"])
    assert reference_settings(options, "m").engine["max_model_len"] == 1153
    assert reference_settings(options, "m").engine["enable_prefix_caching"] is False
    assert WORKER in LOAD_ARMS
