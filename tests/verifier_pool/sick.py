"""A toy reference that goes wrong, and knows answers by which that shows."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np

from policies.evidence import Replay
from tests.verifier_pool.audits import Second
from tests.verifier_pool.toy import VOCAB, ToyReference, answer
from verifier_pool.reference.canary import Canary, Known, spoiled

KNOWN_PROMPT = (1, 2, 4)


class Sick(ToyReference):
    """Sound until `wrong` is set; a restart cures it `cures` times. Takes canaries only when somebody asks for one."""

    def __init__(self, *, seconds: float = 3600.0, cures: int = 10**9, wrong: bool = False) -> None:
        super().__init__()
        self.wrong = wrong
        self.cures = cures
        self.restarts = 0
        good = answer(KNOWN_PROMPT)
        known = Known(good.prompt_ids, good.output_ids, good.claim_ids, good.claim_logprobs)
        self.canary: Canary | None = Canary(seconds)
        self.canary.learn([known, spoiled(known, np.arange(VOCAB, dtype=np.int32))])
        self.canary.due(time.monotonic())  # the first one is over

    def replay(self, requests: Any) -> list[Replay]:
        found = super().replay(requests)
        return [replace(each, logprobs=each.logprobs - 3) for each in found] if self.wrong else found

    def restart(self) -> None:
        self.restarts += 1
        self.wrong = self.wrong and self.restarts > self.cures

    @property
    def canaries(self) -> int:
        return sum(tuple(request.prompt_ids) == KNOWN_PROMPT for request in self.seen) // 4


class SickSecond(Sick):
    """The same, as a second reference."""

    name = Second.name
