"""What may go wrong besides settings."""

from __future__ import annotations

from policies.errors import CountersignError


class CalibrationError(CountersignError):
    """The answers cannot serve as honest ones, or there are too few; the message says why."""
