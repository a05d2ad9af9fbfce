"""Claimed ids and what the reference says about them: the two forms of a replay.

A claim's ids come from the backend under suspicion, so they are cleaned before an engine sees them: an id outside the
vocabulary would be refused with the whole request, a doubled one would count twice.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from policies.errors import ReplayError
from policies.evidence import MASKED, PAD_ID, Ids, Logprobs
from verifier_pool.reference.rows import Entries, replay_rows

MAX_CANDIDATES = 64
"""Ids per token that are scored, the emitted one among them; an honest claim names 21."""


def candidates(output_ids: Ids, claimed: Ids | None, vocab_size: int | None, width: int = MAX_CANDIDATES) -> Ids:
    """The ids to score for each output token.

    Args:
        output_ids: int32 (G,).
        claimed: integers (rows, W) as the backend sent them, or None: any ids, any number of rows.
        vocab_size: ids from here on do not exist; None where nobody knows.
        width: columns at most.

    Returns:
        int32 (G, C), 1 ≤ C ≤ `width`: the emitted token, then each other claimed id once, in the claim's order;
        −1 pads on the right.
    """
    count = len(output_ids)
    given = np.full((count, 1), PAD_ID, np.int64)
    if claimed is not None and claimed.ndim == 2 and claimed.shape[1]:
        rows = min(count, len(claimed))
        given = np.full((count, claimed.shape[1]), PAD_ID, np.int64)
        given[:rows] = claimed[:rows]
    highest = np.iinfo(np.int32).max if vocab_size is None else vocab_size - 1
    given[(given < 0) | (given > highest)] = PAD_ID
    ids = np.concatenate([output_ids[:, None].astype(np.int64), given], axis=1)
    return _to_the_left(np.where(_repeats(ids), PAD_ID, ids).astype(np.int32))[:, : max(width, 1)]


def _repeats(ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Where an id stands that stood further left in its row."""
    order = np.argsort(ids, axis=1, kind="stable")
    ranked = np.take_along_axis(ids, order, axis=1)
    again = np.zeros(ids.shape, np.bool_)
    again[:, 1:] = ranked[:, 1:] == ranked[:, :-1]
    repeats = np.empty_like(again)
    np.put_along_axis(repeats, order, again, axis=1)
    return repeats


def _to_the_left(ids: Ids) -> Ids:
    """Ids before pads in every row, in the order they had; columns that are all pads are dropped but the first."""
    order = np.argsort(ids == PAD_ID, axis=1, kind="stable")
    packed: Ids = np.take_along_axis(ids, order, axis=1)
    columns = int((packed != PAD_ID).sum(axis=1).max(initial=1))
    return packed[:, :columns]


def look_up(entries: Entries, wanted: Ids) -> tuple[Ids, Logprobs]:
    """What a longer list of prompt logprobs says about the wanted ids: their ids and logprobs, (G, C).

    An id that no entry names is left out: −1 and −inf.
    """
    entries = entries.finite()
    key = entries.row * (1 << 32) + entries.ids
    order = np.argsort(key, kind="stable")
    rows = np.arange(len(wanted), dtype=np.int64)[:, None]
    looked_for = np.where(wanted == PAD_ID, -1, rows * (1 << 32) + wanted)
    place = np.minimum(np.searchsorted(key[order], looked_for), max(len(key) - 1, 0))
    found = (key[order][place] == looked_for) if len(key) else np.zeros(wanted.shape, np.bool_)
    logprobs = entries.logprobs[order][place] if len(key) else np.zeros(wanted.shape)
    return np.where(found, wanted, PAD_ID).astype(np.int32), np.where(found, logprobs, -np.inf).astype(np.float32)


def ids_form(output_ids: Ids, ids: Ids, logprobs: Logprobs) -> tuple[Ids, Logprobs]:
    """The arrays of a replay of form `ids` from the engine's scores of `candidates`.

    Raises:
        ReplayError: `bad_replay` when the scores have another shape or are no logprobs, `not_finite` when a
            position holds nothing finite.
    """
    if logprobs.shape != ids.shape or not np.array_equal(ids[:, 0], output_ids):
        raise ReplayError("bad_replay", f"scores of shape {logprobs.shape} for ids of shape {ids.shape}")
    listed = ids != PAD_ID
    if np.isnan(logprobs[listed]).any() or (logprobs[listed] > 1e-3).any():
        raise ReplayError("bad_replay", "a logprob is positive or not a number")
    values = np.where(listed & (logprobs > MASKED), logprobs, -np.inf).astype(np.float32)
    if not np.isfinite(values).any(axis=1).all():
        raise ReplayError("not_finite", "the reference computed no finite logprob at a position")
    return ids, values


def full_form(output_ids: Ids, entries: Entries, scored: tuple[Ids, Logprobs]) -> tuple[Ids, Logprobs, int]:
    """The arrays of a replay of form `full`, and how many leading columns are the reference's own list.

    Args:
        entries: its own prompt logprobs.
        scored: ids (G, C) and their logprobs: what it says about the claimed ids, by whatever means.

    The claimed ids outside the own list follow it. Where both name an id, the own list's number stands.

    Raises:
        ReplayError: as `replay_rows` and `ids_form`.
    """
    own_ids, own_logprobs = replay_rows(output_ids, entries)
    ids, logprobs = scored
    if ids.shape != logprobs.shape or len(ids) != len(own_ids):
        raise ReplayError("bad_replay", f"scores of shape {logprobs.shape} for ids of shape {ids.shape}")
    if np.isnan(logprobs[ids != PAD_ID]).any() or (logprobs[ids != PAD_ID] > 1e-3).any():
        raise ReplayError("bad_replay", "a logprob is positive or not a number")
    known = (ids[:, :, None] == own_ids[:, None, :]).any(axis=2)
    extra = np.where(known, PAD_ID, ids)
    order = np.argsort(extra == PAD_ID, axis=1, kind="stable")
    width = int((extra != PAD_ID).sum(axis=1).max(initial=0))
    extra = np.take_along_axis(extra, order, axis=1)[:, :width]
    values = np.take_along_axis(logprobs, order, axis=1)[:, :width]
    values = np.where((extra != PAD_ID) & (values > MASKED), values, -np.inf)
    return (
        np.concatenate([own_ids, extra], axis=1).astype(np.int32),
        np.concatenate([own_logprobs, values], axis=1).astype(np.float32),
        own_ids.shape[1],
    )
