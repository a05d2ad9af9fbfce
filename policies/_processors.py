"""What a request changes in the logits before sampling, replayed on a claim of the raw logprobs.

vLLM 0.32 applies, to fp32 logits and before the temperature: allowed ids (mask), bad words (mask), stop ids until
`min_tokens` (mask), logit bias (+), presence and frequency penalties (−, from the counts of the tokens sampled so
far). The V1 runner does it in that order, the V2 runner with the bad words last; masks and sums commute, so one replay
serves both (repetition penalties would not commute, and need raw logits: they are not replayed). After that come T,
min-p, top-k and top-p, in both runners. Raw logprobs are logits less one number per position, so a shift of a logit
is the same shift of a logprob as far as any comparison goes.

A claim lists about twenty tokens. Of the others only bounds are known, and they are kept here per position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.evidence import MASKED, Ids, Sampling

MOST_BIAS = 100.0
"""vLLM clamps a logit bias to ±100."""
MASS_ROUNDING = 1e-5
"""How far a sum of claimed probabilities may be off, from fp32 logprobs."""
LOGPROB_ROUNDING = 1e-5
"""Nats by which an fp32 logprob may be off."""
SHIFT_ROUNDING = 2.0**-22
"""Relative rounding of an fp32 logit through a shift: the logit's own and the sum's, half a unit in the last place
each, with as much again to spare. Logits themselves are taken to lie within ±64."""
_LOGIT_RANGE = 64.0

_Floats = NDArray[np.float64]
_Counts = NDArray[np.int64]
_Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Unlisted:
    """Bounds on the tokens a claim does not list, per position; (G,) each.

    Attributes:
        mass: their raw probability together, at most (rounding included).
        least_mass: the raw probability of those that are neither masked nor lowered, at least.
        cap: the raw logprob of any of them, at most.
        open: tokens that nothing shifts or masks may be among them.
        extra: number of others that can be drawn (biased upwards, boosted by a negative penalty, or allowed by
            name), at most.
        lift: largest shift of those, at least 0.
        listed: number of tokens the claim lists.
    """

    mass: _Floats
    least_mass: _Floats
    cap: _Floats
    open: _Flags
    extra: _Counts
    lift: _Floats
    listed: _Counts

    def highest(self) -> _Floats:
        """Shifted logprob that no unlisted token exceeds; −inf where none can be drawn. (G,)."""
        ordinary = np.where(self.open, self.cap, -np.inf)
        highest: _Floats = np.maximum(ordinary, np.where(self.extra > 0, self.cap + self.lift, -np.inf))
        return highest


@dataclass(frozen=True, slots=True)
class Processed:
    """A claim as the sampler saw it, up to one number per position and before the temperature.

    Attributes:
        logprobs: float64 (G, W), shifted; −inf where nothing can be drawn.
        candidates: bool (G, W), listed tokens that can be drawn.
        listed: bool (G, W), entries that are real tokens with a finite, unmasked raw logprob.
        blank: bool (G,), rows in which everything may be masked; there vLLM emits what it likes.
        complete: bool (G,), rows whose claim lists every token that the grammar allows.
        rounding: float64 (G,), nats by which two shifted logprobs may be off against each other; 0 where nothing is
            shifted, because equal logits have equal logprobs.
        unlisted: bounds on the rest.
    """

    logprobs: _Floats
    candidates: _Flags
    listed: _Flags
    blank: _Flags
    complete: _Flags
    rounding: _Floats
    unlisted: Unlisted


def bad_word_ids(words: Sequence[str], encode: Callable[[str], Sequence[int]]) -> list[tuple[int, ...]]:
    """The token sequences that vLLM makes of `bad_words`.

    Each word is tokenised as it is and with a space before it (its own leading blanks taken off), without special
    tokens. The second form counts only where it has as many tokens and begins with another one.
    """
    found: list[tuple[int, ...]] = []
    for word in dict.fromkeys(words):
        bare = tuple(encode(word.lstrip()))
        if not bare:
            continue
        found.append(bare)
        spaced = tuple(encode(" " + word.lstrip()))
        if spaced and spaced[0] != bare[0] and len(spaced) == len(bare):
            found.append(spaced)
    return found


def process(
    sampling: Sampling,
    output_ids: Ids,
    claim_ids: Ids,
    claim_logprobs: NDArray[np.float32],
    *,
    stop_ids: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
) -> Processed:
    """Replays the request's processors on a claim.

    Args:
        output_ids: int32 (G,), the tokens sampled.
        claim_ids, claim_logprobs: (G, W), sampled token first.
        stop_ids: every id that `min_tokens` holds back.
        bad_words: token sequences whose last id is masked after the others.
    """
    raw = claim_logprobs.astype(np.float64)
    listed: _Flags = (claim_ids >= 0) & np.isfinite(raw) & (raw > MASKED)
    # Where a grammar left fewer than twenty tokens the claim pads itself with masked ones, and nothing is unlisted.
    complete: _Flags = np.any((claim_ids >= 0) & (raw <= MASKED), axis=1)
    raw = np.where(listed, raw, -np.inf)
    rows = len(claim_ids)
    tail = _Tail(rows)
    shift = np.zeros(raw.shape)
    masked = np.zeros(raw.shape, bool)
    held: _Flags = np.arange(rows) < sampling.min_tokens
    if sampling.logit_bias:
        shift += tail.biased(dict(sampling.logit_bias), claim_ids, listed, held, stop_ids)
    if sampling.presence_penalty or sampling.frequency_penalty:
        shift -= tail.penalised(sampling, output_ids[:rows], claim_ids, listed)
    if sampling.min_tokens > 0:
        masked |= held[:, None] & np.isin(claim_ids, list(stop_ids))
        tail.lowered += np.where(held, len(set(stop_ids)), 0)
    for word in bad_words:
        masked |= _completes(word, output_ids[:rows])[:, None] & (claim_ids == word[-1])
    tail.lowered += len({word[-1] for word in bad_words})
    blank = np.full(rows, sampling.grammar)
    if sampling.allowed_token_ids:
        allowed = np.sort(np.array(sampling.allowed_token_ids, np.int64))
        allowed = allowed[np.diff(allowed, prepend=allowed[0] - 1) != 0]
        is_allowed = np.isin(claim_ids, allowed)
        masked |= ~is_allowed
        tail.open[:] = False
        tail.extra = np.maximum(len(allowed) - (is_allowed & listed).sum(axis=1), 0)
        blank |= _may_all_be_masked(allowed, held, stop_ids, bad_words)
    candidates = listed & ~masked
    shifted = np.where(candidates, raw + shift, -np.inf)
    largest = np.abs(np.where(candidates, shift, 0.0)).max(axis=1, initial=0.0)
    return Processed(
        logprobs=shifted,
        candidates=candidates,
        listed=listed,
        blank=blank & ~candidates.any(axis=1),
        complete=complete,
        rounding=np.where(largest > 0, LOGPROB_ROUNDING + SHIFT_ROUNDING * (largest + _LOGIT_RANGE), 0.0),
        unlisted=tail.bounds(raw, listed, complete),
    )


class _Tail:
    """Gathers what each processor does to unlisted tokens."""

    def __init__(self, rows: int) -> None:
        self.open = np.ones(rows, bool)
        self.extra: _Counts = np.zeros(rows, np.int64)
        self.lift = np.zeros(rows)
        self.lowered: _Counts = np.zeros(rows, np.int64)

    def biased(
        self, biases: dict[int, float], ids: Ids, listed: _Flags, held: _Flags, stop_ids: Sequence[int]
    ) -> _Floats:
        """The bias of each listed token, (G, W). Rows that `held` marks draw no stop id, whatever its bias."""
        tokens = np.array(sorted(biases), np.int64)
        values = np.clip([biases[token] for token in tokens.tolist()], -MOST_BIAS, MOST_BIAS)
        at = np.minimum(np.searchsorted(tokens, ids), len(tokens) - 1)
        shift = np.where(tokens[at] == ids, values[at], 0.0)
        for rows, free in ((~held, np.ones(len(tokens), bool)), (held, ~np.isin(tokens, list(stop_ids)))):
            raised = tokens[free & (values > 0)]
            inside = (listed & np.isin(ids, raised)).sum(axis=1) if rows.any() else 0
            self.extra += np.where(rows, np.maximum(len(raised) - inside, 0), 0)
            self.lift += np.where(rows, values[free].max(initial=0.0), 0.0)
        self.lowered += np.maximum((values < 0).sum() - (listed & (shift < 0)).sum(axis=1), 0)
        return shift

    def penalised(self, sampling: Sampling, output: Ids, ids: Ids, listed: _Flags) -> _Floats:
        """What the penalties take off each listed token, (G, W)."""
        presence, frequency = sampling.presence_penalty, sampling.frequency_penalty
        counts = _counts(output, ids)
        own = _counts(output, output[:, None])[:, 0]
        distinct = np.cumsum(own == 0) - (own == 0)
        most = np.maximum.accumulate(own + 1)
        most = np.concatenate([[0], most[:-1]])
        unlisted = np.maximum(distinct - (listed & (counts > 0)).sum(axis=1), 0)
        if presence < 0 or frequency < 0:
            boost = np.maximum(-(presence + frequency), -(presence + frequency * most))
            self.lift += np.where(unlisted > 0, np.maximum(boost, 0.0), 0.0)
            self.extra += unlisted
        if presence > 0 or frequency > 0:
            self.lowered += unlisted
        penalty: _Floats = frequency * counts + presence * (counts > 0)
        return penalty

    def bounds(self, raw: _Floats, listed: _Flags, complete: _Flags) -> Unlisted:
        """The bounds, from the raw claim."""
        rest = 1.0 - np.exp(np.minimum(raw, 0.0)).sum(axis=1)
        mass = np.maximum(rest, 0.0) + MASS_ROUNDING
        least = np.where(listed, raw, np.inf)[:, 1:].min(axis=1, initial=np.inf)
        cap = np.minimum(least, np.log(mass))
        open_rows = self.open & ~complete
        least_mass = np.maximum(rest - MASS_ROUNDING - self.lowered * np.exp(cap), 0.0)
        return Unlisted(
            mass=mass,
            least_mass=np.where(open_rows, least_mass, 0.0),
            cap=cap,
            open=open_rows,
            extra=np.where(complete, 0, self.extra),
            lift=self.lift,
            listed=listed.sum(axis=1),
        )


def _counts(output: Ids, ids: Ids) -> _Counts:
    """How often each of `ids` (G, W) is among the tokens sampled before its row."""
    rows = len(output)
    stride = np.int64(rows + 1)
    seen = np.sort(output.astype(np.int64) * stride + np.arange(rows))
    counts: _Counts = np.zeros(ids.shape, np.int64)
    # Most listed tokens were never sampled.
    at = np.nonzero(np.isin(ids, output))
    first = ids[at].astype(np.int64) * stride
    counts[at] = np.searchsorted(seen, first + at[0]) - np.searchsorted(seen, first)
    return counts


def _completes(word: Sequence[int], output: Ids) -> _Flags:
    """Rows at which the last id of `word` would complete it, given the tokens sampled before; (G,)."""
    rows, prefix = len(output), len(word) - 1
    found = np.zeros(rows, bool)
    if prefix < rows:
        found[prefix:] = True
        for offset, token in enumerate(word[:prefix]):
            found[prefix:] &= output[offset : rows - prefix + offset] == token
    return found


def _may_all_be_masked(
    allowed: NDArray[np.int64], held: _Flags, stop_ids: Sequence[int], bad_words: Sequence[Sequence[int]]
) -> _Flags:
    """Rows in which the other masks may take every allowed id; (G,)."""
    if len(allowed) > len(stop_ids) + len(bad_words):
        return np.zeros(len(held), np.bool_)
    left = set(allowed.tolist()) - {word[-1] for word in bad_words}
    if not left:
        return np.ones(len(held), np.bool_)
    return held if left <= set(stop_ids) else np.zeros(len(held), np.bool_)
