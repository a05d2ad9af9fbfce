"""Would the reference have drawn these tokens, with the request's own seed?

Null hypothesis, calibrated: the declared model drew the tokens with the declared runtime's noise, the request's seed
and the request's parameters, and differs from the reference by no more than the kernels, batches and chunks of one of
the profile's conditions. Then a token loses the reference's race only where drift turned a near tie, and by little
more than the drift. One unit is one response; its tokens are not independent.

The statistic is Token-DiFR's margin (arXiv 2511.20621): in nats, the most by which another candidate's
r(v) + T·g(v) exceeds the emitted token's, g being the seed's Gumbel noise; at T = 0, r(max) − r(y). In nats drift
means the same at every temperature. The claim's logprobs play no part, so no bending of them helps, and neither does
omitting the token that should have won: candidates are the claimed ids and the reference's own twenty best. What the
claim shows in such places is no second witness: whoever lets the claim pass `selection` lifts the emitted token
there by at least the margin.

A token counts (min(margin, 0.5)/0.5)². Squares set what lies beyond honest drift apart from the many near ties: on an
H200 margins over 0.2 nats are 100 times as frequent under FP8 weights as in an honest second pass (5.1 % of tokens
against 0.05 %), margins over 0.001 only 8 times. In the response that is judged the largest is cut back to the second
largest, one for every 64 tokens, so that one bad token does not convict (forged ones among true ones are a matter of
`_forged`). Calibration responses are left as they are: few honest answers lose two tokens, and the null of what is
hardly ever above 0 would know no spread. That favours the honest.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from policies import _forged, _grammar, betting
from policies._calibrated import forms, placed, replay_trouble, too_short, winsorised_mean
from policies._margins import CAP, RIVAL_MARGIN, Margins, apart_from, measure
from policies._replayable import no_race, not_replayable
from policies.checks import Check, Result
from policies.evidence import Evidence, Replay
from policies.profile import Profile, Row, bands, response_name
from policies.selection import FORCED
from policies.thinking import UNKNOWN, Tags, forced

__all__ = [
    "CAP",
    "FORGED_RATE",
    "RIVAL_MARGIN",
    "calibration_rows",
    "check",
    "forged_evidence",
    "measure",
]

NAME = "margin"
FORGED_RATE = _forged.RATE
"""Bound on the share of an honest backend's answers with `forged` = 1."""
WINSORISED = 64
"""One token in so many, at least one, is cut back to the largest of the others."""
NEAR_TIE = 1e-3
"""Nats up to which a margin is rounding."""
MOST_UNDECIDED = 0.2
"""Share of tokens whose winner may hang on a cut, or that everything is masked for, before nothing passes."""

_Floats = NDArray[np.float64]


def check(
    evidence: Evidence,
    replay: Replay,
    profile: Profile | None,
    *,
    eos_token_ids: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] | None = None,
    contradicted: bool = False,
    experts: bool = False,
    tags: Tags = UNKNOWN,
) -> Check:
    """The margin check of one generation against its profile: see `_calibrated.placed` for the decision.

    Besides, it rejects answers that hold forged tokens or end where the reference would not (`_forged`, which needs
    nothing calibrated but a profile whose key says that this reference is the one to compare with), at any length and
    also where the noise is not known. On a replay of form `ids` it may reject but never passes: a rival that the claim
    leaves out is not seen there.

    Args:
        eos_token_ids, bad_words: as for `selection.check`.
        contradicted: the declared runtime's noise is known not to be this backend's; then nothing is raced at T > 0.
        experts: the model has experts, so that wild tokens are no evidence.
        tags: as for `selection.check`; tokens that a thinking budget may have forced are not compared.

    Metrics: `tokens`; `checked`; `undecided`, tokens whose winner hangs on a cut; `losing`, tokens with a margin over
    0.001 nats; `losing_far`, over 0.2; `worst_margin` in nats; `omitted_rivals`, tokens beaten by over 0.2 nats by one
    of the reference's best twenty that the claim leaves out; `absurd`, tokens that lose by over 10 nats; `too_early`
    and `too_long`, levels of the stop hazard under the replay, the latter with its likeliest stop left out; `forged`,
    1 where `_forged` rejects (at most `_forged.RATE` of honest answers), 0 where it does not, None where the profile
    lets it say nothing; and those of the decision.
    """
    tokens = len(evidence.output_ids)
    excuse, by_request = _excuse(evidence, eos_token_ids, bad_words)
    if excuse:
        return Check(NAME, Result.INCONCLUSIVE, excuse, by_request=by_request, metrics={"tokens": tokens})
    budget = forced(evidence, tags)
    trouble = _trouble(evidence, replay) or (FORCED if budget.anywhere and budget.any() else "")
    if trouble:
        return Check(NAME, Result.INCONCLUSIVE, trouble, metrics={"tokens": tokens})
    obstacle = _no_race(evidence, contradicted)
    margins = None if obstacle else measure(evidence, replay, eos_token_ids=eos_token_ids, bad_words=bad_words)
    if margins is not None and budget.any():
        margins = apart_from(margins, budget.surely | budget.maybe)
    forged, told = _forged.find(
        evidence,
        replay,
        eos_token_ids,
        lead=None if margins is None else margins.lead,
        checked=0 if margins is None else int(margins.decided.sum()),
        experts=experts,
        tags=tags,
    )
    if margins is None:
        found = Check(NAME, Result.INCONCLUSIVE, obstacle, metrics={"tokens": tokens, **told})
    else:
        found = _compared(evidence, replay, profile, margins, _metrics(margins) | told)
    if found.result is Result.PASS and budget.maybe.any():
        found = dataclasses.replace(found, result=Result.INCONCLUSIVE, reason=FORCED)
    known = profile is not None and not profile.mismatch(evidence, replay) and not _forged.spiky(profile, NAME)
    found.metrics["forged"] = int(forged is not None) if known else None
    if forged is None or not known or (found.level is not None and found.level <= forged.level):
        return found
    reason = f"{forged.code}: {forged.text}"
    return dataclasses.replace(found, result=Result.REJECT, reason=reason, level=forged.level)


def _compared(
    evidence: Evidence,
    replay: Replay,
    profile: Profile | None,
    margins: Margins,
    metrics: dict[str, float | int | None],
) -> Check:
    """The answer as a whole against the calibrated ones."""
    tokens, weights = len(evidence.output_ids), margins.weights()
    if few := too_short(tokens):
        return Check(NAME, Result.INCONCLUSIVE, few, metrics=metrics)
    found = placed(
        NAME,
        evidence,
        replay,
        profile,
        score=_score(weights),
        length=len(weights),
        metrics=metrics,
        words="how far tokens lose under the request's seed",
    )
    if found.result is not Result.PASS:
        return found
    unclear = tokens - int(margins.decided.sum()) + int(margins.hanging.sum())
    if unclear > MOST_UNDECIDED * tokens:
        reason = f"undecided: the outcome of {unclear} of {tokens} tokens cannot be decided"
        return Check(NAME, Result.INCONCLUSIVE, reason, metrics=found.metrics)
    if replay.form == "ids":
        reason = "ids_form: the reference was asked for the claimed ids alone"
        return Check(NAME, Result.INCONCLUSIVE, reason, metrics=found.metrics)
    return found


def forged_evidence(metrics: Sequence[Mapping[str, float | int | None]]) -> betting.LogEvidence:
    """Evidence of forged answers over successive responses, from this check's metrics.

    Beside `betting.of_check`, which hears nothing of a forged token or two: the null is that at most `_forged.RATE` of
    a backend's answers are rejected for them, whatever came before. One response is one unit; one of which nothing
    could be said (`forged` is None, or the check did not run) leaves the evidence as it was.
    """
    said = [found.get("forged") is not None for found in metrics]
    running = betting.bernoulli(
        [found["forged"] == 1 for found, heard in zip(metrics, said, strict=True) if heard], _forged.RATE
    )
    return np.concatenate([[0.0], running])[np.cumsum(said, dtype=np.intp)]


def calibration_rows(
    evidence: Evidence,
    replay: Replay,
    *,
    arm: str = "",
    eos_token_ids: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] | None = None,
) -> list[Row]:
    """Rows of one honest response for `profile.fit`: one per length band it fills, of its first 16, 32, … tokens.

    A replay of form `full` gives rows of both forms. Empty for a response that the check could not judge.
    """
    if _excuse(evidence, eos_token_ids, bad_words)[0] or _trouble(evidence, replay) or _no_race(evidence):
        return []
    if forced(evidence, UNKNOWN).any():
        return []
    rows: list[Row] = []
    name, tokens = response_name(evidence), len(evidence.output_ids)
    for view in forms(evidence, replay):
        weights = measure(evidence, view, eos_token_ids=eos_token_ids, bad_words=bad_words).weights()
        rows += [
            Row(
                NAME,
                view.form,
                arm,
                evidence.sampling.temperature,
                length,
                float(weights[:length].mean()),
                name,
                tokens,
            )
            for length in bands(len(weights))
        ]
    return rows


def _score(weights: _Floats) -> float:
    return winsorised_mean(weights, max(1, len(weights) // WINSORISED))


def _metrics(margins: Margins) -> dict[str, float | int | None]:
    finite = margins.margin[margins.decided & np.isfinite(margins.margin)]
    return {
        "tokens": len(margins.margin),
        "checked": int(margins.decided.sum()),
        "undecided": int(margins.hanging.sum()),
        "losing": int((margins.margin[margins.decided] > NEAR_TIE).sum()),
        "losing_far": int((margins.margin[margins.decided] > RIVAL_MARGIN).sum()),
        "worst_margin": float(finite.max()) if len(finite) else None,
        "omitted_rivals": int(margins.omitted.sum()),
    }


def _excuse(
    evidence: Evidence, eos_token_ids: Sequence[int], bad_words: Sequence[Sequence[int]] | None
) -> tuple[str, bool]:
    """Why the reference's logits are not those that the tokens were drawn from, and whether the request is why."""
    masked, by_request = _grammar.obstacle(evidence)
    return (masked, by_request) if masked else (not_replayable(evidence, eos_token_ids, bad_words), True)


def _trouble(evidence: Evidence, replay: Replay) -> str:
    """Why nothing can be compared, or nothing."""
    if not len(evidence.output_ids):
        return "no_tokens: there is no output to test"
    if not (math.isfinite(evidence.sampling.temperature) and evidence.sampling.temperature >= 0):
        return "bad_temperature: the temperature is no number of 0 or more"
    return replay_trouble(evidence, replay)


def _no_race(evidence: Evidence, contradicted: bool = False) -> str:
    """Why the tokens cannot be raced, or nothing."""
    if evidence.sampling.temperature == 0:
        return ""
    if contradicted:
        return f"runtime_changed: answers do not fit the noise of the declared runtime {evidence.runtime!r}"
    if evidence.speculative:
        return "speculative: tokens drawn by speculative decoding are not tied to the seed"
    return no_race(evidence, evidence.runtime)
