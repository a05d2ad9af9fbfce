"""Which runs are planned, in which order, and which are left after an interrupted one."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.cost.load import load_turns
from benchmarks.cost.plan import ARMS, LONG, VERIFIERS, WORKER, Task, left, lengths, loads, plan
from benchmarks.cost.rows import GRID, Rows, done, grid_row, read
from benchmarks.harness.progress import Clock
from policies.errors import CountersignError

LENGTHS = st.lists(st.integers(1, 10_000), min_size=1, max_size=5)


@given(LENGTHS, LENGTHS, st.integers(1, 4), st.integers(0, 99), st.sets(st.sampled_from(ARMS), min_size=1))
def test_every_cell_has_every_run_once_and_its_worker_comes_first(
    inputs: list[int], outputs: list[int], repeats: int, seed: int, chosen: set[str]
) -> None:
    arms = [arm for arm in ARMS if arm in chosen]
    tasks = plan(inputs, outputs, arms, repeats=repeats, seed=seed)
    assert len(set(tasks)) == len(tasks)
    counts = Counter((task.cell, task.arm) for task in tasks)
    for one in set(inputs):
        for other in set(outputs):
            for arm in arms:
                assert counts[(one, other), arm] == (1 if other >= LONG else repeats)
    first: dict[tuple[int, int], Task] = {}
    for task in tasks:
        first.setdefault(task.cell, task)
    assert WORKER not in arms or all(task.arm == WORKER for task in first.values())


def test_the_order_is_random_and_the_same_for_the_same_seed() -> None:
    one, same, other = (plan([128, 512, 1024], [1, 16], ARMS, repeats=3, seed=seed) for seed in (1, 1, 2))
    assert one == same != other
    assert [task.cell for task in one] != sorted(task.cell for task in one)


def test_cells_that_are_too_long_are_left_out_and_the_worker_may_run_less_often() -> None:
    tasks = plan([100, 200], [10, 50], ARMS, repeats=3, seed=0, max_total_tokens=210, worker_repeats=2)
    assert {task.cell for task in tasks} == {(100, 10), (100, 50), (200, 10)}
    counts = Counter(task.arm for task in tasks)
    assert counts[WORKER] == 6
    assert all(counts[arm] == 9 for arm in VERIFIERS)


@pytest.mark.parametrize(
    ("text", "found"), [("128 512", [128, 512]), ("1,16, 64", [1, 16, 64]), (" 7 ", [7]), ("1\t2\n3", [1, 2, 3])]
)
def test_lengths_are_read(text: str, found: list[int]) -> None:
    assert lengths(text) == found


@pytest.mark.parametrize("text", ["", "0", "12 -3", "a", "1.5", "128x512"])
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="lengths above 0"):
        lengths(text)


def test_loads_are_read() -> None:
    one, mixed = loads("64x128/1024 2x10/5+1x20/7")
    assert len(one.requests) == 64
    assert (one.tokens, one.output_tokens) == (64 * 1152, 64 * 1024)
    assert mixed.requests == ((10, 5), (10, 5), (20, 7))
    assert mixed.tokens == 57


@pytest.mark.parametrize("text", ["64x128", "0x1/1", "1x0/1", "x1/2", "1x1/1+", "a"])
def test_other_loads_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="COUNTxINPUT/OUTPUT"):
        loads(text)


def test_generation_runs_once_at_load() -> None:
    assert load_turns(["plain", "worker", "ids"], 3) == [
        ("plain", 0),
        ("worker", 0),
        ("ids", 0),
        ("ids", 1),
        ("ids", 2),
    ]


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 60))
def test_an_interrupted_run_goes_on_where_it_stopped(cut: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        tasks = plan([16, 32], [1, 8], ARMS, repeats=3, seed=4)
        rows = Rows(path)
        for task in tasks[:cut]:
            rows.append(grid_row(task, 0.5))
        if cut:
            with path.open("ab") as file:  # killed in the middle of a line
                file.write(json.dumps(grid_row(tasks[0], 0.5)).encode()[:-7])
        again = Rows(path)
        assert len(list(again)) == cut
        assert left(tasks, done(again)) == tasks[cut:]


def test_a_failed_run_is_tried_again_and_stays_in_the_file(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows.jsonl")
    task = Task(16, 8, "ids", 0)
    rows.append(grid_row(task, None, error="ReplayError: engine_failed"))
    assert left([task], done(rows)) == [task]
    rows.append(grid_row(task, 0.25))
    assert left([task], done(rows)) == []
    assert len(list(rows)) == 2


def test_a_row_begins_with_the_columns_of_lmcv() -> None:
    row = grid_row(Task(128, 16, WORKER, 2), 1.5, gen_tokens=16)
    assert list(row)[:6] == [
        "input_len",
        "output_len",
        "total_tokens",
        "iter",
        "worker_total_s",
        "verifier_total_s",
    ]
    assert (row["worker_total_s"], row["verifier_total_s"], row["total_tokens"]) == (1.5, None, 144)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a":1}\n[]\n')
    with pytest.raises(CountersignError, match="line 2"):
        read(path)
    assert read(tmp_path / "none.jsonl") == []
    for line in (b"nonsense", b'{"arm": "ids"}'):
        (tmp_path / GRID).write_bytes(line + b"\n")
        with pytest.raises(CountersignError, match="line 1"):
            read(tmp_path / GRID)


def test_the_clock_ends_before_what_would_not_fit() -> None:
    now = [0.0]
    clock = Clock(100, lambda: now[0])
    assert clock.fits("worker", 1e9), "nothing is known yet"
    clock.learn("worker", 10, 20)
    assert clock.expected("worker", 30) == 60
    assert clock.fits("worker", 49)
    assert not clock.fits("worker", 51)
    now[0] = 90.0
    assert not clock.fits("worker", 6)
    assert clock.left({"worker": 5.0, "unknown": 3.0}) == 10
    assert clock.left({"unknown": 3.0}) is None
    now[0] = 101.0
    assert not clock.fits("unknown", 1)
    assert Clock(0, lambda: now[0]).fits("worker", 1e12)
