"""Claimed ids are cleaned before an engine sees them, and set behind the reference's own list."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from policies.errors import ReplayError
from verifier_pool.reference.experts import decode_npy, output_part
from verifier_pool.reference.rows import Entries
from verifier_pool.reference.scoring import MAX_CANDIDATES, candidates, full_form, ids_form, look_up

OUTPUT = np.array([7, 2], np.int32)
CLAIMS = hnp.arrays(np.int64, st.tuples(st.integers(0, 6), st.integers(0, 9)), elements=st.integers(-(2**40), 2**40))
SMALL = hnp.arrays(np.int32, st.tuples(st.integers(0, 6), st.integers(0, 9)), elements=st.integers(-3, 12))


def entries(rows: list[tuple[int, int, float, int]]) -> Entries:
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    return Entries(columns[0], columns[1], columns[2].astype(np.float64), columns[3])


@given(st.one_of(CLAIMS, SMALL), st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(1, 12))
def test_candidates_are_the_emitted_token_and_each_claimed_id_once(claim: Any, output: list[int], width: int) -> None:
    ids = candidates(np.array(output, np.int32), claim, 10, width)
    assert ids.dtype == np.int32
    assert ids.shape[0] == len(output)
    assert 1 <= ids.shape[1] <= width
    for row, emitted in enumerate(output):
        named = claim[row].tolist() if row < len(claim) else []
        wanted = list(dict.fromkeys([emitted, *(id for id in named if 0 <= id < 10)]))[:width]
        assert ids[row].tolist() == wanted + [-1] * (ids.shape[1] - len(wanted))


def test_without_a_claim_the_emitted_token_is_all() -> None:
    for claim in (None, np.zeros((0, 0), np.int32), np.zeros(4, np.int32), np.full((2, 3), -1, np.int32)):
        assert candidates(OUTPUT, claim, None).tolist() == [[7], [2]]


def test_a_claim_as_wide_as_a_vocabulary_is_cut() -> None:
    claim = np.tile(np.arange(50_000, dtype=np.int32), (2, 1))
    assert candidates(OUTPUT, claim, None).shape == (2, MAX_CANDIDATES)


def test_look_up_finds_what_a_list_names() -> None:
    listed = entries([(0, 7, -1.0, 1), (0, 9, -2.0, 2), (1, 2, -0.5, 1), (1, 8, -9999.0, 2)])
    ids, logprobs = look_up(listed, np.array([[7, 8, 9], [2, 8, -1]], np.int32))
    assert ids.tolist() == [[7, -1, 9], [2, 8, -1]]
    assert logprobs.tolist() == [[-1.0, -np.inf, -2.0], [-0.5, -np.inf, -np.inf]]
    none = np.zeros(0, np.int64)
    nothing = Entries(none, none, np.zeros(0, np.float64), none)
    assert look_up(nothing, np.array([[1]], np.int32))[0].tolist() == [[-1]]


def test_own_columns_first_and_claimed_ids_behind() -> None:
    listed = entries([(0, 7, -3.0, 3), (0, 1, -0.5, 1), (1, 2, -0.1, 1), (1, 4, -3.0, 2)])
    ids = np.array([[7, 1, 5, 6], [2, 9, -1, -1]], np.int32)
    scores = np.array([[-3.1, -0.6, -4.0, -np.inf], [-0.1, -5.0, -np.inf, -np.inf]], np.float32)
    out, logprobs, own = full_form(OUTPUT, listed, (ids, scores))
    assert own == 21
    assert out[:, 21:].tolist() == [[5, 6], [9, -1]]
    assert logprobs[:, 21:].tolist() == [[-4.0, -np.inf], [-5.0, -np.inf]]
    assert out[0, :3].tolist() == [7, 1, -1]
    # The list's own numbers stand where both name an id.
    assert logprobs[0, :2].tolist() == [-3.0, -0.5]


def test_ids_form_is_what_was_scored() -> None:
    ids = np.array([[7, 1], [2, -1]], np.int32)
    out, logprobs = ids_form(OUTPUT, ids, np.array([[-1.0, -9999.0], [-2.0, 0.0]], np.float32))
    assert out is ids
    assert logprobs.tolist() == [[-1.0, -np.inf], [-2.0, -np.inf]]


@pytest.mark.parametrize(
    ("scores", "reason"),
    [
        ([[-1.0], [-2.0]], "bad_replay"),
        ([[-1.0, 0.5], [-2.0, -1.0]], "bad_replay"),
        ([[float("nan"), -1.0], [-2.0, -1.0]], "bad_replay"),
        ([[-np.inf, -np.inf], [-2.0, -1.0]], "not_finite"),
    ],
)
def test_scores_of_no_sound_engine(scores: Any, reason: str) -> None:
    with pytest.raises(ReplayError) as caught:
        ids_form(OUTPUT, np.array([[7, 1], [2, 3]], np.int32), np.array(scores, np.float32))
    assert caught.value.reason == reason


def test_the_output_part_of_expert_ids() -> None:
    whole = np.arange(10 * 3 * 2).reshape(10, 3, 2)
    for window in (whole, whole[6:]):
        part = output_part(window, 6, 4)
        assert part is not None
        assert np.array_equal(part, whole[6:9])
    assert output_part(None, 6, 4) is None
    for wrong in (whole[:-1], whole[0], whole.astype(np.float32)):
        with pytest.raises(ReplayError, match="bad_replay"):
            output_part(wrong, 6, 4)


@pytest.mark.parametrize("text", ["", "@", "aGVsbG8=", "k05VTVBZ"])
def test_arrays_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ReplayError, match="bad_replay"):
        decode_npy(text)
