"""A language model of 64 tokens that needs no engine: honest answers to it pass every check, in microseconds.

The next token depends on the last one alone, so a model is one table. The scripted backend and the scripted reference
share it; the backend's kernels drift a little from the reference's, as real ones do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from policies import noise
from policies.evidence import TOP_LOGPROBS, Ids, Logprobs

VOCABULARY = 64
RUNTIME = "vllm-0.32-v2"
ENGINE = "vLLM 0.32.0, toy"
VERSION = "0.32.0"
PROMPT_TOKENS = 8

Table = NDArray[np.float64]
_EVERY = np.arange(VOCABULARY, dtype=np.int32)


@cache
def table(model: int = 0, *, kernels: int = 0) -> Table:
    """float64 (64, 64): row t holds the natural logprobs of the token after t.

    Another `model` is another model; other `kernels` are the same one with a drift of 0.02 in its logits.
    """
    logits = np.random.default_rng(model).normal(size=(VOCABULARY, VOCABULARY)) * 2
    if kernels:
        logits += np.random.default_rng([model, kernels]).normal(size=logits.shape) * 0.02
    normalised: Table = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return normalised


def prompt_ids(text: str) -> list[int]:
    """The chat template: eight tokens that depend on all of the text."""
    drawn = np.random.default_rng(list(text.encode())).integers(0, VOCABULARY, PROMPT_TOKENS)
    return [int(token) for token in drawn]


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """An answer: int32 (G,) output ids, and the claim about them, (G, 21) as `Evidence.claim_ids` has it."""

    output_ids: Ids
    claim_ids: Ids
    claim_logprobs: Logprobs


def draw(prompt: Sequence[int], count: int, temperature: float, seed: int, logprobs: Table) -> Drawn:
    """What vLLM would answer with this model: `count` tokens drawn with its noise."""
    gumbel = np.zeros((count, VOCABULARY))
    if temperature > 0:
        drawn = noise.gumbel(RUNTIME, seed, len(prompt), np.broadcast_to(_EVERY, (count, VOCABULARY)))
        assert drawn is not None
        gumbel = drawn * temperature
    last, tokens = prompt[-1], np.empty(count, np.int32)
    for place in range(count):
        tokens[place] = last = int((logprobs[last] + gumbel[place]).argmax())
    return Drawn(tokens, *listed(np.concatenate([[prompt[-1]], tokens[:-1]]), tokens, logprobs))


def listed(previous: NDArray[np.integer], emitted: Ids, logprobs: Table) -> tuple[Ids, Logprobs]:
    """The emitted token and the others among the twenty best, (G, 21); −1 and −inf pad."""
    rows = logprobs[previous]
    best = np.argsort(-rows, axis=1, kind="stable")[:, :TOP_LOGPROBS].astype(np.int32)
    best = np.where(best == emitted[:, None], -1, best)
    ids = np.concatenate([emitted[:, None], best], axis=1)
    # Pads go to the right.
    ids = np.take_along_axis(ids, np.argsort(ids < 0, axis=1, kind="stable"), axis=1)
    values = np.take_along_axis(rows, np.maximum(ids, 0), axis=1)
    return ids.astype(np.int32), np.where(ids < 0, -np.inf, values).astype(np.float32)
