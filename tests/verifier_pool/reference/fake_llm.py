"""An asynchronous vLLM engine that answers as vLLM's V2 runner does, about the toy model. The runner needs a GPU; what
checks the requests and reads the messages from the engine's process is vLLM's own code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from tests.verifier_pool.toy import VOCAB, logprobs_after
from verifier_pool.reference.engine_start import engine_arguments


class FakeLlm:
    """What `engine_start.build` gives on the V2 runner.

    `spoil` changes a finished result, `drift` what a sequence's logprobs are, `hold` keeps requests waiting.
    """

    made: ClassVar[list[FakeLlm]] = []

    def __init__(self, path: str, given: Mapping[str, Any], max_model_len: int = 200) -> None:
        from vllm.v1.engine.output_processor import OutputProcessor

        FakeLlm.made.append(self)
        self.arguments = engine_arguments(given)
        self.asked: list[Any] = []
        self.sequences: list[list[int]] = []
        self.aborted = 0
        self.spoil: Callable[[Any], Any] = lambda result: result
        self.drift: Callable[[list[int]], float] = lambda ids: 0.0
        self.hold = asyncio.Event()
        self.hold.set()
        self.model_config = SimpleNamespace(
            max_model_len=max_model_len,
            dtype="torch.bfloat16",
            get_vocab_size=lambda: VOCAB,
            max_logprobs=self.arguments["max_logprobs"],
        )
        scheduler = SimpleNamespace(max_num_batched_tokens=int(given.get("max_num_batched_tokens", 8192)))
        self.vllm_config = SimpleNamespace(use_v2_model_runner=True, scheduler_config=scheduler)
        resources = SimpleNamespace(engine_dead=False, engine_manager=None, output_socket=None, input_socket=None)
        self.engine_core = SimpleNamespace(resources=resources, ctx=None)
        self.output_processor = OutputProcessor(None, log_stats=False)
        self.stopped = False

    @property
    def errored(self) -> bool:
        return bool(self.engine_core.resources.engine_dead)

    def shutdown(self, timeout: float) -> None:
        self.stopped = True

    async def generate(self, prompt: Any, sampling: Any, request_id: str) -> AsyncIterator[Any]:
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.output_processor import RequestOutputCollector

        sampling._validate_logprobs(self.model_config)
        ids = prompt["prompt_token_ids"]
        self.asked.append(sampling)
        self.sequences.append(ids)
        queue = RequestOutputCollector(sampling.output_kind, request_id)
        request = EngineCoreRequest(
            request_id, ids, None, sampling, None, 0.0, None, None, None, external_req_id=request_id
        )
        self.output_processor.add_request(request, None, None, 0, queue)
        try:
            await self.hold.wait()
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.aborted += 1
            self.output_processor.abort_requests([request_id], internal=True)
            raise
        self.output_processor.process_outputs([self.message(request_id, ids, sampling)])
        yield self.spoil(await queue.get())

    def message(self, name: str, ids: list[int], sampling: Any) -> Any:
        """What comes from the engine's process."""
        import torch
        from vllm.v1.engine import EngineCoreOutput, FinishReason
        from vllm.v1.outputs import LogprobsLists, LogprobsTensors

        output = EngineCoreOutput(name, [1], finish_reason=FinishReason.LENGTH)
        off = self.drift(ids)
        if sampling.logprobs is not None:
            tokens = list(ids)
            for _ in range(sampling.max_tokens):
                tokens.append(int(np.argmax(logprobs_after(tokens[-1]))))
            output.new_token_ids = tokens[len(ids) :]
            output.new_logprobs = LogprobsLists(*listed(tokens[len(ids) - 1 :], sampling.logprobs))
            return output
        if sampling.prompt_logprobs is not None:
            told = listed(ids, sampling.prompt_logprobs)
            told[1][:] += np.float32(off)
            output.new_prompt_logprobs_tensors = LogprobsTensors(*(torch.from_numpy(each) for each in told))
        wanted = sampling.prompt_logprob_token_ids
        if wanted is not None:
            assert sampling.skip_reading_prefix_cache
            start = sampling.prompt_logprob_start
            assert len(wanted) == len(ids) - 1 - start
            tables = np.array([logprobs_after(last) for last in ids[start:-1]])
            scores = np.where(wanted < 0, -np.inf, np.take_along_axis(tables, np.maximum(wanted, 0), axis=1)) + off
            output.prompt_token_id_logprobs = torch.from_numpy(scores.astype(np.float32))
            rows = len(ids) - sampling.routed_experts_prompt_start
            output.routed_experts = np.arange(rows * 4).reshape(rows, 2, 2).astype(np.uint8)
        return output


def listed(ids: list[int], top: int) -> tuple[Any, Any, Any]:
    """Ids and logprobs (rows, 1 + top) and the tokens' ranks: what the runner says of every token but the first."""
    tables = np.array([logprobs_after(last) for last in ids[:-1]])
    order = np.argsort(-tables, axis=1)
    tokens = np.asarray(ids[1:])[:, None]
    best = np.concatenate([tokens, order[:, :top]], axis=1)
    ranks = np.argmax(order == tokens, axis=1) + 1
    return best, np.take_along_axis(tables, best, axis=1).astype(np.float32), ranks
