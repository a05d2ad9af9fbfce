"""How long processes waited for a core: what a bound on time has to forgive on a busy machine."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import TracebackType

_NANOSECONDS = 1e9


class Lateness:
    """A context manager; `seconds` is how long the threads of these processes (and of this one) could have run
    meanwhile and did not, because others had the cores.

    What code waits for itself (a poll, a time-out, a lock) and what it computes is not in it, and so not forgiven.
    """

    def __init__(self, *pids: int | None) -> None:
        self.seconds = 0.0
        self._pids = {os.getpid(), *(pid for pid in pids if pid is not None)}

    def __enter__(self) -> Lateness:
        self._before = self._waited()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        before = self._before
        self.seconds = sum(waited - before.get(task, 0) for task, waited in self._waited().items()) / _NANOSECONDS

    def _waited(self) -> dict[Path, int]:
        """Nanoseconds on a run queue, by thread."""
        found: dict[Path, int] = {}
        for pid in self._pids:
            for task in Path(f"/proc/{pid}/task").glob("*"):
                with contextlib.suppress(OSError):
                    found[task] = int((task / "schedstat").read_text().split()[1])
        return found
