from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import ReplayError
from verifier_pool.reference.rows import NO_RANK, WIDTH, Entries, replay_rows


def arrange(
    emitted: list[int], entries: list[tuple[int, int, float, int]]
) -> tuple[list[list[int]], list[list[float]]]:
    columns = list(zip(*entries, strict=True)) or [()] * 4
    ids, logprobs = replay_rows(
        np.array(emitted, np.int32),
        Entries(
            np.array(columns[0], np.int64),
            np.array(columns[1], np.int64),
            np.array(columns[2], np.float64),
            np.array(columns[3], np.int64),
        ),
    )
    return ids.tolist(), logprobs.tolist()


def test_the_emitted_token_comes_first_and_once() -> None:
    ids, logprobs = arrange([7, 2], [(0, 7, -1.5, 2), (0, 1, -0.5, 1), (0, 7, -1.5, 2), (1, 9, -3, 2), (1, 2, -0.1, 1)])
    assert ids[0][:3] == [7, 1, -1]
    assert logprobs[0][:3] == [-1.5, -0.5, -np.inf]
    assert ids[1][:3] == [2, 9, -1]


def test_only_the_twenty_best_are_the_references_own() -> None:
    deep = [(0, 50, -9.0, 51), *((0, id, -0.1 * id, id + 1) for id in range(64))]
    ids, _ = arrange([50], deep)
    assert ids == [[50, *range(20)]]
    ids, _ = arrange([3], deep)
    assert ids == [[3, *(id for id in range(20) if id != 3), -1]]
    unranked = [(0, 50, -9.0, NO_RANK), *((0, id, -0.1 * id, NO_RANK) for id in range(64))]
    assert arrange([50], unranked)[0] == [[50, *range(20)]]


def test_no_output_tokens_are_no_rows() -> None:
    assert arrange([], []) == ([], [])


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ([(0, 1, -0.5, 1)], "bad_replay"),
        ([(0, 7, 0.5, 1)], "bad_replay"),
        ([(0, 7, float("nan"), 1)], "bad_replay"),
        ([(0, 7, -9999.0, 2), (0, 1, -9999.0, 1)], "not_finite"),
    ],
)
def test_what_no_sound_reference_says(entries: list[tuple[int, int, float, int]], reason: str) -> None:
    with pytest.raises(ReplayError) as caught:
        arrange([7], entries)
    assert caught.value.reason == reason


def test_an_impossible_token_is_minus_infinity() -> None:
    _, logprobs = arrange([7], [(0, 7, -9999.0, 90), (0, 1, -0.5, 1)])
    assert logprobs[0][0] == -np.inf


@given(st.lists(st.tuples(st.integers(0, 59), st.integers(0, 40)), min_size=1, max_size=8), st.randoms())
def test_any_order_of_entries_gives_the_same_rows(rows: list[tuple[int, int]], random: object) -> None:
    entries = []
    for row, (emitted, offset) in enumerate(rows):
        others = [(offset + step) % 60 for step in range(20)]
        ranked = [(row, id, -0.1 * rank, rank) for rank, id in enumerate(others, 1)]
        entries += ranked if emitted in others else [(row, emitted, -9.0, 50), *ranked]
    tokens = [emitted for emitted, _ in rows]
    straight = arrange(tokens, entries)
    random.shuffle(entries)  # type: ignore[attr-defined]
    assert arrange(tokens, entries) == straight
    for row, (emitted, offset) in enumerate(rows):
        others = [(offset + step) % 60 for step in range(20)]
        want = [emitted, *(id for id in others if id != emitted)]
        assert straight[0][row] == want + [-1] * (WIDTH - len(want))
