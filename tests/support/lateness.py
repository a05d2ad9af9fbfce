"""How long processes waited for a core: what a bound on time has to forgive on a busy machine."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import TracebackType

_NANOSECONDS = 1e9
_STOLEN = 8
"""Place of what a hypervisor gave to others among the words of a line on the machine's cores."""


class Lateness:
    """A context manager that says how long these processes (and this one) could have run meanwhile and did not,
    because others had the cores: other processes of this machine, or other machines on the same host.

    What code waits for itself (a poll, a time-out, a lock) and what it computes is not in it, and so not forgiven.

    Attributes:
        seconds: of all their threads together.
        longest: of the thread that waited longest.
    """

    def __init__(self, *pids: int | None) -> None:
        self.seconds = self.longest = 0.0
        self._pids = {os.getpid(), *(pid for pid in pids if pid is not None)}

    def __enter__(self) -> Lateness:
        self._before, self._stolen = self._waited(), _stolen()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        stolen = _stolen() - self._stolen
        waits = [(waited - self._before.get(task, 0)) / _NANOSECONDS for task, waited in self._waited().items()]
        self.seconds = sum(waits) + stolen
        self.longest = max(waits, default=0.0) + stolen

    def _waited(self) -> dict[Path, int]:
        """Nanoseconds on a run queue, by thread."""
        found: dict[Path, int] = {}
        for pid in self._pids:
            for task in Path(f"/proc/{pid}/task").glob("*"):
                with contextlib.suppress(OSError):
                    found[task] = int((task / "schedstat").read_text().split()[1])
        return found


def _stolen() -> float:
    """Seconds of this machine's cores that its host gave to others; nothing where it does not say."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[_STOLEN]) / os.sysconf("SC_CLK_TCK")
    return 0.0
