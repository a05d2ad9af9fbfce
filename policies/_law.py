"""Bounds on the probability that vLLM draws a token, from the list of likeliest tokens of a claim or a replay.

vLLM draws from softmax(logprob / T) after the request's processors (`policies._processors`) and cuts
(`policies._truncation`), which bound what the unlisted tokens weigh; so every probability is bounded from both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies._processors import process
from policies._race import LOWEST_TEMPERATURE
from policies._truncation import MOST_TOKENS, survivors
from policies.evidence import Ids, Logprobs, Sampling

_Floats = NDArray[np.float64]
_Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Law:
    """Weights exp((logprob − the row's largest) / T) and bounds on their sum over everything that can be drawn.

    Attributes:
        ids: int32 (G, W).
        weights: float64 (G, W), 0 for what cannot be drawn.
        kept, dropped: bool (G, W), listed tokens that certainly can, and certainly cannot, be drawn.
        low, high: float64 (G,), bounds on the sum.
        unlisted: float64 (G,), upper bound on the weight of all unlisted tokens together.
        one: float64 (G,), upper bound on the weight of one unlisted token that the request does not raise.
    """

    ids: Ids
    weights: _Floats
    kept: _Flags
    dropped: _Flags
    low: _Floats
    high: _Floats
    unlisted: _Floats
    one: _Floats


def bounds(
    ids: Ids,
    logprobs: Logprobs,
    output_ids: Ids,
    sampling: Sampling,
    *,
    stop_ids: Sequence[int],
    vocab_size: int | None = None,
) -> Law | None:
    """The law at each position; None at T = 0 and where a request's processors are not followed.

    Args:
        ids, logprobs: (G, W), the emitted token first, the likeliest others after it.
        output_ids: int32 (G,).
        stop_ids: every id that `min_tokens` holds back.
    """
    followed = sampling.repetition_penalty == 1 and not sampling.bad_words
    if sampling.temperature <= 0 or not followed or not ids.size or len(ids) != len(output_ids):
        return None
    claim = process(sampling, output_ids, ids, logprobs, stop_ids=stop_ids)
    if not bool(claim.listed[:, 0].all()) or bool(claim.blank.any()):
        return None
    temperature = max(sampling.temperature, LOWEST_TEMPERATURE)
    fate = survivors(claim, temperature, sampling, vocab_size or MOST_TOKENS, tail=True)
    assert fate.tail_low is not None
    assert fate.tail_high is not None
    largest = claim.logprobs.max(axis=1)
    largest = np.where(np.isfinite(largest), largest, 0.0)
    weights = np.where(claim.candidates, np.exp((claim.logprobs - largest[:, None]) / temperature), 0.0)
    one = np.exp(np.minimum((claim.unlisted.cap - largest) / temperature, 600.0))
    low = (weights * fate.kept).sum(axis=1) + fate.tail_low
    high = (weights * ~fate.dropped).sum(axis=1) + fate.tail_high
    return Law(ids, weights, fate.kept, fate.dropped, low, np.maximum(low, high), fate.tail_high, np.minimum(one, high))
