"""vLLM inside this process as the reference: the CPU build on a laptop, a GPU in earnest.

vLLM is imported when the first engine starts. Its asynchronous engine runs on a loop in one thread here, its EngineCore
in a process of its own; every submitted replay joins the running batch. Nothing on the way back is an object per token.

On vLLM's V2 runner (GPUs) the claimed ids are scored by themselves and at output rows only, at about the cost of a bare
prefill; form `full` asks for the reference's twenty best in the same prefill. The V1 runner (CPUs) cannot score given
ids: it is asked for its 64 best instead, every answer has form `full`, and a claimed id that is none of the 64 is left
out. Expert ids come with a mixture-of-experts model where `engine: {enable_return_routed_experts: true}` is set, on the
V2 runner alone.

`engine_start` says how its memory is bounded, `selftest` what it must get right before it takes work.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import orjson

from policies.errors import ReplayError, SettingsError
from policies.evidence import Ids, Replay
from policies.settings import ReferenceSettings
from verifier_pool.reference import engine_reading as reading
from verifier_pool.reference import engine_start, selftest
from verifier_pool.reference.base import Reference, ReplayRequest
from verifier_pool.reference.canary import Canary, Known, draw
from verifier_pool.reference.engine_loop import LoopThread
from verifier_pool.reference.engine_process import EngineProcess

logger = logging.getLogger(__name__)

READERS = 2
"""Threads that build requests and read results; one more renders prompts, for tokenizers are not thread-safe."""

START_TRIES = 3
START_PAUSE = 3.0
"""A killed engine's memory may take a moment to come back."""

CLOSE_SECONDS = 30.0

START_PATIENCE = 600.0
"""Seconds of silence that the self-test allows: kernels compile on their first use."""

NOTHING: Ids = np.zeros(0, np.int32)

TEXT = "The three primary colours are red, yellow and blue. A painter mixes them to"
"""What the known answer goes on with."""


class VllmEngine(Reference):
    """The reference on the folder `settings.path`. Starting takes seconds (135M, CPU) to minutes (8B, GPU).

    An engine from which nothing comes back for `settings.timeout` seconds while it holds replays is killed.

    Attributes:
        scores_ids: whether vLLM runs its V2 runner here, which scores given ids.
        llm, loop: vLLM's `AsyncLLM` and the loop it runs on, for what is no replay (benchmarks).
    """

    canary: Canary

    def __init__(self, model_name: str, settings: ReferenceSettings) -> None:
        """
        Raises:
            SettingsError: no such folder, no vLLM, an engine that does not start or fails its self-test.
        """
        if not settings.path or not os.path.isdir(settings.path):
            raise SettingsError(f"models.{model_name}.reference.path", f"a model folder, not {settings.path!r}")
        key = f"models.{model_name}.reference"
        _import_vllm(key)
        self._settings = settings
        self._known: list[Known] = []
        self._engine: EngineProcess | None = None
        self._starting: asyncio.Task[EngineProcess] | None = None
        self._closing = False
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix=f"read-{model_name}")
        self._renderer = ThreadPoolExecutor(1, thread_name_prefix=f"render-{model_name}")
        self._thread = LoopThread(f"reference-{model_name}")
        self.loop = self._thread.loop
        try:
            engine = self._thread.run(self._start_first())
        except BaseException as error:
            self.close()
            told = _settings_error(key, error)
            if told is None:
                raise
            raise told from error
        self.name, self.max_tokens = engine.name, engine.ability.max_tokens
        self.scores_ids = engine.ability.scores_ids
        self.canary = Canary(settings.canary_seconds)
        self.canary.learn(self._known)

    @property
    def llm(self) -> Any:
        """The running `AsyncLLM`. Raises ReplayError `engine_failed` while none runs."""
        if self._engine is None or self._engine.dead:
            raise ReplayError("engine_failed", "no engine runs")
        return self._engine.llm

    def submit(self, request: ReplayRequest) -> Future[Replay]:
        """See `Reference.submit`. A dead engine is started anew, once for all who wait."""
        return self._thread.submit(self._replay(request))

    def prefill(self, request: ReplayRequest) -> Future[None]:
        """The same sequence without logprobs: what no replay can be cheaper than. For benchmarks."""
        return self._thread.submit(self._prefill(request))

    def restart(self) -> None:
        """See `Reference.restart`."""
        self._thread.run(self._restart())

    def close(self) -> None:
        """Stop the engine's process and free its memory. Safe to call twice.

        An engine that is just loading is not waited for: it ends with this process, or when it is loaded.
        """
        patience = CLOSE_SECONDS
        try:
            self._thread.submit(self._end()).exception(patience)
        except TimeoutError:
            patience = 1.0
        finally:
            self._thread.close(patience)
            self._readers.shutdown(cancel_futures=True)
            self._renderer.shutdown(cancel_futures=True)

    async def _replay(self, request: ReplayRequest) -> Replay:
        try:
            # Who was not in the engine yet when it died goes on with the next one.
            while (replay := await self._try(await self._running(), request)) is None:
                pass
            return replay
        except asyncio.CancelledError:
            if self._closing:
                raise ReplayError("engine_failed", "the reference was closed") from None
            raise

    async def _try(self, engine: EngineProcess, request: ReplayRequest) -> Replay | None:
        """The replay, or None where the engine died before it held this one."""
        rendering = self.loop.run_in_executor(self._renderer, engine.prompts.of, request)
        rendering.add_done_callback(_noticed)
        try:
            replay = await self._ask(engine, request)
            return None if replay is None else replace(replay, prompt_ids=await rendering)
        finally:
            rendering.cancel()

    async def _ask(self, engine: EngineProcess, request: ReplayRequest) -> Replay | None:
        asked = await self.loop.run_in_executor(self._readers, reading.ask, request, engine.ability)
        # Without given ids both forms are asked for alike.
        form = request.form if engine.ability.scores_ids else "full"
        async with engine.gate.through(form, request.tokens):
            if engine.dead:
                return None
            result = await engine.ask(asked.sequence, asked.sampling)
        replay = await self.loop.run_in_executor(self._readers, reading.read, result, asked, engine.ability)
        return replace(replay, reference=engine.name)

    async def _prefill(self, request: ReplayRequest) -> None:
        engine = await self._running()
        asked = await self.loop.run_in_executor(self._readers, reading.ask, request, engine.ability)
        async with engine.gate.through("ids", request.tokens):
            await engine.ask(asked.sequence, reading.bare_prefill())

    async def _running(self) -> EngineProcess:
        """The engine, started if none runs. A start that fails fails for all who wait, and the next call tries anew."""
        if self._engine is not None and not self._engine.dead:
            return self._engine
        if self._closing:
            raise ReplayError("engine_failed", "the reference was closed")
        if self._starting is None or self._starting.done():
            self._starting = self.loop.create_task(self._start_again())
            self._starting.add_done_callback(_noticed)
        return await asyncio.shield(self._starting)

    async def _start_first(self) -> EngineProcess:
        try:
            return await self._start()
        except RuntimeError as error:
            # The engine's process gave up, perhaps because the memory of a killed predecessor is not free yet.
            logger.warning("the reference engine does not start (%s); once more", type(error).__name__)
            await asyncio.sleep(START_PAUSE)
            return await self._start()

    async def _start_again(self) -> EngineProcess:
        await self._stop()
        for left in reversed(range(START_TRIES)):
            try:
                return await self._start()
            except selftest.SelfTestFailed as error:
                raise ReplayError("self_test", str(error)) from error
            except Exception as error:
                logger.exception("the reference engine does not start")
                if not left:
                    raise ReplayError("engine_failed", f"restart: {type(error).__name__}") from error
                await asyncio.sleep(START_PAUSE)
        raise AssertionError("unreachable")

    async def _start(self) -> EngineProcess:
        """Start an engine on this loop, which waits meanwhile, and test it before anybody else sees it."""
        settings = self._settings
        engine = EngineProcess(str(settings.path), settings.engine, max(settings.timeout, START_PATIENCE))
        try:
            await self._examine(engine)
        except BaseException:
            await _stopped(engine)
            raise
        engine.patience = settings.timeout
        self.life += 1
        self._engine = engine
        return engine

    async def _examine(self, engine: EngineProcess) -> None:
        async def ask(requests: Sequence[ReplayRequest]) -> list[Replay]:
            replays = await asyncio.gather(*(self._ask(engine, request) for request in requests))
            return [_some(replay) for replay in replays]

        text = ReplayRequest(NOTHING, NOTHING, "completions", orjson.dumps({"prompt": TEXT}))
        prompt_ids = await self.loop.run_in_executor(self._renderer, engine.prompts.of, text)
        limits = engine.ability
        vocabulary = selftest.middle(limits.vocab_size)

        async def answer(length: int) -> Known:
            room = limits.max_tokens - length
            asked = draw(vocabulary, min(room, 32), 1) if prompt_ids is None else prompt_ids
            result = await engine.ask(asked[:room].tolist(), reading.greedy_answer(length))
            return reading.read_answer(result, asked[:room])

        known = await selftest.examine(ask, answer, max_tokens=limits.max_tokens, vocabulary=vocabulary)
        if self._known:
            await selftest.recheck(ask, self._known)
        else:
            self._known = known

    async def _restart(self) -> None:
        if self._engine is not None:
            self._engine.die("the reference is restarted")
        await self._running()

    async def _end(self) -> None:
        self._closing = True
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.wait([self._starting])
        await self._stop()

    async def _stop(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await _stopped(engine)


async def _stopped(engine: EngineProcess) -> None:
    try:
        await engine.stop()
    except Exception:
        logger.exception("the reference engine did not stop cleanly")


def _noticed(future: asyncio.Future[Any]) -> None:
    """Have asyncio know that this failure was seen, whether or not anybody still waits for it."""
    if not future.cancelled():
        future.exception()


def _some(replay: Replay | None) -> Replay:
    if replay is None:
        raise ReplayError("engine_failed", "the engine died")
    return replay


def _import_vllm(key: str) -> None:
    engine_start.prepare_environment()
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise SettingsError(
            f"{key}.kind", "vllm_engine needs vLLM: install this project with its extra `vllm`"
        ) from error


def _settings_error(key: str, error: BaseException) -> SettingsError | None:
    """How the operator is told why the engine cannot take work; None for what is no matter of settings."""
    if isinstance(error, selftest.SelfTestFailed):
        return SettingsError(f"{key}.engine", f"an engine that passes its self-test ({error})")
    if isinstance(error, Exception):
        # vLLM has many ways of saying no to its arguments.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return SettingsError(f"{key}.engine", f"an engine that starts ({reason})")
    return None
