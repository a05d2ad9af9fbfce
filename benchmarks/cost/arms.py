"""One vLLM engine and the arms on it: what a worker does to answer, and what replaying the answer can look like.

| arm | request |
|---|---|
| `plain` | generation without logprobs |
| `worker` | generation with the top-k logprobs of every token, as backends behind the proxy are asked |
| `dicts` | one prefill of prompt and answer with `prompt_logprobs` in vLLM's default form, an object per entry |
| `flat` | our reference's form `full`: its own top-k and the claimed ids of the output rows, as arrays |
| `ids` | our reference's form `ids`: the claimed ids of the output rows alone |
| `prefill` | the same prompt and no logprobs: the floor |

`flat` and `ids` go through `Reference.submit`, so what is timed is what occupies the reference in service. Nothing is
turned into text anywhere: a server's `worker` and `dicts` also decode every top-k token, which is more than the rest.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks.cost.claims import claim_arrays
from benchmarks.cost.plan import DICTS, FLAT, IDS, PLAIN, PREFILL, WORKER
from policies.errors import CountersignError
from policies.evidence import Evidence, Ids, Replay, ReplayForm, Sampling, Usage
from policies.settings import ReferenceSettings
from verifier_pool.reference.base import ReplayRequest

BACKEND = "bench"
MODEL = "bench"
PATIENCE = 900.0
"""Seconds after which an engine that gives no answer counts as broken."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a worker is asked, and what it answered where a replay needs that.

    `temperature` 0 is greedy; above, `seed` draws. `at_least` also asks for that many tokens by `min_tokens`, as LMCV
    does; the end token is ignored in any case.
    """

    name: str
    prompt_ids: Ids
    output_len: int
    temperature: float = 0.0
    seed: int | None = None
    at_least: bool = True
    answer: Evidence | None = None


@dataclass(frozen=True, slots=True)
class Timed:
    """How long a batch took, from the first submission to the last result, and each of its requests (seconds)."""

    seconds: float
    each: tuple[float, ...]
    results: tuple[Any, ...]


class Arms:
    """Starts our in-process reference and runs every arm on its one engine; a context manager.

    Raises:
        SettingsError: the engine does not start.
    """

    def __init__(self, settings: ReferenceSettings, *, top_k: int, runtime: str = "", precision: str = "") -> None:
        from verifier_pool.reference.vllm_engine import VllmEngine

        self._reference = VllmEngine(MODEL, settings)
        self._top_k = top_k
        self._runtime, self._precision = runtime, precision
        self._numbers = itertools.count()
        spelling = Path(str(settings.path)) / "tokenizer.json"
        self._tokenizer = Tokenizer.from_file(str(spelling)) if spelling.exists() else None
        self.name = self._reference.name
        self.scores_ids = self._reference.scores_ids

    def __enter__(self) -> Arms:
        return self

    def __exit__(self, *_: object) -> None:
        self._reference.close()

    @property
    def vocab_size(self) -> int:
        """Token ids below it exist."""
        return int(self._reference.llm.model_config.get_vocab_size())

    def run(self, arm: str, requests: Sequence[Request]) -> Timed:
        """All requests at once, with nothing else in flight.

        Raises:
            ReplayError, CountersignError: the engine refused one, or gave no answer.
        """
        submit = {FLAT: self._replay, IDS: self._replay}.get(arm, self._generate)
        ended: list[float] = [0.0] * len(requests)
        began: list[float] = [0.0] * len(requests)
        prepared = [self._prepare(arm, request) for request in requests]
        futures: list[Future[Any]] = []
        for place, one in enumerate(prepared):
            began[place] = time.perf_counter()
            future = submit(one)
            future.add_done_callback(_note(ended, place))
            futures.append(future)
        try:
            results = tuple(future.result(PATIENCE) for future in futures)
        except TimeoutError as error:
            raise CountersignError(f"no answer within {PATIENCE:.0f} s") from error
        _settle(ended)
        each = tuple(end - begin for begin, end in zip(began, ended, strict=True))
        return Timed(max(ended, default=0.0) - min(began, default=0.0), each, results)

    def evidence(self, request: Request, result: Any) -> Evidence:
        """What the proxy would keep of a `worker` result."""
        answer = result.outputs[0]
        output_ids = np.asarray(answer.token_ids, np.int32)
        claim_ids, claim_logprobs = claim_arrays(answer.logprobs, output_ids, self._top_k)
        prompt, output = len(request.prompt_ids), len(output_ids)
        body = {
            "model": MODEL,
            "prompt": request.prompt_ids.tolist(),
            "max_tokens": request.output_len,
            "min_tokens": request.output_len if request.at_least else 0,
            "ignore_eos": True,
            "temperature": request.temperature,
            "seed": request.seed,
            "logprobs": self._top_k,
            "return_token_ids": True,
        }
        return Evidence(
            id=request.name,
            endpoint="completions",
            backend=BACKEND,
            model=MODEL,
            sampling=Sampling(
                temperature=request.temperature,
                seed=request.seed,
                max_tokens=request.output_len,
                min_tokens=request.output_len if request.at_least else 0,
                ignore_eos=True,
            ),
            runtime=self._runtime,
            precision=self._precision,
            request=json.dumps(body).encode(),
            prompt_ids=request.prompt_ids,
            output_ids=output_ids,
            claim_ids=claim_ids,
            claim_logprobs=claim_logprobs,
            text=self._tokenizer.decode(output_ids.tolist()) if self._tokenizer else "",
            finish_reason=answer.finish_reason,
            usage=Usage(prompt, output, prompt, output, prompt + output),
        )

    def _prepare(self, arm: str, request: Request) -> Any:
        """Made before the clock starts, as a worker holds its claim and a verifier its job."""
        if arm in (PLAIN, WORKER):
            return request.prompt_ids.tolist(), self._answering(request, self._top_k if arm == WORKER else None)
        if request.answer is None:
            raise CountersignError(f"{request.name} has no answer to replay")
        answer = request.answer
        if arm in (DICTS, PREFILL):
            ids = np.concatenate([answer.prompt_ids, answer.output_ids]).tolist()
            return ids, self._prefilling(self._top_k if arm == DICTS else None)
        form: ReplayForm = "full" if arm == FLAT else "ids"
        return ReplayRequest(
            answer.prompt_ids, answer.output_ids, "completions", b"", candidate_ids=answer.claim_ids, form=form
        )

    def _answering(self, request: Request, logprobs: int | None) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=request.temperature,
            seed=request.seed,
            max_tokens=request.output_len,
            min_tokens=request.output_len if request.at_least else 0,
            ignore_eos=True,
            logprobs=logprobs,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _prefilling(self, prompt_logprobs: int | None) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=prompt_logprobs,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _replay(self, request: ReplayRequest) -> Future[Replay]:
        return self._reference.submit(request)

    def _generate(self, prepared: tuple[list[int], Any]) -> Future[Any]:
        ids, sampling = prepared
        number = next(self._numbers)
        return asyncio.run_coroutine_threadsafe(
            _last(self._reference.llm, ids, sampling, f"bench-{number}"), self._reference.loop
        )


async def _last(llm: Any, ids: list[int], sampling: Any, name: str) -> Any:
    """The one result of a request that reports at its end only."""
    result = None
    async for latest in llm.generate({"type": "token", "prompt_token_ids": ids}, sampling, name):
        result = latest
    if result is None or not result.finished:
        raise CountersignError("the engine ended a request without a result")
    return result


def _note(ended: list[float], place: int) -> Callable[[Future[Any]], None]:
    def note(_: Future[Any]) -> None:
        ended[place] = time.perf_counter()

    return note


def _settle(ended: list[float]) -> None:
    """Wait for callbacks, which a future calls after it woke its waiter."""
    waiting = threading.Event()
    for _ in range(1000):
        if all(ended):
            return
        waiting.wait(0.001)
