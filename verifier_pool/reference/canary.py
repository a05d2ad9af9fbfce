"""Replays with a known answer, mixed into a reference's traffic.

Known good: the reference's own greedy answer, as it was when the reference started, whose logprobs a sound replay
gives again. Known bad: the same logprobs claimed for tokens drawn at random; a replay that agrees with those compares
nothing. To the engine either looks like any other replay.

The null of "agrees" is batching noise between decoding and prefill of one engine on the same weights. Per response it
was 0.00–0.04 nats (mean |difference|, T = 0) on an H200 and 0.01–0.03 on a CPU; sparse-attention models are known to
reach 0.15. Another model, or four-bit weights, lies at 0.9 and more, random tokens at 1 (the cut).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from policies.evidence import PAD_ID, Ids, Logprobs, Replay, ReplayForm
from verifier_pool.reference.base import ReplayRequest

AGREEMENT = 0.3
"""Nats, mean |difference| per entry: the largest distance of two sound computations of the same logprobs."""

CUT = 1.0
"""Nats: one router flip of a mixture of experts can move one token by tens, and says nothing about the rest."""


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """Ids and what is claimed for them.

    Attributes:
        prompt_ids, output_ids: int32 (P,) and (G,).
        ids, logprobs: int32 and float32 (G, X), the emitted token first; −1 and −inf pad.
        good: whether a sound replay agrees with the claim.
    """

    prompt_ids: Ids
    output_ids: Ids
    ids: Ids
    logprobs: Logprobs
    good: bool = True

    def request(self, form: ReplayForm = "full") -> ReplayRequest:
        """The replay of it. It holds no claim and nothing that tells it from other replays."""
        return ReplayRequest(self.prompt_ids, self.output_ids, "completions", b"", candidate_ids=self.ids, form=form)

    def holds(self, replay: Replay) -> bool:
        """Whether a replay says of the claim what a sound one does."""
        return agrees(self.ids, self.logprobs, replay) == self.good


def spoiled(known: Known, vocabulary: Ids) -> Known:
    """The claim of a good answer on tokens drawn at random from a vocabulary: known bad."""
    output = draw(vocabulary, len(known.output_ids), 5)
    return Known(known.prompt_ids, output, output[:, None], known.logprobs[:, :1], good=False)


def draw(vocabulary: Ids, count: int, seed: int) -> Ids:
    """int32 (count,): random ids of a vocabulary, the same ones every time."""
    chosen: Ids = np.random.default_rng(seed).choice(vocabulary, count).astype(np.int32)
    return chosen


def gap(ids: Ids, logprobs: Logprobs, replay: Replay) -> float:
    """Mean |difference| in nats, each cut at `CUT`, over the entries that both name; inf where it is no comparison.

    Args:
        ids, logprobs: (G, X), the emitted token first; −1 and −inf pad.
    """
    if len(ids) != len(replay.ids) or not len(ids) or not np.array_equal(ids[:, 0], replay.ids[:, 0]):
        return float("inf")
    same = (ids[:, :, None] == replay.ids[:, None, :]) & (ids != PAD_ID)[:, :, None]
    rows, ours, theirs = np.nonzero(same)
    claimed, replayed = logprobs[rows, ours].astype(np.float64), replay.logprobs[rows, theirs].astype(np.float64)
    # What both hold impossible is the same; what only one does is as far apart as anything gets.
    alike = ~np.isfinite(claimed) & ~np.isfinite(replayed)
    apart = np.where(alike, 0.0, np.abs(np.where(alike, 0.0, claimed) - np.where(alike, 0.0, replayed)))
    return float(np.minimum(np.nan_to_num(apart, nan=np.inf), CUT).mean())


def agrees(ids: Ids, logprobs: Logprobs, replay: Replay) -> bool:
    """Whether a replay gives the claimed logprobs again but for noise: `gap` at most `AGREEMENT`."""
    return gap(ids, logprobs, replay) <= AGREEMENT


class Canary:
    """Which canary is sent next, and when. One is out at a time; good and bad ones in turn, in both forms.

    Silent until its reference knows an answer (`learn`): a server may come up later than the pool.
    """

    def __init__(self, seconds: float, study: Callable[[], None] | None = None) -> None:
        """
        Args:
            seconds: between two canaries; 0 is never.
            study: begins to find out a known answer. Called when a canary would be due and none is known.
        """
        self._seconds, self._study = seconds, study
        self._lock = threading.Lock()
        self._turns: Iterator[tuple[Known, ReplayForm]] | None = None
        self._next = float("-inf")
        self._out: Known | None = None

    @property
    def known(self) -> bool:
        """Whether an answer is known."""
        return self._turns is not None

    def learn(self, known: Sequence[Known]) -> None:
        """Take these answers in turn from now on.

        Args:
            known: good and bad ones, at least one.
        """
        turns = [(each, form) for form in ("full", "ids") for each in known]
        with self._lock:
            self._turns = itertools.cycle(turns)  # type: ignore[arg-type]

    def due(self, now: float) -> bool:
        """Whether one is to be sent: its time has come, and the last one is back.

        Args:
            now: seconds of any one clock.
        """
        with self._lock:
            if not self._seconds or self._out is not None or now < self._next:
                return False
            self._next = now + self._seconds
            known = self._turns is not None
        if not known and self._study is not None:
            self._study()
        return known

    def request(self) -> ReplayRequest:
        """The next canary, to be submitted like any other replay; `judge` must follow."""
        with self._lock:
            assert self._turns is not None, "no answer is known"
            self._out, form = next(self._turns)
            return self._out.request(form)

    def judge(self, replay: Replay | None) -> bool:
        """Whether the reference is sound by the canary that was out. False: take it out of service.

        Args:
            replay: of the last `request`; None when it failed, which says nothing about the numbers.
        """
        with self._lock:
            known, self._out = self._out, None
        return known is None or replay is None or known.holds(replay)
