"""Cheats about the bill, and answers that were sold before."""

from __future__ import annotations

import json
import time
import uuid

from aiohttp import web

from benchmarks.adversary.answers import Choice, bill, read, write
from benchmarks.adversary.base import Cheat, Setup
from benchmarks.adversary.servers import PROMPT_FIELDS, Body


class Usage(Cheat):
    """Bills more output tokens than it delivers."""

    name = "usage"
    about = "bills half again as many output tokens as it delivers"
    caught_by = ("structure",)

    async def answer(self, frames: list[Body], asked: Body) -> list[Body]:
        for frame in frames:
            if frame.get("usage"):
                bill(frame["usage"], completion=frame["usage"]["completion_tokens"] * 3 // 2 + 1)
        return frames


class Cached(Cheat):
    """Answers a repeated request from memory, under a new id and as if just made."""

    name = "cached"
    about = "answers a repeated prompt with the answer it gave before, re-labelled"
    caught_by = ("selection", "structure")
    shape = "repeated"
    limits = "an answer at temperature 0 is the right one however often it is sold"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._kept: dict[str, tuple[list[Body], list[Choice]]] = {}

    async def ask(self, body: Body) -> Body:
        return body | {"return_token_ids": True, "return_tokens_as_token_ids": True}

    async def answer(self, frames: list[Body], asked: Body) -> list[Body]:
        self._kept.setdefault(_key(asked), (frames, read(frames)))
        return frames

    async def generate(self, request: web.Request) -> web.StreamResponse:
        asked: Body = await request.json()
        kept = self._kept.get(_key(asked))
        if kept is None:
            return await super().generate(request)
        frames, choices = kept
        prefix = str(frames[0].get("id", "chatcmpl")).split("-")[0]
        fresh = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time())}
        relabelled = [frame | {name: value for name, value in fresh.items() if name in frame} for frame in frames]
        again = write(relabelled, choices, asked)
        kind = "text/event-stream; charset=utf-8" if asked.get("stream") else "application/json"
        return web.Response(body=self.wire(again, asked), headers={"content-type": kind})


def _key(asked: Body) -> str:
    """What an answer depends on, the seed left out."""
    names = (*PROMPT_FIELDS, "model", "temperature", "top_p", "top_k", "max_tokens", "n", "stream", "stop")
    return json.dumps({name: asked.get(name) for name in names}, sort_keys=True)
