"""The HTTP of a reference that is a server: bounded connections, one time-out per request, errors with reasons.

Megabytes are written and read as JSON in threads, so that the loop stays free for the other requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

import httpx
import orjson

from policies.errors import ReplayError
from policies.settings import ReferenceSettings
from verifier_pool.reference import wire

T = TypeVar("T")

CONNECTIONS = 32
"""Requests at once. A replay's answer may be megabytes of JSON, and a server batches this many well."""

REFUSED = (400, 403, 404, 413, 422)


class Client:
    """One server. Used on one loop."""

    def __init__(self, settings: ReferenceSettings, readers: Executor) -> None:
        """
        Args:
            readers: threads for JSON.
        """
        key = settings.api_key
        self._readers, self._timeout = readers, settings.timeout
        self._client = httpx.AsyncClient(
            base_url=str(settings.url).rstrip("/").removesuffix("/v1"),
            headers={"authorization": f"Bearer {key.get_secret_value()}"} if key else {},
            timeout=httpx.Timeout(settings.timeout, pool=None),
            limits=httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS),
            trust_env=False,
        )
        self._places = asyncio.Semaphore(CONNECTIONS)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def get(self, path: str, shape: Any) -> Any:
        """The answer of a small route as `shape`. Raises ReplayError."""
        return wire.decode(await self.send("GET", path), shape)

    async def post(self, path: str, body: dict[str, Any], read: Callable[[httpx.Response], T]) -> T:
        """What `read` makes of a successful answer. Raises ReplayError."""
        return await self.read(read, await self.send("POST", path, body))

    async def read(self, read: Callable[[httpx.Response], T], response: httpx.Response) -> T:
        """Call `read` in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, read, response)

    async def send(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | Callable[[], dict[str, Any]] | None = None,
        accept: tuple[int, ...] = (),
    ) -> httpx.Response:
        """One request; the clock starts when it has a connection.

        Args:
            body: of JSON and numpy arrays, or what makes it in a thread.
            accept: statuses beside 200 that are answers.

        Raises:
            ReplayError: `timeout`, `unreachable`, and what `refusal` says of other statuses.
        """
        async with self._places:
            content = None
            if body is not None:
                content = await asyncio.get_running_loop().run_in_executor(self._readers, _dumped, body)
            try:
                async with asyncio.timeout(self._timeout):
                    response = await self._client.request(
                        method, path, content=content, headers={"content-type": "application/json"} if content else None
                    )
            except (httpx.TimeoutException, TimeoutError) as error:
                raise ReplayError("timeout", f"{path} after {self._timeout} s") from error
            except (httpx.HTTPError, RuntimeError) as error:
                # A client that is being closed raises RuntimeError.
                raise ReplayError("unreachable", f"{path}: {type(error).__name__}") from error
        if response.status_code == 200 or response.status_code in accept:
            return response
        raise refusal(path, response)


def _dumped(body: dict[str, Any] | Callable[[], dict[str, Any]]) -> bytes:
    return orjson.dumps(body() if callable(body) else body, option=orjson.OPT_SERIALIZE_NUMPY)


def refusal(path: str, response: httpx.Response) -> ReplayError:
    """The error that a status stands for."""
    status = response.status_code
    if status in (400, 413, 422):
        reason = "too_long" if _is_about_length(wire.message(response)) else "refused"
        return ReplayError(reason, f"{path} answered {status}")
    if status == 429:
        return ReplayError("overloaded", path)
    return ReplayError("http_5xx" if status >= 500 else f"http_{status}", f"{path} answered {status}")


def _is_about_length(words: str) -> bool:
    """vLLM's words for a prompt that leaves no room for the one token it must generate."""
    lengths = ("max_tokens must be at least 1", "maximum context length", "max_model_len")
    return any(length in words for length in lengths)
