"""What every tap has, and keeps: nothing that a backend sends makes one raise."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod

logger = logging.getLogger(__name__)

UNREADABLE_FAULT = "unreadable"
"""Fault of what broke its reader. It counts as the backend's: who else can know how, would do it to all its answers."""


class Guarded(ABC):
    """Feeds, settles and closes a tap, which does the work in `_feed`, `_pass_on`, `_settle` and `_close`. Where one of
    them raises, the tap has given up."""

    done = b""
    failed = False
    begun = False
    fault: str | None = None
    erred = False
    cut = False
    refusal: bytes | None = None
    streamed = False
    content_type: str | None = None

    def feed(self, data: bytes) -> bytes:
        """Bytes from the backend in, bytes for the client out (may be empty)."""
        try:
            return self._feed(data)
        except Exception:
            said = self._give_up()
            return said if self.streamed else b""

    def pass_on(self, data: bytes) -> bytes | None:
        """See Tap."""
        try:
            return self._pass_on(data)
        except Exception:
            said = self._give_up()
            return said if self.streamed else b""

    def settle(self) -> None:
        """See Tap."""
        try:
            self._settle()
        except Exception:
            self._broke()

    def close(self, fault: str | None = None) -> bytes:
        """The backend ended, cleanly or with a fault; what is left for the client."""
        try:
            return self._close(fault)
        except Exception:
            told = self.failed and self.streamed
            said = self._give_up()
            return b"" if told else said

    @abstractmethod
    def _feed(self, data: bytes) -> bytes:
        """See `feed`; may raise."""

    def _pass_on(self, data: bytes) -> bytes | None:
        """See `pass_on`; may raise."""
        return None

    def _settle(self) -> None:
        """See `settle`; may raise."""
        return None

    @abstractmethod
    def _close(self, fault: str | None) -> bytes:
        """See `close`; may raise."""

    def _broke(self) -> None:
        """An exception was raised over what came: remember it."""
        logger.exception("an answer cannot be read")

    def _instead(self, fault: str) -> bytes:
        """What the client gets instead of an answer, or of the rest of it."""
        self.cut = True
        return b""

    def _give_up(self) -> bytes:
        self._broke()
        self.failed, self.fault = True, UNREADABLE_FAULT
        return self._instead(UNREADABLE_FAULT)
