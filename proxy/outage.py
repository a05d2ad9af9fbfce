"""Whether Redis answers: one switch that the event loop and the recorder's thread share."""

from __future__ import annotations

import logging
import threading
import time

from verifier_pool.link.durable import NotDurable

logger = logging.getLogger(__name__)


class Outage:
    """Remembers that Redis failed, so that nobody waits for it again until it is back.

    Whoever sees a failure calls `failed`; only the recorder's thread asks again and calls `recovered`.
    Every outage makes one log line when it begins and one when it ends; `count` says how many began.
    """

    def __init__(self) -> None:
        self.down = False
        self.count = 0
        self._since = 0.0
        self._lock = threading.Lock()

    def failed(self, error: BaseException) -> None:
        """Redis did not answer."""
        if self.down:
            return
        with self._lock:
            if self.down:
                return
            self.down = True
            self.count += 1
            self._since = time.monotonic()
        why = {"why": str(error)} if isinstance(error, NotDurable) else {}
        logger.error(
            "redis does not answer; requests are served unverified until it does",
            extra={"error": type(error).__name__} | why,
        )

    def recovered(self) -> None:
        """Redis answers again."""
        with self._lock:
            if not self.down:
                return
            self.down = False
        logger.warning("redis answers again", extra={"seconds": round(time.monotonic() - self._since, 3)})
