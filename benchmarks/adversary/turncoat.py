"""Good for a while, then bad: a history that a lifetime average would forgive."""

from __future__ import annotations

from aiohttp import ClientSession, web

from benchmarks.adversary.base import Cheat, Setup
from benchmarks.adversary.relays import Honest
from benchmarks.adversary.spoofs import Spoofer


class GoodThenBad(Cheat):
    """Relays the true server for the first answers, then turns into another cheat, a spoofer unless told which."""

    name = "good-then-bad"
    about = "honest for its first answers, then a spoofer, or whatever `--then` names"
    generates = "cheap"
    scores = True
    caught_by = ("selection", "margin")

    def __init__(self, setup: Setup, bad: type[Cheat] = Spoofer) -> None:
        super().__init__(setup)
        self._good = Honest(Setup(setup.truth or setup.upstream))
        self._bad = bad(setup)
        self._left = setup.good

    def join(self, session: ClientSession) -> None:
        super().join(session)
        self._good.join(session)
        self._bad.join(session)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        self._left -= 1
        return await (self._good if self._left >= 0 else self._bad).generate(request)
