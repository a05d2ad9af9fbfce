"""What a reference must get right before it takes work, asked of it as any replay is.

| test | it fails when |
|---|---|
| finite | the engine computes NaN, or holds impossible what it said itself |
| known answer | its replay of its own greedy answer differs from what it said while it decoded |
| twice | the same replay gives other numbers |
| forms | both forms give other numbers for the same ids |
| shared beginnings | a replay depends on who else began with the same tokens, and when: a stale prefix cache |

All of them allow the noise of batching and of decoding against prefill (`canary.AGREEMENT`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from policies.errors import CountersignError
from policies.evidence import Ids, Replay, ReplayForm
from verifier_pool.reference.base import ReplayRequest
from verifier_pool.reference.canary import AGREEMENT, CUT, Known, draw, gap, spoiled

Ask = Callable[[Sequence[ReplayRequest]], Awaitable[list[Replay]]]
"""Replays of all requests at once, in order."""

Answer = Callable[[int], Awaitable[Known]]
"""The reference's own greedy answer of so many tokens, to whatever prompt it likes."""

ANSWER_TOKENS = 24
SHARED_TOKENS = 48
APART_TOKENS = 16
"""The shared beginning spans several blocks of a prefix cache (16 tokens on GPUs)."""

LEAST_TOKENS = 16


class SelfTestFailed(CountersignError):
    """The reference computes what a sound one does not; the message says what."""


async def examine(ask: Ask, answer: Answer, *, max_tokens: int, vocabulary: Ids | None = None) -> list[Known]:
    """Test a reference; its known answers, good and bad, for canaries.

    Args:
        max_tokens: prompt and output of its longest replay.
        vocabulary: ids to draw random tokens from; those of its own answer otherwise.

    Returns:
        A good one, and a bad one where the model tells tokens apart (one of random weights does not).

    Raises:
        SelfTestFailed: it is not sound, or reads fewer than `LEAST_TOKENS`.
        ReplayError: it could not be asked.
    """
    if max_tokens < LEAST_TOKENS:
        raise SelfTestFailed(f"it reads only {max_tokens} tokens, of {LEAST_TOKENS}")
    good = await answer(min(ANSWER_TOKENS, max_tokens // 2))
    await _known_answer(ask, good)
    ids = _own_vocabulary(good) if vocabulary is None else vocabulary
    await _shared_beginnings(ask, ids, max_tokens)
    bad = spoiled(good, ids)
    (replay,) = await ask([bad.request()])
    _sound("random tokens", bad.request(), replay)
    return [good, bad] if bad.holds(replay) else [good]


async def recheck(ask: Ask, known: Sequence[Known]) -> None:
    """Test a restarted reference by what it said when it first started.

    Raises:
        SelfTestFailed.
        ReplayError: it could not be asked.
    """
    for each, replay in zip(known, await ask([each.request() for each in known]), strict=True):
        if not each.holds(replay):
            raise SelfTestFailed("it does not say what it said when it first started")


async def _known_answer(ask: Ask, known: Known) -> None:
    replays = {}
    # One after the other, each alone: what is in the batch must not matter here.
    turns: dict[str, ReplayForm] = {"known answer": "full", "twice": "full", "forms": "ids", "forms twice": "ids"}
    for name, form in turns.items():
        (replays[name],) = await ask([known.request(form)])
        _sound(name, known.request(form), replays[name])
    if not np.isfinite(known.logprobs[:, 0]).all():
        raise SelfTestFailed("it answered with a token that it holds impossible")
    _same("its replay of its own answer", gap(known.ids, known.logprobs, replays["known answer"]))
    _same("a second replay of form full", _between(replays["known answer"], replays["twice"]))
    _same("a second replay of form ids", _between(replays["forms"], replays["forms twice"]))
    _same("the two forms of a replay", _between(replays["forms"], replays["known answer"]))


async def _shared_beginnings(ask: Ask, vocabulary: Ids, max_tokens: int) -> None:
    apart = min(APART_TOKENS, max_tokens // 4)
    shared = draw(vocabulary, min(SHARED_TOKENS, max_tokens - apart), 2)
    # The beginning is scored too: cached rows have no logits, and stale ones have another sequence's.
    prompt, scored = shared[: len(shared) // 3], shared[len(shared) // 3 :]
    pair = [
        ReplayRequest(prompt, np.concatenate([scored, draw(vocabulary, apart, seed)]), "completions", b"")
        for seed in (3, 4)
    ]
    alone = [(await ask([each]))[0] for each in pair]
    for order in ([0, 1], [1, 0], [0, 1, 0, 1]):
        for place, replay in zip(order, await ask([pair[place] for place in order]), strict=True):
            _sound("shared beginnings", pair[place], replay)
            _same("sequences that begin alike", _between(alone[place], replay))


def middle(vocab_size: int) -> Ids:
    """The ids of a vocabulary's middle: special tokens stand at its ends."""
    first = vocab_size // 8
    return np.arange(first, max(vocab_size * 3 // 4, first + 1), dtype=np.int32)


def _own_vocabulary(known: Known) -> Ids:
    ids = np.unique(np.concatenate([known.prompt_ids, known.ids.ravel()]))
    return ids[ids >= 0].astype(np.int32)


def _between(one: Replay, other: Replay) -> float:
    return gap(one.ids, one.logprobs, other)


def _same(what: str, apart: float) -> None:
    if not apart <= AGREEMENT:
        raise SelfTestFailed(f"{what}: {'not comparable' if apart > CUT else f'{apart:.2f} nats apart'}")


def _sound(what: str, request: ReplayRequest, replay: Replay) -> None:
    if not np.array_equal(replay.ids[:, 0], request.output_ids):
        raise SelfTestFailed(f"{what}: a replay of other tokens than it was asked for")
    if not np.isfinite(replay.logprobs[:, 0]).all():
        raise SelfTestFailed(f"{what}: logprobs that are not finite")
