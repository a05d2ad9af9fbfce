"""Selection on answers that are made up: no honest one is rejected, whatever its parameters, and no garbage passes."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from policies import noise, selection
from policies.checks import Result
from policies.evidence import MASKED, Evidence, Sampling
from tests.policies import recorded


def sampled(sampling: Sampling, runtime: str, vocabulary: int, tokens: int, rng: np.random.Generator) -> Evidence:
    """An answer drawn as vLLM draws it: T, min-p, top-k, top-p over fp32 logits, then Gumbel argmax."""
    logits = (rng.normal(size=(tokens, vocabulary)) * rng.uniform(0.5, 4)).astype(np.float32)
    # A bf16 head makes ties common.
    logits = (logits.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    raw = (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).astype(np.float32)
    scaled = logits / np.float32(sampling.temperature)
    if sampling.min_p > 0:
        scaled[scaled < scaled.max(axis=1, keepdims=True) + np.float32(np.log(sampling.min_p))] = -np.inf
    if sampling.top_k > 0:
        kth = np.sort(scaled, axis=1)[:, ::-1][:, min(sampling.top_k, vocabulary) - 1]
        scaled[scaled < kth[:, None]] = -np.inf
    if sampling.top_p < 1:
        order = np.argsort(scaled, axis=1, kind="stable")
        ascending = np.take_along_axis(scaled, order, axis=1)
        weights = np.exp(ascending - ascending[:, -1:])
        mass = np.cumsum(weights / weights.sum(axis=1, keepdims=True), axis=1)
        cut = mass <= 1 - sampling.top_p
        cut[:, -1] = False
        np.put_along_axis(scaled, order, np.where(cut, -np.inf, ascending), axis=1)
    every = np.broadcast_to(np.arange(vocabulary, dtype=np.int32), (tokens, vocabulary))
    assert sampling.seed is not None
    gumbel = noise.gumbel(runtime, sampling.seed, 10, every)
    assert gumbel is not None
    drawn = (scaled + gumbel.astype(np.float32)).argmax(axis=1)
    top = np.argsort(-raw, axis=1, kind="stable")[:, :20]
    ids = np.full((tokens, 21), -1, np.int32)
    logprobs = np.full((tokens, 21), -np.inf, np.float32)
    for row in range(tokens):
        # A chat answer loses the twentieth when the token is not among the twenty.
        others = [token for token in top[row] if token != drawn[row]][:19]
        listed = [drawn[row], *others]
        ids[row, : len(listed)] = listed
        logprobs[row, : len(listed)] = raw[row, listed]
    return recorded.evidence(np.arange(10), ids, logprobs, sampling=sampling, runtime=runtime)


@given(
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.0, 1.3, 2.0]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.9, 0.5, 0.1, 0.001]),
    top_k=st.sampled_from([0, -1, 1, 2, 5, 19, 20, 21, 40, 400]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.1, 0.5, 1.0]),
    runtime=st.sampled_from(sorted(noise.RUNTIMES)),
    seed=st.integers(-(2**63), 2**63 - 1).filter(lambda seed: seed != -1),
)
@example(temperature=2.0, top_p=0.5, top_k=21, min_p=0.0, runtime="vllm-0.32-v1-cpu", seed=-547)
@settings(max_examples=150)
def test_no_honest_answer_is_ever_rejected(
    temperature: float, top_p: float, top_k: int, min_p: float, runtime: str, seed: int
) -> None:
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
    answer = sampled(sampling, runtime, 300, 40, np.random.default_rng(seed & 0xFFFF))
    for vocab_size in (300, None):
        check = selection.check(answer, vocab_size=vocab_size)
        assert check.metrics["violations"] == 0, check
    # With the pool inside the claim's sight every token is decided but for ties at the cut.
    if 1 <= top_k <= 19:
        assert check.result is Result.PASS or int(check.metrics["skipped"] or 0) > 8


def test_masked_alternatives_are_no_candidates() -> None:
    ids = np.array([[5, 3, 8, 11]], np.int32)
    logprobs = np.array([[np.log(0.7), np.log(0.3), MASKED, MASKED]], np.float32)
    for top_p in (1.0, 0.99):
        sampling = Sampling(temperature=1.0, seed=3, grammar=True, top_p=top_p)
        answer = recorded.evidence(np.arange(3), ids, logprobs, sampling=sampling, runtime=recorded.GPU)
        gumbel = noise.gumbel(recorded.GPU, 3, 3, ids)
        assert gumbel is not None
        wins = logprobs[0, 0] + gumbel[0, 0] > logprobs[0, 1] + gumbel[0, 1]
        assert selection.check(answer).result is (Result.PASS if wins else Result.REJECT)


@given(
    claim=arrays.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=5).flatmap(
        lambda shape: st.tuples(
            arrays.arrays(np.int32, shape),
            arrays.arrays(np.float32, shape, elements=st.floats(width=32, allow_nan=True, allow_infinity=True)),
        )
    ),
    output=st.integers(0, 6).flatmap(lambda n: arrays.arrays(np.int32, n)),
    temperature=st.sampled_from([0.0, 1e-9, 0.7, 2.0]),
    sampling=st.sampled_from([{}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.2}, {"top_k": 2, "top_p": 0.9}]),
)
@settings(max_examples=100)
def test_garbage_never_crashes(
    claim: tuple[Any, Any], output: Any, temperature: float, sampling: dict[str, Any]
) -> None:
    answer = Evidence(
        id="",
        endpoint="chat",
        backend="",
        model="",
        runtime=recorded.CPU,
        sampling=Sampling(temperature=temperature, seed=1, **sampling),
        output_ids=output,
        claim_ids=claim[0],
        claim_logprobs=claim[1],
    )
    check = selection.check(answer)
    assert check.result in (Result.PASS, Result.REJECT, Result.INCONCLUSIVE)
