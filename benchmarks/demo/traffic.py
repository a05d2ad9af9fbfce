"""The demo's requests: a dozen questions per backend through the openai SDK, and the verdicts that come of them."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from benchmarks.demo.servers import MODEL
from benchmarks.questions import DEMO

MAX_TOKENS = 80
TOGETHER = 8
"""Requests in flight at once, after the first few have gone singly."""

VERDICT_PATIENCE = 300.0
"""Seconds until a verdict that has not come counts as missing."""

STANDING_PATIENCE = 10.0
"""The same for the standing, which follows each verdict at once."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Shot:
    """One request."""

    question: str
    temperature: float
    stream: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one request. `verification` is the JSON of `/v1/verifications/{id}`."""

    shot: Shot
    verification: dict[str, Any]

    @property
    def verdict(self) -> str:
        """The verdict's word, or `missing`."""
        return str(self.verification.get("verdict") or "missing")


def shots() -> list[Shot]:
    """Every question once, the four ways of asking in turn."""
    ways = [(0.0, False), (0.8, True), (0.8, False), (0.0, True)]
    return [Shot(question, *ways[index % len(ways)]) for index, question in enumerate(DEMO)]


class Client:
    """Asks one proxy through the openai SDK and fetches verdicts from it."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url
        self._openai = openai.AsyncOpenAI(base_url=base_url, api_key="demo", max_retries=0, timeout=300.0)
        self._http = httpx.AsyncClient(trust_env=False, timeout=60.0, headers={"authorization": "Bearer demo"})

    async def close(self) -> None:
        """Close both connections' pools."""
        await self._openai.close()
        await self._http.aclose()

    async def run(self, backend: str, plan: Sequence[Shot], tick: Say) -> list[Outcome]:
        """Send the plan: all but the last eight singly, those at once; then wait for every verdict."""
        singly, together = plan[:-TOGETHER], plan[-TOGETHER:]
        ids: list[str] = []
        for shot in singly:
            ids.append(await self.ask(backend, shot))
            tick(f"{len(ids)} of {len(plan)} answers")
        ids += await asyncio.gather(*(self.ask(backend, shot) for shot in together))
        tick(f"{len(ids)} of {len(plan)} answers")
        outcomes = []
        for shot, id in zip(plan, ids, strict=True):
            outcomes.append(Outcome(shot, await self.verification(id)))
            tick(f"{len(ids)} answers, {len(outcomes)} verdicts")
        return outcomes

    async def ask(self, backend: str, shot: Shot, max_tokens: int = MAX_TOKENS) -> str:
        """One chat request; returns the id of its verification."""
        response = await self._openai.chat.completions.with_raw_response.create(
            model=MODEL,
            messages=[{"role": "user", "content": shot.question}],
            temperature=shot.temperature,
            max_tokens=max_tokens,
            stream=shot.stream,
            extra_headers={"x-countersign-backend": backend},
        )
        answer: Any = response.parse()
        if shot.stream:
            async for _ in answer:
                pass
        return response.headers["x-countersign-id"]

    async def verification(self, id: str) -> dict[str, Any]:
        """The verification once it is done, or as it is when patience runs out."""
        deadline = time.monotonic() + VERDICT_PATIENCE
        while True:
            response = await self._http.get(f"{self._base_url}/verifications/{id}", params={"wait": 10})
            found: dict[str, Any] = response.json() if response.status_code == 200 else {}
            if found.get("status") == "done" or time.monotonic() > deadline:
                return found
            await asyncio.sleep(0.2)

    async def standing(self, backend: str, answers: int) -> dict[str, Any]:
        """The backend's standing once so many answers are in it, or as it is when patience runs out."""
        deadline = time.monotonic() + STANDING_PATIENCE
        while True:
            response = await self._http.get(f"{self._base_url}/backends/{backend}/standing")
            response.raise_for_status()
            found: dict[str, Any] = response.json()
            if found["coverage"]["generations"] >= answers or time.monotonic() > deadline:
                return found
            await asyncio.sleep(0.2)


async def added_latency(client: Client, backend: str, direct_url: str, pairs: int = 12) -> float:
    """Milliseconds that a one-token answer takes longer through the proxy: median over paired requests.

    The direct request asks for nothing that evidence needs, so the backend's own cost of logprobs is in it. Which of
    a pair goes first alternates, and verdicts are awaited in between, so that no replay runs meanwhile. The first
    pair warms up.
    """
    gaps = []
    async with openai.AsyncOpenAI(base_url=direct_url + "/v1", api_key="demo", max_retries=0) as direct:
        for index in range(pairs + 1):
            question = DEMO[index % len(DEMO)]
            seconds = {}
            for way in ("direct", "proxied") if index % 2 else ("proxied", "direct"):
                start = time.perf_counter()
                if way == "direct":
                    await _ask_directly(direct, question)
                else:
                    id = await client.ask(backend, Shot(question, 0.0, False), max_tokens=1)
                seconds[way] = time.perf_counter() - start
                if way == "proxied":
                    await client.verification(id)
            gaps.append(seconds["proxied"] - seconds["direct"])
    return 1000 * statistics.median(gaps[1:])


async def _ask_directly(direct: openai.AsyncOpenAI, question: str) -> None:
    messages: Any = [{"role": "user", "content": question}]
    await direct.chat.completions.create(model=MODEL, messages=messages, temperature=0.0, max_tokens=1)
