"""Did the answer end when it should? Early stops and padding, by the probability of stopping at each token.

h_t is the probability, given everything before, that token t is one of the ids that end this answer (the model's end
tokens unless `ignore_eos`, and `stop_token_ids`; none of them before `min_tokens`). A claim bounds it from both sides.
N is the token at which the answer stops by such an id; S_n = Π_{t ≤ n} (1 − h_t) is the probability of going on.

Null hypothesis: at every position the token was drawn from the law the claim states, at the request's temperature and
truncation, with noise nobody chose. Both tests below are exact in law under it, need no seed and no calibration, and
hold with speculative decoding too. One answer is one unit of evidence, and both tests speak of the whole of it.

*Went on too long* (padding). 1{N > n} / S_n is a non-negative martingale that starts at 1: its next value is 0 with
probability h and 1/(1−h) times itself otherwise. By Ville's inequality P(ever N > n with S_n ≤ α) ≤ α, whenever one
looks. The level is S at the last token that did not stop the answer, from the lower bounds of h, which make it larger.

*Stopped too early*. For a threshold ε let C_n be 1 − Π (1 − h_t) over the tokens t ≤ n with h_t ≤ ε, which is known
before token n is drawn. The answer stops at such a token while C ≤ α with probability at most α: until C first passes
α, the martingale of those tokens alone is at most 1/(1−α), and it has mean 1. The level is the least C over the
thresholds `THRESHOLDS`, times their number, from the upper bounds of h. So a stop id that was next to impossible where
it stands is found even after a long answer, in which plain Σ h would drown it.

At T = 0 nothing is drawn: there selection compares the token with the claimed maximum. A stop string's probability
cannot be had from a list of tokens, so an answer that one ended is not tested for an early stop.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies._law import Law, bounds
from policies._request import extras
from policies.evidence import Evidence, Ids, Logprobs, Replay

THRESHOLDS = tuple(10.0 ** (-2 * step) for step in range(8))
REJECT_LEVEL = 1e-6
"""No answer is rejected at a higher level; both tests together count twice."""
SLACK = 0.5
"""Nats by which a replay's logprob of a stop id may be off the law the backend sampled from."""
_CERTAIN = 1.0 - 1e-6
"""fp32 logprobs cannot tell a probability from 1 any better."""

_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Hazard:
    """What the stop probabilities of one answer say.

    Attributes:
        stopped: a stop id ended it.
        low, high: bounds on Σ h over all its tokens. `stopped − Σ h` has mean 0 under the null (it is a martingale),
            so over generations `Σ (stopped − low)` drifts up, or `Σ (stopped − high)` down, only without it.
        too_long, too_early: levels of the two tests, 1 where one does not apply.
    """

    stopped: bool
    low: float
    high: float
    too_long: float
    too_early: float

    @property
    def level(self) -> float:
        """P(either level this small) under the null."""
        return min(1.0, 2.0 * min(self.too_long, self.too_early))


def from_claim(evidence: Evidence, eos_token_ids: Iterable[int], vocab_size: int | None = None) -> Hazard | None:
    """Under the backend's own claim. None where it is not defined: T = 0, no stop id declared, a grammar, biased stop
    ids, bad words, a repetition penalty, a forced end of reasoning, or a claim that does not cover the answer."""
    stops = stop_ids(evidence, eos_token_ids)
    return _judged(evidence, _law(evidence, evidence.claim_ids, evidence.claim_logprobs, stops, vocab_size), stops, 0.0)


def from_replay(
    evidence: Evidence, replay: Replay, eos_token_ids: Iterable[int], vocab_size: int | None = None
) -> Hazard | None:
    """Under the reference's own list of likeliest tokens (form `full`), for a claim that is not trusted.

    `SLACK` is taken off both bounds, so the levels hold for a backend whose stop probabilities are within that factor
    of the reference's.
    """
    if replay.form != "full":
        return None
    stops = stop_ids(evidence, eos_token_ids)
    own = replay.ids.shape[1] if replay.own is None else replay.own
    return _judged(
        evidence, _law(evidence, replay.ids[:, :own], replay.logprobs[:, :own], stops, vocab_size), stops, SLACK
    )


def stop_ids(evidence: Evidence, eos_token_ids: Iterable[int]) -> frozenset[int]:
    """The ids that end this answer."""
    sampling = evidence.sampling
    eos = frozenset() if sampling.ignore_eos else frozenset(map(int, eos_token_ids))
    return frozenset(sampling.stop_token_ids) | eos


def _law(evidence: Evidence, ids: Ids, logprobs: Logprobs, stops: frozenset[int], vocab_size: int | None) -> Law | None:
    """The law the stop ids are drawn by, where it can be had and they may stop the answer at all."""
    sampling = evidence.sampling
    biased = stops.intersection(token for token, _ in sampling.logit_bias) or sampling.allowed_token_ids
    forced = sampling.grammar or biased or extras(evidence).thinking_token_budget is not None
    if not stops or forced:
        return None
    return bounds(ids, logprobs, evidence.output_ids, sampling, stop_ids=sorted(stops), vocab_size=vocab_size)


def _judged(evidence: Evidence, law: Law | None, stops: frozenset[int], slack: float) -> Hazard | None:
    if law is None:
        return None
    least = evidence.sampling.min_tokens
    low, high = _probabilities(law, np.array(sorted(stops), np.int64))
    low, high = np.minimum(low * np.exp(-slack), _CERTAIN), np.minimum(high * np.exp(slack), _CERTAIN)
    low[:least] = high[:least] = 0.0
    ended = int(evidence.output_ids[-1]) in stops
    stopped = ended and len(evidence.output_ids) > least and evidence.complete
    too_long = float(np.exp(np.log1p(-(low[:-1] if ended else low)).sum()))
    return Hazard(stopped, float(low.sum()), float(high.sum()), too_long, _too_early(high) if stopped else 1.0)


def _probabilities(law: Law, stops: NDArray[np.int64]) -> tuple[_Floats, _Floats]:
    """Bounds on the probability of all stop ids together, float64 (G,) each."""
    here = np.isin(law.ids, stops)
    unseen = len(stops) - here.sum(axis=1)
    sure = (law.weights * (here & law.kept)).sum(axis=1)
    possible = (law.weights * (here & ~law.dropped)).sum(axis=1)
    possible += np.minimum(unseen * law.one, np.where(unseen > 0, law.unlisted, 0.0))
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = sure / law.high, possible / law.low
    return np.nan_to_num(low, nan=0.0), np.where(np.isfinite(high), np.minimum(high, 1.0), 1.0)


def _too_early(high: _Floats) -> float:
    """Level of a stop at the last token."""
    logs = np.log1p(-high)
    at_stop = high[-1]
    levels = [-np.expm1(logs[high <= threshold].sum()) for threshold in THRESHOLDS if at_stop <= threshold]
    return min(1.0, len(THRESHOLDS) * float(min(levels, default=1.0)))


def drawn_again(evidence: Evidence, vocab_size: int | None = None) -> float | None:
    """Upper bound on the natural log of the probability of drawing this very answer again under its claim.

    None where the law is not followed (`min_tokens` among it: it raises every other token's probability), or the claim
    does not cover the answer.
    """
    sampling = evidence.sampling
    if sampling.min_tokens > 0:
        return None
    law = bounds(
        evidence.claim_ids,
        evidence.claim_logprobs,
        evidence.output_ids,
        sampling,
        stop_ids=(),
        vocab_size=vocab_size,
    )
    if law is None:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(law.weights[:, 0] / law.low)
    return float(np.minimum(np.nan_to_num(logs, nan=0.0, neginf=0.0), 0.0).sum())
