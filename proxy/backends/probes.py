"""Background probes: is each backend well, and does it still have its model?

A probe looks the same whatever is thought of a backend, and comes when it comes: it says nothing about audits, and a
backend gains nothing by its answer. One that says that it is not well is asked last; one that says that it is well has
only said so: its breaker listens to requests alone.
"""

from __future__ import annotations

import asyncio
import logging
import random

import aiohttp
import msgspec
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL

from policies.settings import HealthSettings
from proxy.backends.backend import Backend
from proxy.backends.pool import Backends
from proxy.metrics import Metrics
from proxy.resolver import Resolver
from proxy.tasks import end

logger = logging.getLogger(__name__)

_SPREAD = 0.2
_MOST_BYTES = 1024 * 1024


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_models = msgspec.json.Decoder(_Models)


class Probes:
    """Asks every backend every `interval` seconds, each in a task of its own: one that hangs holds up no other."""

    def __init__(self, rules: HealthSettings, backends: Backends, metrics: Metrics) -> None:
        self._rules = rules
        self._backends = backends
        self._metrics = metrics
        self._chance = random.Random()
        self._client: aiohttp.ClientSession | None = None
        self._tasks: dict[Backend, asyncio.Task[None]] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin, each backend at a moment of its own within the first interval."""
        if not self._rules.interval:
            return
        if self._client is None and self._backends.all:
            self._client = _client()
        for backend in self._backends.all:
            if backend not in self._tasks:
                self._tasks[backend] = asyncio.create_task(self._follow(backend))

    def renew(self, rules: HealthSettings) -> None:
        """Ask by other rules, and the backends that there are now."""
        present = frozenset(self._backends.all) if rules == self._rules else frozenset()
        for backend in [each for each in self._tasks if each not in present]:
            task = self._tasks.pop(backend)
            task.add_done_callback(self._leaving.discard)
            self._leaving.add(task)
            task.cancel()
        self._rules = rules
        self.start()

    async def close(self) -> None:
        """Stop."""
        await end(*self._tasks.values(), *self._leaving)
        if self._client is not None:
            await self._client.close()

    async def _follow(self, backend: Backend) -> None:
        await asyncio.sleep(self._rules.interval * self._chance.random())
        while True:
            try:
                await self._ask(backend)
            except Exception:
                # Whatever a backend sends, it must not end its probes.
                logger.exception("a probe broke", extra={"backend": backend.name})
            spread = 1 + _SPREAD * (2 * self._chance.random() - 1)
            await asyncio.sleep(self._rules.interval * spread)

    async def _ask(self, backend: Backend) -> None:
        assert self._client is not None
        problem = await probe(self._client, backend, self._rules)
        backend.probed(problem, self._rules)
        # Its number is the backend's to choose: one label is enough.
        result = "well" if problem is None else "status" if problem.startswith("status") else problem
        self._metrics.probes.add(1, {"backend": backend.name, "result": result})


async def probe(client: aiohttp.ClientSession, backend: Backend, rules: HealthSettings) -> str | None:
    """What is wrong with a backend: `unreachable`, `timeout`, `status_…` or `model_missing`; None when nothing is."""
    try:
        async with asyncio.timeout(rules.timeout):
            status, _ = await _get(client, backend, rules.path, 0)
            if status >= 500:
                return f"status_{status}"
            if rules.models:
                status, body = await _get(client, backend, "/v1/models", _MOST_BYTES)
                if status == 200 and _lacks(body, backend.settings.served_model or backend.settings.model):
                    return "model_missing"
    except TimeoutError:
        return "timeout"
    except (aiohttp.ClientError, HttpProcessingError, OSError, ValueError):
        return "unreachable"
    return None


async def _get(client: aiohttp.ClientSession, backend: Backend, path: str, most: int) -> tuple[int, bytes]:
    """Status and body of a page, the body empty where it is longer than `most` bytes."""
    key = backend.settings.api_key
    headers = {} if key is None else {"authorization": f"Bearer {key.get_secret_value()}"}
    url = URL(backend.base_url + path, encoded=True)
    parts: list[bytes] = []
    async with client.get(url, headers=headers, allow_redirects=False) as response:
        left = most
        if not most:
            return response.status, b""
        async for part in response.content.iter_any():
            left -= len(part)
            if left < 0:
                return response.status, b""
            parts.append(part)
        return response.status, b"".join(parts)


def _lacks(body: bytes, model: str) -> bool:
    """Whether a list of models can be read and does not have this one."""
    try:
        return all(item.id != model for item in _models.decode(body).data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False


def _client() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True, ttl_dns_cache=30, resolver=Resolver()),
        timeout=aiohttp.ClientTimeout(total=None),
        headers={"user-agent": "countersign", "accept": "application/json", "accept-encoding": "identity"},
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
    )
