"""From a vLLM's prompt logprobs to the arrays of a replay. Shared by every reference built on vLLM."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.errors import ReplayError
from policies.evidence import MASKED, PAD_ID, TOP_LOGPROBS, Ids, Logprobs

TOP_K = TOP_LOGPROBS
"""How many of its own best tokens the reference reports per position; vLLM's default ceiling."""

WIDTH = TOP_K + 1
NO_RANK = np.iinfo(np.int64).max
"""Rank of an entry that came without one."""


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """Prompt logprobs of the output tokens as one flat list.

    Attributes:
        row: (N,) in 0…G−1, ascending: which output token an entry belongs to.
        ids, logprobs, ranks: (N,); natural logarithms; rank 1 is the largest. vLLM lists the emitted token first and
            may list it again among its best; −9999 is how it writes what is not finite.
    """

    row: NDArray[np.int64]
    ids: NDArray[np.int64]
    logprobs: NDArray[np.float64]
    ranks: NDArray[np.int64]

    def finite(self) -> Entries:
        """The same with −∞ for −9999.

        Raises:
            ReplayError: `bad_replay` when a logprob is positive or not a number.
        """
        logprobs = np.where(self.logprobs <= MASKED, -np.inf, self.logprobs)
        if np.isnan(logprobs).any() or (logprobs > 1e-3).any():
            raise ReplayError("bad_replay", "a logprob is positive or not a number")
        return Entries(self.row, self.ids, logprobs, self.ranks)

    def table(self, rows: int) -> Ids:
        """int32 (rows, W): the ids of every row in their order, −1 pads."""
        column = np.arange(len(self.row)) - np.searchsorted(self.row, self.row, side="left")
        table = np.full((rows, int(column.max(initial=0)) + 1), PAD_ID, np.int32)
        table[self.row, column] = self.ids
        return table


def replay_rows(output_ids: Ids, entries: Entries) -> tuple[Ids, Logprobs]:
    """The emitted token and the reference's own best as `Replay.ids` and `Replay.logprobs`.

    Args:
        output_ids: int32 (G,), the emitted tokens.
        entries: may hold more than the twenty best; what lies deeper is left out.

    Returns:
        int32 (G, 21) and float32 (G, 21): the emitted token, then the others by rank; −1 and −inf pad.
        An emitted token the reference holds impossible has −inf.

    Raises:
        ReplayError: `bad_replay` when an emitted token has no entry or a logprob is positive, `not_finite`
            when a row holds nothing finite.
    """
    entries = entries.finite()
    row, ids, logprobs, ranks = entries.row, entries.ids, entries.logprobs, entries.ranks
    count = len(output_ids)
    out_ids = np.full((count, WIDTH), PAD_ID, np.int32)
    out_logprobs = np.full((count, WIDTH), -np.inf, np.float32)
    own = ids == output_ids[row]
    out_ids[row[own], 0] = ids[own]
    out_logprobs[row[own], 0] = logprobs[own]
    if (out_ids[:, 0] == PAD_ID).any():
        raise ReplayError("bad_replay", "an emitted token has no logprob")

    order = np.flatnonzero(~own & ((ranks <= TOP_K) | (ranks == NO_RANK)))
    order = order[np.lexsort((ranks[order], row[order]))]
    rows = row[order]
    column = np.arange(len(order)) - np.searchsorted(rows, rows, side="left") + 1
    fits = column < WIDTH
    out_ids[rows[fits], column[fits]] = ids[order][fits]
    out_logprobs[rows[fits], column[fits]] = logprobs[order][fits]
    if not np.isfinite(out_logprobs).any(axis=1).all():
        raise ReplayError("not_finite", "the reference computed no finite logprob at a position")
    return out_ids, out_logprobs
