"""vLLM inside this process as the reference: the CPU build on a laptop, a GPU in earnest.

vLLM is imported when the first engine starts. Its flat logprobs (no object per position) go straight to numpy.

On vLLM's V2 runner (GPUs) the claimed ids are scored by themselves, at about the cost of a bare prefill; form `full`
asks for the reference's twenty best in the same prefill. The V1 runner (CPUs) cannot score given ids: it is asked for
its 64 best instead, every answer has form `full`, and a claimed id that is none of the 64 is left out. Expert ids come
with a mixture-of-experts model where `engine: {enable_return_routed_experts: true}` is set, on the V2 runner alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from policies.errors import ReplayError, SettingsError
from policies.evidence import Ids, Replay, ReplayForm
from policies.settings import ReferenceSettings
from verifier_pool.reference.base import Reference, ReplayRequest
from verifier_pool.reference.engine_rendering import render
from verifier_pool.reference.experts import output_part
from verifier_pool.reference.rows import TOP_K, Entries
from verifier_pool.reference.scoring import MAX_CANDIDATES, candidates, full_form, ids_form, look_up

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
    "max_logprobs": MAX_CANDIDATES,
}


FORMS: tuple[ReplayForm, ...] = ("full", "ids")


class VllmEngine(Reference):
    """The reference on the folder `settings.path`. Starting takes seconds (135M, CPU) to minutes (8B, GPU)."""

    def __init__(self, model_name: str, settings: ReferenceSettings) -> None:
        if not settings.path or not os.path.isdir(settings.path):
            raise SettingsError(f"models.{model_name}.reference.path", f"a model folder, not {settings.path!r}")
        self._key = f"models.{model_name}.reference"
        self._settings = settings
        self._engine: Any = None
        self._pool = ThreadPoolExecutor(1)
        self.scores_ids = False
        """Whether vLLM runs its V2 runner here, which scores given ids."""
        self._start()
        self._self_test()

    def submit(self, request: ReplayRequest) -> Future[Replay]:
        """Queue one replay."""
        return self._pool.submit(lambda: self.replay([request])[0])

    def replay(self, requests: Sequence[ReplayRequest]) -> list[Replay]:
        """Replay all in one engine batch.

        Raises:
            ReplayError: `too_long`, `bad_ids` and `bad_request` are final; `engine_failed` may pass, the
                engine is started anew for the next call when it died.
        """
        if self._engine is None:
            self._restart()
        rendered = [render(self._engine, self.name, request) for request in requests]
        replays = self._prefill(requests)
        return [replace(replay, prompt_ids=ids) for replay, ids in zip(replays, rendered, strict=True)]

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
        try:
            arguments = engine_arguments(self._settings.engine)
            self._engine = vllm.LLM(model=str(self._settings.path), **arguments)
        except (TypeError, ValueError, OSError, RuntimeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise SettingsError(f"{self._key}.engine", f"an engine that starts ({reason})") from error
        config = self._engine.model_config
        self._max_model_len = int(config.max_model_len)
        self.max_tokens = self._max_model_len - 1
        self._vocab_size = int(config.get_vocab_size())
        self.scores_ids = bool(getattr(self._engine.llm_engine.vllm_config, "use_v2_model_runner", False))
        self._experts = bool(arguments.get("enable_return_routed_experts"))
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
        ids = ids[: min(16, self._max_model_len - 1)]
        half = len(ids) // 2
        request = ReplayRequest(ids[:half], ids[half:], "completions", b"", candidate_ids=ids[half:, None])
        first, second = (self._prefill([replace(request, form=form)])[0] for form in FORMS)
        gap = float(np.max(np.abs(first.logprobs[:, 0] - second.logprobs[:, 0])))
        if not np.isfinite(first.logprobs[:, 0]).all() or not gap < 1e-3:
            self.close()
            raise SettingsError(f"{self._key}.path", "an engine that computes the same finite logprobs twice")

    def _sequence(self, request: ReplayRequest) -> list[int]:
        if not len(request.prompt_ids) or not len(request.output_ids):
            raise ReplayError("nothing_to_replay", "prompt or output ids are missing")
        sequence = np.concatenate([request.prompt_ids, request.output_ids])
        if len(sequence) + 1 > self._max_model_len:
            raise ReplayError("too_long", f"{len(sequence)} tokens and one more, of {self._max_model_len}")
        # An id outside the embedding kills the engine, not the request.
        if sequence.min(initial=0) < 0 or sequence.max(initial=0) >= self._vocab_size:
            raise ReplayError("bad_ids", "a token id is outside the vocabulary")
        ids: list[int] = sequence.tolist()
        return ids

    def _prefill(self, requests: Sequence[ReplayRequest]) -> list[Replay]:
        from vllm.v1.engine.exceptions import EngineDeadError

        prompts = [{"prompt_token_ids": self._sequence(request)} for request in requests]
        wanted = [candidates(request.output_ids, request.candidate_ids, self._vocab_size) for request in requests]
        sampling = [self._sampling(request, ids) for request, ids in zip(requests, wanted, strict=True)]
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
        if len(results) != len(requests):
            raise ReplayError("bad_replay", "the engine left out a sequence")
        return [self._read(*each) for each in zip(results, requests, wanted, strict=True)]

    def _sampling(self, request: ReplayRequest, ids: Ids) -> Any:
        from vllm import SamplingParams

        arguments: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "flat_logprobs": True, "detokenize": False}
        if not self.scores_ids:
            deeper = request.candidate_ids is not None
            return SamplingParams(prompt_logprobs=MAX_CANDIDATES if deeper else TOP_K, **arguments)
        if request.form == "full":
            arguments["prompt_logprobs"] = TOP_K
        if self._experts and request.experts:
            arguments["routed_experts_prompt_start"] = len(request.prompt_ids)
        # A row scores the token after it: the first output token is the last prompt token's prediction.
        start = len(request.prompt_ids) - 1
        return SamplingParams(prompt_logprob_token_ids=ids, prompt_logprob_start=start, **arguments)

    def _read(self, result: Any, request: ReplayRequest, ids: Ids) -> Replay:
        """The replay that one engine output holds."""
        experts = None
        if self._experts and request.experts:
            captured = result.outputs[0].routed_experts if result.outputs else None
            experts = output_part(captured, len(request.prompt_ids), len(request.output_ids))
        if not self.scores_ids:
            entries = flat_entries(result.prompt_logprobs, len(request.output_ids))
            rows = full_form(request.output_ids, entries, look_up(entries, ids))
            return Replay(rows[0], rows[1], "full", None, self.name, rows[2], experts)
        scores = result.prompt_token_id_logprobs
        if scores is None:
            raise ReplayError("bad_replay", "the engine scored no given ids")
        scored = ids_form(request.output_ids, ids, np.asarray(scores, np.float32))
        if request.form == "ids":
            return Replay(*scored, "ids", None, self.name, None, experts)
        entries = flat_entries(result.prompt_logprobs, len(request.output_ids))
        rows = full_form(request.output_ids, entries, scored)
        return Replay(rows[0], rows[1], "full", None, self.name, rows[2], experts)

    def _drop(self) -> None:
        try:
            self.close()
        except Exception:
            logger.exception("the reference engine did not stop cleanly")


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


def engine_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of the engine: ours, the operator's over them, and what replays cannot do without."""
    arguments = ENGINE_DEFAULTS | dict(given)
    most = int(arguments["max_logprobs"])
    arguments["max_logprobs"] = most if most == -1 else max(most, MAX_CANDIDATES)
    if arguments.get("enable_return_routed_experts") and "enable_prefix_caching" not in given:
        # vLLM keeps captured expert ids by the hash of their cache block; replays still read nothing from the cache.
        arguments["enable_prefix_caching"] = True
    return arguments


def flat_entries(flat: Any, output: int) -> Entries:
    """Entries of the last `output` rows of vLLM's FlatLogprobs over a whole sequence (whose first row is empty)."""
    if flat is None or len(flat) < output + 1:
        raise ReplayError("bad_replay", "the engine left out rows of prompt logprobs")
    starts = np.asarray(flat.start_indices[-output:])
    counts = np.asarray(flat.end_indices[-output:]) - starts
    span = slice(int(starts[0]), int(starts[-1] + counts[-1]))
    return Entries(
        np.repeat(np.arange(output), counts),
        np.asarray(flat.token_ids[span], np.int64),
        np.asarray(flat.logprobs[span], np.float64),
        np.asarray(flat.ranks[span], np.int64),
    )
