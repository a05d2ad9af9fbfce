"""How much work one answer may make: whoever chooses the answer must not choose how long it takes to judge."""

from __future__ import annotations

_LEAST, _PER_CHARACTER = 64_000_000, 16


class TooMuchError(Exception):
    """The work that an answer makes is more than linear in its length, which no honest one's is."""


class Effort:
    """Work left for a text of so many characters; one unit is a character read, about 10 ns."""

    def __init__(self, characters: int) -> None:
        self._left = _LEAST + _PER_CHARACTER * characters

    def spend(self, units: int) -> None:
        """Raises TooMuchError when there is no more left."""
        self._left -= units
        if self._left < 0:
            raise TooMuchError
