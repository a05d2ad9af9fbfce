"""Where differences stand: windows, spikes and runs of them, per sample.

From LMCV's study of a mixture-of-experts model (Qwen3.6-35B-A3B, K = 32): honest routes flip, so single positions
jump by nats, 92.8–94.3 % of them alone; a wrong precision shifts whole windows. Differences are nats, in order of
depth within one sample; NaN is a position without one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from policies.lmcv.divergence import Flags, Floats, Integers

SPIKE = 1.0
"""Nats above which one difference is a spike."""
WINDOW_THRESHOLDS: Mapping[int, float] = {3: 0.1600, 5: 0.1085, 16: 0.0513, 32: 0.0365}
"""Width → median above which a window is bad: the 99 % quantile of pooled BF16 windows, so 1 % is the honest rate.
FP8 measured 2.99, 3.41, 4.66 and 5.07 %."""
SPIKE_THRESHOLDS: Mapping[str, float] = {"nat": SPIKE, "bf16_p99": 0.408211, "bf16_p999": 11.123}


def window_medians(difference: Floats, width: int) -> Floats:
    """Median of every window of a sample, one step apart; none when it is shorter. A NaN makes its windows NaN."""
    if width < 1 or len(difference) < width:
        return np.zeros(0)
    return np.asarray(np.median(np.lib.stride_tricks.sliding_window_view(difference, width), axis=1), np.float64)


def pooled_medians(samples: Sequence[Floats], width: int) -> Floats:
    """Window medians of all samples; no window spans two."""
    return np.concatenate([window_medians(sample, width) for sample in samples] or [np.zeros(0)])


def bad_window_rate(samples: Sequence[Floats], width: int, threshold: float | None = None) -> float:
    """Share of windows whose median exceeds the threshold (`WINDOW_THRESHOLDS` by default); NaN without windows."""
    medians = pooled_medians(samples, width)
    medians = medians[np.isfinite(medians)]
    limit = WINDOW_THRESHOLDS[width] if threshold is None else threshold
    return float((medians > limit).mean()) if len(medians) else float("nan")


def window_threshold(samples: Sequence[Floats], width: int, level: float = 0.99) -> float:
    """The quantile of honest window medians that `bad_window_rate` compares with."""
    medians = pooled_medians(samples, width)
    medians = medians[np.isfinite(medians)]
    return float(np.quantile(medians, level)) if len(medians) else float("nan")


def spikes(difference: Floats, threshold: float = SPIKE) -> Flags:
    """Positions whose difference exceeds the threshold."""
    return np.asarray(difference > threshold, np.bool_)


def run_lengths(flags: Flags) -> Integers:
    """Lengths of the maximal blocks of consecutive flagged positions of one sample, in order."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    lengths: Integers = np.diff(edges)[::2].astype(np.int64)
    return lengths


def location_overlap(replicates: Sequence[NDArray[np.bool_]]) -> dict[int, float]:
    """Share of spiked positions (in any replicate) that spike in at least 2, 3, … of them.

    Args:
        replicates: flags of the same positions in each run; equal lengths.
    """
    if not replicates:
        return {}
    counts = np.sum(np.stack(replicates), axis=0)
    spiked = counts[counts > 0]
    return {
        least: float((spiked >= least).mean()) if len(spiked) else float("nan")
        for least in range(2, len(replicates) + 1)
    }


def summary(samples: Sequence[Floats]) -> dict[str, float]:
    """Window rates of every width, spike rate, and the runs of spikes, over all samples."""
    flags = [spikes(sample) for sample in samples]
    runs = np.concatenate([run_lengths(flag) for flag in flags] or [np.zeros(0, np.int64)])
    tokens = sum(len(sample) for sample in samples)
    return {
        **{f"bad_window_rate_w{width}": bad_window_rate(samples, width) for width in WINDOW_THRESHOLDS},
        "spike_rate": sum(int(flag.sum()) for flag in flags) / tokens if tokens else float("nan"),
        "spike_runs": float(len(runs)),
        "spike_run_longest": float(runs.max()) if len(runs) else 0.0,
        "spike_runs_single_rate": float((runs == 1).mean()) if len(runs) else float("nan"),
    }
