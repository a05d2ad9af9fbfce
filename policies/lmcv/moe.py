"""LMCV's routing rule: share of layer-0 expert slots in which backend and reference differ, over several samples.

Slots are compared in place. Routing differences pile up with depth, so only layer 0 (embedding, first attention,
router) tells precisions apart: on Qwen3.6-35B-A3B 2.4–2.9 % (BF16) and 4.8–4.9 % (FP8) for the same model, 11.3–11.7 %
across. Null: the declared model and precision, with the entry mismatch LMCV measured over 1,000 samples per case; of
random sets of five samples, 0.0008 % (BF16, 0.060) and 0.168 % (FP8, 0.080) exceed the bound. One unit is one
sample; its tokens are not independent. Route windows follow vLLM: (tokens, layers, slots), −1 for rows it no
longer has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from policies.lmcv.divergence import Flags, Floats, Integers

SAMPLES = 5
TOKENS = 512
THRESHOLDS: Mapping[str, float] = {"bf16": 0.060, "fp8": 0.080}
"""Reference precision → largest accepted weighted mismatch."""
LENIENT_FP8 = 0.085
SINGLE_THRESHOLDS: Mapping[str, float] = {"bf16": 0.066, "fp8": 0.074}
"""For one sample; to look at, not to decide by."""
SENTINEL = -1

Decision = Literal["accept", "reject", "uncertain", "insufficient_samples", "insufficient_tokens"]


@dataclass(frozen=True, slots=True)
class RouteCounts:
    """How two route arrays of the same tokens agree, over the selected layers.

    `set` compares the slots of a token and layer as a set; `overlap` = |∩| ÷ the larger, `jaccard` = |∩| ÷ |∪|,
    summed over tokens and layers.
    """

    tokens: int
    token_layers: int
    entries: int
    entry_mismatches: int
    token_layer_matches: int
    token_layer_set_matches: int
    token_matches: int
    overlap_sum: float
    jaccard_sum: float


def compare_routes(
    ours: NDArray[np.integer], theirs: NDArray[np.integer], *, sentinel: int | None = SENTINEL
) -> RouteCounts:
    """Counts over two arrays (T, L, S) of the same tokens.

    Entries where either side holds the sentinel do not count; tokens or layers left without any are not counted.

    Raises:
        ValueError: the shapes differ.
    """
    if ours.shape != theirs.shape or ours.ndim != 3:
        raise ValueError(f"route arrays of shapes {ours.shape} and {theirs.shape}")
    valid: Flags = np.ones(ours.shape, np.bool_)
    if sentinel is not None:
        valid = np.asarray((ours != sentinel) & (theirs != sentinel), np.bool_)
    equal: Flags = np.logical_and(ours == theirs, valid)
    present: Flags = np.asarray(valid.any(axis=2), np.bool_)
    matches = (equal | ~valid).all(axis=2) & present
    shared, either, larger = _sets(ours.astype(np.int64), theirs.astype(np.int64), valid)
    some = present.any(axis=1)
    ratio = np.where(present, shared / np.maximum(larger, 1), 0.0)
    jaccard = np.where(present, shared / np.maximum(either, 1), 0.0)
    return RouteCounts(
        tokens=int(some.sum()),
        token_layers=int(present.sum()),
        entries=int(valid.sum()),
        entry_mismatches=int(valid.sum() - equal.sum()),
        token_layer_matches=int(matches.sum()),
        token_layer_set_matches=int((present & (shared == either)).sum()),
        token_matches=int(((matches | ~present).all(axis=1) & some).sum()),
        overlap_sum=float(ratio.sum()),
        jaccard_sum=float(jaccard.sum()),
    )


def weighted_mismatch(entries: Integers, mismatches: Integers) -> float:
    """R = Σ mismatches ÷ Σ entries; NaN without entries."""
    total = int(entries.sum())
    return int(mismatches.sum()) / total if total else float("nan")


def decide(
    entries: Integers,
    mismatches: Integers,
    tokens: Integers,
    threshold: float,
    *,
    illegal: int = 0,
    uncertain: int = 0,
) -> Decision:
    """The rule over samples, in LMCV's order. Counts per sample, (n,), of layer 0.

    Args:
        threshold: `THRESHOLDS` by the reference's precision.
        illegal, uncertain: tokens so classed by `legality`, over all samples.
    """
    counted = entries > 0
    if int(counted.sum()) < SAMPLES:
        return "insufficient_samples"
    if int(tokens[counted].sum()) < TOKENS:
        return "insufficient_tokens"
    if illegal > 0:
        return "reject"
    if uncertain > 0:
        return "uncertain"
    return "accept" if weighted_mismatch(entries, mismatches) <= threshold else "reject"


def random_groups(samples: int, trials: int, *, size: int = SAMPLES, seed: int = 0) -> Integers:
    """Random sets of samples without repetition, (trials, size). Raises ValueError when there are too few samples."""
    if samples < size:
        raise ValueError(f"{samples} samples, {size} are needed")
    keys = np.random.default_rng(seed).random((trials, samples))
    chosen: Integers = np.argpartition(keys, size - 1, axis=1)[:, :size].astype(np.int64)
    return chosen


def group_mismatch(entries: Integers, mismatches: Integers, groups: Integers) -> Floats:
    """R of every group, (trials,)."""
    return np.asarray(mismatches[groups].sum(axis=1) / entries[groups].sum(axis=1), np.float64)


def acceptance_rate(
    entries: Integers,
    mismatches: Integers,
    tokens: Integers,
    threshold: float,
    *,
    trials: int = 20_000,
    size: int = SAMPLES,
    seed: int = 0,
) -> dict[str, float]:
    """Over random groups: `groups` with enough tokens, the share of them accepted, and the extremes of R."""
    groups = random_groups(len(entries), trials, size=size, seed=seed)
    groups = groups[tokens[groups].sum(axis=1) >= TOKENS]
    if not len(groups):
        return {"groups": 0.0, "accepted": float("nan"), "lowest": float("nan"), "highest": float("nan")}
    scores = group_mismatch(entries, mismatches, groups)
    return {
        "groups": float(len(groups)),
        "accepted": float((scores <= threshold).mean()),
        "lowest": float(scores.min()),
        "highest": float(scores.max()),
    }


def attribute(by_bf16: Decision, by_fp8: Decision) -> Literal["bf16", "fp8", "unknown", "ambiguous"]:
    """Which precision ran, from the decisions of a BF16 and an FP8 reference. Ambiguous: compare the margins to the
    thresholds over at least 10 samples and 1,024 tokens."""
    accepted = by_bf16 == "accept", by_fp8 == "accept"
    if accepted == (True, True):
        return "ambiguous"
    if accepted == (True, False) and by_fp8 == "reject":
        return "bf16"
    if accepted == (False, True) and by_bf16 == "reject":
        return "fp8"
    return "unknown"


def _sets(ours: Integers, theirs: Integers, valid: Flags) -> tuple[Integers, Integers, Integers]:
    """Sizes of intersection and union of each token and layer's valid slots as sets, and of the larger set."""
    same = (ours[..., :, None] == theirs[..., None, :]) & valid[..., :, None] & valid[..., None, :]
    first, second = _first(ours, valid), _first(theirs, valid)
    shared = (same.any(axis=3) & first).sum(axis=2)
    own, other = first.sum(axis=2), second.sum(axis=2)
    return shared, own + other - shared, np.maximum(own, other)


def _first(values: Integers, valid: Flags) -> Flags:
    """Valid entries that no valid entry before them repeats."""
    slots = values.shape[-1]
    earlier = np.tril(np.ones((slots, slots), np.bool_), -1)
    repeats = (values[..., :, None] == values[..., None, :]) & valid[..., None, :] & earlier
    first: Flags = valid & ~repeats.any(axis=-1)
    return first
