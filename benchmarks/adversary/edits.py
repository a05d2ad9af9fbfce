"""Cheats that change a finished answer's words or tokens: advertising, watermarks, and bills for more tokens."""

from __future__ import annotations

import re

from benchmarks.adversary.answers import Choice, width_asked
from benchmarks.adversary.base import Rewriting
from benchmarks.adversary.servers import Body

BRAND = "Acme"
LONG_WORD = re.compile(r"(?<= )[A-Za-z]{6,}")
SHORTEST_SPLIT = 5
SPLITS = 0.25
"""Share of the answer's tokens that `retokenised` splits, counted from the front."""


class Substitution(Rewriting):
    """Puts a brand's name in place of one word, in text and ids, and scores what follows in a true prefill."""

    name = "substitution"
    about = "replaces a word by a brand's name in text and ids, and claims a true prefill from there on"
    scores = True
    caught_by = ("selection", "margin", "structure")

    async def edit(self, choice: Choice, asked: Body) -> None:
        text = advertised(choice.text)
        if text == choice.text or choice.rows is None:
            return
        model = str(asked.get("model"))
        ended = choice.ids[-1:] if choice.finish == "stop" and choice.ids[-1] in self.setup.eos else []
        ids = await self.upstream.tokenize(model, text)
        # A stop string or a limit may have cut the text within a token.
        same = next((at for at, (new, old) in enumerate(zip(ids, choice.ids, strict=False)) if new != old), len(ids))
        ids = _fit(ids, len(choice.ids) if choice.finish == "length" else None) + ended
        rows = await self.truth.score(model, choice.prompt, ids, width_asked(asked))
        choice.rows = choice.rows[:same] + rows[same:]
        if choice.finish == "length" and len(ids) < len(choice.ids):
            ids, choice.rows = await self._fill(choice, ids, asked)
        choice.ids = ids
        choice.text = await self.upstream.detokenize(model, ids[: len(ids) - len(ended)])

    async def _fill(self, choice: Choice, ids: list[int], asked: Body) -> tuple[list[int], list[dict[int, float]]]:
        """As many tokens as before, because a shorter answer would not have ended by its length."""
        model = str(asked.get("model"))
        rows = list(choice.rows or [])
        more, _ = await self.upstream.draft(asked, choice.prompt + ids, asked.get("seed"), len(choice.ids) - len(ids))
        scored = await self.truth.score(model, choice.prompt, ids + more, width_asked(asked))
        return ids + more, rows + scored[len(rows) :]


class TextSubstitution(Rewriting):
    """Puts a brand's name into the text only; ids and logprobs are those of the honest answer."""

    name = "text-substitution"
    about = "replaces a word by a brand's name in the text and leaves the ids alone"
    caught_by = ("structure",)

    async def edit(self, choice: Choice, asked: Body) -> None:
        choice.text = advertised(choice.text)


class Retokenised(Rewriting):
    """Splits tokens into smaller ones that decode to the same text, and bills them all."""

    name = "retokenised"
    about = "splits a quarter of the tokens into smaller ones of the same text, claims a true prefill, bills them all"
    scores = True
    caught_by = ("structure", "selection", "margin")

    async def edit(self, choice: Choice, asked: Body) -> None:
        if choice.rows is None:
            return
        model = str(asked.get("model"))
        most = len(choice.ids)
        ids: list[int] = []
        splits = 0
        for id in choice.ids:
            parts = await self._split(model, id) if splits < SPLITS * most else [id]
            splits += len(parts) > 1
            ids += parts
        limited = choice.finish == "length"
        choice.ids = ids[:most] if limited else ids
        choice.text = await self._text(model, choice) if limited else choice.text
        choice.rows = await self.truth.score(model, choice.prompt, choice.ids, width_asked(asked))

    async def _split(self, model: str, id: int) -> list[int]:
        text = await self.upstream.detokenize(model, [id])
        if len(text) < SHORTEST_SPLIT or not text.strip().isalpha():
            return [id]
        half = len(text) // 2
        parts = await self.upstream.tokenize(model, text[:half]) + await self.upstream.tokenize(model, text[half:])
        return parts if await self.upstream.detokenize(model, parts) == text else [id]

    async def _text(self, model: str, choice: Choice) -> str:
        return await self.upstream.detokenize(model, choice.ids)


def advertised(text: str) -> str:
    """The text with its first long word replaced by the brand."""
    return LONG_WORD.sub(BRAND, text, count=1)


def _fit(ids: list[int], most: int | None) -> list[int]:
    return ids if most is None else ids[:most]
