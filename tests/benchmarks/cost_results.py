"""Made-up rows of a whole run, for the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.cost.plan import ARMS, LOAD_ARMS, PLAIN, WORKER, Task, runs
from benchmarks.cost.rows import GRID, LOAD, POOL, Rows, grid_row

SPEED = {"worker": 0.1, "dicts": 0.005, "flat": 0.002, "ids": 0.00125, "prefill": 0.001}
"""Seconds per output token."""
CELLS = ((128, 16), (128, 2048), (512, 2048))
_QUANTILES = {"n": 90.0, "p50": 0.02, "p90": 0.04, "p95": 0.05, "p99": 0.08, "max": 0.1}


def write_rows(folder: Path) -> None:
    """Rows of a grid with a failed arm, of a load with a failed run, of a pool, and metadata."""
    grid = Rows(folder / GRID)
    for prompt, output in CELLS:
        for arm in ARMS:
            for number in range(runs(output, 3)):
                task = Task(prompt, output, arm, number)
                if (prompt, output, arm) == (128, 2048, "ids"):
                    grid.append(grid_row(task, None, error="ReplayError: engine_failed"))
                else:
                    grid.append(grid_row(task, SPEED[arm] * output + 0.01 * (number - 1), gen_tokens=output))
    load = Rows(folder / LOAD)
    for place, arm in enumerate(LOAD_ARMS):
        for number in range(1 if arm in (PLAIN, WORKER) else 3):
            load.append(_load(arm, number, {"ids": 0.11, "prefill": 0.1}.get(arm, 0.2 + place)))
    load.append(_load("flat", 3, None))
    pool = Rows(folder / POOL)
    pool.append(_phase("capacity", 0.0, warm=True, generations=8, decided=8))
    pool.append(_phase("capacity", 0.0, warm=False))
    for level in (0.5, 0.8, 0.95):
        pool.append(
            _phase("queueing", 0.0, level=level, rate=level * 30, late_s=0.0, alone_s=0.01, queued_s=_QUANTILES)
        )
    for number in range(3):
        pool.append(
            {
                "phase": "latency",
                "input_len": 128,
                "output_len": 16,
                "iter": number,
                "share": 0.0,
                "end_to_end_s": 0.03,
                "verdict": "pass",
                "error": "",
            }
        )
    (folder / "metadata.json").write_text(json.dumps(_metadata()))


def _load(arm: str, number: int, seconds: float | None) -> dict[str, Any]:
    return {
        "load": "4x128/16",
        "arm": arm,
        "iter": number,
        "requests": 4,
        "tokens": 576,
        "output_tokens": 64,
        "seconds": seconds,
        "latency_p50_s": seconds,
        "latency_max_s": seconds,
        "error": "" if seconds else "RuntimeError: broken",
    }


def _phase(phase: str, share: float, **more: Any) -> dict[str, Any]:
    return {
        "phase": phase,
        "load": "4x128/16",
        "share": share,
        "generations": 100,
        "decided": 100,
        "tokens": 14_400,
        "seconds": 3.125,
        "per_s": 32.0,
        "tokens_per_s": 4608.0,
        "steady_tokens_per_s": 5000.0,
        "verdicts": {"pass": 99, "inconclusive": 1},
        "latency_s": _QUANTILES,
        "cpu_s": {"verify": 0.5, "replay": 0.2, "engine": 3.0, "store": 0.1, "feeder": 0.2},
        "gpu_percent": 97.0,
        "error": "",
    } | more


def _metadata() -> dict[str, Any]:
    machine = {"gpu": "NVIDIA H200, 143771 MiB, 580.159", "cpu": "a processor", "cores": 16}
    run = {
        "began": "2026-11-30 00:00 UTC",
        "machine": machine,
        "engine_packages": {"vllm": "0.32.0"},
        "reference": "vllm_engine vllm-0.32.0 qwen3-8b bfloat16 NVIDIA H200",
    }
    what = {"model": "qwen3-8b", "engine": {"load_format": "dummy"}, "top_k": 20, "seed": 5}
    return {"benchmark": "cost", "what": what, "runs": [run]}
