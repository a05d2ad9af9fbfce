"""By how much each token of an answer loses the reference's race: the part of `policies.margin` that looks at tokens.

A reference's cut by top-k, top-p or min-p falls elsewhere than the backend's, so a rival races only when it would
survive half a nat lower, and the emitted token is impossible only when it would be cut half a nat higher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies import noise
from policies._cuts import Cuts
from policies._processors import process
from policies._race import LOWEST_TEMPERATURE
from policies.evidence import Evidence, Replay

CAP = 0.5
"""Nats from which a margin counts in full."""
RIVALS = 3
"""Best-placed candidates that are looked at per token; with cuts, those that certainly survive among them race."""
RIVAL_MARGIN = 0.2
"""Nats by which an omitted token must win to be reported."""
_Floats = NDArray[np.float64]
_Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Margins:
    """Per token, (G,).

    Attributes:
        margin: nats by which the token loses to a rival that is certainly in play, at least 0; inf where it can
            never have been drawn.
        decided: something can be said of it.
        hanging: a rival beats it that may or may not have been cut.
        lead: the same, but 0 where nothing can be said and where it can never have been drawn, however narrowly.
        omitted: a rival beats it by `RIVAL_MARGIN` that is among the reference's best and not in the claim.
    """

    margin: _Floats
    decided: _Flags
    hanging: _Flags
    lead: _Floats
    omitted: _Flags

    def weights(self) -> _Floats:
        """What each decided token counts, in [0, 1]."""
        return (np.minimum(self.margin[self.decided], CAP) / CAP) ** 2


def measure(
    evidence: Evidence,
    replay: Replay,
    *,
    eos_token_ids: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] | None = None,
) -> Margins:
    """The margin of every token. The noise must be known and the replay be of these tokens."""
    sampling = evidence.sampling
    shown = process(
        sampling,
        evidence.output_ids,
        replay.ids,
        replay.logprobs,
        stop_ids=(*eos_token_ids, *sampling.stop_token_ids),
        bad_words=bad_words if sampling.bad_words and bad_words else (),
    )
    temperature = max(sampling.temperature, LOWEST_TEMPERATURE) if sampling.temperature > 0 else 0.0
    scores = shown.logprobs
    if temperature > 0:
        assert sampling.seed is not None
        gumbel = noise.gumbel(evidence.runtime, sampling.seed, len(evidence.prompt_ids), replay.ids)
        assert gumbel is not None
        scores = np.where(shown.candidates, scores + temperature * gumbel, -np.inf)
    possible = shown.candidates[:, 0]
    own = np.where(possible, scores[:, 0], 0.0)
    best = _best(scores)
    lead = np.take_along_axis(scores, best, axis=1) - own[:, None]
    certain, cut = np.ones(best.shape, bool), np.zeros(len(best), bool)
    if temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0):
        cuts = Cuts(shown.logprobs, replay, sampling, temperature)
        certain = cuts.survives(np.take_along_axis(shown.logprobs, best, axis=1))
        cut = cuts.falls(shown.logprobs[:, 0])
    margin = np.maximum(np.where(certain, lead, -np.inf).max(axis=1, initial=0.0), 0.0)
    beating = lead > RIVAL_MARGIN
    unclaimed = _unclaimed(evidence, replay, best)
    return Margins(
        margin=np.where(possible & ~cut, margin, np.inf),
        decided=~shown.blank,
        hanging=possible & ~cut & (np.where(certain, -np.inf, lead) > np.maximum(margin, 0.0)[:, None]).any(axis=1),
        lead=np.where(~shown.blank & possible, margin, 0.0),
        omitted=possible & (beating & certain & unclaimed).any(axis=1),
    )


def apart_from(margins: Margins, rows: _Flags) -> Margins:
    """The same, but nothing is said of these tokens."""
    return Margins(
        margin=np.where(rows, 0.0, margins.margin),
        decided=margins.decided & ~rows,
        hanging=margins.hanging & ~rows,
        lead=np.where(rows, 0.0, margins.lead),
        omitted=margins.omitted & ~rows,
    )


def _best(scores: _Floats) -> NDArray[np.intp]:
    """Columns of the best-placed rivals, (G, up to `RIVALS`)."""
    width = scores.shape[1] - 1
    if width <= RIVALS:
        return np.broadcast_to(np.arange(1, width + 1), (len(scores), width))
    return np.argpartition(scores[:, 1:], width - RIVALS, axis=1)[:, width - RIVALS :] + 1


def _unclaimed(evidence: Evidence, replay: Replay, columns: NDArray[np.intp]) -> _Flags:
    """Which of these entries of the replay are the reference's own and not in the claim."""
    ids = np.take_along_axis(replay.ids, columns, axis=1)
    found: _Flags = np.zeros(columns.shape, np.bool_)
    rows = min(len(ids), len(evidence.claim_ids))
    if replay.form == "full":
        found[:rows] = (ids[:rows, :, None] != evidence.claim_ids[:rows, None, :]).all(axis=2)
    return found
