"""How late this machine is: what a bound on time has to forgive."""

from __future__ import annotations

import threading
import time
from types import TracebackType

NAP = 0.002


class Lateness:
    """A context manager whose thread sleeps again and again; `worst` is the most by which it woke too late (seconds).

    On a busy machine threads wait for a core, and so does a server under test. Code that waits for something itself
    (a poll, a time-out, a lock) makes nobody else late, and is not forgiven.
    """

    def __init__(self) -> None:
        self.worst = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._over.is_set():
            asleep = time.monotonic()
            time.sleep(NAP)
            self.worst = max(self.worst, time.monotonic() - asleep - NAP)

    def __enter__(self) -> Lateness:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
