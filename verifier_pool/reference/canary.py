"""Replays with a known answer, mixed into a reference's traffic.

Known good: the reference's own greedy answer, as it was when the reference started, whose logprobs a sound replay
gives again. Known bad: the same logprobs claimed for tokens drawn at random; a replay that agrees with those compares
nothing. To the engine either looks like any other replay.

The null of "agrees" is batching noise between decoding and prefill of one engine on the same weights. Per response it
was 0.00–0.04 nats (mean |difference|, T = 0) on an H200 and 0.01–0.03 on a CPU; sparse-attention models are known to
reach 0.15. Another model, or four-bit weights, lies at 0.9 and more, random tokens at 1 (the cut).
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from policies.evidence import PAD_ID, Ids, Logprobs, Replay, ReplayForm
from verifier_pool.reference.base import ReplayRequest

AGREEMENT = 0.3
"""Nats, mean |difference| per entry: the largest distance of two sound computations of the same logprobs."""

CUT = 1.0
"""Nats: one router flip of a mixture of experts can move one token by tens, and says nothing about the rest."""

FORMS: tuple[ReplayForm, ...] = ("full", "ids")

WANTED_SECONDS = 1.0
"""Between two canaries at least, however many want one: what a liar who always accuses may cost the engine."""

STUDY_SECONDS = 10.0
"""Between two tries to find out a known answer."""


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
    """When a canary is sent: all known answers, good and bad, each in both forms. One is out at a time.

    Silent until its reference knows an answer (`learn`): a server may come up later than the pool.

    Attributes:
        sent: how many were.
        token: names its reference, from one start to the next (`renew`), among all there are.
    """

    def __init__(self, seconds: float, study: Callable[[], None] | None = None) -> None:
        """
        Args:
            seconds: between two canaries; 0 is never.
            study: begins to find out a known answer. Called when a canary would be due and none is known.
        """
        self._seconds, self._study = seconds, study
        self._lock = threading.Lock()
        self._turns: list[tuple[Known, ReplayForm]] = []
        self._last = float("-inf")
        self._out: list[tuple[Known, ReplayForm]] | None = None
        self._hopeless = False
        self.sent = 0
        self.renew()

    @property
    def known(self) -> bool:
        """Whether an answer is known."""
        return bool(self._turns)

    @property
    def possible(self) -> bool:
        """Whether there are, or may yet be, any canaries."""
        return self._seconds > 0 and not self._hopeless

    def learn(self, known: Sequence[Known]) -> None:
        """Send these answers from now on.

        Args:
            known: good and bad ones, at least one.
        """
        with self._lock:
            self._turns = [(each, form) for each in known for form in FORMS]
            self._hopeless = False

    def renew(self) -> None:
        """Its reference was started again: what canaries say from now on is about another one."""
        self.token = secrets.token_hex(8)

    def give_up(self) -> None:
        """There is no known answer, and there will be none."""
        self._hopeless = True

    def due(self, now: float, *, wanted: bool = False) -> bool:
        """Whether one is to be sent: its time has come, and the last one is back.

        Args:
            now: seconds of any one clock.
            wanted: somebody waits for one, so that `WANTED_SECONDS` after the last one are enough.
        """
        with self._lock:
            soon = WANTED_SECONDS if self._turns else STUDY_SECONDS
            seconds = min(soon, self._seconds) if wanted else self._seconds
            if not self.possible or self._out is not None or now < self._last + seconds:
                return False
            self._last = now
        if not self.known and self._study is not None:
            self._study()
            return False
        return self.known

    def requests(self) -> list[ReplayRequest]:
        """The next canary, each request to be submitted like any other replay; `judge` must follow."""
        with self._lock:
            assert self._turns, "no answer is known"
            self._out = self._turns
            self.sent += 1
            return [known.request(form) for known, form in self._out]

    def judge(self, replays: Sequence[Replay | None]) -> bool | None:
        """Whether the reference is sound by the canary that was out. False: take it out of service.

        Args:
            replays: of the last `requests`, in their order; None for what failed, which says nothing about numbers.

        Returns:
            None where not all came back, and nothing is wrong with those that did.
        """
        with self._lock:
            turns, self._out = self._out or [], None
        came = [(known, replay) for (known, _), replay in zip(turns, replays, strict=False) if replay is not None]
        if not all(known.holds(replay) for known, replay in came):
            return False
        return True if came and len(came) == len(turns) else None
