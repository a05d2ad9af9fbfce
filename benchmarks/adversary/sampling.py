"""Cheats that sample by other rules than the client asked for."""

from __future__ import annotations

from benchmarks.adversary.base import Cheat
from benchmarks.adversary.servers import Body


class Hot(Cheat):
    """Samples at another temperature than the client asked for, and reports its own (raw) logprobs."""

    name = "hot"
    about = "samples 0.4 hotter than asked"
    caught_by = ("selection", "margin")
    shift = 0.4

    async def ask(self, body: Body) -> Body:
        return body | {"temperature": min(2.0, float(body.get("temperature", 1.0)) + self.shift)}


class TopP(Cheat):
    """Cuts the nucleus of every sampled answer, as a server does that wants fewer tokens to go wrong."""

    name = "top-p"
    about = "samples from the nucleus of 0.8 whatever top_p was asked for"
    caught_by = ("selection", "margin")
    shape = "hot"
    limits = "changes nothing at temperature 0"

    async def ask(self, body: Body) -> Body:
        return body | {"top_p": 0.8 if float(body.get("top_p") or 1.0) > 0.8 else 1.0}


class Greedy(Cheat):
    """Answers at temperature 0 whatever was asked, which needs no sampler and can be cached."""

    name = "greedy"
    about = "always takes the most probable token"
    caught_by = ("selection", "margin")
    shape = "hot"
    limits = "changes nothing at temperature 0"

    async def ask(self, body: Body) -> Body:
        changed = body | {"temperature": 0.0}
        # vLLM refuses several choices at temperature 0.
        return changed if int(body.get("n") or 1) == 1 else body | {"temperature": 0.01}
