"""Which replays are inside the engine: enough to fill its next steps, and as a rule of one form.

vLLM's V2 runner computes the top-k of every token of a step in which one sequence asks for it, so a batch that mixes
both forms costs what the dearer one does. Each form therefore has its turn. The engine's own queue stays short, which
also bounds what it holds and lets a cancelled replay leave without having cost anything.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from policies.evidence import ReplayForm


class Gate:
    """Lets replays in, first come first served within a form. Used on one loop only.

    Args:
        window: tokens inside at which nobody else enters; the last one in may reach beyond it.
        turn: tokens of one form that enter before the other's turn, when the other waits.
    """

    def __init__(self, window: int, turn: int) -> None:
        self._window, self._turn = window, turn
        self._waiting: dict[ReplayForm, deque[tuple[int, asyncio.Future[None]]]] = {"full": deque(), "ids": deque()}
        self._form: ReplayForm = "ids"
        self._entered = 0
        self.inside = 0
        """Tokens in the engine."""

    @asynccontextmanager
    async def through(self, form: ReplayForm, tokens: int) -> AsyncIterator[None]:
        """Wait to enter; leaving lets the next ones in."""
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[form].append((tokens, ticket))
        self._admit()
        try:
            await ticket
        except asyncio.CancelledError:
            if ticket.done() and not ticket.cancelled():
                self._leave(tokens)
            raise
        try:
            yield
        finally:
            self._leave(tokens)

    def _leave(self, tokens: int) -> None:
        self.inside -= tokens
        self._admit()

    def _admit(self) -> None:
        while (form := self._next()) is not None:
            tokens, ticket = self._waiting[form][0]
            if not ticket.done() and self.inside >= self._window:
                return
            self._waiting[form].popleft()
            if ticket.done():
                continue
            if form != self._form:
                self._form, self._entered = form, 0
            self.inside += tokens
            self._entered += tokens
            ticket.set_result(None)

    def _next(self) -> ReplayForm | None:
        other: ReplayForm = "full" if self._form == "ids" else "ids"
        if self._waiting[other] and (not self._waiting[self._form] or self._entered >= self._turn):
            return other
        return self._form if self._waiting[self._form] else None
