"""Cheats about where an answer ends: cut short to save work, or dragged out to bill more."""

from __future__ import annotations

import math

from benchmarks.adversary.answers import Choice, longest, width_asked
from benchmarks.adversary.base import Cheat, Rewriting
from benchmarks.adversary.race import bend, listed, rules
from benchmarks.adversary.servers import Body


class EarlyStop(Rewriting):
    """Cuts an answer where its end is likeliest, adds the end token and bends the claim so that it wins there."""

    name = "early-stop"
    about = "cuts answers where an end is likeliest, adds the end token and bends its claim so that it wins"
    caught_by = ("distance", "margin", "structure")
    limits = "needs the model's end token (--eos); cuts in the second half only"

    async def edit(self, choice: Choice, asked: Body) -> None:
        if not self.setup.eos or choice.rows is None or choice.finish != "length" or len(choice.ids) < 8:
            return
        eos = self.setup.eos[0]
        half = len(choice.ids) // 2
        likely = [row.get(eos, min(row.values()) - 1.0) for row in choice.rows[half:]]
        at = half + max(range(len(likely)), key=likely.__getitem__)
        row = listed(dict(choice.rows[at]) | {eos: likely[at - half]}, eos, width_asked(asked))
        rule = rules(choice, asked, self.setup.runtime)
        if rule.known:
            (scores,) = rule.scores(len(choice.prompt), [row], at)
            row = listed(bend(row, eos, scores, rule.temperature), eos, width_asked(asked))
        choice.ids = [*choice.ids[:at], eos]
        choice.rows = [*choice.rows[:at], row]
        choice.text = await self.upstream.detokenize(str(asked.get("model")), choice.ids[:-1])
        choice.finish, choice.stop = "stop", None


class CutShort(Rewriting):
    """Generates half the tokens and calls that the end."""

    name = "cut-short"
    about = "generates at most half of the tokens asked for and says the model had finished"
    caught_by = ("structure",)

    async def ask(self, body: Body) -> Body:
        limit = longest(body)
        if limit is None:
            return await super().ask(body)
        names = [name for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None]
        return await super().ask(body | {name: math.ceil(limit / 2) for name in names})

    async def edit(self, choice: Choice, asked: Body) -> None:
        choice.finish = "stop"


class Padding(Cheat):
    """Forbids the end of the answer until every token asked for is there to be billed."""

    name = "padding"
    about = "suppresses the end token until the request's max_tokens, to bill more"
    caught_by = ("selection", "structure", "margin")
    shape = "short"
    limits = "changes only answers that would have ended before their limit"

    async def ask(self, body: Body) -> Body:
        limit = longest(body)
        return body if limit is None else body | {"min_tokens": limit}


class PaddingOpen(Cheat):
    """Lets the end token pass and goes on."""

    name = "padding-open"
    about = "goes on after the end token until the request's max_tokens, to bill more"
    caught_by = ("structure",)
    shape = "short"
    limits = "changes only answers that would have ended before their limit"

    async def ask(self, body: Body) -> Body:
        return body | {"ignore_eos": True}
