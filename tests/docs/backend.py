"""The backend of the trial stack: the toy model of `benchmarks.chaos`, for requests that leave out what it needs.

`python -m tests.docs.backend PORT` serves until SIGTERM.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from benchmarks.chaos import server
from benchmarks.chaos.upstream import Log, Upstream

MODEL = "toy"
TOKENS = 24
"""The most that an answer has, prompt and answer then filling the model; the profile is made of such answers."""


class _NoLog(Log):
    """Nobody reads it."""

    def __init__(self) -> None:
        pass

    def write(self, **fields: Any) -> None:
        """Nothing."""


class Backend(Upstream):
    """Answers honestly, or behind the path `/cheat` hotter than asked."""

    async def _answer(self, fields: dict[str, Any], kind: str, writer: asyncio.StreamWriter) -> None:
        asked = fields.get("max_tokens") or fields.get("max_completion_tokens") or TOKENS
        kind = "honest" if kind == "honest" else "hotter"
        await super()._answer(fields | {"max_tokens": min(asked, TOKENS)}, kind, writer)


if __name__ == "__main__":
    asyncio.run(server.run(Backend(_NoLog(), interval=0.0), int(sys.argv[1])))
