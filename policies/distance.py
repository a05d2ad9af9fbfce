"""How far the claim lies from what the reference computes for the same tokens.

Null hypothesis, calibrated: the declared model at the declared precision made the claim, and differs from the
reference by no more than the kernels, batches and chunks of one of the profile's conditions. One unit is one
response; its tokens are not independent.

The deciding score is made for one question: is the noise between the two sets of logits that of other kernels, or
larger?

- Per position it takes every id both sides know, not the emitted one alone, and removes the difference they share.
  That difference is mostly the normaliser's; what is left is the noise of single logits, whose size hardly depends on
  how peaked the distribution is (measured on SmolLM2: 0.075 nats under 0.1 nat of entropy, 0.068 over 1.7; |Δ| of the
  emitted token, LMCV's quantity, goes from 0.0003 to 0.04). Ids that one side leaves out count with the least they
  must differ by, which is how omitted mass enters.
- Over positions it takes only those that drift at all. Decode and prefill often agree bit for bit for a while, or
  throughout at another batch size; when they drift they do so at a level that is a property of precision and
  kernels. Leaving the others out makes the mean independent of how many there are.
- The largest sixteenth of the positions counts no more than the one below it, and no id counts over 1 nat:
  mixture-of-experts models flip routes, and no single token may decide.

LMCV's metrics are reported beside it. Effect sizes d′ on an H200 (SmolLM2; honest answers of several kernels, loads and
temperatures pooled; prompts that the design was not chosen on), first 16 / 128 tokens of an answer:

| | int8 weights | FP8 KV cache | FP8 weights |
|---|---|---|---|
| this score | 4.3 / 7.2 | 6.4 / 6.9 | 8.1 / 8.6 |
| gonka's distance | 3.6 / 4.1 | 5.3 / 7.1 | 5.6 / 7.3 |
| 1 − top-20 Jaccard | 3.4 / 4.9 | 5.0 / 6.7 | 6.7 / 7.3 |
| LMCV's mean of the emitted token | 2.8 / 1.7 | 2.6 / 2.7 | 3.0 / 2.8 |
| LMCV's p99 of it | 2.4 / 2.1 | 2.3 / 3.1 | 1.9 / 3.0 |

From 16 tokens on, every answer of those three lay beyond all of some 300 honest ones; with gonka's distance half of
the int8 answers did.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from policies import _grammar
from policies._calibrated import forms, placed, replay_trouble, too_short, winsorised_mean
from policies._comparison import Comparison, compare
from policies.checks import Check, Result
from policies.evidence import Evidence, Replay
from policies.profile import SHORTEST_BAND, Profile, Row, bands, response_name

NAME = "distance"
WINSORISED = 16
"""One position in so many is cut back to the largest of the others."""

_Metrics = dict[str, "float | int | None"]
_Floats = NDArray[np.float64]


def measure(evidence: Evidence, replay: Replay) -> _Metrics:
    """Every distance metric of one response. Logprobs in nats; None where a metric does not exist.

    Over all positions: `tokens`; `compared`, positions where both sides have the emitted token's logprob;
    `unmatched`, claimed ids that the replay does not score; `abs_mean/p50/p95/p99/max` of |Δ| of the emitted token;
    `rank_change_rate`, share of positions where its rank among the listed differs (1 + listed logprobs above it,
    which is its place in vLLM's own list but for ties); `topk_jaccard` (1 is equal); `union_js` and `union_js_p99` in
    [0, ln 2]; `omitted_mass`, mean reference probability of the reference's listed ids that the claim leaves out;
    `claimed_mass`, mean reference probability of the claimed ids.

    Over positions that drift: `drift_tokens`, how many; `drift_topk`, mean |Δ| over all shared ids, each capped at
    1 nat; `score`, the deciding statistic (see the module's docstring).

    A replay of form `ids` has no ranks, Jaccard or omitted mass.
    """
    return _metrics(compare(evidence, replay), len(evidence.output_ids), full=replay.form == "full")


def calibration_rows(evidence: Evidence, replay: Replay, *, arm: str = "") -> list[Row]:
    """Rows of one honest response for `profile.fit`: one per length band it fills.

    Each takes the response's first 16, 32, 64, … drifting positions, so that a band's null has the spread of its
    shortest member. `arm` names the condition (batch size, chunking, machine). A response that drifts at fewer than
    16 positions gives one row of that length. A replay of form `full` gives rows of both forms. Empty for a response
    that the check could not judge.
    """
    if _obstacle(evidence, replay) or _grammar.obstacle(evidence)[0] or len(evidence.output_ids) < SHORTEST_BAND:
        return []
    rows: list[Row] = []
    for view in forms(evidence, replay):
        comparison = compare(evidence, view)
        values = comparison.apart[np.flatnonzero(comparison.changed)]
        rows += [
            Row(
                NAME,
                view.form,
                arm,
                evidence.sampling.temperature,
                length,
                _score(values[:length]),
                response_name(evidence),
                len(evidence.output_ids),
            )
            for length in list(bands(len(values))) or [len(values)]
        ]
    return rows


def check(evidence: Evidence, replay: Replay, profile: Profile | None) -> Check:
    """The distance check of one generation against its profile: see `_calibrated.placed` for the decision.

    Metrics: those of `measure`, and those of the decision.
    """
    obstacle = _obstacle(evidence, replay)
    tokens = len(evidence.output_ids)
    if obstacle:
        return Check(NAME, Result.INCONCLUSIVE, obstacle, metrics={"tokens": tokens})
    metrics = measure(evidence, replay)
    masked, by_request = _grammar.obstacle(evidence)
    if masked:
        return Check(NAME, Result.INCONCLUSIVE, masked, by_request=by_request, metrics=metrics)
    if few := too_short(tokens):
        return Check(NAME, Result.INCONCLUSIVE, few, metrics=metrics)
    found = placed(
        NAME,
        evidence,
        replay,
        profile,
        score=float(metrics["score"] or 0.0),
        length=max(int(metrics["drift_tokens"] or 0), SHORTEST_BAND),
        metrics=metrics,
        words="the drift of the claimed logits",
    )
    if found.result is Result.PASS and metrics["compared"] != tokens:
        reason = f"not_compared: {tokens - int(metrics['compared'] or 0)} tokens have no logprob to compare"
        return Check(NAME, Result.INCONCLUSIVE, reason, metrics=found.metrics)
    return found


def _score(values: _Floats) -> float:
    """Winsorised mean over drifting positions; fewer than 16 are filled up with positions that do not drift."""
    values = np.concatenate([values, np.zeros(max(0, SHORTEST_BAND - len(values)))])
    return winsorised_mean(values, len(values) // WINSORISED)


def _metrics(comparison: Comparison, tokens: int, *, full: bool) -> _Metrics:
    difference = comparison.difference[np.isfinite(comparison.difference)]
    drifting = np.flatnonzero(comparison.changed)
    quantiles = [_quantile(difference, q) for q in (0.5, 0.95, 0.99, 1.0)]
    return {
        "tokens": tokens,
        "compared": len(difference),
        "unmatched": int(comparison.unmatched.sum()),
        "abs_mean": _mean(difference),
        **dict(zip(("abs_p50", "abs_p95", "abs_p99", "abs_max"), quantiles, strict=True)),
        "rank_change_rate": _mean(comparison.rank_changed) if full else None,
        "topk_jaccard": _mean(comparison.jaccard) if full else None,
        "union_js": _mean(comparison.js),
        "union_js_p99": _quantile(comparison.js, 0.99),
        "omitted_mass": _mean(comparison.omitted) if full else None,
        "claimed_mass": _mean(comparison.claimed),
        "drift_tokens": len(drifting),
        "drift_topk": _mean(comparison.spread[drifting]) or 0.0,
        "score": _score(comparison.apart[drifting]),
    }


def _obstacle(evidence: Evidence, replay: Replay) -> str:
    if not len(evidence.output_ids):
        return "no_tokens: there is no output to compare"
    if not evidence.claim_ids.size or evidence.claim_ids.shape != evidence.claim_logprobs.shape:
        return "no_claim: there are no claimed logprobs to compare"
    return replay_trouble(evidence, replay)


def _mean(values: _Floats) -> float | None:
    values = values[~np.isnan(values)]
    return float(values.mean()) if len(values) else None


def _quantile(values: _Floats, q: float) -> float | None:
    values = values[~np.isnan(values)]
    return float(np.quantile(values, q)) if len(values) else None
