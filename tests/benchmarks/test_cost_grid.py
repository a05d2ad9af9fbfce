"""Grids and loads on the toy: rows, answers that are kept, what fails, what the clock leaves out."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.cost.claims import Claims, claim_arrays, grid_name, load_name, made_up
from benchmarks.cost.grid import Engine, prompt_ids, run_grid
from benchmarks.cost.load import Loads
from benchmarks.cost.plan import ARMS, LOAD_ARMS, VERIFIERS, WORKER, Task, left, loads, plan
from benchmarks.cost.rows import Rows, done, read
from benchmarks.harness.progress import Bar, Clock
from tests.benchmarks.cost_toy import ToyEngine


def _run(
    folder: Path, engine: ToyEngine, tasks: list[Task], *, clock: Clock | None = None, worker: bool = True
) -> bool:
    checked: Engine = engine
    return run_grid(
        checked,
        tasks,
        Rows(folder / "rows.jsonl"),
        Claims(folder / "claims.bin"),
        clock or Clock(),
        Bar("cost", io.StringIO()),
        warmup=2,
        seed=3,
        top_k=20,
        worker=worker,
    )


def test_every_task_is_a_row_and_the_workers_answer_is_what_is_replayed(tmp_path: Path) -> None:
    engine = ToyEngine()
    tasks = plan([8, 12], [4, 6], ARMS, repeats=2, seed=1)
    assert _run(tmp_path, engine, tasks)
    rows = read(tmp_path / "rows.jsonl")
    assert done(rows) == set(tasks)
    assert not any(row["error"] for row in rows)
    claims = Claims(tmp_path / "claims.bin")
    kept = claims[grid_name((12, 6))]
    assert (len(kept.prompt_ids), len(kept.output_ids)) == (12, 6)
    assert kept.claim_ids.shape == (6, 21)
    # A fresh engine's run of every arm; two warm-ups before the first of two timed runs, for 4 cells and 5 arms.
    assert len(engine.ran) == 5 + 4 * 5 * (2 + 2)
    assert sorted({row["warmup"] for row in rows}) == [0, 2]


def test_what_has_rows_is_not_run_again(tmp_path: Path) -> None:
    tasks = plan([8], [4, 6], ARMS, repeats=2, seed=1)
    _run(tmp_path, ToyEngine(), tasks[:7])
    engine = ToyEngine()
    rest = left(tasks, done(read(tmp_path / "rows.jsonl")))
    assert len(rest) == len(tasks) - 7
    assert _run(tmp_path, engine, rest)
    assert len(read(tmp_path / "rows.jsonl")) == len(tasks)


def test_errors_are_rows_and_the_rest_goes_on(tmp_path: Path) -> None:
    tasks = plan([8], [4], ARMS, repeats=2, seed=1)
    assert _run(tmp_path, ToyEngine(broken=["ids"]), tasks)
    rows = read(tmp_path / "rows.jsonl")
    assert len(rows) == len(tasks)
    failed = [row for row in rows if row["error"]]
    assert [row["arm"] for row in failed] == ["ids", "ids"]
    assert failed[0]["error"] == "RuntimeError: the toy is broken"
    assert failed[0]["verifier_total_s"] is None


def test_without_an_answer_nothing_is_replayed(tmp_path: Path) -> None:
    tasks = plan([8], [4], ARMS, repeats=1, seed=1)
    engine = ToyEngine(short=True)
    assert _run(tmp_path, engine, tasks)
    rows = read(tmp_path / "rows.jsonl")
    assert all(row["error"] for row in rows)
    assert {arm for arm, _ in engine.ran[len(ARMS) :]} == {WORKER}, "after each arm's first on a fresh engine"
    assert "3 tokens came instead of 4" in rows[0]["error"]
    assert grid_name((8, 4)) not in Claims(tmp_path / "claims.bin")


def test_the_clock_leaves_out_what_does_not_fit(tmp_path: Path) -> None:
    now = [0.0]
    clock = Clock(10, lambda: now[0])
    clock.learn(WORKER, 1, 1)  # a second per output token
    for arm in VERIFIERS:
        clock.learn(arm, 1, 1e-9)
    tasks = plan([64], [2, 50], ARMS, repeats=1, seed=1)
    assert not _run(tmp_path, ToyEngine(), tasks, clock=clock)
    rows = read(tmp_path / "rows.jsonl")
    assert {row["output_len"] for row in rows} == {2}
    assert not any(row["error"] for row in rows)


def test_without_a_worker_made_up_answers_are_replayed(tmp_path: Path) -> None:
    tasks = plan([8], [4], VERIFIERS, repeats=1, seed=1)
    assert _run(tmp_path, ToyEngine(), tasks, worker=False)
    assert not any(row["error"] for row in read(tmp_path / "rows.jsonl"))
    assert not (tmp_path / "claims.bin").exists()


def test_loads_run_the_worker_first_and_keep_its_answers(tmp_path: Path) -> None:
    engine, (load,) = ToyEngine(), loads("3x8/4+2x10/6")
    rows, claims = Rows(tmp_path / "load.jsonl"), Claims(tmp_path / "claims.bin")

    def runner() -> Loads:
        return Loads(engine, rows, claims, Clock(), Bar("cost", io.StringIO()), top_k=20, seed=5, worker=True)

    shown: list[tuple[int, int, float | None]] = []

    class Watched(Bar):
        def show(self, what: str, done: int, total: int, left: float | None, *, last: bool = False) -> None:
            shown.append((done, total, left))

    first = runner()
    first._bar = Watched("cost", io.StringIO())
    assert first.run([load], LOAD_ARMS, 2)
    assert [(done, total) for done, total, _ in shown] == [(done, 10) for done in range(10)]
    assert shown[0][2] is None, "nothing is known yet"
    assert any(left is not None and left > 0 for _, _, left in shown)
    # Each arm warms up once, on short answers; generation runs once, replays twice.
    assert len(list(rows)) == 2 + 4 * 2
    assert next(iter(rows))["arm"] == WORKER
    assert [len(claims[load_name(load.name, place)].output_ids) for place in range(5)] == [4, 4, 4, 6, 6]
    assert len(first.replays) == 5
    assert first.replays[3][1].ids.shape == (6, 21)
    assert len({request.seed for request in first.requests(load)}) == 5
    ran = len(engine.ran)
    assert runner().run([load], LOAD_ARMS, 2)
    assert len(engine.ran) == ran, "everything was there"


def test_a_load_that_fails_is_a_row(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "load.jsonl")
    Loads(
        ToyEngine(broken=["prefill"]),
        rows,
        Claims(tmp_path / "claims.bin"),
        Clock(),
        Bar("cost", io.StringIO()),
        top_k=20,
        seed=5,
        worker=True,
    ).run(loads("2x8/4"), LOAD_ARMS, 1)
    failed = [row for row in rows if row["error"]]
    assert [row["arm"] for row in failed] == ["prefill"]
    assert failed[0]["seconds"] is None


def test_answers_survive_a_kill_in_the_middle_of_a_record(tmp_path: Path) -> None:
    path = tmp_path / "claims.bin"
    claims = Claims(path)
    for place in range(3):
        claims.add(made_up(prompt_ids(5, 64, place), 4, 20, 64, f"answer-{place}"))
    claims.add(made_up(prompt_ids(9, 64), 2, 20, 64, "answer-0"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    again = Claims(path)
    assert "answer-1" in again
    assert "answer-2" not in again
    again.add(made_up(prompt_ids(5, 64, 2), 4, 20, 64, "answer-2"))
    assert path.read_bytes() == whole
    assert len(Claims(path)["answer-0"].prompt_ids) == 5, "the first answer of a name stays"


def test_claims_are_stored_as_the_tap_stores_them() -> None:
    class Logprob:
        def __init__(self, logprob: float) -> None:
            self.logprob = logprob

    entries = [
        {7: Logprob(-3.0), 1: Logprob(-0.5), 2: Logprob(-1.0)},  # the sampled token lies outside the top two
        {1: Logprob(-0.1), 2: Logprob(-2.5)},
    ]
    ids, logprobs = claim_arrays(entries, np.array([7, 1], np.int32), 2)
    assert ids.tolist() == [[7, 1, 2], [1, 2, -1]]
    assert logprobs.tolist() == [[-3.0, -0.5, -1.0], [pytest.approx(-0.1), -2.5, -np.inf]]


@pytest.mark.parametrize("length", [1, 100])
def test_prompts_are_ordinary_ids_and_the_same_for_the_same_seed(length: int) -> None:
    make: Callable[[int], list[int]] = lambda seed: prompt_ids(length, 1000, seed).tolist()  # noqa: E731
    assert make(1) == make(1) != make(2)
    assert min(make(1)) >= 100
    assert max(make(1)) < 900


def test_progress_is_one_line_on_a_terminal_and_rare_in_a_log() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, log = Terminal(), io.StringIO()
    now = [0.0]
    for out in (terminal, log):
        bar = Bar("cost", out, lambda: now[0])
        for number in range(5):
            now[0] += 1
            bar.show("128/16 ids", number, 5, 30.0)
        bar.say("ready")
    assert terminal.getvalue().count("\n") == 2
    assert terminal.getvalue().count("\r") == 5
    assert re.search(r"0/5 128/16 ids, about 30 s left", terminal.getvalue())
    assert log.getvalue().count("\n") == 2
    assert "\r" not in log.getvalue()
