"""One score against its profile: the decision that the distance, margin and routing checks share."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from policies.checks import Check, Result
from policies.evidence import MASKED, Evidence, Replay
from policies.profile import SHORTEST_BAND, Placement, Profile

REJECT_TAIL = 1e-4
"""Parametric tail probability under which a score beyond every calibrated one rejects."""
PASS_LEVEL = 1e-3
"""A score less probable than this, counted or extrapolated, does not pass."""

_POSITIVE = 1e-3
"""Nats above 0 that rounding explains in a replay."""

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

    Rejects when the score lies beyond every calibration score of every matching cell, by at least `profile.BAR`, and
    its parametric tail is at most 1e-4; the stated level is the conformal p-value 1/(n + 1) of the most lenient cell.
    Passes when the score is not improbable: p inside the calibrated range, the tail beyond it, above 1e-3. Never
    rejects without a profile, under another key, or outside the calibrated bands.

    Measured on an H200 (SmolLM2, vLLM 0.32, answers of up to 128 tokens at T = 0, 0.7 and 1): distance and margin, in
    both forms, under a profile of 2,592 answers (eager and CUDA graphs) rejected none of 1,548 other honest answers,
    from batches of 1, 8 and 64, graphs, chunked prefill, another attention kernel, long prompts and speculative
    decoding (5,928 judgements; 0 of 1,548 bounds the rate per answer by 0.2 % at 95 %). Nor did 36 smaller profiles, 12
    each of 12, 24 and 48 answers per condition and temperature drawn from those (213,408 judgements, all of the same
    1,548 answers).

    Metrics added: `score`, `p`, `n`, `tail`, `bet`, `mu0`, `exceeds` (0 or 1), `n_least`, `groups` (see
    `profile.Placement`).

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
    metrics |= {"exceeds": int(place.exceeds), "n_least": place.n_least, "groups": place.groups}
    return _decided(
        name, place, metrics, f"{words} is {score:.4g}, {place.n} honest answers stay within {place.usual:.4g}"
    )


def forms(evidence: Evidence, replay: Replay) -> tuple[Replay, ...]:
    """The replay, and for one of form `full` also what form `ids` would have told: the claimed ids alone."""
    if replay.form != "full":
        return (replay,)
    claimed = (replay.ids[:, :, None] == evidence.claim_ids[: len(replay.ids), None, :]).any(axis=2)
    claimed[:, :1] = True
    ids = np.where(claimed, replay.ids, -1).astype(np.int32)
    logprobs = np.where(claimed, replay.logprobs, -np.inf).astype(np.float32)
    return replay, Replay(ids, logprobs, "ids", replay.prompt_ids, replay.reference)


def winsorised_mean(values: NDArray[np.float64], cut: int) -> float:
    """Mean with the `cut` largest values cut back to the largest of the others; 0 when there are no others."""
    if len(values) <= cut:
        return 0.0
    ordered = np.sort(np.nan_to_num(values))
    return float(np.minimum(ordered, ordered[len(ordered) - cut - 1]).mean())


def too_short(tokens: int) -> str:
    """Why so few tokens are not compared, or nothing."""
    return f"too_short: {tokens} tokens, {SHORTEST_BAND} are needed" if tokens < SHORTEST_BAND else ""


def replay_trouble(evidence: Evidence, replay: Replay) -> str:
    """Why a replay cannot be used, or nothing. A reference that failed to compute is no fault of the backend's."""
    if replay.ids.ndim != 2 or replay.ids.shape != replay.logprobs.shape or not replay.ids.size:
        return "bad_replay: the replay holds no logprobs"
    if len(replay.ids) != len(evidence.output_ids) or not np.array_equal(replay.ids[:, 0], evidence.output_ids):
        return "bad_replay: the replay is of other tokens"
    listed = replay.ids >= 0
    if bool(np.isnan(replay.logprobs[listed]).any()) or bool((replay.logprobs[listed] > _POSITIVE).any()):
        return "bad_replay: a replayed logprob is not a number, or is positive"
    if not bool((listed & np.isfinite(replay.logprobs) & (replay.logprobs > MASKED)).any(axis=1).all()):
        return "bad_replay: the replay holds nothing at a token"
    return ""


def _outside(evidence: Evidence, replay: Replay, profile: Profile | None, length: int) -> str:
    if profile is None:
        return "no_profile: nothing was calibrated for this model"
    mismatch = profile.mismatch(evidence, replay)
    if mismatch:
        return f"profile_mismatch: {mismatch}"
    return too_short(length)


def _decided(name: str, place: Placement, metrics: dict[str, float | int | None], words: str) -> Check:
    if place.exceeds and place.tail is not None and place.tail <= REJECT_TAIL:
        return Check(name, Result.REJECT, f"too_far: {words}", level=place.p, metrics=metrics)
    if place.plausible > PASS_LEVEL:
        return Check(name, Result.PASS, metrics=metrics)
    return Check(name, Result.INCONCLUSIVE, f"borderline: {words}", metrics=metrics)
