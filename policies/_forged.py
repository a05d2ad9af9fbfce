"""Tokens that no drift explains: forged ones, among tokens of which every other is true.

A cheat that ends an answer early, or puts one word in another's place, bends the claim at a token or two, and `margin`,
which looks at the whole answer and cuts its largest token back, cannot tell that from an honest answer with one wild
token. Those exist. LMCV (2026) found one of 18.75 nats among 25,600 honest tokens of a dense model; on an H200 with
SmolLM2 none of 433,000 tokens lost by more than 0.66. So a token that loses by nats is a spike or forged, and spikes
are rare.

Null hypothesis, measured: the declared model drew the tokens as declared; a token whose replay is off by nats (a spike)
comes at a rate of at most `SPIKE_RATE` per token of a dense model, independently, and everything else drifts by less.
One answer is one unit. Three tests:

*Absurd tokens* lose by over `ABSURD` nats. Level: P(Binomial(tokens, rate) ≥ their number). In 128 tokens one is
nothing, two are 3e-4.
*Stopped early*: the token that ended the answer loses by over `STOPPED` nats or, where there is no race, was next to
impossible in law (`hazard.from_replay`, at 1e-6). That is one named token, so the level is the rate, plus the hazard's
1e-6 where that was used. The hazard is exact but for its slack; what limits the level is how rare spikes are known to
be. Of 1,158 honest answers that stopped (dense, H200) none lost its last token by more than 0.31 nats.
*Went on*: the answer would have stopped long before (1e-6), even with the likeliest stop left out, so that a single
spike does not matter. Level: the hazard's, plus that of two spikes.

Nothing is rejected at a level above `REJECT_LEVEL`. Models with experts spike many times as often (LMCV: 0.1 % of
tokens by over 10 nats, 0.6 % by over 1, in clusters near the beginning), at no rate that these tests could be built
on. There the figures are told and nothing is rejected; nor for a model whose calibration looks like theirs (`spiky`),
whatever is declared.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from policies import hazard
from policies._findings import Finding, rejected
from policies._tails import binomial_tail
from policies.evidence import Evidence, Replay
from policies.hazard import Hazard
from policies.profile import Profile
from policies.thinking import UNKNOWN, Tags

ABSURD = 10.0
"""Nats by which a token loses only where it is forged or its replay a spike."""
STOPPED = hazard.SLACK
"""The same for the one token that ends the answer, which nobody picked from many."""
SPIKE_RATE = 1 / 5000
"""Share of an honest dense model's tokens that spike: 95 % upper bound on LMCV's one in 25,600 (1 in 5,400)."""
REJECT_LEVEL = 1e-3
RATE = 2 * REJECT_LEVEL + 2 * SPIKE_RATE
"""Bound on the probability that any of the three rejects one honest answer."""
HAZARD_LEVEL = hazard.REJECT_LEVEL
"""Level of the stop hazard alone, for the part that is exact up to its slack."""
SPIKY = 0.02
"""Share of calibration answers with the weight of a spike from which a model counts as one that spikes."""

_ROUNDING = 1e-3
_Floats = NDArray[np.float64]
Metrics = dict[str, float | int | None]


def find(
    evidence: Evidence,
    replay: Replay,
    eos_token_ids: Iterable[int],
    *,
    lead: _Floats | None,
    checked: int,
    experts: bool,
    tags: Tags = UNKNOWN,
) -> tuple[Finding | None, Metrics]:
    """The finding of lowest level, if any, and the metrics `absurd`, `too_early`, `too_long` (see `margin.check`).

    Args:
        lead: nats by which each token loses the race, (G,); None where it cannot be run.
        checked: tokens that were raced.
        experts: the model is declared to have experts; evidence or replay may show it too.
        tags: tokens that open and close reasoning.
    """
    stops = hazard.stop_ids(evidence, eos_token_ids)
    odds = hazard.from_replay(evidence, replay, eos_token_ids, tags=tags)
    absurd = None if lead is None else int((lead > ABSURD).sum())
    metrics: Metrics = {
        "absurd": absurd,
        "too_early": None if odds is None else odds.too_early,
        "too_long": None if odds is None else odds.too_long_spared,
    }
    if experts or evidence.routed_experts is not None or replay.routed_experts is not None:
        return None, metrics
    if evidence.sampling.client_seed:
        # A law says nothing of noise that somebody chose; the race is run with that very noise.
        odds = None
    findings = [*_too_many(absurd, checked), *_stopped(evidence, lead, stops, odds), *_went_on(odds, len(replay.ids))]
    findings = [finding for finding in findings if finding.level <= REJECT_LEVEL]
    return min(findings, key=lambda finding: finding.level, default=None), metrics


def spiky(profile: Profile, check: str) -> bool:
    """Whether honest answers of this profile have wild tokens too often, or nothing says that they have not.

    Looks at the shortest calibrated answers, where ordinary drift adds up to least: a token that loses by `margin.CAP`
    or more counts 1, which is what all of an answer's tokens together counted in 1 of 2,550 answers of a dense model's
    first 16 tokens (H200, SmolLM2). With LMCV's 0.6 % of spikes it would be one answer in eleven.
    """
    cells = [cell for cell in profile.cells if cell.check == check]
    shortest = min((cell.length for cell in cells), default=0)
    totals = [score * cell.length for cell in cells if cell.length == shortest for score in cell.scores]
    return not totals or sum(total >= 1.0 - _ROUNDING for total in totals) > SPIKY * len(totals)


def _too_many(absurd: int | None, checked: int) -> list[Finding]:
    text = f"{absurd} of {checked} tokens lose by over {ABSURD:g} nats under the request's seed"
    return [rejected("forged_tokens", text, binomial_tail(checked, SPIKE_RATE, absurd))] if absurd else []


def _stopped(evidence: Evidence, lead: _Floats | None, stops: frozenset[int], odds: Hazard | None) -> list[Finding]:
    if not evidence.complete or int(evidence.output_ids[-1]) not in stops:
        return []
    if lead is not None and lead[-1] > STOPPED:
        text = f"the token that ends the answer loses by {lead[-1]:.3g} nats under the request's seed"
        return [rejected("stopped_early", text, SPIKE_RATE)]
    if odds is not None and odds.too_early <= HAZARD_LEVEL:
        text = "the reference would hardly ever have stopped here"
        return [rejected("stopped_early", text, SPIKE_RATE + odds.too_early)]
    return []


def _went_on(odds: Hazard | None, tokens: int) -> list[Finding]:
    if odds is None or odds.too_long_spared > HAZARD_LEVEL:
        return []
    level = odds.too_long_spared + binomial_tail(tokens, SPIKE_RATE, 2)
    return [rejected("went_on", "the reference would have stopped long before", level)]
