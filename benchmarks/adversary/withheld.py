"""Cheats that keep evidence back or make it unusable, hoping that what cannot be checked is not held against them."""

from __future__ import annotations

import json
import math
import random
import re

from benchmarks.adversary.answers import Choice, parts_of
from benchmarks.adversary.base import Cheat, Rewriting
from benchmarks.adversary.servers import Body, Row

MASKED = -9999.0
_PAIR = re.compile(rb'\{("token_id:\d+":\s?[-+.\deE]+),\s?"token_id:\d+":\s?[-+.\deE]+')


class NoLogprobs(Cheat):
    """Withholds the logprobs it was asked for."""

    name = "no-logprobs"
    about = "withholds the logprobs"
    caught_by = ("withheld",)

    async def answer(self, frames: list[Body], asked: Body) -> list[Body]:
        return without(frames, "logprobs")


class NoTokenIds(Cheat):
    """Withholds the ids of what it generated."""

    name = "no-token-ids"
    about = "withholds the output ids"
    caught_by = ("withheld",)

    async def answer(self, frames: list[Body], asked: Body) -> list[Body]:
        return without(frames, "token_ids")


class NoPromptIds(Cheat):
    """Withholds the ids of the prompt."""

    name = "no-prompt-ids"
    about = "withholds the prompt ids"
    caught_by = ("withheld",)

    async def answer(self, frames: list[Body], asked: Body) -> list[Body]:
        without(frames, "prompt_token_ids")
        for frame in frames:
            if "prompt_token_ids" in frame:
                frame["prompt_token_ids"] = None
        return frames


class NoRoutedExperts(Cheat):
    """Withholds the expert ids of a mixture-of-experts model."""

    name = "no-routed-experts"
    about = "withholds the expert ids"
    caught_by = ("withheld", "routing")
    moe = True
    limits = "no cheat in a stream, which never carries expert ids"

    async def answer(self, frames: list[Body], asked: Body) -> list[Body]:
        return without(frames, "routed_experts")


class _Rows(Rewriting):
    """Changes the claim row by row."""

    def change(self, row: Row, own: int, at: int) -> Row:
        """One row as it is claimed."""
        return row

    async def edit(self, choice: Choice, asked: Body) -> None:
        if choice.rows is not None:
            pairs = zip(choice.rows, choice.ids, strict=True)
            choice.rows = [self.change(row, own, at) for at, (row, own) in enumerate(pairs)]


class NanLogprobs(_Rows):
    """NaN where logprobs belong."""

    name = "nan-logprobs"
    about = "reports NaN for every fourth emitted token"
    caught_by = ("withheld",)

    def change(self, row: Row, own: int, at: int) -> Row:
        return row if at % 4 else row | {own: math.nan}


class MaskedLogprobs(_Rows):
    """Pretends a grammar had masked the alternatives."""

    name = "masked-logprobs"
    about = "reports −9999 for every alternative, as vLLM does under a grammar that nobody asked for"
    caught_by = ("withheld",)

    def change(self, row: Row, own: int, at: int) -> Row:
        return {id: value if id == own else MASKED for id, value in row.items()}


class ShortLists(_Rows):
    """Fewer alternatives than asked for."""

    name = "short-lists"
    about = "reports five alternatives where twenty were asked for"
    caught_by = ("withheld",)

    def change(self, row: Row, own: int, at: int) -> Row:
        return dict(list(row.items())[:5])


class Unsorted(_Rows):
    """The right entries in no order."""

    name = "unsorted"
    about = "shuffles the alternatives"
    caught_by = ("withheld",)

    def change(self, row: Row, own: int, at: int) -> Row:
        others = [id for id in row if id != own]
        random.Random(at).shuffle(others)
        return {id: row[id] for id in (own, *others)}


class Duplicates(Cheat):
    """The same alternative again and again."""

    name = "duplicates"
    about = "fills the lists up with repetitions of one alternative"
    caught_by = ("withheld",)
    limits = "completions name alternatives as keys, which cannot repeat: there it repeats them in the raw JSON"

    def wire(self, frames: list[Body], asked: Body) -> bytes:
        if "messages" in asked:
            _repeat(frames)
            return super().wire(frames, asked)
        return _twice(super().wire(frames, asked))


class WrongIds(Rewriting):
    """Output ids that are not those of the logprobs."""

    name = "wrong-ids"
    about = "reports output ids that are one off from those its logprobs name"
    caught_by = ("withheld",)

    async def answer(self, frames: list[Body], asked: Body) -> list[Body]:
        for parts in parts_of(frames).values():
            for part in parts:
                if part.get("token_ids"):
                    part["token_ids"] = [id + 1 for id in part["token_ids"]]
        return frames


class BrokenFrame(Cheat):
    """JSON that ends too soon, in the middle of the answer."""

    name = "broken-frame"
    about = "sends a frame whose JSON breaks off"
    caught_by = ("withheld",)
    limits = "a client that reads the broken frame fails, so nobody can do this often"

    def wire(self, frames: list[Body], asked: Body) -> bytes:
        if not asked.get("stream"):
            return super().wire(frames, asked)[:-20]
        data = [f"data: {json.dumps(frame)}\n\n" for frame in frames]
        data[len(data) // 2] = data[len(data) // 2][:-20] + "\n\n"
        return "".join([*data, "data: [DONE]\n\n"]).encode()


def without(frames: list[Body], name: str) -> list[Body]:
    """Every choice with that field null."""
    for parts in parts_of(frames).values():
        for part in parts:
            if name in part:
                part[name] = None
    return frames


def _repeat(frames: list[Body]) -> None:
    for parts in parts_of(frames).values():
        for entry in (entry for part in parts for entry in (part.get("logprobs") or {}).get("content") or ()):
            tops = entry["top_logprobs"]
            entry["top_logprobs"] = tops[:2] + tops[1:2] * (len(tops) - 2)


def _twice(data: bytes) -> bytes:
    """Every list of alternatives with its first entry in place of the second too, which only raw JSON can hold."""
    return _PAIR.sub(rb"{\1,\1", data)
