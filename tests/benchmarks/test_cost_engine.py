"""The whole benchmark on real vLLM: engine, loads, pool, report; and a second call that finds all of it done."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cost.plan import ARMS, LOAD_ARMS
from benchmarks.cost.rows import GRID, LOAD, POOL, read

pytestmark = pytest.mark.e2e


def _bench(model: Path, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "countersign", "bench", "cost", "--model", str(model), "--output-dir", str(folder)]
    command += ["--input-lengths", "16", "--output-lengths", "1 24", "--repeats", "3", "--warmup", "0", "--no-plots"]
    command += ["--max-model-len", "128", "--engine", '{"enforce_eager": true}', "--runtime", "vllm-0.32-v1-cpu"]
    command += ["--load", "12x16/24", "--load-repeats", "1", "--pool", "--pool-seconds", "1", "--pool-workers", "1"]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("COUNTERSIGN_")}
    return subprocess.run([*command, *more], capture_output=True, text=True, timeout=3600, env=environ, check=False)


def test_measures_everything_once(model_dir: Path, tmp_path: Path) -> None:
    done = _bench(model_dir, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    grid, load, pool = (read(tmp_path / name) for name in (GRID, LOAD, POOL))
    assert len(grid) == 2 * len(ARMS) * 3
    assert {row["arm"] for row in load} == set(LOAD_ARMS)
    assert not [row for row in [*grid, *load, *pool] if row["error"]]
    answers = [row for row in pool if row["phase"] == "capacity" and not row["warm"]]
    assert {row["share"] for row in answers} == {0.0, 0.25}
    # Honest answers under a profile of this very engine.
    assert all(set(row["verdicts"]) <= {"pass", "inconclusive"} for row in answers)
    assert [row["level"] for row in pool if row["phase"] == "queueing"] == [0.5, 0.8, 0.95]
    text = (tmp_path / "summary.md").read_text()
    assert "## Through the whole pool" in text
    assert str(model_dir) not in text + (tmp_path / "metadata.json").read_text()
    again = _bench(model_dir, tmp_path, "--time-limit", "0.001")
    assert again.returncode == 0, again.stderr[-3000:]
    assert len(read(tmp_path / GRID)) == len(grid), "nothing is measured twice"
    assert (tmp_path / "summary.md").read_text().count("## At load") == 1
