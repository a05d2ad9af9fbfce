"""vLLM inside this process as the reference: the CPU build on a laptop, a GPU in earnest.

vLLM is imported when the first engine starts. Its flat logprobs (no object per position) go straight to numpy;
the prompt is rendered by vLLM's own renderer with this model folder's tokenizer and chat template.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from policies.errors import ReplayError, SettingsError
from policies.evidence import Ids, Replay
from policies.settings import ReferenceSettings
from verifier_pool.reference.base import ReplayRequest
from verifier_pool.reference.rendering import prompt_fields, prompt_index
from verifier_pool.reference.rows import TOP_K, replay_rows

logger = logging.getLogger(__name__)

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
"""Set before vLLM is imported, unless the operator set them: no downloads, no telemetry, 1 GiB of KV cache."""

SHUTDOWN_SECONDS = 10.0
"""What the engine's process gets to end by itself before it is killed."""

ENGINE_DEFAULTS: dict[str, Any] = {
    # A replay never reads the prefix cache (vLLM skips it for prompt logprobs), so do not fill it either.
    "enable_prefix_caching": False,
    "disable_log_stats": True,
}


class VllmEngine:
    """The reference on the folder `settings.path`. Starting takes seconds (135M, CPU) to minutes (8B, GPU)."""

    def __init__(self, model_name: str, settings: ReferenceSettings) -> None:
        if not settings.path or not os.path.isdir(settings.path):
            raise SettingsError(f"models.{model_name}.reference.path", f"a model folder, not {settings.path!r}")
        self._key = f"models.{model_name}.reference"
        self._settings = settings
        self._engine: Any = None
        self.name = ""
        self._start()
        self._self_test()

    def replay(self, requests: Sequence[ReplayRequest]) -> list[Replay]:
        """Replay all in one engine batch.

        Raises:
            ReplayError: `too_long`, `bad_ids` and `bad_request` are final; `engine_failed` may pass, the
                engine is started anew for the next call when it died.
        """
        if self._engine is None:
            self._restart()
        rendered = [self._render(request) for request in requests]
        sequences = [self._sequence(request) for request in requests]
        rows = self._prefill(sequences, [request.output_ids for request in requests])
        return [
            Replay(ids, logprobs, "full", prompt_ids, self.name)
            for (ids, logprobs), prompt_ids in zip(rows, rendered, strict=True)
        ]

    def close(self) -> None:
        """Stop the engine's process and free its memory. Safe to call twice."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        core = engine.llm_engine.engine_core
        core.shutdown(timeout=SHUTDOWN_SECONDS)
        # vLLM leaves its sockets' context open; it may only be closed once the reading thread let go of its own.
        reader, sockets = getattr(core, "output_queue_thread", None), getattr(core, "ctx", None)
        if reader is not None and sockets is not None:
            reader.join(timeout=2)
            if not reader.is_alive():
                sockets.term()

    def _start(self) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            import vllm
        except ImportError as error:
            raise SettingsError(
                f"{self._key}.kind", "vllm_engine needs vLLM: install this project with its extra `vllm`"
            ) from error
        arguments = ENGINE_DEFAULTS | self._settings.engine
        try:
            self._engine = vllm.LLM(model=str(self._settings.path), **arguments)
        except (TypeError, ValueError, OSError, RuntimeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise SettingsError(f"{self._key}.engine", f"an engine that starts ({reason})") from error
        config = self._engine.model_config
        self._max_model_len = int(config.max_model_len)
        self._vocab_size = int(config.get_vocab_size())
        device = vllm.platforms.current_platform.device_name
        dtype = str(config.dtype).removeprefix("torch.")
        model = os.path.basename(os.path.normpath(str(self._settings.path)))
        self.name = f"vllm_engine vllm-{vllm.__version__} {model} {dtype} {device}"

    def _restart(self) -> None:
        try:
            self._start()
        except Exception as error:
            raise ReplayError("engine_failed", f"restart: {type(error).__name__}") from error

    def _self_test(self) -> None:
        """Replay one fixed sequence twice: the engine must compute finite numbers, and the same ones."""
        ids = (np.arange(16, dtype=np.int32) * 37 + 1) % self._vocab_size
        length = min(16, self._max_model_len - 1)
        first, second = (self._prefill([ids[:length].tolist()], [ids[length // 2 : length]])[0] for _ in range(2))
        gap = float(np.max(np.abs(first[1][:, 0] - second[1][:, 0])))
        if not np.isfinite(first[1][:, 0]).all() or not gap < 1e-3:
            self.close()
            raise SettingsError(f"{self._key}.path", "an engine that computes the same finite logprobs twice")

    def _sequence(self, request: ReplayRequest) -> list[int]:
        sequence = np.concatenate([request.prompt_ids, request.output_ids])
        if len(sequence) + 1 > self._max_model_len:
            raise ReplayError("too_long", f"{len(sequence)} tokens and one more, of {self._max_model_len}")
        # An id outside the embedding kills the engine, not the request.
        if sequence.min(initial=0) < 0 or sequence.max(initial=0) >= self._vocab_size:
            raise ReplayError("bad_ids", "a token id is outside the vocabulary")
        ids: list[int] = sequence.tolist()
        return ids

    def _prefill(self, sequences: list[list[int]], outputs: Sequence[Ids]) -> list[tuple[Ids, Any]]:
        from vllm import SamplingParams
        from vllm.v1.engine.exceptions import EngineDeadError

        sampling = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=TOP_K, flat_logprobs=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": sequence} for sequence in sequences]
        try:
            with _death_watch(self._engine.llm_engine.engine_core, EngineDeadError):
                results = self._engine.generate(prompts, sampling, use_tqdm=False)
        except EngineDeadError as error:
            logger.error("the reference engine died; it starts again with the next replay")
            self._drop()
            raise ReplayError("engine_failed", "the engine died") from error
        except BaseException:
            # A job time-out lands here: what is left in the engine must not leak into the next batch.
            self._drop()
            raise
        if len(results) != len(sequences):
            raise ReplayError("bad_replay", "the engine left out a sequence")
        return [_arrange(result.prompt_logprobs, ids) for result, ids in zip(results, outputs, strict=True)]

    def _drop(self) -> None:
        try:
            self.close()
        except Exception:
            logger.exception("the reference engine did not stop cleanly")

    def _render(self, request: ReplayRequest) -> Ids | None:
        """This model's own rendering of the request, or None when this vLLM cannot render it."""
        if not request.request:
            return None
        body = prompt_fields(request.request, self.name)
        if body is None:
            return None
        try:
            if request.endpoint == "chat":
                return self._render_chat(body)
            return self._render_completion(body, prompt_index(request.request, request.choice))
        except Exception as error:
            # A request this vLLM refuses is no evidence against the backend, only one comparison less.
            logger.warning("the reference cannot render a %s request: %s", request.endpoint, type(error).__name__)
            return None

    def _render_chat(self, body: dict[str, Any]) -> Ids | None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        engine = self._engine
        tokenizer = engine.get_tokenizer()
        template = body.get("chat_template") or engine.chat_template or getattr(tokenizer, "chat_template", None)
        # Such a template prints today's date, which may not be the day the backend rendered.
        if engine.model_config.hf_config.model_type == "gpt_oss" or "strftime_now" in str(template):
            return None
        request = ChatCompletionRequest.model_validate(body)
        tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
        mistral = type(tokenizer).__name__ == "MistralTokenizer"
        chat = request.build_chat_params(engine.chat_template, "auto").with_defaults(
            {"tools": tools, "tokenize": mistral}
        )
        _, prompts = engine.renderer.render_chat(
            [request.messages], chat, request.build_tok_params(engine.model_config)
        )
        return np.asarray(prompts[0]["prompt_token_ids"], np.int32)

    def _render_completion(self, body: dict[str, Any], index: int) -> Ids | None:
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
        from vllm.renderers.inputs.preprocess import parse_model_prompt, prompt_to_seq

        request = CompletionRequest.model_validate(body)
        if request.prompt is None or request.prompt_embeds is not None or request.suffix is not None:
            return None
        prompts = prompt_to_seq(request.prompt)
        if index >= len(prompts):
            return None
        engine = self._engine
        parsed = parse_model_prompt(engine.model_config, prompts[index])
        rendered = engine.renderer.render_cmpl([parsed], request.build_tok_params(engine.model_config))
        return np.asarray(rendered[0]["prompt_token_ids"], np.int32)


@contextlib.contextmanager
def _death_watch(core: Any, error: type[Exception]) -> Iterator[None]:
    """Wake a caller that waits for a killed engine: vLLM 0.32 marks it dead but leaves the wait as it is."""
    resources, outputs = getattr(core, "resources", None), getattr(core, "outputs_queue", None)
    if resources is None or outputs is None:
        yield
        return
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            if resources.engine_dead:
                outputs.put_nowait(error())
                return

    watcher = threading.Thread(target=watch, name="engine-death-watch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()


def _arrange(flat: Any, output_ids: Ids) -> tuple[Ids, Any]:
    """Rows of the output tokens out of vLLM's FlatLogprobs over the whole sequence (the first row is empty)."""
    if flat is None or len(flat) < len(output_ids) + 1:
        raise ReplayError("bad_replay", "the engine left out rows of prompt logprobs")
    starts = np.asarray(flat.start_indices[-len(output_ids) :])
    counts = np.asarray(flat.end_indices[-len(output_ids) :]) - starts
    span = slice(int(starts[0]), int(starts[-1] + counts[-1]))
    row = np.repeat(np.arange(len(output_ids)), counts)
    ids = np.asarray(flat.token_ids[span], np.int64)
    logprobs = np.asarray(flat.logprobs[span], np.float64)
    return replay_rows(output_ids, row, ids, logprobs, np.asarray(flat.ranks[span], np.int64))
