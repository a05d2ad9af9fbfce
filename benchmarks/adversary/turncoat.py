"""Good at times: for a while and then bad, whom a lifetime average would forgive, or bad in a share of answers."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod

from aiohttp import ClientSession, web

from benchmarks.adversary.base import Cheat, Setup
from benchmarks.adversary.relays import Honest
from benchmarks.adversary.spoofs import Spoofer
from benchmarks.adversary.withheld import NoLogprobs


class Wavering(Cheat, ABC):
    """The true server and another cheat, one of which answers each request."""

    def __init__(self, setup: Setup, bad: type[Cheat]) -> None:
        super().__init__(setup)
        self._good = Honest(Setup(setup.truth or setup.upstream))
        self._bad = bad(setup)

    def join(self, session: ClientSession) -> None:
        super().join(session)
        self._good.join(session)
        self._bad.join(session)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        return await (self._bad if self.cheats() else self._good).generate(request)

    @abstractmethod
    def cheats(self) -> bool:
        """Whether this request is cheated."""


class GoodThenBad(Wavering):
    """Relays the true server for the first answers, then turns into another cheat, a spoofer unless told which."""

    name = "good-then-bad"
    about = "honest for its first answers, then a spoofer, or whatever `--then` names"
    generates = "cheap"
    scores = True
    caught_by = ("selection", "margin")

    def __init__(self, setup: Setup, bad: type[Cheat] = Spoofer) -> None:
        super().__init__(setup, bad)
        self._left = setup.good

    def cheats(self) -> bool:
        self._left -= 1
        return self._left < 0


class Sometimes(Wavering):
    """Cheats in a random share of its answers, and withholds logprobs there unless told what else."""

    name = "sometimes"
    about = "in a random share of its answers (`--share`) leaves out the logprobs, or does what `--then` names"
    limits = "caught as that cheat is, more slowly; by default it cheats one answer in ten"

    def __init__(self, setup: Setup, bad: type[Cheat] = NoLogprobs) -> None:
        super().__init__(setup, bad)
        self._random = random.Random()

    def cheats(self) -> bool:
        return self._random.random() < self.setup.share
