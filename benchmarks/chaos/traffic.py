"""Clients that never stop asking, and write down what they saw.

Each client has a key of its own and asks one thing at a time, so a record that only says whose it is and when it was
made belongs to one request and no other.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from benchmarks.chaos.declared import CHEATING, HONEST, OUTPUT_TOKENS, TEMPERATURES
from benchmarks.overhead.client import Target

ABORTS = 0.15
CHEATS = 0.12
INLINE = 0.25
STREAMS = 0.6
PATIENCE = 20.0
"""Seconds after which a client gives up on an answer."""


@dataclass(slots=True)
class Asked:
    """One request as its client saw it.

    Attributes:
        number: the marker in its prompt.
        client, model, backend, stream, mode, proxy: what was asked of whom.
        sent, ended: Unix seconds.
        status: of the answer; 0 when not even its head came.
        id: what the proxy called it, empty when it did not say.
        unrecorded: the proxy said that it could not write the intent.
        outcome: `complete`, `aborted` (by the client, on purpose), `broken` (the connection ended early) or `timeout`.
        verdict: an inline verdict that came with the answer.
    """

    number: int
    client: int
    model: str
    backend: str
    stream: bool
    mode: str
    proxy: str
    sent: float
    ended: float = 0.0
    status: int = 0
    id: str = ""
    unrecorded: bool = False
    outcome: str = ""
    verdict: str = ""

    def line(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


class Clients:
    """All clients together.

    Args:
        proxies: addresses, by name; a request that cannot even connect is not counted.
        keys: one per client.
        rng: decides everything about the requests.
        pause: mean seconds between an answer and the next request of a client.
    """

    def __init__(
        self,
        proxies: dict[str, int],
        models: Sequence[str],
        keys: Sequence[str],
        rng: random.Random,
        *,
        pause: float,
        interval: float,
    ) -> None:
        self.asked: list[Asked] = []
        self.refused = 0
        self._proxies = proxies
        self._models = models
        self._keys = keys
        self._rng = rng
        self._pause = pause
        self._whole = interval * OUTPUT_TOKENS
        self._number = 0

    async def run(self, stopped: Callable[[], bool]) -> None:
        """Ask until `stopped`; returns when every answer has come or is given up."""
        await asyncio.gather(*(self._client(index, stopped) for index in range(len(self._keys))))

    async def _client(self, index: int, stopped: Callable[[], bool]) -> None:
        while not stopped():
            await asyncio.sleep(self._rng.expovariate(1 / self._pause))
            await self._ask(index)

    async def _ask(self, index: int) -> None:
        rng, self._number = self._rng, self._number + 1
        name = rng.choice(list(self._proxies))
        model = self._models[index % len(self._models)]
        backend = f"{CHEATING if rng.random() < CHEATS else HONEST}-{model}"
        stream, mode = rng.random() < STREAMS, "inline" if rng.random() < INLINE else "async"
        asked = Asked(self._number, index, model, backend, stream, mode, name, time.time())
        leave = rng.uniform(0, self._whole) if rng.random() < ABORTS else None
        request = self._request(asked, rng.choice(TEMPERATURES))
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._proxies[name], limit=2**20)
        except OSError:
            self.refused += 1
            await asyncio.sleep(0.05)
            return
        asked.sent = time.time()
        self.asked.append(asked)
        try:
            async with asyncio.timeout(PATIENCE if leave is None else leave):
                writer.write(request)
                await _read(reader, asked)
            asked.outcome = "complete"
        except TimeoutError:
            asked.outcome = "timeout" if leave is None else "aborted"
        except (OSError, asyncio.IncompleteReadError, ValueError):
            asked.outcome = "broken"
        finally:
            asked.ended = time.time()
            writer.transport.abort()

    def _request(self, asked: Asked, temperature: float) -> bytes:
        body = {
            "model": asked.model,
            "messages": [{"role": "user", "content": f"marker-{asked.number}- say something"}],
            "max_tokens": OUTPUT_TOKENS,
            "temperature": temperature,
            "stream": asked.stream,
        }
        headers = {
            "authorization": f"Bearer {self._keys[asked.client]}",
            "x-countersign-backend": asked.backend,
            "x-countersign-mode": asked.mode,
        }
        url = f"http://127.0.0.1:{self._proxies[asked.proxy]}/v1/chat/completions"
        return Target("chaos", url, orjson.dumps(body), headers).request()


async def _read(reader: asyncio.StreamReader, asked: Asked) -> None:
    """Read the whole answer. Raises ValueError when it is not one."""
    line, *rows = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (row.partition(":") for row in rows)}
    asked.status = int(line.split(" ")[1])
    asked.id = headers.get("x-countersign-id", "")
    asked.unrecorded = headers.get("x-countersign-reason") == "store_unavailable"
    asked.verdict = headers.get("x-countersign-verdict", "") if asked.mode == "inline" else ""
    if "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    else:
        body = b""
        while (size := int((await reader.readline()).strip() or b"z", 16)) > 0:
            body += (await reader.readexactly(size + 2))[:size]
        if b"data: [DONE]" not in body:
            raise ValueError("a stream without its end")
    if asked.stream and asked.mode == "inline":
        asked.verdict = _in_stream(body) or asked.verdict


def _in_stream(body: bytes) -> str:
    _, found, rest = body.partition(b": countersign ")
    if not found:
        return ""
    said = orjson.loads(rest.partition(b"\n")[0])
    return str(said.get("verdict") or said.get("status"))
