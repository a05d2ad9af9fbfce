"""What every cheating backend shares: it stands in front of a real vLLM server and speaks its JSON and SSE.

A cheat changes the request on its way up and the finished answer on its way down. Answers are held until they are
complete, as a list of frames (one for a plain body, many for a stream), so a cheat is written once for both. A relay
that changes no answer passes bytes on as they come.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from aiohttp import ClientError, ClientSession, ClientTimeout, web

from benchmarks.adversary.answers import Choice, read, read_sse, write, write_sse
from benchmarks.adversary.servers import Body, Server, Site

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Kind = Literal["cheap", "true", "own"]

HOP_HEADERS = frozenset({"host", "content-length", "connection", "transfer-encoding", "accept-encoding"})
GENERATING = ("/v1/chat/completions", "/v1/completions")


@dataclass(frozen=True, slots=True)
class Setup:
    """What a cheat is put in front of.

    Attributes:
        upstream: the server that generates.
        truth: a server that runs the model which was paid for; `upstream` where none is named.
        runtime: name of the sampling noise of both, for cheats that compute it.
        eos: ids that end an answer.
        good: honest answers before `good-then-bad` turns.
        share: of answers in which `sometimes` cheats.
    """

    upstream: Site
    truth: Site | None = None
    runtime: str = ""
    eos: tuple[int, ...] = ()
    good: int = 10
    share: float = 0.1


class Cheat:
    """An honest relay, and the two places where a cheat departs from it.

    Attributes:
        about: what it does.
        generates: where its tokens come from: a `cheap` server, the `true` one, or a server of its `own` that runs
            what the name says.
        scores: it also needs the true server, for prefills.
        caught_by: checks that should catch it, the likeliest first; empty where no check is expected to.
        limits: what this implementation does not do, or when it is no cheat at all.
        honest: it is no cheat; it must never be rejected.
        shape: what its requests must look like to show it: `hot` (temperature over 0), `greedy`, `long` prompts,
            `short` answers, `repeated` prompts, many at once (`batch`).
        moe: only a mixture-of-experts model can show it.
        speculative: its server is to be declared as decoding speculatively.
    """

    name: ClassVar[str] = ""
    about: ClassVar[str] = ""
    generates: ClassVar[Kind] = "true"
    scores: ClassVar[bool] = False
    caught_by: ClassVar[tuple[str, ...]] = ()
    limits: ClassVar[str] = ""
    honest: ClassVar[bool] = False
    shape: ClassVar[Literal["", "hot", "greedy", "long", "short", "repeated", "batch"]] = ""
    moe: ClassVar[bool] = False
    speculative: ClassVar[bool] = False
    rewrites: ClassVar[bool] = True

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    async def ask(self, body: Body) -> Body:
        """The request as it goes to `upstream`."""
        return body

    async def answer(self, frames: list[Body], asked: Body) -> list[Body]:
        """The frames as they go to the client, who sent `asked`."""
        return frames

    def wire(self, frames: list[Body], asked: Body) -> bytes:
        """The frames as bytes."""
        return write_sse(frames) if asked.get("stream") else json.dumps(frames[0], ensure_ascii=False).encode()

    def app(self) -> web.Application:
        """The backend as an aiohttp application."""
        app = web.Application(client_max_size=64 * 1024 * 1024, middlewares=[_unreachable])
        app.cleanup_ctx.append(self._servers)
        for path in GENERATING:
            app.router.add_post(path, self.generate)
        app.router.add_route("*", "/{path:.*}", self._relay)
        return app

    def join(self, session: ClientSession) -> None:
        """Use this session for every call behind."""
        self.session = session
        self.upstream = Server(self.setup.upstream, session)
        self.truth = Server(self.setup.truth or self.setup.upstream, session)

    async def _servers(self, app: web.Application) -> AsyncIterator[None]:
        async with ClientSession(timeout=ClientTimeout(total=600), trust_env=False) as session:
            self.join(session)
            yield

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """One generating request, from the client's side."""
        asked: Body = await request.json()
        body = await self.ask(json.loads(json.dumps(asked)))
        if self.setup.upstream.model is not None:
            body["model"] = self.setup.upstream.model
        async with self.session.post(
            self.upstream.url + request.path, json=body, headers=self._headers(request)
        ) as response:
            if not self.rewrites:
                return await _pass(request, response)
            raw = await response.read()
            if response.status != 200:
                return web.Response(status=response.status, body=raw, content_type=response.content_type)
        frames = read_sse(raw) if asked.get("stream") else [json.loads(raw)]
        data = self.wire(await self.answer(frames, asked), asked)
        kind = "text/event-stream; charset=utf-8" if asked.get("stream") else "application/json"
        return web.Response(body=data, headers={"content-type": kind})

    async def _relay(self, request: web.Request) -> web.Response:
        data = await request.read()
        url = self.upstream.url + request.path_qs
        async with self.session.request(request.method, url, data=data, headers=self._headers(request)) as response:
            body = await response.read()
            return web.Response(status=response.status, body=body, content_type=response.content_type)

    def _headers(self, request: web.Request) -> dict[str, str]:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_HEADERS}
        if self.setup.upstream.key:
            headers = {name: value for name, value in headers.items() if name.lower() != "authorization"}
            headers["authorization"] = f"Bearer {self.setup.upstream.key}"
        return headers


class Rewriting(Cheat):
    """A cheat that changes finished choices; ids and claims are asked for whether the client wants them or not."""

    async def ask(self, body: Body) -> Body:
        return body | {"return_token_ids": True, "return_tokens_as_token_ids": True}

    async def answer(self, frames: list[Body], asked: Body) -> list[Body]:
        choices = read(frames)
        await asyncio.gather(*(self.edit(choice, asked) for choice in choices if choice.ids))
        return write(frames, choices, asked)

    async def edit(self, choice: Choice, asked: Body) -> None:
        """Change one choice in place."""


async def _pass(request: web.Request, response: Any) -> web.StreamResponse:
    passed = web.StreamResponse(status=response.status, headers={"content-type": response.headers["content-type"]})
    await passed.prepare(request)
    async for piece in response.content.iter_any():
        await passed.write(piece)
    await passed.write_eof()
    return passed


@web.middleware
async def _unreachable(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ClientError as error:
        return web.json_response({"error": {"message": f"behind this server: {error}", "code": 502}}, status=502)
