"""A vLLM server as the reference, asked over HTTP.

Each generation is one request of token ids; vLLM then skips its prefix cache, so a replay is one full prefill. A server
with `--enable-scale-out` on vLLM's V2 runner scores the claimed ids by themselves (`/inference/v1/generate`), in either
form. Any other one is asked for its best by `/v1/completions`, as many as its `--max-logprobs` allows up to 64; every
answer then has form `full`, and a claimed id that is not among them is left out. Which of them a server can do is
learned from what it refuses, once, and logged.

The prompt is rendered by the server's `/render` routes, which exist only with `--enable-scale-out`; without them
`Replay.prompt_ids` is None.

Requests run on a loop in one thread, at most `CONNECTIONS` at once; bodies of megabytes are made and read in others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from policies.errors import ReplayError
from policies.evidence import Replay
from policies.settings import ReferenceSettings
from verifier_pool.reference import http_asking as asking
from verifier_pool.reference import selftest, wire
from verifier_pool.reference.base import Reference, ReplayRequest
from verifier_pool.reference.canary import Canary, Known
from verifier_pool.reference.engine_loop import LoopThread
from verifier_pool.reference.http_client import REFUSED, Client, refusal
from verifier_pool.reference.http_rendering import Prompts

logger = logging.getLogger(__name__)

READERS = 2
UNKNOWN_LENGTH = 4096
"""Tokens that a server which does not say how long it reads is trusted with in its self-test."""


class VllmHttp(Reference):
    """The reference at `settings.url`. The server need not be up yet: it is asked for its name when it is.

    Its canaries' known answer is found out when the first one is due, by the same self-test that an engine in this
    process starts with. A server that fails it, or a canary, takes no work until it passes again.
    """

    canary: Canary

    def __init__(self, model_name: str, settings: ReferenceSettings) -> None:
        self.name = f"vllm_http {settings.served_model or model_name}"
        self.canary = Canary(settings.canary_seconds, self._begin_to_study)
        self._server = asking.Server(settings.served_model)
        self._getting_ready: asyncio.Task[None] | None = None
        self._studying: Future[None] | None = None
        self._known: list[Known] = []
        self._ready = self._doubted = self._closing = False
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix=f"read-{model_name}")
        self._client = Client(settings, self._readers)
        self._prompts = Prompts(self._client, self._server)
        self._thread = LoopThread(f"reference-{model_name}")

    def submit(self, request: ReplayRequest) -> Future[Replay]:
        """See `Reference.submit`.

        The future's ReplayError: `too_long` and `refused` are final; `unreachable`, `timeout`, `http_5xx`,
        `overloaded`, `bad_replay`, `not_finite`, `wrong_model` and `self_test` may pass.
        """
        return self._thread.submit(self._submitted(request))

    def probe(self) -> None:
        """Ask the server for its version and model, which make up `name`. Raises ReplayError."""
        self._thread.run(self._be_ready())

    def restart(self) -> None:
        """Ask the server anew what it is, and hold it to what it said before. See `Reference.restart`."""
        self._thread.run(self._doubt())

    def close(self) -> None:
        """Close the connections; the server stays as it is."""
        self._closing = True
        with contextlib.suppress(TimeoutError):
            self._thread.submit(self._client.close()).exception(10)
        self._thread.close(10)
        self._readers.shutdown(cancel_futures=True)

    async def _submitted(self, request: ReplayRequest) -> Replay:
        try:
            await self._be_ready()
            rendering = asyncio.create_task(self._prompts.of(request))
            try:
                replay = await self._replay(request)
                return replace(replay, prompt_ids=await rendering, reference=self.name)
            finally:
                rendering.cancel()
                await asyncio.gather(rendering, return_exceptions=True)
        except ReplayError as error:
            if error.reason == "unreachable":
                self.life += 1  # whoever answers next may be another
            raise
        except asyncio.CancelledError:
            if self._closing:
                raise ReplayError("engine_failed", "the reference was closed") from None
            raise

    async def _be_ready(self) -> None:
        """Know what the server is, and that it is sound if that was in doubt: asked once for all who wait."""
        if self._ready:
            return
        if self._getting_ready is None or self._getting_ready.done():
            self._getting_ready = asyncio.create_task(self._get_ready())
            self._getting_ready.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._getting_ready)

    async def _get_ready(self) -> None:
        version = await self._client.get("/version", wire.Version)
        cards = await self._client.get("/v1/models", wire.Cards)
        self.name = self._server.introduced(cards.data, version.version)
        self.max_tokens = self._server.max_tokens
        if self._doubted:
            await self._examine()
        self._ready, self._doubted = True, False

    async def _doubt(self) -> None:
        if self._getting_ready is not None:
            await asyncio.wait([self._getting_ready])
        self._doubt_it()
        await self._be_ready()

    def _doubt_it(self) -> None:
        self.life += 1
        self._ready, self._doubted = False, True

    def _begin_to_study(self) -> None:
        if self._studying is None or self._studying.done():
            self._studying = self._thread.submit(self._study())

    async def _study(self) -> None:
        try:
            await self._be_ready()
            await self._examine()
        except ReplayError as error:
            if error.reason == "self_test":
                self._doubt_it()
            elif error.reason in ("refused", "too_long"):
                self.canary.give_up()
            logger.warning("the reference of the canaries gives no known answer: %s", error)

    async def _examine(self) -> None:
        """Raises ReplayError `self_test`."""

        async def ask(requests: Sequence[ReplayRequest]) -> list[Replay]:
            return list(await asyncio.gather(*(self._replay(request) for request in requests)))

        async def answer(length: int) -> Known:
            body = asking.greedy_answer(self._server, length)
            return await self._client.post(asking.COMPLETIONS, body, asking.read_answer)

        try:
            known = await selftest.examine(ask, answer, max_tokens=self.max_tokens or UNKNOWN_LENGTH)
            await selftest.recheck(ask, self._known)
        except selftest.SelfTestFailed as error:
            raise ReplayError("self_test", str(error)) from error
        if not self._known:
            self._known = known
            self.canary.learn(known)

    async def _replay(self, request: ReplayRequest) -> Replay:
        server = self._server
        if server.max_tokens is not None and request.tokens > server.max_tokens:
            raise ReplayError("too_long", f"{request.tokens} tokens and one more, of {server.max_tokens + 1}")
        wanted = request.candidate_ids is not None or request.form == "ids"
        while wanted and server.scores_ids:
            limits = server.limits
            score = asking.Scoring(request, server.served, *limits)
            response = await self._client.send("POST", asking.GENERATE, score.body, accept=REFUSED)
            if response.status_code == 200:
                replay = await self._client.read(score.read, response)
                if replay is not None:
                    return replay
                server.cannot_score(self.name, "it ignores them")
            else:
                server.learn(self.name, response)
            if limits == server.limits:
                break
        while True:
            limits = server.limits
            listing = asking.Listing(request, server.served, *limits)
            response = await self._client.send("POST", asking.COMPLETIONS, listing.body, accept=REFUSED)
            if response.status_code == 200:
                return await self._client.read(listing.read, response)
            server.learn(self.name, response)
            if limits[0] == server.limits[0]:
                raise refusal(asking.COMPLETIONS, response)
