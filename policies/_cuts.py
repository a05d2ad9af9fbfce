"""Which tokens a backend's top-k, top-p and min-p certainly left in play, judged by a reference that drifts from it.

The backend cut its own logits, and the reference's differ. So a token is taken to survive only if it would even when
lowered by `SLACK`, and to fall only if it would when raised by it. Whatever lies between is neither.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from policies._truncation import MOST_TOKENS
from policies.evidence import Replay, Sampling

SLACK = 0.5
"""Nats; several times what kernels of one precision differ by (0.25 at most on SmolLM2)."""
MASS_SLACK = 0.02
"""By how much the share of mass that top-p keeps may seem to differ, besides."""
_ROUNDING = 1e-5

_Floats = NDArray[np.float64]
_Flags = NDArray[np.bool_]


class Cuts:
    """The request's cuts over a replay.

    Args:
        logprobs: float64 (G, X), the replay's as the sampler saw them; −inf where nothing can be drawn.
        temperature: above 0.
    """

    def __init__(self, logprobs: _Floats, replay: Replay, sampling: Sampling, temperature: float) -> None:
        self._sampling, self._temperature, self._logprobs = sampling, temperature, logprobs
        highest = logprobs.max(axis=1, keepdims=True)
        self._largest = np.where(np.isfinite(highest), highest, 0.0)
        self._weights = self._weigh(logprobs)
        # A token that is not listed lies no higher than the reference's own last one, nor than all that is left.
        raw = replay.logprobs.astype(np.float64)
        listed = (replay.ids >= 0) & np.isfinite(raw)
        rest = 1.0 - np.exp(np.where(listed, np.minimum(raw, 0.0), -np.inf)).sum(axis=1, keepdims=True)
        self._mass = np.maximum(rest, 0.0) + _ROUNDING
        own = slice(1, replay.own if replay.form == "full" else 1)
        least = raw[:, own].min(axis=1, initial=np.inf, where=listed[:, own])[:, None]
        self._cap = np.minimum(least, np.log(self._mass))
        self._tail = self._tail_weight()
        self._total_low, self._total_high = self._totals()

    def survives(self, values: _Floats) -> _Flags:
        """Whether tokens of these logprobs, (G, k), are certainly left; every value is one of the replay's."""
        sampling, lowered = self._sampling, values - SLACK
        above = self._logprobs[:, None, :] > lowered[:, :, None]
        unlisted = self._cap > lowered
        with np.errstate(over="ignore"):
            hidden = np.where(unlisted, np.floor(self._mass / np.exp(np.maximum(lowered, -600.0))), 0.0)
        rank = above.sum(axis=2) - 1 + hidden
        left: _Flags = np.isfinite(values)
        if sampling.top_k > 0:
            left &= rank < sampling.top_k
        if sampling.min_p > 0:
            left &= (lowered - self._largest) / self._temperature >= np.log(sampling.min_p)
        if sampling.top_p < 1:
            before = (self._weights[:, None, :] * above).sum(axis=2) - self._weigh(values)
            before += np.where(unlisted, self._tail, 0.0)
            left &= before < (sampling.top_p - MASS_SLACK) * self._total_low
            if sampling.top_k > 0 and sampling.min_p > 0:
                # With few tokens left vLLM 0.32's GPU kernel cuts some that top-p should keep (see `_truncation`).
                left &= rank == 0
        return left

    def falls(self, values: _Floats) -> _Flags:
        """Whether tokens of these logprobs, (G,), are certainly cut."""
        sampling, raised = self._sampling, values[:, None] + SLACK
        above = self._logprobs > raised
        out: _Flags = np.zeros(len(values), np.bool_)
        if sampling.top_k > 0:
            out |= above.sum(axis=1) >= sampling.top_k
        if sampling.min_p > 0:
            out |= ((raised - self._largest) / self._temperature < np.log(sampling.min_p))[:, 0]
        if sampling.top_p < 1:
            before = (self._weights * above).sum(axis=1, keepdims=True)
            out |= (before >= (sampling.top_p + MASS_SLACK) * self._total_high)[:, 0]
        return out

    def _weigh(self, values: _Floats) -> _Floats:
        weights: _Floats = np.exp(np.minimum((values - self._largest) / self._temperature, 300.0))
        return weights

    def _totals(self) -> tuple[_Floats, _Floats]:
        """Bounds on the weight that top-p takes its share of: what top-k and min-p leave. (G, 1) each."""
        weights, least, most = self._weights, self._weights, self._weights
        tail = self._tail
        if self._sampling.min_p > 0:
            edge, slack = np.log(self._sampling.min_p), SLACK / self._temperature
            scaled = (self._logprobs - self._largest) / self._temperature
            least, most = np.where(scaled - slack >= edge, weights, 0.0), np.where(scaled + slack >= edge, weights, 0.0)
        if 0 < self._sampling.top_k < weights.shape[1]:
            keep = slice(-self._sampling.top_k, None)
            least, most, tail = np.sort(least, axis=1)[:, keep], np.sort(most, axis=1)[:, keep], np.zeros_like(tail)
        return least.sum(axis=1, keepdims=True), most.sum(axis=1, keepdims=True) + tail

    def _tail_weight(self) -> _Floats:
        """Weight of everything unlisted, at most: in as few tokens as can be up to T = 1, in as many above."""
        inverse = 1.0 / self._temperature
        log_mass = np.log(self._mass)
        spread = log_mass + (inverse - 1.0) * self._cap
        if self._temperature > 1:
            even = (1.0 - inverse) * np.log(MOST_TOKENS) + inverse * log_mass
            spread = np.minimum(even, np.log(MOST_TOKENS) + inverse * self._cap)
        weight: _Floats = np.exp(np.minimum(spread - inverse * self._largest, 300.0))
        return weight
