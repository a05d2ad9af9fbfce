"""Clients on raw sockets that read, dawdle, leave in every phase, or never speak HTTP at all."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import orjson

from benchmarks.leaks.upstream import ACTS, LARGE_TOKENS, TOKENS, act
from benchmarks.overhead.answer import MODEL

DOWN = "nobody"
"""A model whose backend cannot be connected to."""
PATIENCE = 30.0
WAYS: Mapping[str, float] = {
    "reads it all": 10,
    "reads three on one connection": 4,
    "leaves before the head": 3,
    "leaves after the head": 3,
    "leaves midway": 3,
    "resets midway": 3,
    "reads slowly, then leaves": 0.5,
    "sends half a request": 1,
    "sends no HTTP": 0.5,
    "connects and leaves": 1,
    "has a wrong key": 1,
    "asks for a verdict": 2,
    "asks for a strange verdict": 0.5,
}
"""How often each way comes, relative to the others."""
_ACT_WEIGHTS = {"serve-well": 12, "whole": 6, "slowly": 2, "endless-line": 0.05, "large": 0.2, "hangs-midway": 0.3}
_PATHS = {"/v1/chat/completions": 12, "/v1/completions": 0.5, "/v1/embeddings": 1, "/v1/responses": 1}


@dataclass(slots=True)
class Tally:
    """What became of the requests."""

    sent: int = 0
    ways: Counter[str] = field(default_factory=Counter)
    acts: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    endless: Counter[str] = field(default_factory=Counter)


class Client:
    """One of many; `run` until it is cancelled or the time is over."""

    def __init__(self, port: int, keys: Sequence[str], seed: int, tally: Tally) -> None:
        self._port = port
        self._keys = keys
        self._random = random.Random(seed)
        self._tally = tally
        self._ids: list[str] = []
        self._wanted = ""

    async def run(self, until: float) -> None:
        """Come and go."""
        loop = asyncio.get_running_loop()
        while loop.time() < until:
            way = self._choose(WAYS)
            self._tally.ways[way] += 1
            self._wanted = ""
            try:
                async with asyncio.timeout(PATIENCE):
                    await self._come(way)
            except TimeoutError:
                self._tally.outcomes["no end in time"] += 1
                self._tally.endless[f"{way}: {self._wanted}"] += 1
            except (OSError, asyncio.IncompleteReadError):
                self._tally.outcomes["connection closed"] += 1

    async def _come(self, way: str) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            match way:
                case "connects and leaves":
                    return
                case "sends no HTTP":
                    writer.write(b"\x00\xffHELLO\r\n\r\n")
                    while await reader.read(4096):
                        pass
                case "sends half a request":
                    request = self._request()
                    writer.write(request[: self._random.randrange(1, len(request))])
                    await asyncio.sleep(0.01)
                case "asks for a verdict" | "asks for a strange verdict":
                    await self._ask_verdict(reader, writer, strange=way != "asks for a verdict")
                case "reads three on one connection":
                    for _ in range(3):
                        writer.write(self._request(acts=("serve-well", "whole")))
                        await self._read(reader)
                case _:
                    writer.write(self._request(key="sk-wrong" if way == "has a wrong key" else None))
                    await self._read_and_leave(way, reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _read_and_leave(self, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        match way:
            case "leaves before the head":
                await asyncio.sleep(self._random.uniform(0, 0.03))
            case "leaves after the head":
                await reader.readuntil(b"\r\n\r\n")
            case "leaves midway" | "resets midway":
                await reader.read(self._random.randrange(1, 2000))
                await asyncio.sleep(self._random.uniform(0, 0.03))
                if way == "resets midway":
                    reset(writer)
            case "reads slowly, then leaves":
                for _ in range(20):
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.2):
                            await reader.read(64)
                    await asyncio.sleep(0.05)
            case _:
                await self._read(reader)
                return
        self._tally.outcomes["left"] += 1

    async def _ask_verdict(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, strange: bool) -> None:
        id = "0" * 32 if strange or not self._ids else self._random.choice(self._ids)
        path = f"/v1/verifications/{id}?wait=0.2"
        writer.write(f"GET {path} HTTP/1.1\r\nhost: h\r\nauthorization: Bearer {self._keys[0]}\r\n\r\n".encode())
        self._tally.sent += 1
        await self._read(reader)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """One whole answer."""
        head = await reader.readuntil(b"\r\n\r\n")
        status = head.split(b" ", 2)[1].decode("latin-1")
        fields = dict(line.partition(b": ")[::2] for line in head.lower().split(b"\r\n")[1:] if line)
        if id := fields.get(b"x-countersign-id"):
            self._ids = [*self._ids[-50:], id.decode()]
        if b"chunked" in fields.get(b"transfer-encoding", b""):
            while size := int((await reader.readuntil(b"\r\n")).strip(), 16):
                await reader.readexactly(size + 2)
            await reader.readexactly(2)
        else:
            await reader.readexactly(int(fields.get(b"content-length", b"0")))
        self._tally.outcomes[f"status {status}"] += 1

    def _request(self, *, acts: Sequence[str] = (), key: str | None = None) -> bytes:
        wanted = self._choose({name: _ACT_WEIGHTS.get(name, 1.0) for name in acts or ACTS})
        path = self._choose(_PATHS) if not acts else "/v1/chat/completions"
        down = not acts and self._random.random() < 0.02
        self._tally.acts["cannot be reached" if down else wanted] += 1
        self._tally.sent += 1
        self._wanted = f"{wanted} at {path}"
        said = f"Tell me a story. {act(wanted)} {'word ' * self._random.randrange(200)}"
        body = orjson.dumps(
            {
                "model": DOWN if down else MODEL,
                "messages": [{"role": "user", "content": said}],
                "prompt": said,
                "max_tokens": LARGE_TOKENS if wanted == "large" else TOKENS,
                "temperature": 0,
                "stream": wanted not in ("whole", "refuses") and self._random.random() < 0.9,
            }
        )
        mode = "inline" if self._random.random() < 0.2 else "async"
        lines = [
            f"POST {path} HTTP/1.1",
            "host: h",
            "content-type: application/json",
            f"authorization: Bearer {key or self._random.choice(self._keys)}",
            f"x-countersign-mode: {mode}",
            f"content-length: {len(body)}",
        ]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body

    def _choose(self, weights: Mapping[str, float]) -> str:
        return self._random.choices(list(weights), list(weights.values()))[0]


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with an RST: nothing lingers, and what is under way is lost."""
    found: socket.socket = writer.get_extra_info("socket")
    found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
