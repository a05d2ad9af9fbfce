"""A backend that is honest for a while and then is not, through `policies.standing` as the product folds it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.standing.evidence import Answer
from policies import standing
from policies.settings import AuditSettings, StandingSettings
from policies.unit import Unit

DECLARATION = {"model": "simulated", "runtime": "", "precision": "", "engine": "", "speculative": ""}
INTERVAL = 10.0
"""Seconds between two answers: 8,640 a day."""
DELTA = 1e-6


@dataclass(frozen=True, slots=True)
class Clients:
    """Who asks, in turn: client keys; `operator` where all of it is the operator's own traffic."""

    keys: tuple[str, ...] = ("one", "two", "three", "four")
    operator: bool = False


@dataclass(frozen=True, slots=True)
class Caught:
    """Answers from the change until a state was reached, that answer included, and their output tokens; None: never.

    `enough`: until the total evidence sufficed, corroborated or not.
    """

    suspect: int | None = None
    enough: int | None = None
    quarantined: int | None = None
    tokens: int | None = None


class Backend:
    """One backend's record, its answers folded one by one at the audit rate that the record then has."""

    def __init__(
        self,
        random: np.random.Generator,
        clients: Clients,
        rules: StandingSettings,
        audits: AuditSettings,
        record: standing.Record | None = None,
        served: int = 0,
    ) -> None:
        self.record = record if record is not None else standing.new("simulated", DECLARATION, 1, 0.0)
        self.served = served
        self._random, self._clients, self._rules, self._audits = random, clients, rules, audits

    def serve(self, answers: Iterable[Answer]) -> None:
        """Answers that are served, verified and folded, each to a prompt of its own."""
        for answer in answers:
            self._serve(answer)

    def turn(self, answers: Iterable[Answer]) -> Caught:
        """Serves, in its first life, until it is quarantined or the answers end."""
        tokens = 0
        suspect: int | None = None
        enough: int | None = None
        needed = math.log(2 / self._rules.alpha)
        for generations, answer in enumerate(answers, 1):
            self._serve(answer)
            tokens += answer.tokens
            state = self.record.state
            if suspect is None and state in (standing.SUSPECT, standing.QUARANTINED):
                suspect = generations
            if enough is None and self.record.log_evidence >= needed:
                enough = generations
            if state == standing.QUARANTINED:
                return Caught(suspect, enough, generations, tokens)
        return Caught(suspect, enough)

    def _serve(self, answer: Answer) -> None:
        audited = self._random.random() < standing.audit_rate(self.record, self._audits)
        self.record = standing.fold(self.record, [self._unit(answer, audited)], frozenset(), self._rules).record
        self.served += 1

    def _unit(self, answer: Answer, audited: bool) -> Unit:
        number, clients = self.served, self._clients
        return Unit(
            id=str(number),
            at=number * INTERVAL,
            served=number * INTERVAL,
            backend="simulated",
            declaration=DECLARATION,
            key=clients.keys[number % len(clients.keys)],
            operator=clients.operator,
            unit=str(number),
            prompt=str(number),
            tokens=answer.tokens,
            audited=audited,
            replayed=audited and answer.replayed,
            undecided=answer.undecided,
            blame=answer.blame,
            outcomes=dict(answer.outcomes if audited else answer.unseen),
            profile="simulated",
            delta=DELTA,
            draw=self._random.random(),
        )


def quantile(found: Sequence[int | None], share: float) -> int | None:
    """The smallest number that at least this share of the runs did not exceed; None where they mostly never ended."""
    numbers = sorted(number for number in found if number is not None)
    place = int(np.ceil(share * len(found))) - 1
    return numbers[place] if 0 <= place < len(numbers) else None
