"""A vLLM server over HTTP: answers with evidence, and teacher-forced replays of any K it allows."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import httpx

from benchmarks.lmcv.files import PipelineError

ATTEMPTS = 3
"""Tries of one request that a server failed or dropped; a refusal is final."""
PAUSE_SECONDS = 0.5


class RequestFailed(Exception):
    """One request came to nothing. `reason` is a short code; the run goes on without it."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class Server:
    """An OpenAI-compatible vLLM. Use as an async context manager.

    Attributes:
        model: name the server knows the model by.
        version: what `/version` says.
        max_model_len: longest sequence, or None where the server does not say.
    """

    def __init__(self, url: str, model: str | None, *, api_key_env: str | None, timeout: float) -> None:
        key = os.environ.get(api_key_env) if api_key_env else None
        if api_key_env and not key:
            raise PipelineError(f"${api_key_env} is not set")
        self._client = httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=timeout,
            trust_env=False,
        )
        self.url = url
        self.model = model or ""
        self.version = "unknown"
        self.max_model_len: int | None = None

    async def __aenter__(self) -> Server:
        try:
            await self._probe()
        except BaseException:
            await self._client.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """One `/v1/completions` answer. Raises RequestFailed."""
        return await self._post("/v1/completions", {"model": self.model, "stream": False} | body)

    async def tokenize(self, text: str) -> list[int]:
        """The server's own ids of a text. Raises RequestFailed."""
        answer = await self._post("/tokenize", {"model": self.model, "prompt": text})
        tokens = answer.get("tokens")
        if not isinstance(tokens, list):
            raise RequestFailed("bad_answer", "/tokenize gave no ids")
        return tokens

    async def _probe(self) -> None:
        try:
            cards = await self._get("/v1/models")
            version = await self._get("/version")
        except RequestFailed as error:
            raise PipelineError(f"{self.url}: {error}") from error
        data = cards.get("data") if cards else None
        known = [card for card in data if isinstance(card, dict)] if isinstance(data, list) else []
        card = next((card for card in known if self.model in ("", card.get("id"))), None)
        if card is None:
            raise PipelineError(f"{self.url} does not serve {self.model!r}")
        self.model = str(card.get("id"))
        length = card.get("max_model_len")
        self.max_model_len = length if isinstance(length, int) else None
        self.version = str((version or {}).get("version", "unknown"))

    async def _get(self, path: str) -> dict[str, Any] | None:
        try:
            response = await self._client.get(path)
            if response.status_code == 404 and path == "/version":
                return None
            response.raise_for_status()
            found = response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise RequestFailed("unreachable", f"{path}: {type(error).__name__}") from error
        return found if isinstance(found, dict) else None

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        for attempt in range(ATTEMPTS):
            try:
                return await self._once(path, body)
            except RequestFailed as error:
                if error.reason in ("refused", "bad_answer") or attempt == ATTEMPTS - 1:
                    raise
                await asyncio.sleep(PAUSE_SECONDS * 2**attempt)
        raise AssertionError("unreachable")

    async def _once(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            response = await self._client.post(path, json=body)
        except httpx.TimeoutException as error:
            raise RequestFailed("timeout", path) from error
        except httpx.HTTPError as error:
            raise RequestFailed("unreachable", f"{path}: {type(error).__name__}") from error
        if response.status_code != 200:
            final = 400 <= response.status_code < 500 and response.status_code != 429
            reason = "refused" if final else f"http_{response.status_code}"
            raise RequestFailed(reason, f"{path} answered {response.status_code}: {_message(response)}")
        try:
            found = response.json()
        except ValueError as error:
            raise RequestFailed("bad_answer", f"{path} answered no JSON") from error
        if not isinstance(found, dict):
            raise RequestFailed("bad_answer", f"{path} answered no JSON object")
        return found


def _message(response: httpx.Response) -> str:
    """The server's own words about a refusal, without what follows them: vLLM may quote the request there."""
    try:
        return str(response.json()["error"]["message"]).split("\n")[0].split("(")[0][:200]
    except (ValueError, KeyError, TypeError):
        return ""
