"""One score against its profile: the decision that the distance, margin and routing checks share."""

from __future__ import annotations

from collections.abc import Mapping

from policies.checks import Check, Result
from policies.evidence import Evidence, Replay
from policies.profile import SHORTEST_BAND, Placement, Profile

REJECT_TAIL = 1e-4
"""Parametric tail probability under which a score beyond every calibrated one rejects."""
PASS_LEVEL = 1e-2
"""A score less probable than this, counted or extrapolated, does not pass."""

Metrics = Mapping[str, "float | int | None"]


def placed(
    name: str,
    evidence: Evidence,
    replay: Replay,
    profile: Profile | None,
    *,
    score: float,
    length: int,
    metrics: Metrics,
    words: str,
) -> Check:
    """The check `name` of one response whose deciding statistic is `score`, made of `length` positions.

    Rejects when the score lies beyond every calibration score of every matching cell, and its parametric tail is at
    most 1e-4; the stated level is the conformal p-value 1/(n + 1) of the most lenient cell. Passes when the score is
    not improbable: p inside the calibrated range, the tail beyond it, above 1e-2. Never rejects without a profile,
    under another key, or outside the calibrated bands.

    Metrics added: `score`, `p`, `n`, `tail`, `bet`, `mu0` (see `profile.Placement`).

    Args:
        words: what the score is, for the reason; the figures follow.
    """
    metrics = {**metrics, "score": score}
    obstacle = _outside(evidence, replay, profile, length)
    if obstacle or profile is None:
        return Check(name, Result.INCONCLUSIVE, obstacle, metrics=metrics)
    temperature = evidence.sampling.temperature
    place = profile.judge(name, form=replay.form, temperature=temperature, length=length, score=score)
    if place is None:
        reason = f"outside_profile: no {replay.form} replays were calibrated at T = {temperature:g}, {length} tokens"
        return Check(name, Result.INCONCLUSIVE, reason, metrics=metrics)
    metrics |= {"p": place.p, "n": place.n, "tail": place.tail, "bet": place.bet, "mu0": place.mu0}
    return _decided(
        name, place, metrics, f"{words} is {score:.4g}, {place.n} honest answers stay within {place.usual:.4g}"
    )


def _outside(evidence: Evidence, replay: Replay, profile: Profile | None, length: int) -> str:
    if profile is None:
        return "no_profile: nothing was calibrated for this model"
    mismatch = profile.mismatch(evidence, replay)
    if mismatch:
        return f"profile_mismatch: {mismatch}"
    if length < SHORTEST_BAND:
        return f"too_short: {length} tokens, {SHORTEST_BAND} are needed"
    return ""


def _decided(name: str, place: Placement, metrics: dict[str, float | int | None], words: str) -> Check:
    if place.beyond and place.tail is not None and place.tail <= REJECT_TAIL:
        return Check(name, Result.REJECT, f"too_far: {words}", level=place.p, metrics=metrics)
    if place.plausible > PASS_LEVEL:
        return Check(name, Result.PASS, metrics=metrics)
    return Check(name, Result.INCONCLUSIVE, f"borderline: {words}", metrics=metrics)
