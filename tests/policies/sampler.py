"""vLLM's sampler with every processor of a request, token by token over a small vocabulary, for honest answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from policies import noise
from policies.evidence import MASKED, Evidence, Sampling
from tests.policies import recorded

PROMPT = 10
_Logits = NDArray[np.float32]


def draw(
    sampling: Sampling,
    runtime: str,
    *,
    vocabulary: int = 300,
    tokens: int = 40,
    eos: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
    legal: NDArray[np.bool_] | None = None,
    random: np.random.Generator,
    fresh: np.random.Generator | None = None,
    chat: bool = True,
) -> Evidence:
    """An honest answer.

    Args:
        eos: stop ids beside the request's own; an answer does not end at them, so that it stays long.
        legal: bool (V,), what a grammar allows at every position.
        random: makes the logits.
        fresh: draws the tokens, as speculative decoding does, instead of the seed's noise.
        chat: the claim loses its twentieth alternative where the token is not among the twenty.
    """
    spread = random.uniform(0.5, 4)
    logits = (random.normal(size=(tokens, vocabulary)) * spread).astype(np.float32)
    # A bf16 head makes ties common.
    logits = (logits.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    if legal is not None:
        logits[:, ~legal] = -np.inf
    output: list[int] = []
    every = np.broadcast_to(np.arange(vocabulary, dtype=np.int32), (tokens, vocabulary))
    gumbel = noise.gumbel(runtime, sampling.seed or 0, PROMPT, every)
    assert gumbel is not None
    ids = np.full((tokens, 21), -1, np.int32)
    logprobs = np.full((tokens, 21), -np.inf, np.float32)
    for row in range(tokens):
        raw = (logits[row] - np.log(np.exp(logits[row]).sum())).astype(np.float32)
        seen = processed(logits[row].copy(), output, sampling, eos, bad_words)
        if sampling.temperature == 0 or not np.isfinite(seen.max()):
            token = int(seen.argmax())
        else:
            seen = cut((seen / np.float32(sampling.temperature)).astype(np.float32), sampling)
            lottery = gumbel[row] if fresh is None else fresh.gumbel(size=vocabulary)
            token = int((seen + lottery.astype(np.float32)).argmax())
        output.append(token)
        top = [int(other) for other in np.argsort(-raw, kind="stable")[:20] if other != token]
        listed = [token, *(top[:19] if chat else top)]
        ids[row, : len(listed)] = listed
        logprobs[row, : len(listed)] = np.where(np.isfinite(raw[listed]), raw[listed], MASKED)
    endpoint = "chat" if chat else "completions"
    return recorded.evidence(np.arange(PROMPT), ids, logprobs, sampling=sampling, runtime=runtime, endpoint=endpoint)


def processed(
    logits: _Logits, output: Sequence[int], sampling: Sampling, eos: Sequence[int], bad_words: Sequence[Sequence[int]]
) -> _Logits:
    """Masks, bias and penalties in the V1 runner's order, in fp32."""
    if sampling.allowed_token_ids:
        allowed = np.zeros(len(logits), bool)
        allowed[list(sampling.allowed_token_ids)] = True
        logits[~allowed] = -np.inf
    for word in bad_words:
        prefix = list(word[:-1])
        if len(prefix) <= len(output) and list(output[len(output) - len(prefix) :]) == prefix:
            logits[word[-1]] = -np.inf
    if len(output) < sampling.min_tokens:
        logits[[*eos, *sampling.stop_token_ids]] = -np.inf
    for token, bias in dict(sampling.logit_bias).items():
        logits[token] += np.float32(min(100.0, max(-100.0, bias)))
    counts = np.bincount(np.array(output, int), minlength=len(logits)).astype(np.float32)
    logits -= np.float32(sampling.frequency_penalty) * counts
    logits -= np.float32(sampling.presence_penalty) * (counts > 0)
    return logits


def cut(scaled: _Logits, sampling: Sampling) -> _Logits:
    """min-p, top-k, top-p."""
    if sampling.min_p > 0:
        scaled[scaled < scaled.max() + np.float32(np.log(sampling.min_p))] = -np.inf
    if sampling.top_k > 0:
        kth = np.sort(scaled)[::-1][min(sampling.top_k, len(scaled)) - 1]
        scaled[scaled < kth] = -np.inf
    if sampling.top_p < 1:
        order = np.argsort(scaled, kind="stable")
        weights = np.exp(scaled[order] - scaled.max())
        gone = np.cumsum(weights / weights.sum()) <= 1 - sampling.top_p
        gone[-1] = False
        scaled[order[gone]] = -np.inf
    return scaled
