"""Answers replayed as a worker would, in every form and batch that a worker might use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from benchmarks.calibration.errors import CalibrationError
from policies.errors import ReplayError
from policies.evidence import Evidence, Replay, ReplayForm
from verifier_pool.reference.base import Reference, ReplayRequest

FORMS: tuple[ReplayForm, ...] = ("full", "ids")
BATCHES = (1, 4)
ATTEMPTS = 4
PAUSE_SECONDS = 2.0
FINAL = frozenset({"too_long", "refused", "bad_ids", "bad_request", "wrong_model"})
"""Troubles that trying again cannot cure."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way of replaying: a form, and so many answers at once."""

    form: ReplayForm
    batch: int

    @property
    def name(self) -> str:
        """In the archive."""
        return f"{self.form}-{self.batch}"


def ways(forms: Sequence[ReplayForm] = FORMS, batches: Sequence[int] = BATCHES) -> list[Way]:
    """Every combination."""
    return [Way(form, batch) for form, batch in product(forms, batches)]


def replay(
    reference: Reference,
    answers: Sequence[Evidence],
    ways: Sequence[Way],
    *,
    experts: bool,
    tick: Callable[[int], None],
) -> Iterator[tuple[int, dict[str, Replay]]]:
    """Yields the position of each answer with its replays by name, a batch at a time.

    A reference that cannot take a form answers in the other; it is asked once and then no more.

    Raises:
        CalibrationError: a passing trouble of the reference did not pass, or it refuses an answer.
    """
    step = max((way.batch for way in ways), default=1)
    impossible: set[ReplayForm] = set()
    for start in range(0, len(answers), step):
        group = answers[start : start + step]
        found: list[dict[str, Replay]] = [{} for _ in group]
        for way in (way for way in ways if way.form not in impossible):
            for offset in range(0, len(group), way.batch):
                part = group[offset : offset + way.batch]
                requests = [_request(evidence, way.form, experts) for evidence in part]
                for place, result in enumerate(_patiently(reference, requests), offset):
                    if result.form == way.form:
                        found[place][way.name] = result
                    else:
                        impossible.add(way.form)
        for place, replays in enumerate(found):
            yield start + place, replays
        tick(len(group))


def _request(evidence: Evidence, form: ReplayForm, experts: bool) -> ReplayRequest:
    return ReplayRequest(
        evidence.prompt_ids,
        evidence.output_ids,
        evidence.endpoint,
        evidence.request,
        evidence.index,
        candidate_ids=evidence.claim_ids,
        form=form,
        experts=experts,
    )


def _patiently(reference: Reference, requests: Sequence[ReplayRequest]) -> list[Replay]:
    for attempt in range(ATTEMPTS):
        try:
            return reference.replay(requests)
        except ReplayError as error:
            if error.reason in FINAL or attempt == ATTEMPTS - 1:
                raise CalibrationError(f"the reference cannot replay an answer: {error}") from error
            time.sleep(PAUSE_SECONDS * 2**attempt)
    raise AssertionError("unreachable")
