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

*Stopped too early*. Weights w_1, w_2, … that are fixed before the answer begins and sum to at most 1 share the level
out over its tokens: P(it ever stops at a token n with h_n ≤ α·w_n) ≤ Σ α·w_n ≤ α. The level is the upper bound of h at
the stop, divided by its weight: half of it is spread evenly over the tokens the request allows (`max_tokens`), half
falls as 1/(n(n+1)). Only h at the stop is needed, so it does not matter that a list shows a stop id outside the twenty
likeliest just where it was drawn.

At T = 0 nothing is drawn: there selection compares the token with the claimed maximum. A stop string's probability
cannot be had from a list of tokens, so an answer that one ended is not tested for an early stop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies._law import Law, bounds
from policies._race import LOWEST_TEMPERATURE
from policies.evidence import Evidence, Ids, Logprobs, Replay, Sampling
from policies.thinking import UNKNOWN, Tags, forced

REJECT_LEVEL = 1e-6
"""No answer is rejected at a higher level; both tests together count twice."""
SLACK = 2.5
"""Nats by which a stop's log odds in a replay, before temperature, may be off those the backend sampled from: three
times what kernels, batches and chunks moved any emitted token's logprob by (see `from_replay`)."""
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
        too_long_spared: level of the first with the likeliest stop left out, which holds even if one position of the
            list, whichever, has nothing to do with the law the backend sampled from.
    """

    stopped: bool
    low: float
    high: float
    too_long: float
    too_early: float
    too_long_spared: float

    @property
    def level(self) -> float:
        """P(either level this small) under the null."""
        return min(1.0, 2.0 * min(self.too_long, self.too_early))


def from_claim(
    evidence: Evidence, eos_token_ids: Iterable[int], vocab_size: int | None = None, *, tags: Tags = UNKNOWN
) -> Hazard | None:
    """Under the backend's own claim. None where it is not defined: T = 0, no stop id declared, a grammar, biased stop
    ids, bad words, a repetition penalty, a thinking budget that may have forced tokens, or a claim that does not cover
    the answer."""
    stops = stop_ids(evidence, eos_token_ids)
    law = _law(evidence, evidence.claim_ids, evidence.claim_logprobs, stops, vocab_size, tags)
    return _judged(evidence, law, stops, 0.0)


def from_replay(
    evidence: Evidence,
    replay: Replay,
    eos_token_ids: Iterable[int],
    vocab_size: int | None = None,
    *,
    tags: Tags = UNKNOWN,
) -> Hazard | None:
    """Under the reference's own list of likeliest tokens (form `full`), for a claim that is not trusted.

    Exact, as under a claim, for a backend whose odds of stopping, h/(1 − h), are at every position within a factor of
    exp(`SLACK`/T) of the reference's. That assumption is measured: on an H200 (SmolLM2, vLLM 0.32) no logprob of
    465,000 honest emitted tokens lay further than 0.81 nats from the replay's, over batches of 1 to 64, CUDA graphs,
    chunks, two attention kernels and a model with experts. Rare tokens of some models break it by tens of nats, and a
    level from here says nothing about those: `_forged` allows for them.

    A reference's top-k, top-p and min-p fall elsewhere than the backend's. So the cuts may leave nothing but the stop
    and the likeliest token, where that makes the stop likelier, and they may take every stop that is not the likeliest
    token by `SLACK` nats, where it makes it less likely.
    """
    if replay.form != "full":
        return None
    stops = stop_ids(evidence, eos_token_ids)
    own = slice(replay.ids.shape[1] if replay.own is None else replay.own)
    sampling = dataclasses.replace(evidence.sampling, top_k=0, top_p=1.0, min_p=0.0)
    uncut = dataclasses.replace(evidence, sampling=sampling)
    law = _law(uncut, replay.ids[:, own], replay.logprobs[:, own], stops, vocab_size, tags)
    if law is not None and sampling != evidence.sampling:
        law = dataclasses.replace(law, kept=law.kept & _alone(law, sampling), low=np.ones(len(law.low)))
    return _judged(evidence, law, stops, SLACK)


def _alone(law: Law, sampling: Sampling) -> NDArray[np.bool_]:
    """Which tokens are the likeliest by `SLACK` nats, (G, W)."""
    others = np.sort(law.weights, axis=1)[:, -2:-1] if law.weights.shape[1] > 1 else np.zeros((len(law.ids), 1))
    far = others <= np.exp(-SLACK / max(sampling.temperature, LOWEST_TEMPERATURE))
    alone: NDArray[np.bool_] = (law.weights == 1.0) & far
    return alone


def stop_ids(evidence: Evidence, eos_token_ids: Iterable[int]) -> frozenset[int]:
    """The ids that end this answer."""
    sampling = evidence.sampling
    eos = frozenset() if sampling.ignore_eos else frozenset(map(int, eos_token_ids))
    return frozenset(sampling.stop_token_ids) | eos


def _law(
    evidence: Evidence, ids: Ids, logprobs: Logprobs, stops: frozenset[int], vocab_size: int | None, tags: Tags
) -> Law | None:
    """The law the stop ids are drawn by, where it can be had and they may stop the answer at all."""
    sampling = evidence.sampling
    biased = stops.intersection(token for token, _ in sampling.logit_bias) or sampling.allowed_token_ids
    if not stops or sampling.grammar or biased or forced(evidence, tags).any():
        return None
    return bounds(ids, logprobs, evidence.output_ids, sampling, stop_ids=sorted(stops), vocab_size=vocab_size)


def _judged(evidence: Evidence, law: Law | None, stops: frozenset[int], slack: float) -> Hazard | None:
    if law is None:
        return None
    least = evidence.sampling.min_tokens
    low, high = _probabilities(law, np.array(sorted(stops), np.int64))
    scale = slack / max(evidence.sampling.temperature, LOWEST_TEMPERATURE)
    low, high = np.minimum(_shifted(low, -scale), _CERTAIN), np.minimum(_shifted(high, scale), _CERTAIN)
    low[:least] = high[:least] = 0.0
    ended = int(evidence.output_ids[-1]) in stops
    stopped = ended and len(evidence.output_ids) > least and evidence.complete
    going_on = np.log1p(-(low[:-1] if ended else low))
    return Hazard(
        stopped,
        float(low.sum()),
        float(high.sum()),
        too_long=float(np.exp(going_on.sum())),
        too_early=_too_early(evidence, float(high[-1])) if stopped else 1.0,
        too_long_spared=float(np.exp(going_on.sum() - going_on.min(initial=0.0))),
    )


def _shifted(chances: _Floats, nats: float) -> _Floats:
    """Probabilities whose odds are multiplied by exp(`nats`)."""
    with np.errstate(divide="ignore", over="ignore"):
        shifted: _Floats = 1.0 / (1.0 + np.exp(-nats) * (1.0 / chances - 1.0))
    return shifted


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


def _too_early(evidence: Evidence, chance: float) -> float:
    """Level of a stop at the last token, where it had this probability at most."""
    at, most = len(evidence.output_ids), evidence.sampling.max_tokens
    weight = 0.5 / (at * (at + 1))
    if most is not None and at <= most:
        weight += 0.5 / most
    return min(1.0, chance / weight)


def drawn_again(evidence: Evidence, vocab_size: int | None = None, *, tags: Tags = UNKNOWN) -> float | None:
    """Upper bound on the natural log of the probability of drawing this very answer again under its claim. Tokens that
    a thinking budget may have forced count as certain.

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
    budget = forced(evidence, tags)
    logs[(budget.surely | budget.maybe)[: len(logs)]] = 0.0
    return float(np.minimum(np.nan_to_num(logs, nan=0.0, neginf=0.0), 0.0).sum())
