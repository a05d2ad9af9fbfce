"""What every cheating backend shares: it stands in front of a real vLLM server and speaks its JSON and SSE.

A cheat changes the request on its way up and the finished answer on its way down. Answers are held until they are
complete, as a list of frames (one for a plain body, many for a stream), so a cheat is written once for both.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

from aiohttp import ClientError, ClientSession, ClientTimeout, web

Body = dict[str, Any]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

HOP_HEADERS = frozenset({"host", "content-length", "connection", "transfer-encoding", "accept-encoding"})
GENERATING = ("/v1/chat/completions", "/v1/completions")


class Cheat:
    """An honest relay, and the two places where a cheat departs from it.

    `upstream` is the server that generates; `truth` is one that runs the model which was paid for.
    """

    name: ClassVar[str] = ""
    about: ClassVar[str] = ""
    needs_truth: ClassVar[bool] = False

    def __init__(self, upstream: str, truth: str | None = None) -> None:
        self.upstream = upstream.rstrip("/")
        self.truth = (truth or "").rstrip("/")

    async def ask(self, body: Body) -> Body:
        """The request as it goes to `upstream`."""
        return body

    async def answer(self, frames: list[Body], asked: Body) -> list[Body]:
        """The frames as they go to the client, who sent `asked`."""
        return frames

    def app(self) -> web.Application:
        """The backend as an aiohttp application."""
        app = web.Application(client_max_size=64 * 1024 * 1024, middlewares=[_unreachable])
        app.cleanup_ctx.append(self._session)
        for path in GENERATING:
            app.router.add_post(path, self._generate)
        app.router.add_route("*", "/{path:.*}", self._relay)
        return app

    async def _session(self, app: web.Application) -> Any:
        async with ClientSession(timeout=ClientTimeout(total=600)) as self.session:
            yield

    async def post(self, url: str, body: Body) -> Body:
        """POST JSON to another server and read its JSON answer. Raises aiohttp.ClientError."""
        async with self.session.post(url, json=body, raise_for_status=True) as response:
            answer: Body = await response.json()
            return answer

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        asked: Body = await request.json()
        body = await self.ask(json.loads(json.dumps(asked)))
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_HEADERS}
        async with self.session.post(self.upstream + request.path, json=body, headers=headers) as response:
            raw = await response.read()
            if response.status != 200:
                return web.Response(status=response.status, body=raw, content_type=response.content_type)
        if asked.get("stream"):
            frames = await self.answer(read_sse(raw), asked)
            return web.Response(body=write_sse(frames), headers={"content-type": "text/event-stream; charset=utf-8"})
        (frame,) = await self.answer([json.loads(raw)], asked)
        return web.json_response(frame)

    async def _relay(self, request: web.Request) -> web.Response:
        data = await request.read()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_HEADERS}
        url = self.upstream + request.path_qs
        async with self.session.request(request.method, url, data=data, headers=headers) as response:
            body = await response.read()
            return web.Response(status=response.status, body=body, content_type=response.content_type)


@web.middleware
async def _unreachable(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ClientError as error:
        return web.json_response({"error": {"message": f"behind this server: {error}", "code": 502}}, status=502)


def read_sse(raw: bytes) -> list[Body]:
    """The JSON frames of a finished stream, without its `[DONE]`."""
    lines = (line[6:] for line in raw.decode().splitlines() if line.startswith("data: "))
    return [json.loads(line) for line in lines if line != "[DONE]"]


def write_sse(frames: list[Body]) -> bytes:
    """Frames as a finished stream."""
    parts = [json.dumps(frame, ensure_ascii=False, separators=(",", ":")) for frame in frames]
    return "".join(f"data: {part}\n\n" for part in [*parts, "[DONE]"]).encode()


def choices(frames: list[Body]) -> dict[int, list[Body]]:
    """Each choice's parts in order, by index."""
    parts: dict[int, list[Body]] = {}
    for frame in frames:
        for choice in frame.get("choices") or ():
            parts.setdefault(choice["index"], []).append(choice)
    return parts


def output_ids(parts: list[Body]) -> list[int]:
    """Token ids of one choice."""
    return [token for part in parts for token in part.get("token_ids") or ()]


def prompt_ids(frames: list[Body], parts: list[Body]) -> list[int]:
    """Prompt ids of one choice: beside the choices in chat answers, inside them in completions."""
    for holder in [*parts, *frames]:
        if holder.get("prompt_token_ids"):
            return list(holder["prompt_token_ids"])
    return []
