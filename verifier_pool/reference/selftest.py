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
from verifier_pool.reference.canary import AGREEMENT, CUT, Known, gap, spoiled

Ask = Callable[[Sequence[ReplayRequest]], Awaitable[list[Replay]]]
"""Replays of all requests at once, in order."""

Answer = Callable[[Ids, int], Awaitable[Known]]
"""The reference's own greedy answer of so many tokens to a prompt."""

PROMPT_TOKENS = 32
ANSWER_TOKENS = 24
SHARED_TOKENS = 48
APART_TOKENS = 16
"""The shared beginning spans several blocks of a prefix cache (16 tokens on GPUs)."""


class SelfTestFailed(CountersignError):
    """The reference computes what a sound one does not; the message says what."""


async def examine(
    ask: Ask, answer: Answer, *, vocab_size: int, max_tokens: int, prompt_ids: Ids | None = None
) -> list[Known]:
    """Test a reference; its known answers, good and bad, for canaries.

    Args:
        max_tokens: prompt and output of its longest replay; a reference of fewer than 8 cannot be tested.
        prompt_ids: what it answers to: text it can go on with. Random tokens otherwise.

    Returns:
        A good one, and a bad one where the model tells tokens apart (one of random weights does not).

    Raises:
        SelfTestFailed.
        ReplayError: it could not be asked.
    """
    if max_tokens < 8:
        raise SelfTestFailed(f"it reads only {max_tokens} tokens")
    good = await _known_answer(ask, answer, vocab_size, max_tokens, prompt_ids)
    await _shared_beginnings(ask, vocab_size, max_tokens)
    bad = spoiled(good, vocab_size)
    (replay,) = await ask([bad.request()])
    _finite("random tokens", replay)
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


async def _known_answer(ask: Ask, answer: Answer, vocab_size: int, max_tokens: int, prompt_ids: Ids | None) -> Known:
    prompt = min(PROMPT_TOKENS, max_tokens // 2)
    asked = prompt_ids if prompt_ids is not None and 0 < len(prompt_ids) <= max_tokens // 2 else None
    asked = random_ids(prompt, vocab_size, 1) if asked is None else asked
    known = await answer(asked, min(ANSWER_TOKENS, max_tokens - len(asked)))
    replays = {}
    # One after the other, each alone: what is in the batch must not matter here.
    turns: dict[str, ReplayForm] = {"known answer": "full", "twice": "full", "forms": "ids", "forms twice": "ids"}
    for name, form in turns.items():
        (replays[name],) = await ask([known.request(form)])
        _finite(name, replays[name])
    if not np.isfinite(known.logprobs[:, 0]).all():
        raise SelfTestFailed("it answered with a token that it holds impossible")
    _same("its replay of its own answer", gap(known.ids, known.logprobs, replays["known answer"]))
    _same("a second replay of form full", _between(replays["known answer"], replays["twice"]))
    _same("a second replay of form ids", _between(replays["forms"], replays["forms twice"]))
    _same("the two forms of a replay", _between(replays["forms"], replays["known answer"]))
    return known


async def _shared_beginnings(ask: Ask, vocab_size: int, max_tokens: int) -> None:
    apart = min(APART_TOKENS, max_tokens // 4)
    shared = random_ids(min(SHARED_TOKENS, max_tokens - apart), vocab_size, 2)
    # The beginning is scored too: cached rows have no logits, and stale ones have another sequence's.
    prompt, scored = shared[: len(shared) // 3], shared[len(shared) // 3 :]
    pair = [
        ReplayRequest(prompt, np.concatenate([scored, random_ids(apart, vocab_size, seed)]), "completions", b"")
        for seed in (3, 4)
    ]
    alone = [(await ask([each]))[0] for each in pair]
    for order in ([0, 1], [1, 0], [0, 1, 0, 1]):
        for place, replay in zip(order, await ask([pair[place] for place in order]), strict=True):
            _finite("shared beginnings", replay)
            _same("sequences that begin alike", _between(alone[place], replay))


def random_ids(count: int, vocab_size: int, seed: int) -> Ids:
    """int32 (count,), the same ones every time, from the middle of the vocabulary: special tokens stand at its ends."""
    first, last = vocab_size // 8, max(vocab_size * 3 // 4, vocab_size // 8 + 1)
    return np.random.default_rng([vocab_size, seed]).integers(first, last, count).astype(np.int32)


def _between(one: Replay, other: Replay) -> float:
    return gap(one.ids, one.logprobs, other)


def _same(what: str, apart: float) -> None:
    if not apart <= AGREEMENT:
        raise SelfTestFailed(f"{what}: {'not comparable' if apart > CUT else f'{apart:.2f} nats apart'}")


def _finite(what: str, replay: Replay) -> None:
    if not np.isfinite(replay.logprobs[:, 0]).all():
        raise SelfTestFailed(f"{what}: logprobs that are not finite")
