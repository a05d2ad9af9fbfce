"""An outside witness: vLLM's own load tool on the same stack, in turn with our client, and whether the two agree."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from benchmarks.harness.plan import shuffled
from benchmarks.harness.rows import Row, rounded, told
from benchmarks.overhead.asking import PATHS, Endpoint, tokens
from benchmarks.overhead.cells import Cell
from benchmarks.overhead.steps import DIRECT, PLAIN, VERIFIED, Step
from policies.errors import CountersignError

WITNESS = "witness"
"""Kind of its rows."""
OURS, THEIRS = "ours", "vllm bench serve"
METRICS = ("ttft_ms", "gap_mean_ms", "total_ms")
"""First token, time per token after it, and the whole answer: medians over the requests of a run."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of either tool."""

    round: int
    tool: str
    arm: str

    @property
    def key(self) -> tuple[int, str, str]:
        """Tells it from every other one."""
        return self.round, self.tool, self.arm


def runs(arms: Sequence[str], rounds: int, seed: int) -> list[Run]:
    """Both tools on every arm, shuffled inside rounds."""
    return [
        run
        for number in range(1, rounds + 1)
        for run in shuffled([Run(number, tool, arm) for tool in (OURS, THEIRS) for arm in arms], seed, WITNESS, number)
    ]


def done(rows: Sequence[Row]) -> set[tuple[int, str, str]]:
    """Runs that have their row."""
    return {(row["round"], row["tool"], row["arm"]) for row in rows if row["what"] == WITNESS and not row["error"]}


def step(run: Run, cell: Cell, audit: float) -> Step:
    """The step that our client takes. Its number is no round's, so that its prompts are its own."""
    return Step(1000 + run.round, audit, run.arm, cell)


def row_of_ours(run: Run, row: Row) -> Row:
    """A step's row as one of the witness's."""
    good = [not error for error in row["errors"]]
    samples = {
        name: [value for value, well in zip(row[name], good, strict=True) if well and value is not None]
        for name in METRICS
    }
    return _row(run, row["requests"], samples, "" if all(good) else f"{good.count(False)} requests failed")


def broken(run: Run, error: Exception) -> Row:
    """The row of a run that came to nothing."""
    return _row(run, 0, {name: [] for name in METRICS}, told(error))


def _row(run: Run, requests: int, samples: Mapping[str, Sequence[float]], error: str) -> Row:
    found: Row = {
        "what": WITNESS,
        "round": run.round,
        "tool": run.tool,
        "arm": run.arm,
        "requests": requests,
        **{name: list(values) for name, values in samples.items()},
        "error": error,
    }
    kept: Row = rounded(found, 4)
    return kept


class Witness:
    """vLLM's tool in a process of its own; a context manager.

    Raises:
        CountersignError: it does not start.
    """

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self._folder = folder
        self._environ = dict(environ)

    def __enter__(self) -> Witness:
        log = self._folder / "witness.log"
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.overhead.vllm_bench"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=self._environ,
                text=True,
                start_new_session=True,
            )
        if self._said() != "ready":
            raise CountersignError(f"vllm bench serve did not start\n{log.read_text(errors='replace')[-1500:]}")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def run(self, run: Run, words: Sequence[str]) -> Row:
        """One run of vLLM's tool: its row."""
        result = self._folder / "witness.json"
        result.unlink(missing_ok=True)
        assert self._process.stdin is not None
        where = [
            "--save-result",
            "--save-detailed",
            "--result-dir",
            str(self._folder),
            "--result-filename",
            result.name,
        ]
        self._process.stdin.write(json.dumps([*words, *where]) + "\n")
        self._process.stdin.flush()
        said = self._said()
        if said != "ok" or not result.exists():
            return _row(run, 0, {name: [] for name in METRICS}, said or "ended")
        return _theirs(run, json.loads(result.read_text()))

    def _said(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def command(
    run: Run, cell: Cell, *, url: str, endpoint: Endpoint, model: str, tokenizer: Path, temperature: float, seed: int
) -> list[str]:
    """The command line of vLLM's tool for a run. Its prompts have as many tokens as ours."""
    lengths = cell.mix.longest
    prompt = tokens(tokenizer, lengths.prompt, seed) if endpoint == "chat" else lengths.prompt
    words = {
        "--backend": "openai-chat" if endpoint == "chat" else "openai",
        "--base-url": url,
        "--endpoint": PATHS[endpoint],
        "--model": model,
        "--tokenizer": str(tokenizer),
        "--dataset-name": "random",
        "--random-input-len": str(prompt),
        "--random-output-len": str(lengths.answer),
        "--num-prompts": str(cell.requests),
        "--max-concurrency": str(round(cell.at)),
        "--num-warmups": "1",
        "--temperature": str(temperature),
        # The arms get prompts of their own, as ours do.
        "--seed": str(seed * 1000 + 10 * run.round + (DIRECT, PLAIN, *VERIFIED).index(run.arm)),
    }
    header = ["--header", f"x-countersign-mode={run.arm}"] if run.arm in VERIFIED else []
    return [*(part for pair in words.items() for part in pair), "--ignore-eos", "--disable-tqdm", *header]


def _theirs(run: Run, result: Mapping[str, Any]) -> Row:
    samples: dict[str, list[float]] = {name: [] for name in METRICS}
    failed = 0
    for first, gaps, error in zip(result["ttfts"], result["itls"], result["errors"], strict=True):
        if error or not gaps:
            failed += 1
            continue
        samples["ttft_ms"].append(1000 * first)
        samples["gap_mean_ms"].append(1000 * float(np.mean(gaps)))
        samples["total_ms"].append(1000 * (first + sum(gaps)))
    return _row(run, len(result["ttfts"]), samples, f"{failed} requests failed" if failed else "")
