"""One request at one backend: it takes a place there, and says how it went."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from email.utils import parsedate_to_datetime
from types import TracebackType

from proxy.backends.backend import Backend
from proxy.backends.breaker import Failure

_BUSY, _UNAVAILABLE = 429, 503
_DEFAULT_REST = 1.0


class Turn:
    """A request's place at a backend, from its making until `free`, `close` or the end of `with`, whichever is first.

    What was not said by the end, such as of a client that left, says nothing of the backend.
    """

    __slots__ = ("_closed", "_entry", "_free", "_settled", "backend")

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._entry = backend.enter()
        self._settled = self._free = self._closed = False

    def __enter__(self) -> Turn:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def free(self) -> None:
        """Give the place back: the backend has sent its last byte, whoever may have to wait for it still."""
        if not self._free:
            self._free = True
            self.backend.leave()

    def close(self) -> None:
        """The request is over."""
        self.free()
        if not self._closed:
            self._closed = True
            self.backend.over(self._entry)

    def answered(self, status: int, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """A status came that is no answer: 500 and more are failures; a 4xx says nothing, except that after a 429, as
        after a 503, the backend rests as long as it wants."""
        if self._settled:
            return
        if status in (_BUSY, _UNAVAILABLE):
            seconds = retry_after(headers)
            if seconds is None and status == _BUSY:
                seconds = _DEFAULT_REST
            if seconds:
                self.backend.rest(seconds)
        if status >= 500:
            self.failed("status")
        elif status >= 400:
            self._settled = True

    def began(self) -> None:
        """The first of an answer came."""
        if not self._settled:
            self.backend.began(self._entry)

    def finished(self) -> None:
        """The answer ended well."""
        if not self._settled:
            self._settled = True
            self.backend.finished(self._entry)

    def failed(self, kind: Failure) -> None:
        """The request failed, by the backend's fault. Only the first that is said of a request counts."""
        if not self._settled:
            self._settled = True
            self.backend.failed(self._entry, kind)


def retry_after(headers: Iterable[tuple[bytes, bytes]]) -> float | None:
    """Seconds until a backend wants to be asked again, by `retry-after-ms` or `retry-after` (RFC 9110 10.2.3)."""
    found = {name.lower(): value.strip().decode("latin-1") for name, value in headers}
    milliseconds = _number(found.get(b"retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    text = found.get(b"retry-after")
    seconds = _number(text)
    if seconds is not None or text is None:
        return seconds
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError, OSError):
        return None


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None
