"""A language model of 64 tokens in ten lines, so that references and honest answers need no engine."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from policies.errors import ReplayError
from policies.evidence import Evidence, Ids, Logprobs, Replay, Sampling, Usage
from policies.settings import Settings
from tests.support.bundles import asking
from verifier_pool.reference.base import Reference, ReplayRequest

VOCAB = 64
WIDTH = 21


def logprobs_after(token: int, salt: int = 0, kernels: int = 0) -> NDArray[np.float64]:
    """float64 (64,): the toy's next-token distribution depends on the last token alone.

    Another `salt` is another model; other `kernels` are the same model with a little drift.
    """
    logits = np.random.default_rng([token, salt]).normal(size=VOCAB) * 2
    if kernels:
        logits += np.random.default_rng([token, salt, kernels]).normal(size=VOCAB) * 0.02
    normalised: NDArray[np.float64] = logits - np.log(np.exp(logits).sum())
    return normalised


def rows(previous: Sequence[int], emitted: Ids, salt: int = 0, kernels: int = 0) -> tuple[Ids, Logprobs]:
    """The (G, 21) arrays of a claim or a replay."""
    ids = np.full((len(emitted), WIDTH), -1, np.int32)
    logprobs = np.full((len(emitted), WIDTH), -np.inf, np.float32)
    for row, (last, token) in enumerate(zip(previous, emitted, strict=True)):
        table = logprobs_after(int(last), salt, kernels)
        others = [other for other in np.argsort(-table)[:20] if other != token]
        ids[row, : len(others) + 1] = [token, *others]
        logprobs[row, : len(others) + 1] = table[ids[row, : len(others) + 1]]
    return ids, logprobs


def answer(
    prompt: Sequence[int] = (3, 5, 7), length: int = 12, salt: int = 0, kernels: int = 0, **changes: object
) -> Evidence:
    """Honest evidence of a greedy answer by the toy."""
    tokens = [*prompt]
    for _ in range(length):
        tokens.append(int(np.argmax(logprobs_after(tokens[-1], salt, kernels))))
    output = np.asarray(tokens[len(prompt) :], np.int32)
    ids, logprobs = rows(tokens[len(prompt) - 1 : -1], output, salt, kernels)
    evidence = Evidence(
        id=secrets.token_hex(16),
        endpoint="chat",
        backend="honest",
        model="toy",
        owner="0" * 64,
        sampling=Sampling(temperature=0.0, seed=1, max_tokens=length),
        runtime="vllm-0.32-v1-cpu",
        created=time.time(),
        prompt_ids=np.asarray(prompt, np.int32),
        output_ids=output,
        claim_ids=ids,
        claim_logprobs=logprobs,
        finish_reason="length",
        usage=Usage(len(prompt), length, len(prompt), length),
    )
    evidence = replace(evidence, **changes)  # type: ignore[arg-type]
    return evidence if "request" in changes else replace(evidence, request=asking(evidence))


class ToyReference(Reference):
    """Replays with the toy; `trouble` is called first and may raise. With `threads`, so many at once."""

    name = "toy 1"

    def __init__(self, trouble: Callable[[Sequence[ReplayRequest]], None] | None = None, *, threads: int = 0) -> None:
        self.trouble = trouble
        self.pool = ThreadPoolExecutor(threads) if threads else None
        self.batches: list[int] = []
        self.seen: list[ReplayRequest] = []
        self.closed = False

    def submit(self, request: ReplayRequest) -> Future[Replay]:
        if self.pool is not None:
            return self.pool.submit(lambda: self.replay([request])[0])
        future: Future[Replay] = Future()
        try:
            future.set_result(self.replay([request])[0])
        except Exception as error:
            future.set_exception(error)
        return future

    def replay(self, requests: Sequence[ReplayRequest]) -> list[Replay]:
        self.batches.append(len(requests))
        self.seen.extend(requests)
        if self.trouble is not None:
            self.trouble(requests)
        return [
            Replay(
                *rows([int(request.prompt_ids[-1]), *request.output_ids[:-1]], request.output_ids),
                "full",
                None,
                self.name,
            )
            for request in requests
        ]

    def close(self) -> None:
        self.closed = True


def failing(reason: str, times: int = 10**9) -> Callable[[Sequence[ReplayRequest]], None]:
    """A trouble that raises ReplayError the first `times` times."""
    left = [times]

    def trouble(_requests: Sequence[ReplayRequest]) -> None:
        if left[0] > 0:
            left[0] -= 1
            raise ReplayError(reason)

    return trouble


def settings(redis_url: str, **changes: object) -> Settings:
    """Settings of one toy model and one backend."""
    tree: dict[str, object] = {
        "redis_url": redis_url,
        "models": {"toy": {"vocab_size": VOCAB}},
        "backends": [{"name": "honest", "url": "http://127.0.0.1:1", "model": "toy"}],
    }
    return Settings.model_validate(tree | changes)
