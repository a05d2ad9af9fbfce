"""One running vLLM engine as a reference sees it: asked for one sequence at a time, and known to be dead when it is."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from policies.errors import ReplayError
from verifier_pool.reference import engine_start
from verifier_pool.reference.engine_reading import Ability, keep_arrays
from verifier_pool.reference.engine_rendering import Prompts
from verifier_pool.reference.gate import Gate

logger = logging.getLogger(__name__)

WINDOW_STEPS = 3
TURN_STEPS = 4
"""Engine steps whose tokens wait inside the engine, and that one form runs before the other's turn."""

WATCH_SECONDS = 0.25
SHUTDOWN_SECONDS = 10.0
"""What the engine's process gets to end by itself before it is killed."""


class EngineProcess:
    """vLLM's `AsyncLLM` (`llm`) and the process its EngineCore is. Made and used on one loop.

    vLLM 0.32 notices a killed EngineCore but may leave some of those who wait for it as they are, so every call
    here is ended by `die` when the process is gone, or when nothing came back for `patience` seconds.
    """

    def __init__(self, path: str, given: Mapping[str, Any], patience: float) -> None:
        """Blocks while the weights load.

        Raises:
            TypeError, ValueError, OSError, RuntimeError: whatever vLLM has against its arguments or the folder.
        """
        self.llm = engine_start.build(path, given)
        self.dead = ""
        """Why it takes no more work; empty while it does."""
        keep_arrays(self.llm)
        config = self.llm.vllm_config
        model = self.llm.model_config
        self.ability = Ability(
            scores_ids=bool(getattr(config, "use_v2_model_runner", False)),
            experts=bool(given.get("enable_return_routed_experts")),
            max_tokens=int(model.max_model_len) - 1,
            vocab_size=int(model.get_vocab_size()),
        )
        step = int(config.scheduler_config.max_num_batched_tokens)
        self.gate = Gate(WINDOW_STEPS * step, TURN_STEPS * step)
        self.prompts = Prompts(self.llm, given.get("chat_template"))
        self.name = _name(path, model)
        self.patience = patience
        self._callers: set[asyncio.Task[Any]] = set()
        self._numbers = itertools.count()
        self._silent = 0.0
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    async def ask(self, sequence: list[int], sampling: Any) -> Any:
        """vLLM's one output for a sequence. Cancelling the caller aborts it there.

        Raises:
            ReplayError: `engine_failed` when the engine died meanwhile, `refused` when it does not take the request.
        """
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        prompt = {"type": "token", "prompt_token_ids": sequence}
        result: Any = None
        async with self._calling():
            try:
                stream = self.llm.generate(prompt, sampling, f"replay-{next(self._numbers)}")
                async with contextlib.aclosing(stream):
                    async for output in stream:
                        result = output
            except EngineDeadError as error:
                self.die("the engine died")
                raise ReplayError("engine_failed", "the engine died") from error
            except EngineGenerateError as error:
                raise ReplayError("engine_failed", f"{type(error.__cause__).__name__}") from error
            except (VLLMClientError, ValueError) as error:
                raise ReplayError("refused", f"{type(error).__name__}") from error
        self._silent = 0.0
        if result is None or not result.finished:
            raise ReplayError("bad_replay", "the engine ended a sequence without a result")
        return result

    @asynccontextmanager
    async def _calling(self) -> AsyncIterator[None]:
        if self.dead:
            raise ReplayError("engine_failed", self.dead)
        task = asyncio.current_task()
        assert task is not None
        if not self._callers:
            self._silent = 0.0
        self._callers.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self.dead:
                raise ReplayError("engine_failed", self.dead) from None
            raise
        finally:
            self._callers.discard(task)

    def die(self, why: str) -> None:
        """Take no more work and fail what is in flight."""
        if self.dead:
            return
        self.dead = why
        resources = getattr(self.llm.engine_core, "resources", None)
        if resources is not None:
            # Nobody shall try to abort anything in a dead engine.
            resources.engine_dead = True
        for task in self._callers:
            task.cancel()

    async def stop(self) -> None:
        """End the process and free its memory."""
        self.die("the reference was closed")
        self._watcher.cancel()
        core, handler = self.llm.engine_core, getattr(self.llm, "output_handler", None)
        if handler is not None:
            # It would log the end it was told to make as a failure.
            handler.cancel()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, lambda: self.llm.shutdown(timeout=SHUTDOWN_SECONDS))
        await asyncio.sleep(0.05)
        # vLLM leaves its sockets' context open; it may only be closed once none of them is.
        context = getattr(core, "ctx", None)
        sockets = [getattr(core.resources, name, None) for name in ("output_socket", "input_socket")]
        if context is not None and all(socket is None or socket.closed for socket in sockets):
            await loop.run_in_executor(None, context.term)

    async def _watch(self) -> None:
        last = time.monotonic()
        while not self.dead:
            await asyncio.sleep(WATCH_SECONDS)
            now = time.monotonic()
            # A machine that slept is no engine that hangs: only what this loop lived through counts.
            self._silent = self._silent + min(now - last, 2 * WATCH_SECONDS) if self._callers else 0.0
            last = now
            if self.llm.errored or self._gone():
                self.die("the engine died")
            elif self._silent > self.patience:
                self.die(f"the engine was silent for {self.patience:.0f} s")
                for process in self._processes():
                    process.kill()
        logger.error("the reference engine is down: %s", self.dead)

    def _processes(self) -> list[Any]:
        manager = getattr(getattr(self.llm.engine_core, "resources", None), "engine_manager", None)
        return list(getattr(manager, "processes", ()))

    def _gone(self) -> bool:
        return any(process.exitcode is not None for process in self._processes())


def _name(path: str, model: Any) -> str:
    import vllm

    device = vllm.platforms.current_platform.device_name
    dtype = str(model.dtype).removeprefix("torch.")
    return f"vllm_engine vllm-{vllm.__version__} {os.path.basename(os.path.normpath(path))} {dtype} {device}"
