"""Progress on a terminal: one line that counts seconds; in a log, a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

LOG_EVERY = 15.0


class Progress:
    """Steps with elapsed seconds. On a terminal the current step's line is rewritten in place."""

    def __init__(self, out: TextIO = sys.stdout) -> None:
        self._out = out
        self._live = out.isatty()
        self._start = time.monotonic()
        self._step = ""
        self._step_start = self._start
        self._spoken = self._start

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Announce a step, and how long it took once it is over."""
        self._step, self._step_start = what, time.monotonic()
        self._spoken = self._step_start
        self._write(f"… {what}", keep=not self._live)
        yield
        self._write(f"✓ {what} ({self.elapsed(self._step_start)})", keep=True)

    def tick(self, detail: str) -> None:
        """Say where the current step is; in a log only every few seconds."""
        now = time.monotonic()
        if self._live or now - self._spoken >= LOG_EVERY:
            self._spoken = now
            self._write(f"… {self._step}: {detail} ({self.elapsed(self._step_start)})", keep=not self._live)

    def elapsed(self, since: float | None = None) -> str:
        """Seconds since then, or since the beginning, as text."""
        return f"{time.monotonic() - (self._start if since is None else since):.0f} s"

    def _write(self, text: str, *, keep: bool) -> None:
        start, end = ("\r\033[K", "\n" if keep else "") if self._live else ("", "\n")
        self._out.write(f"{start}{text}{end}")
        self._out.flush()
