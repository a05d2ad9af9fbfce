"""From answers and their replays to a profile."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.calibration.errors import CalibrationError
from benchmarks.calibration.plan import Shot
from policies import distance, margin, routing
from policies.evidence import Evidence, Replay
from policies.profile import Profile, ProfileKey, Row, fit, response_name

DECLARED = ("model", "runtime", "precision", "engine")
"""What of a backend's declaration goes into the key."""


@dataclass(slots=True)
class Measured:
    """What was seen so far, reduced to what a profile needs.

    One answer replayed in several batches gives several rows of one name, of which a cell counts the largest score:
    in which company the worker will replay an answer is not known beforehand.

    Attributes:
        eos_token_ids: the model's, which `min_tokens` and the like forbid.
        kinds: kind of prompt by response.
        references: names of what replayed.
        width: alternatives per token, the most that any claim lists.
    """

    eos_token_ids: Sequence[int] = ()
    rows: list[Row] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)
    references: set[str] = field(default_factory=set)
    width: int = 0
    answers: int = 0
    tokens: int = 0

    def add(self, shot: Shot, evidence: Evidence, replays: Iterable[Replay]) -> None:
        """Take one answer with its replays."""
        self.answers += 1
        self.tokens += len(evidence.output_ids)
        self.kinds[response_name(evidence)] = shot.kind
        self.width = max(self.width, evidence.claim_ids.shape[1] - 1)
        for replay in replays:
            self.references.add(replay.reference)
            self.rows += distance.calibration_rows(evidence, replay, arm=shot.label)
            self.rows += margin.calibration_rows(evidence, replay, arm=shot.label, eos_token_ids=self.eos_token_ids)
            self.rows += routing.calibration_rows(evidence, replay, arm=shot.label)


def fit_profile(measured: Measured, declared: Mapping[str, Any], made: Mapping[str, str]) -> Profile:
    """Fit the nulls.

    Args:
        declared: model, runtime, precision and engine.
        made: how the profile came about, for people.

    Raises:
        CalibrationError: several references replayed.
        ProfileError: too little was measured to fit anything.
    """
    if len(measured.references) != 1:
        names = ", ".join(sorted(measured.references)) or "none"
        raise CalibrationError(
            f"one reference must have replayed all answers, not {names}; replay again in a new folder"
        )
    key = ProfileKey(
        **{name: declared[name] for name in DECLARED}, reference=measured.references.pop(), top_k=measured.width
    )
    return fit(measured.rows, key, created=time.time(), made={k: v for k, v in made.items() if v})
