"""The processes on the stage: started, killed without notice, and started again as an orchestrator would."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.chaos.nursery import Born

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
        start: starts it with the given file as its log. `killed`: called when it was killed, before it starts again.
        due: monotonic second of its next start, while it is gone.
        exits: exit codes it ended with by itself.
        logs: one file per life.
    """

    kind: str
    name: str
    start: Callable[[Path], Born]
    killed: Callable[[], object] = lambda: None
    life: Born | None = None
    due: float = 0.0
    exits: list[int] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self.life is not None and self.life.poll() is None

    @property
    def ready(self) -> bool:
        """Whether its log says that it takes work."""
        return b"ready: taking" in self.logs[-1].read_bytes()

    def last_lines(self, count: int = 12) -> str:
        """The end of its log."""
        return "\n".join(self.logs[-1].read_text(errors="replace").splitlines()[-count:])


class Fleet:
    """All members. `tend` has to be called often.

    Args:
        folder: of the logs.
        longest_gap: seconds until a process that ended is started again, at most.
    """

    def __init__(self, folder: Path, rng: random.Random, *, longest_gap: float = 0.5) -> None:
        self.members: list[Member] = []
        self._folder = folder
        self._rng = rng
        self._longest_gap = longest_gap

    def add(self, kind: str, name: str, start: Callable[[Path], Born]) -> Member:
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
        if member.life is None or member.life.poll() is not None:
            return False
        member.life.kill()
        member.life.wait()
        member.killed()
        self._gone(member)
        return True

    def tend(self) -> None:
        """Start what is due, and note what ended by itself."""
        now = time.monotonic()
        for member in self.members:
            if member.life is not None:
                code = member.life.poll()
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
        log = self._folder / f"{member.name}.{len(member.logs) + 1}.log"
        log.touch()
        member.logs.append(log)
        member.life = member.start(log)

    def _gone(self, member: Member) -> None:
        member.life = None
        member.due = time.monotonic() + self._rng.uniform(0.02, self._longest_gap)
