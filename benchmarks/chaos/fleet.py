"""The processes on the stage: started, killed without notice, and started again as an orchestrator would."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.demo.processes import Child, Children

PROXY = "proxy"
WORKER = "worker"
REFERENCE = "reference"
ENGINE = "engine"
REDIS = "redis"
UPSTREAM = "upstream"


@dataclass(eq=False)
class Member:
    """One place on the stage and the process that fills it now.

    Attributes:
        start: starts it under the given name.
        due: monotonic second of its next start, while it is gone.
        lives: how often it was started. `exits`: exit codes it ended with by itself.
    """

    kind: str
    name: str
    start: Callable[[str], Child]
    child: Child | None = None
    due: float = 0.0
    lives: int = 0
    exits: list[int] = field(default_factory=list)
    logs: list[Child] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self.child is not None and self.child.process.poll() is None


class Fleet:
    """All members. `tend` has to be called often."""

    def __init__(self, children: Children, rng: random.Random, *, longest_gap: float = 1.0) -> None:
        self.members: list[Member] = []
        self.kills: Counter[str] = Counter()
        self._children = children
        self._rng = rng
        self._longest_gap = longest_gap

    def add(self, kind: str, name: str, start: Callable[[str], Child]) -> Member:
        """A new member, started at once."""
        member = Member(kind, name, start)
        self.members.append(member)
        self._start(member)
        return member

    def of(self, kind: str) -> list[Member]:
        """Members of a kind."""
        return [member for member in self.members if member.kind == kind]

    def kill(self, member: Member) -> bool:
        """SIGKILL; false when it was gone already. It comes back after a random time."""
        if not member.alive:
            return False
        assert member.child is not None
        member.child.process.kill()
        member.child.process.wait()
        self.kills[member.kind] += 1
        self._gone(member)
        return True

    def tend(self) -> None:
        """Start what is due, and note what ended by itself."""
        now = time.monotonic()
        for member in self.members:
            if member.child is not None:
                code = member.child.process.poll()
                if code is not None:
                    member.exits.append(code)
                    self._gone(member)
            elif now >= member.due:
                self._start(member)

    def hurry(self) -> None:
        """Start at once whatever is gone."""
        for member in self.members:
            member.due = 0.0
        self.tend()

    def _start(self, member: Member) -> None:
        member.lives += 1
        member.child = member.start(f"{member.name}.{member.lives}")
        member.logs.append(member.child)

    def _gone(self, member: Member) -> None:
        assert member.child is not None
        self._children.stop(member.child)
        member.child = None
        member.due = time.monotonic() + self._rng.uniform(0.02, self._longest_gap)
