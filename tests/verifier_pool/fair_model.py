"""The order of the fair queue as its docstring tells it, in a few lines of Python, and what the tests push with."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from redis import Redis
from rq.job import Job

from policies.settings import VerificationSettings
from verifier_pool.link import fair
from verifier_pool.link.fair import FairQueue
from verifier_pool.link.queue import VERIFY_JOB

RULES = VerificationSettings()


@dataclass
class Model:
    """The order as the module's docstring tells it, one list per lane."""

    first: list[str] = field(default_factory=list)
    lanes: list[list[tuple[float, str]]] = field(default_factory=lambda: [[], [], [], []])
    ends: list[dict[str, float]] = field(default_factory=lambda: [{}, {}, {}, {}])
    clocks: list[float] = field(default_factory=lambda: [0.0] * 4)
    served: list[int] = field(default_factory=lambda: [0] * 4)
    turn: int = 0
    gone: set[str] = field(default_factory=set)
    costs: dict[str, int] = field(default_factory=dict)

    def push(self, id: str, lane: int, tenant: str, cost: int) -> None:
        self.costs[id] = cost
        start = max(self.clocks[lane], self.ends[lane].get(tenant, 0.0))
        self.ends[lane][tenant] = start + cost
        self.lanes[lane].append((start, id))

    def take(self, n: int, tokens: int | None, alone: bool) -> list[str]:
        taken: list[str] = []
        while len(taken) < n:
            lane = None
            if self.first:
                id, start = self.first[0], 0.0
            elif full := [lane for lane in range(4) if self.lanes[lane]]:
                lane = full[0]
                if (self.turn + 1) % 8 == 0 and len(full) > 1:
                    lane = min(full[1:], key=lambda each: self.served[each])
                start, id = min(self.lanes[lane])
            else:
                self.turn, self.served = 0, [0] * 4
                break
            waits = id not in self.gone
            if waits and tokens is not None:
                cost = self.costs.get(id, 1)
                if cost > tokens and not (alone and not taken):
                    break
                tokens = max(tokens - cost, 0)
            if lane is None:
                self.first.pop(0)
            else:
                self.lanes[lane].remove((start, id))
                if waits:
                    self.turn += 1
                    self.served[lane], self.clocks[lane] = self.turn, start
                if not self.lanes[lane]:
                    self.ends[lane], self.clocks[lane] = {}, 0.0
            if waits:
                taken.append(id)
        return taken

    def waiting(self) -> set[str]:
        return {*self.first, *(id for lane in self.lanes for _, id in lane)}


def name(number: int) -> str:
    """An id; their order is not that of the numbers."""
    return hashlib.sha256(str(number).encode()).hexdigest()[:32]


def push(queue: FairQueue, id: str, *, lane: int = 3, tenant: str = "A", cost: int = 1) -> Job:
    stage: fair.Stage = "verify" if lane % 2 else "judge"
    given = fair.options(id, RULES, inline=lane < 2, tenant=tenant, tokens=cost, size=0, stage=stage)
    return queue.enqueue(VERIFY_JOB, id, **given | {"job_id": id})


def clean(redis: Redis) -> FairQueue:
    redis.flushall()
    return FairQueue("q", connection=redis)
