"""Cheats that generate with one model and report another's logprobs: one prefill of the true model pays for it."""

from __future__ import annotations

import math
from typing import ClassVar

from benchmarks.adversary.answers import Choice, longest, width_asked
from benchmarks.adversary.base import Rewriting
from benchmarks.adversary.race import Rules, bend, listed, losses, rules, winner
from benchmarks.adversary.servers import Body, Row


class Spoofer(Rewriting):
    """Generates with a cheap model, then has the true model score those very tokens in one prefill.

    The claim is then the true model's own, so its distance to any reference is honest; only the choice of
    tokens gives it away.
    """

    name = "spoofer"
    about = "generates at a cheap server and reports the true model's logprobs for those tokens"
    generates = "cheap"
    scores = True
    caught_by: ClassVar[tuple[str, ...]] = ("selection", "margin")

    async def edit(self, choice: Choice, asked: Body) -> None:
        if choice.rows is not None:
            choice.rows = await self.score(choice.prompt, choice.ids, asked)

    async def score(self, prompt: list[int], ids: list[int], asked: Body, spare: int = 0) -> list[Row]:
        """The true model's rows for these ids."""
        return await self.truth.score(str(asked.get("model")), prompt, ids, width_asked(asked), spare)


class SpoofRepaired(Spoofer):
    """Lossy speculative decoding: cheap drafts, true prefills, and the true winner wherever a draft loses by too much.

    After a repair the cheap model goes on from there in chunks. Where the noise is a function of the position (V2
    runner) it drafts a chunk in one request with the request's seed; elsewhere, token by token with the noise computed
    here.
    """

    name = "spoof-repaired"
    about = "a spoofer that replaces tokens losing by more than τ under the true model, and drafts on from there"
    limits = "drafts after a repair know temperature and seed, and top-p and top-k only on a V2 runner"
    tau = 0.14
    budget = 0.25
    """Share of the tokens that may be repaired; what remains violates."""
    chunk = 16

    async def edit(self, choice: Choice, asked: Body) -> None:
        rule = rules(choice, asked, self.setup.runtime)
        if choice.rows is None or not rule.known:
            return await super().edit(choice, asked)
        limit = longest(asked) or len(choice.ids)
        ids, left = list(choice.ids), int(self.budget * limit)
        rows: list[Row] = []
        while True:
            rows += (await self.score(choice.prompt, ids, asked))[len(rows) :]
            scores = rule.scores(len(choice.prompt), rows)
            bad = next((at for at, loss in enumerate(losses(ids, scores)) if loss > self.tau), None)
            if bad is not None and left > 0:
                left -= 1
                ids = [*ids[:bad], winner(scores[bad])]
                rows = [*rows[:bad], listed(rows[bad], ids[-1], width_asked(asked))]
            if len(ids) >= limit or ids[-1] in self.setup.eos or ids == choice.ids:
                break
            ids += await self._draft(choice.prompt + ids, len(ids), rule, asked, min(self.chunk, limit - len(ids)))
        if ids != choice.ids:
            await self._replace(choice, ids, asked)
        choice.rows = rows

    async def _draft(self, prompt: list[int], start: int, rule: Rules, asked: Body, count: int) -> list[int]:
        if rule.temperature == 0 or rule.runtime.endswith("-v2"):
            return (await self.upstream.draft(asked, prompt, rule.seed, count))[0]
        drafted: list[int] = []
        while len(drafted) < count and not (drafted and drafted[-1] in self.setup.eos):
            row = await self.upstream.next_row(str(asked.get("model")), prompt + drafted, width_asked(asked))
            (scores,) = rule.scores(len(prompt) - start, [row], start + len(drafted))
            drafted.append(winner(scores))
        return drafted

    async def _replace(self, choice: Choice, ids: list[int], asked: Body) -> None:
        stopped = ids[-1] in self.setup.eos
        choice.ids, choice.stop, choice.finish = ids, None, "stop" if stopped else "length"
        shown = ids[:-1] if stopped else ids
        choice.text = await self.upstream.detokenize(str(asked.get("model")), shown) if shown else ""


class SpoofBent(Spoofer):
    """Bends the claim of every token that loses, as little as makes it win; the listed mass stays what it was."""

    name = "spoof-bent"
    about = "a spoofer that bends the claim of losing tokens just enough that they win by the request's seed"
    caught_by = ("margin", "distance")
    limits = "ignores top-p, top-k and min-p when it looks for rivals"

    async def edit(self, choice: Choice, asked: Body) -> None:
        await super().edit(choice, asked)
        bend_choice(choice, asked, self.setup.runtime)


class SpoofRepairedBent(SpoofRepaired):
    """Repairs what loses by much and bends what loses by little: the best that is known."""

    name = "spoof-repaired-bent"
    about = "repairs tokens that lose by more than τ and bends the claim of those that lose by less"
    caught_by = ()
    limits = (
        "close to lossless speculative decoding, and paid for like it: what τ lets through is all that is left of the "
        "cheat, so it is reported, not expected to be caught within 20 responses"
    )
    budget = 1.0

    async def edit(self, choice: Choice, asked: Body) -> None:
        await super().edit(choice, asked)
        bend_choice(choice, asked, self.setup.runtime)


class SpoofOmitted(Spoofer):
    """Drops the rivals that beat the emitted token from the claimed list and fills up with what comes next.

    Every remaining number is the true model's own. A server that caps logprobs at the width asked for cannot be
    asked for the next ones: then ids of the cheap model's list fill the places, just under the smallest.
    """

    name = "spoof-omitted"
    about = "a spoofer that leaves the rival which beats the emitted token out of the claim, for the true 21st"
    caught_by = ("distance", "margin")
    limits = "needs --max-logprobs over 20 at the true server for the true 21st; invents its logprob elsewhere"
    spare = 8

    async def edit(self, choice: Choice, asked: Body) -> None:
        rule = rules(choice, asked, self.setup.runtime)
        if choice.rows is None or not rule.known:
            return await super().edit(choice, asked)
        rows = await self.score(choice.prompt, choice.ids, asked, self.spare)
        anywhere = dict.fromkeys(other for row in rows for other in row)
        scores = rule.scores(len(choice.prompt), rows)
        choice.rows = [
            listed(_omit(row, id, scored, [*cheap, *anywhere]), id, width_asked(asked))
            for row, id, scored, cheap in zip(rows, choice.ids, scores, choice.rows, strict=True)
        ]


class InventedTopK(Rewriting):
    """Reports the emitted token's true logprob and invents the alternatives, in falling order and possible in sum."""

    name = "invented-topk"
    about = "reports a true logprob for each emitted token and invents the other twenty"
    generates = "cheap"
    scores = True
    caught_by = ("distance",)

    async def edit(self, choice: Choice, asked: Body) -> None:
        if choice.rows is None:
            return
        rule = rules(choice, asked, self.setup.runtime)
        truth = await self.truth.score(str(asked.get("model")), choice.prompt, choice.ids, 1)
        rows = [_invent(true[id], id, cheap) for id, true, cheap in zip(choice.ids, truth, choice.rows, strict=True)]
        scores = rule.scores(len(choice.prompt), rows)
        choice.rows = [
            listed(_lose(row, id, scored, rule.temperature), id, width_asked(asked))
            for row, id, scored in zip(rows, choice.ids, scores, strict=True)
        ]


def bend_choice(choice: Choice, asked: Body, runtime: str) -> None:
    """Bend every row in which the emitted token loses."""
    rule = rules(choice, asked, runtime)
    if choice.rows is None or not rule.known:
        return
    scores = rule.scores(len(choice.prompt), choice.rows)
    width = width_asked(asked)
    choice.rows = [
        listed(bend(row, id, scored, rule.temperature), id, width) if max(scored.values()) > scored[id] + 1e-6 else row
        for row, id, scored in zip(choice.rows, choice.ids, scores, strict=True)
    ]


def _omit(row: Row, own: int, scores: Row, fillers: list[int]) -> Row:
    """The row without what beats `own`; `fillers` stand in where nothing true is left, or the list would be short."""
    kept = {id: value for id, value in row.items() if id == own or scores[id] <= scores[own] + 1e-6}
    smallest = min(row.values())
    for filler in [*dict.fromkeys(id for id in fillers if id not in row)][: len(row) - len(kept)]:
        smallest -= 0.05
        kept[filler] = smallest
    return kept


def _invent(logprob: float, own: int, cheap: Row) -> Row:
    """The cheap model's alternatives, scaled to the mass that the emitted token leaves."""
    others = {id: value for id, value in cheap.items() if id != own}
    room = max(1e-6, 0.98 * (1.0 - math.exp(logprob)))
    shift = math.log(room) - math.log(max(sum(map(math.exp, others.values())), 1e-9))
    return {own: logprob} | {id: min(value + shift, -1e-6) for id, value in others.items()}


def _lose(row: Row, own: int, scores: Row, temperature: float) -> Row:
    """The row with every invented alternative lowered that would win."""
    scale = temperature or 1.0
    return {
        id: value if id == own else value - max(0.0, (scores[id] - scores[own] + 0.01) * scale)
        for id, value in row.items()
    }
