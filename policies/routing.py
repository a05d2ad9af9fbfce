"""Did the tokens take the experts that the reference sends them to?

Null hypothesis, calibrated: the declared mixture-of-experts model at the declared precision routed these tokens, and
differs from the reference by no more than the kernels, batches and chunks of one of the profile's conditions. One unit
is one response; its tokens are not independent.

The score is LMCV's (TrueOpen/lmcv-experiments, 2026): at the first mixture-of-experts layer, the share of expert slots
that hold another expert than the reference's, compared in place. Routing differences pile up with depth (H200,
SmolLM2 upcycled to 8 experts, FP8 weights: 2.9 % at layer 0, 12 % at layer 10; the same weights: 0.02 % and 0.3 %), so
only the first layer tells precisions apart. The same compared as sets is reported beside it.

Which layers hold experts is read off the reference, never off the claim: a layer without any (vLLM reports zeros
there, others −1) has the same id everywhere. Rows of the prompt are not compared: a backend's may come from whichever
request filled its prefix cache. The last output token was never fed forward and has no row.

The blind spot: who generates with a cheap model and prefills the declared one over its text has genuine routes.
`selection` and `margin` catch that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies._calibrated import placed
from policies._routes import Aligned, Misfit, align, by_layer, output_rows, repeats
from policies.checks import Check, Result
from policies.evidence import EXCUSED_FAULTS, Evidence, Replay
from policies.lmcv import moe
from policies.profile import Profile, Row, bands, response_name

__all__ = ["Aggregate", "Aligned", "Counts", "Misfit", "aggregate", "align", "by_layer", "calibration_rows", "check",
           "counts", "measure", "obstacle", "output_rows"]  # fmt: skip

NAME = "routing"
SHORTEST = 64
"""Compared tokens under which one response says nothing."""
MOST_BLANK = 0.01
"""Share of the slots a backend may leave out. vLLM 0.32 leaves out none of an answer's, and FP8 weights change from
2.9 % of them on: more would hide what the check looks for."""
OFTEN = 8
"""Slots that the reference gives an expert before its absence from a single answer is worth a word."""
OFTEN_TOGETHER = 32
"""The same over several answers together."""

_Metrics = dict[str, "float | int | None"]


def measure(evidence: Evidence, replay: Replay) -> _Metrics:
    """Every routing metric of one response.

    At the first layer with experts: `layer`, which one it is; `tokens`, compared; `entries` and `mismatches`, slots;
    `entry_mismatch`, their ratio and the score; `set_match`, share of tokens whose experts are the same set;
    `set_overlap` and `set_jaccard`, means over tokens; `blank`, share of the reference's slots that the backend left
    out; `experts_used` and `experts_used_reference`, different experts; `missing_experts`, how many of those the
    reference uses at least 8 times never occur. `layers`, how many have experts; `mean_mismatch`, over them all.

    Raises:
        ValueError: as `align`.
    """
    return _metrics(align(evidence, replay))


def calibration_rows(evidence: Evidence, replay: Replay, *, arm: str = "") -> list[Row]:
    """Rows of one honest response for `profile.fit`: one per length band from 64 tokens on that it fills.

    Empty for a response that the check could not judge. The replay's form plays no part; every row says `full`.
    """
    try:
        aligned = align(evidence, replay)
    except ValueError:
        return []
    if not aligned.layers:
        return []
    first = Aligned(aligned.ours[:, :1], aligned.theirs[:, :1], aligned.layers[:1])
    valid = ((first.ours != moe.SENTINEL) & (first.theirs != moe.SENTINEL)).any(axis=(1, 2))
    ours, theirs = first.ours[valid], first.theirs[valid]
    return [
        Row(
            NAME,
            "full",
            arm,
            evidence.sampling.temperature,
            length,
            _ratio(counts.entry_mismatches, counts.entries),
            response_name(evidence),
            len(evidence.output_ids),
        )
        for length in bands(len(ours))
        if length >= SHORTEST
        for counts in [moe.compare_routes(ours[:length], theirs[:length])]
    ]


def obstacle(evidence: Evidence, experts: int | None = None) -> Check | None:
    """What the expert ids of an answer alone say: a check that ends there, or None when they can be compared.

    Args:
        experts: how many experts the declared model has.

    Withheld: none at all, though the model is declared with experts and the answer is whole; or ids that cannot be
    this answer's (`bad_routed_experts`). Inconclusive: a stream, which vLLM 0.32 never gives expert ids; an answer
    that broke off.
    """
    ids = evidence.routed_experts
    if "bad_routed_experts" in evidence.faults:
        return _withheld("bad_routed_experts: the expert ids cannot be read or have the wrong shape")
    if ids is None:
        if evidence.stream:
            return _inconclusive("stream: this backend's streams carry no expert ids")
        if not evidence.complete or EXCUSED_FAULTS.intersection(evidence.faults) or not len(evidence.output_ids):
            return _inconclusive("incomplete: the answer broke off, and expert ids come with its end")
        return _withheld("no_routed_experts: the answer holds no expert ids, its model is declared with experts")
    if not len(evidence.prompt_ids) or not len(evidence.output_ids):
        return _inconclusive("no_tokens: without prompt and output ids nobody knows whose the expert ids are")
    try:
        output_rows(ids, len(evidence.prompt_ids), len(evidence.output_ids))
    except Misfit as error:
        return _withheld(f"bad_routed_experts: {error}")
    low, high = int(ids.min(initial=0)), int(ids.max(initial=0))
    if low < moe.SENTINEL or (experts is not None and high >= experts):
        return _withheld(f"bad_routed_experts: ids from {low} to {high}, the model is declared with {experts} experts")
    return None


def check(evidence: Evidence, replay: Replay, profile: Profile | None, *, experts: int | None = None) -> Check:
    """The routing check of one generation against its profile: see `_calibrated.placed` for the decision.

    Withheld, beside what `obstacle` says: other layers or slots than the reference has; more than 1 % of the slots left
    out; one expert twice for a token, which no router does (and the reference did not either).
    Metrics: those of `measure`, and those of the decision.
    """
    ended = obstacle(evidence, experts)
    if ended is not None:
        return ended
    if replay.routed_experts is None:
        return _inconclusive("no_reference_experts: the reference returns no expert ids")
    try:
        aligned = align(evidence, replay)
    except Misfit as error:
        return _withheld(f"bad_routed_experts: {error}")
    except ValueError as error:
        return _inconclusive(f"bad_replay: {error}")
    if not aligned.layers:
        return _inconclusive("too_short: no expert ids differ" if len(aligned.ours) else "too_short: 0 tokens")
    if experts is not None and int(aligned.theirs.max()) >= experts:
        return _inconclusive(f"bad_replay: the reference has more than the {experts} experts that are declared")
    metrics = _metrics(aligned)
    return _against_backend(aligned, metrics) or _against_profile(evidence, replay, profile, metrics)


def _against_backend(aligned: Aligned, metrics: _Metrics) -> Check | None:
    blank = float(metrics["blank"] or 0.0)
    if blank > MOST_BLANK:
        return _withheld(f"bad_routed_experts: {blank:.1%} of the expert ids are left out", metrics)
    if repeats(aligned.ours) and not repeats(aligned.theirs):
        return _withheld("bad_routed_experts: a token has one expert twice in a layer", metrics)
    return None


def _against_profile(evidence: Evidence, replay: Replay, profile: Profile | None, metrics: _Metrics) -> Check:
    tokens = int(metrics["tokens"] or 0)
    if tokens < SHORTEST:
        reason = f"too_short: {tokens} tokens with expert ids, {SHORTEST} are needed"
        return _inconclusive(reason, metrics)
    words = f"the share of other experts at layer {metrics['layer']}"
    if metrics["missing_experts"]:
        words += f" ({metrics['missing_experts']} of the reference's experts never occur)"
    score = float(metrics["entry_mismatch"] or 0.0)
    # Expert ids are the same whatever logprobs came with them, so one calibration serves both forms.
    any_form = dataclasses.replace(replay, form="full")
    return placed(NAME, evidence, any_form, profile, score=score, length=tokens, metrics=metrics, words=words)


@dataclass(frozen=True, slots=True, eq=False)
class Counts:
    """One response's part in an aggregate, at the first layer with experts.

    Attributes:
        tokens, entries, mismatches: compared tokens, slots, and slots that differ.
        used, used_reference: slots per expert, (E,), on either side.
    """

    tokens: int
    entries: int
    mismatches: int
    used: NDArray[np.int64]
    used_reference: NDArray[np.int64]


def counts(aligned: Aligned) -> Counts:
    """Of one aligned response; nothing compared where no layer has experts."""
    ours, theirs = aligned.ours[:, :1], aligned.theirs[:, :1]
    both = (ours != moe.SENTINEL) & (theirs != moe.SENTINEL)
    size = int(max(ours.max(initial=0), theirs.max(initial=0))) + 1
    return Counts(
        tokens=int(both.any(axis=(1, 2)).sum()),
        entries=int(both.sum()),
        mismatches=int((both & (ours != theirs)).sum()),
        used=np.bincount(ours[ours >= 0], minlength=size).astype(np.int64),
        used_reference=np.bincount(theirs[theirs >= 0], minlength=size).astype(np.int64),
    )


@dataclass(frozen=True, slots=True)
class Aggregate:
    """Several responses together.

    Attributes:
        decision: LMCV's, in its order: `insufficient_samples` (under 5), `insufficient_tokens` (under 512), then
            `accept` or `reject` by its bound.
        score: Σ mismatches ÷ Σ entries; NaN without entries.
        samples, tokens: with anything to compare.
        pruned: experts that the reference uses at least 32 times and the backend never.
    """

    decision: moe.Decision
    score: float
    samples: int
    tokens: int
    pruned: tuple[int, ...] = ()


def aggregate(samples: Sequence[Counts], threshold: float = moe.THRESHOLDS["bf16"]) -> Aggregate:
    """LMCV's rule over responses, weighted by their slots.

    Args:
        threshold: `moe.THRESHOLDS` by the reference's precision: 0.060 for BF16, 0.080 for FP8.
    """
    kept = [sample for sample in samples if sample.entries > 0]
    entries = np.array([sample.entries for sample in kept], np.int64)
    mismatches = np.array([sample.mismatches for sample in kept], np.int64)
    tokens = np.array([sample.tokens for sample in kept], np.int64)
    return Aggregate(
        decision=moe.decide(entries, mismatches, tokens, threshold),
        score=moe.weighted_mismatch(entries, mismatches),
        samples=len(kept),
        tokens=int(tokens.sum()),
        pruned=_missing(
            _total([sample.used for sample in kept]), _total([sample.used_reference for sample in kept]), OFTEN_TOGETHER
        ),
    )


def _metrics(aligned: Aligned) -> _Metrics:
    if not aligned.layers:
        return {"layer": None, "layers": 0, "tokens": 0, "entries": 0, "mismatches": 0, "entry_mismatch": None}
    per_layer = by_layer(aligned)
    first = per_layer[aligned.layers[0]]
    ours, theirs = aligned.ours[:, 0], aligned.theirs[:, 0]
    known = theirs != moe.SENTINEL
    part = counts(aligned)
    return {
        "layer": aligned.layers[0],
        "layers": len(aligned.layers),
        "tokens": first.tokens,
        "entries": first.entries,
        "mismatches": first.entry_mismatches,
        "entry_mismatch": _ratio(first.entry_mismatches, first.entries),
        "set_match": _ratio(first.token_layer_set_matches, first.token_layers),
        "set_overlap": _ratio(first.overlap_sum, first.token_layers),
        "set_jaccard": _ratio(first.jaccard_sum, first.token_layers),
        "mean_mismatch": float(np.mean([_ratio(c.entry_mismatches, c.entries) for c in per_layer.values()])),
        "blank": _ratio(int((known & (ours == moe.SENTINEL)).sum()), int(known.sum())),
        "experts_used": int((part.used > 0).sum()),
        "experts_used_reference": int((part.used_reference > 0).sum()),
        "missing_experts": len(_missing(part.used, part.used_reference, OFTEN)),
    }


def _missing(used: NDArray[np.int64], reference: NDArray[np.int64], often: int) -> tuple[int, ...]:
    size = max(len(used), len(reference))
    ours, theirs = (np.pad(each, (0, size - len(each))) for each in (used, reference))
    return tuple(np.flatnonzero((ours == 0) & (theirs >= often)).tolist())


def _total(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    total = np.zeros(max(map(len, parts), default=0), np.int64)
    for part in parts:
        total[: len(part)] += part
    return total


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _withheld(reason: str, metrics: _Metrics | None = None) -> Check:
    return Check(NAME, Result.WITHHELD, reason, metrics=metrics or {})


def _inconclusive(reason: str, metrics: _Metrics | None = None) -> Check:
    return Check(NAME, Result.INCONCLUSIVE, reason, metrics=metrics or {})
