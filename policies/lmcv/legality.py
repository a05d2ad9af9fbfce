"""LMCV's candidate check: was each token within the registered top-k of the reference?

Necessary, not sufficient: a cheaper model of the same family mostly emits legal tokens, and at top-k 0 the rule has no
strength. Replaces `missing_selected_count == 0`, which vLLM meets for every token whatsoever.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from policies.evidence import Replay
from policies.lmcv.divergence import Flags, Floats
from policies.lmcv.spikes import run_lengths

LEGAL, UNCERTAIN, ILLEGAL = 0, 1, 2
Codes = NDArray[np.int8]

TOLERANCE = 0.25
"""Nats below the k-th logprob that still count as uncertain. LMCV gives no number. bf16 logits between 16 and 32 stand
0.125 apart, so two of them trade places by one step of rounding each; SmolLM2's greedy tokens, answered singly and
replayed in a batch, do so about once in 300."""
SPIKE_SHARE = 0.01
"""Share of isolated illegal tokens that a mixture-of-experts model is allowed: honest routes flip."""


def codes(rank: Floats, selected: Floats, kth: Floats, k: int, listed: int, tolerance: float = TOLERANCE) -> Codes:
    """LEGAL, UNCERTAIN or ILLEGAL per token.

    Args:
        rank: (G,), the reference's rank, 1 is best; NaN when the token is not among those it lists.
        selected, kth: (G,), the reference's logprob of the token, of its k-th best; NaN or −inf where unknown.
        k: registered top-k; 1 is greedy. 0 and below is unrestricted: everything is legal.
        listed: how many the reference lists. Below k, a token it does not list is uncertain.
    """
    if k <= 0:
        return np.full(len(rank), LEGAL, np.int8)
    near = np.isfinite(selected) & np.isfinite(kth) & (kth - selected <= tolerance)
    unsure = near | (np.isnan(rank) & (listed < k))
    return np.where(rank <= k, LEGAL, np.where(unsure, UNCERTAIN, ILLEGAL)).astype(np.int8)


def of_replay(replay: Replay, k: int, tolerance: float = TOLERANCE) -> Codes:
    """Codes of one generation from the reference's own list. Equal logprobs are equal rank, in the token's favour.

    A replay of form `ids` has no list: every token is uncertain (or legal where k is unrestricted).
    """
    if replay.form == "ids" or not replay.logprobs.size:
        return np.full(len(replay.ids), UNCERTAIN if k > 0 else LEGAL, np.int8)
    own = slice(0, replay.own)
    values = np.where(replay.ids[:, own] >= 0, replay.logprobs[:, own], -np.inf).astype(np.float64)
    ordered = -np.sort(-values, axis=1)
    width = ordered.shape[1]
    kth = ordered[:, min(max(k, 1), width) - 1]
    rank = 1.0 + (values[:, 1:] > values[:, :1]).sum(axis=1)
    return codes(rank, values[:, 0], kth, k, width - 1, tolerance)


def verdict(found: Codes, kind: Literal["dense", "moe"] = "dense") -> str:
    """`pass`, `uncertain` or `reject` for one sample.

    Dense: one illegal token rejects. Mixture of experts: illegal tokens are tolerated while they are isolated and at
    most 1 % of the sample, so that under 100 tokens none are: there, replay once more before rejecting.
    """
    illegal: Flags = found == ILLEGAL
    if illegal.any():
        if kind == "dense" or illegal.mean() > SPIKE_SHARE or int(run_lengths(illegal).max()) > 1:
            return "reject"
        return "uncertain"
    return "uncertain" if (found == UNCERTAIN).any() else "pass"
