"""Requests through a proxy, and the verdicts that come of them, as rows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from benchmarks.adversary.plan import Shot

Row = dict[str, Any]
PATIENCE = 300.0
"""Seconds until a verdict that has not come counts as missing."""


class Client:
    """Asks one proxy. Failed requests become rows too."""

    def __init__(self, url: str, key: str, patience: float = PATIENCE) -> None:
        limits = httpx.Limits(max_connections=200)
        headers = {"authorization": f"Bearer {key}"}
        self._http = httpx.AsyncClient(base_url=url, headers=headers, timeout=600.0, trust_env=False, limits=limits)
        self._patience = patience

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def run(
        self, backend: str, shots: Sequence[Shot], together: int, tick: Callable[[int], None] = lambda done: None
    ) -> list[Row]:
        """Send all shots, at most `together` at once, and wait for every verdict; rows in the shots' order."""
        gate = asyncio.Semaphore(together)
        done = 0

        async def one(shot: Shot) -> Row:
            nonlocal done
            async with gate:
                row = await self.ask(backend, shot)
            if row["id"]:
                row |= await self.verdict(row["id"])
            done += 1
            tick(done)
            return row

        return list(await asyncio.gather(*(one(shot) for shot in shots)))

    async def ask(self, backend: str, shot: Shot) -> Row:
        """One request. `error` says what failed, as a class and a status, never with text of an answer."""
        start = time.monotonic()
        row: Row = {
            "endpoint": shot.path.removeprefix("/v1/"),
            "stream": shot.stream,
            "temperature": shot.body["temperature"],
            "n": shot.body.get("n", 1),
            "id": None,
            "error": None,
            "verdict": "missing",
        }
        try:
            headers = {"x-countersign-backend": backend}
            async with self._http.stream("POST", shot.path, json=shot.body, headers=headers) as response:
                row["id"] = response.headers.get("x-countersign-id")
                async for _ in response.aiter_bytes():
                    pass
                if response.status_code != 200:
                    row["error"] = f"HTTP {response.status_code}"
        except httpx.HTTPError as error:
            row["error"] = type(error).__name__
        return row | {"seconds": round(time.monotonic() - start, 3)}

    async def verdict(self, id: str) -> Row:
        """What the stack's worker says, waited for: verdict, reasons, audited and the checks of every choice."""
        deadline = time.monotonic() + self._patience
        found: dict[str, Any] = {}
        while time.monotonic() < deadline:
            try:
                response = await self._http.get(f"/v1/verifications/{id}", params={"wait": 20})
                found = response.json() if response.status_code == 200 else {}
            except (httpx.HTTPError, ValueError):
                found = {}
            if found.get("status") == "done":
                break
            await asyncio.sleep(0.2)
        whole = {"verdict": found.get("verdict"), "checks": found.get("checks", [])}
        choices = found.get("choices") or [whole]
        return {
            "verdict": found.get("verdict") or "missing",
            "reasons": found.get("reasons", []),
            "audited": bool(found.get("audited")),
            "choices": [{"verdict": choice["verdict"], "checks": choice["checks"]} for choice in choices],
        }
