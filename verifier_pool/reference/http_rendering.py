"""The prompt of a request as a vLLM server renders it: its `/render` routes, each distinct request once."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import numpy as np

from policies.evidence import Ids
from verifier_pool.reference import wire
from verifier_pool.reference.base import ReplayRequest
from verifier_pool.reference.http_asking import Server
from verifier_pool.reference.http_client import Client
from verifier_pool.reference.rendering import prompt_fields, prompt_index, same_but_for_the_date

PATHS = {"chat": "/v1/chat/completions/render", "completions": "/v1/completions/render"}
REFUSED = (400, 403, 404, 422)
REMEMBERED = 256
"""The choices of a request share their rendering, and so do two replays of one answer."""


class Prompts:
    """Renders on one server. Used on one loop."""

    def __init__(self, client: Client, server: Server) -> None:
        self._client, self._server = client, server
        self._remembered: dict[tuple[str, bytes], asyncio.Task[list[Ids] | None]] = {}

    async def of(self, request: ReplayRequest) -> Ids | None:
        """The rendering of one choice's prompt, or None where the server cannot render it.

        It is the backend's own where a template that prints the date is all that differs.

        Raises:
            ReplayError: as `Client.send`, or `bad_request`.
        """
        rendered = await self._prompt(request)
        if rendered is None or request.endpoint != "chat" or np.array_equal(rendered, request.prompt_ids):
            return rendered
        ours, theirs = await self._text(rendered), await self._text(request.prompt_ids)
        return request.prompt_ids if same_but_for_the_date(ours, theirs, datetime.now(UTC).date()) else rendered

    async def _prompt(self, request: ReplayRequest) -> Ids | None:
        if not self._server.renders or not request.request:
            return None
        prompts = await self._once(request.endpoint, request.request)
        index = 0 if request.endpoint == "chat" else prompt_index(request.request, request.choice)
        return prompts[index] if prompts is not None and index < len(prompts) else None

    async def _once(self, endpoint: str, request: bytes) -> list[Ids] | None:
        key = endpoint, request
        task = self._remembered.get(key)
        if task is None:
            task = self._remembered[key] = asyncio.create_task(self._render(endpoint, request))
            task.add_done_callback(lambda done: self._forget(key, done))
            while len(self._remembered) > REMEMBERED:
                del self._remembered[next(iter(self._remembered))]
        return await asyncio.shield(task)

    def _forget(self, key: tuple[str, bytes], task: asyncio.Task[list[Ids] | None]) -> None:
        """A refusal may pass."""
        if (task.cancelled() or task.exception() or task.result() is None) and self._remembered.get(key) is task:
            del self._remembered[key]

    async def _render(self, endpoint: str, request: bytes) -> list[Ids] | None:
        body = prompt_fields(request, str(self._server.served))
        if body is None:
            return None
        response = await self._client.send("POST", PATHS[endpoint], body, accept=REFUSED)
        if response.status_code in (403, 404):
            self._server.renders = False
        if response.status_code != 200:
            return None
        rendered = wire.decode(response, wire.Rendered | list[wire.Rendered])
        prompts = rendered if isinstance(rendered, list) else [rendered]
        return [np.asarray(prompt.token_ids, np.int32) for prompt in prompts]

    async def _text(self, ids: Ids) -> str:
        body = {"model": self._server.served, "tokens": np.ascontiguousarray(ids)}
        response = await self._client.send("POST", "/detokenize", body, accept=REFUSED)
        return str(wire.decode(response, wire.Text).prompt) if response.status_code == 200 else ""
