"""How far the claim lies from what the reference computes for the same tokens.

Null hypothesis: the declared model at the declared precision made the claim, and differs from the reference by no
more than the kernels, batches and chunks the profile was measured over. Honest drift is not one number: decode and
prefill often agree bit for bit for a while (or throughout, at another batch size) and then drift at a level that is
a property of precision and kernels, almost whatever the text. So the deciding metrics are means over the positions
that drift at all (`drift_…`, over at least 16), which leaves them alone by how many do; the metrics over all
positions (those of LMCV, TrueOpen/lmcv-experiments, 2026) are reported beside them.

`drift_topk` is the sharpest: the mean |Δ| over all listed ids of a position hears twenty logits where the emitted
token is one, and a peaked distribution mutes only the latter. SmolLM2 on a CPU, 64 tokens: honest 0.056 ± 12 %,
FP8-rounded weights 0.20–0.30.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from policies._comparison import SPIKE, Comparison, compare
from policies.checks import Check, Result
from policies.evidence import MASKED, Evidence, Replay
from policies.profile import SHORTEST_BAND, Arm, Profile, tail

NAME = "distance"
REJECT_LEVEL = 1e-4
"""Bound on the probability of rejecting one honest response, over all deciding metrics together."""
PASS_LEVEL = 1e-2
"""A response less likely than this under the null, but not by enough to reject, is inconclusive."""
DECIDING = ("drift_topk", "drift_js", "drift_jaccard", "drift_abs", "drift_omitted")
"""Larger is farther, in every one of them."""

_POSITIVE = 1e-3
"""Nats above 0 that rounding explains in a replay."""

_Metrics = dict[str, "float | int | None"]
_Floats = NDArray[np.float64]


def measure(evidence: Evidence, replay: Replay) -> _Metrics:
    """Every distance metric of one response. Logprobs in nats; None where a metric does not exist.

    Over all positions: `tokens`; `compared`, positions where both sides have the emitted token's logprob;
    `abs_mean/p50/p95/p99/max` of |Δ| of the emitted token; `rank_change_rate`, share of positions where its rank
    among the listed differs (1 + listed logprobs above it, which is its place in vLLM's own list but for ties);
    `topk_jaccard` (1 is equal); `union_js` and `union_js_p99` in [0, ln 2]; `omitted_mass`, mean reference
    probability of the reference's listed ids that the claim leaves out; `claimed_mass`, mean reference probability
    of the claimed ids.

    Over positions that drift: `drift_tokens`, how many; `drift_topk`, mean |Δ| over all listed ids; `drift_js`;
    `drift_jaccard` = 1 − Jaccard; `drift_abs`, |Δ| of the emitted token, each |Δ| capped at 1 nat; `drift_omitted`.

    A replay of form `ids` has no ranks, Jaccard or omitted mass.
    """
    comparison = compare(evidence, replay)
    full = replay.form == "full"
    difference = comparison.difference[np.isfinite(comparison.difference)]
    metrics: _Metrics = {
        "tokens": len(evidence.output_ids),
        "compared": len(difference),
        "abs_mean": _mean(difference),
        "abs_p50": _quantile(difference, 0.5),
        "abs_p95": _quantile(difference, 0.95),
        "abs_p99": _quantile(difference, 0.99),
        "abs_max": _quantile(difference, 1.0),
        "rank_change_rate": _mean(comparison.rank_changed) if full else None,
        "topk_jaccard": _mean(comparison.jaccard) if full else None,
        "union_js": _mean(comparison.js),
        "union_js_p99": _quantile(comparison.js, 0.99),
        "omitted_mass": _mean(comparison.omitted) if full else None,
        "claimed_mass": _mean(comparison.claimed),
    }
    return metrics | _drift(comparison, np.flatnonzero(comparison.changed), full)


def calibration_rows(evidence: Evidence, replay: Replay, *, arm: str = "") -> list[dict[str, float | int | str | None]]:
    """Rows of one honest response for `profile.fit`: one per length band it fills.

    Each takes the response's first 16, 32, 64, … drifting positions, so that a band's null has the spread of its
    shortest member. `arm` names the condition (batch size, chunking, machine). A response that drifts at fewer than
    16 positions gives one row, which counts it.
    """
    comparison = compare(evidence, replay)
    full = replay.form == "full"
    whole = measure(evidence, replay)
    positions = np.flatnonzero(comparison.changed)
    meta: dict[str, float | int | str | None] = {"temperature": evidence.sampling.temperature, "arm": arm}
    lengths = list(_bands(len(positions)))
    if not lengths:
        return [{**whole, **meta, "response": 1}]
    longest = lengths[-1]
    return [
        {
            **(whole if length == longest else {"tokens": whole["tokens"]}),
            **_drift(comparison, positions[:length], full),
            **meta,
            "response": int(length == longest),
        }
        for length in lengths
    ]


def check(evidence: Evidence, replay: Replay, profile: Profile | None) -> Check:
    """The distance check of one generation against its profile.

    Each deciding metric is as probable as the most lenient matching arm says. Rejects when one of them is below
    1e-4 ÷ their number, passes when all are above 1e-2 ÷ their number. A reject's level is their number times the
    smallest probability. Metrics: those of `measure`, and `level`, the same product without a verdict (at most 1).
    """
    obstacle = _obstacle(evidence, replay)
    if obstacle:
        return Check(NAME, Result.INCONCLUSIVE, obstacle, metrics={"tokens": len(evidence.output_ids)})
    metrics = measure(evidence, replay)
    if evidence.sampling.grammar:
        reason = "grammar: a grammar masked the claimed logprobs, the reference's are unmasked"
        return Check(NAME, Result.INCONCLUSIVE, reason, by_request=True, metrics=metrics)
    if profile is None:
        return Check(NAME, Result.INCONCLUSIVE, "no_profile: nothing was calibrated for this model", metrics=metrics)
    mismatch = _mismatch(evidence, replay, profile)
    if mismatch:
        return Check(NAME, Result.INCONCLUSIVE, f"profile_mismatch: {mismatch}", metrics=metrics)
    tokens = len(evidence.output_ids)
    if tokens < SHORTEST_BAND:
        reason = f"too_short: {tokens} tokens, {SHORTEST_BAND} are needed"
        return Check(NAME, Result.INCONCLUSIVE, reason, metrics=metrics)
    drifting = max(int(metrics["drift_tokens"] or 0), SHORTEST_BAND)
    arms = profile.matching(evidence.sampling.temperature, drifting)
    if not arms:
        reason = f"outside_profile: no calibration at temperature {evidence.sampling.temperature:g}, {drifting} tokens"
        return Check(NAME, Result.INCONCLUSIVE, reason, metrics=metrics)
    return _judged(metrics, arms, tokens)


def _judged(metrics: _Metrics, arms: tuple[Arm, ...], tokens: int) -> Check:
    probabilities = {
        name: max(tail(arm.nulls[name], float(value)) for arm in arms if name in arm.nulls)
        for name in DECIDING
        if (value := metrics.get(name)) is not None and any(name in arm.nulls for arm in arms)
    }
    if not probabilities:
        return Check(NAME, Result.INCONCLUSIVE, "outside_profile: no deciding metric was calibrated", metrics=metrics)
    telling = min(probabilities, key=lambda name: probabilities[name])
    level = min(1.0, probabilities[telling] * len(probabilities))
    metrics = {**metrics, "level": level}
    usual = max(arm.nulls[telling].quantiles.get("0.99", math.nan) for arm in arms if telling in arm.nulls)
    words = f"{telling} is {float(metrics[telling] or 0):.4g}, honest answers stay within {usual:.4g}"
    if level < REJECT_LEVEL:
        return Check(NAME, Result.REJECT, f"too_far: {words}", level=level, metrics=metrics)
    if metrics["compared"] != tokens:
        reason = f"not_compared: {tokens - int(metrics['compared'] or 0)} tokens have no logprob to compare"
        return Check(NAME, Result.INCONCLUSIVE, reason, metrics=metrics)
    if level < PASS_LEVEL:
        return Check(NAME, Result.INCONCLUSIVE, f"borderline: {words}", metrics=metrics)
    return Check(NAME, Result.PASS, metrics=metrics)


def _obstacle(evidence: Evidence, replay: Replay) -> str:
    if not len(evidence.output_ids):
        return "no_tokens: there is no output to compare"
    if not evidence.claim_ids.size or evidence.claim_ids.shape != evidence.claim_logprobs.shape:
        return "no_claim: there are no claimed logprobs to compare"
    if replay.ids.ndim != 2 or replay.ids.shape != replay.logprobs.shape or not replay.ids.size:
        return "bad_replay: the replay holds no logprobs"
    if len(replay.ids) != len(evidence.output_ids) or not np.array_equal(replay.ids[:, 0], evidence.output_ids):
        return "bad_replay: the replay is of other tokens"
    # A reference that failed to compute is no distance of the backend's.
    listed = replay.ids >= 0
    if bool(np.isnan(replay.logprobs[listed]).any()) or bool((replay.logprobs[listed] > _POSITIVE).any()):
        return "bad_replay: a replayed logprob is not a number, or is positive"
    if not bool((listed & np.isfinite(replay.logprobs) & (replay.logprobs > MASKED)).any(axis=1).all()):
        return "bad_replay: the replay holds nothing at a token"
    return ""


def _mismatch(evidence: Evidence, replay: Replay, profile: Profile) -> str:
    key = profile.key
    for what, has, wanted in (
        ("model", evidence.model, key.model),
        ("runtime", evidence.runtime, key.runtime),
        ("precision", evidence.precision, key.precision),
        ("reference", replay.reference, key.reference),
        ("replay form", replay.form, key.form),
    ):
        if has != wanted:
            return f"{what} is {has!r}, the profile was measured with {wanted!r}"
    if evidence.claim_ids.shape[1] - 1 > key.top_k:
        return f"the claim lists {evidence.claim_ids.shape[1] - 1} alternatives, the profile {key.top_k}"
    return ""


def _drift(comparison: Comparison, positions: NDArray[np.intp], full: bool) -> _Metrics:
    """Means over drifting positions; fewer than 16 are filled up with positions that do not drift."""
    count = max(len(positions), SHORTEST_BAND)

    def mean(values: _Floats) -> float:
        return float(np.nan_to_num(values[positions]).sum() / count)

    return {
        "drift_tokens": len(positions),
        "drift_topk": mean(comparison.spread),
        "drift_js": mean(comparison.js),
        "drift_jaccard": mean(1.0 - comparison.jaccard) if full else None,
        "drift_abs": mean(np.minimum(comparison.difference, SPIKE)),
        "drift_omitted": mean(comparison.omitted) if full else None,
    }


def _bands(positions: int) -> Iterator[int]:
    length = SHORTEST_BAND
    while length <= positions:
        yield length
        length *= 2


def _mean(values: _Floats) -> float | None:
    values = values[~np.isnan(values)]
    return float(values.mean()) if len(values) else None


def _quantile(values: _Floats, q: float) -> float | None:
    values = values[~np.isnan(values)]
    return float(np.quantile(values, q)) if len(values) else None
