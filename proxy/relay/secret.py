"""The key that a backend gets from us: a backend, or a gateway before it, may quote it, and no client shall read it."""

from __future__ import annotations

import re
from functools import lru_cache

from pydantic import SecretStr

_LEAST = 4
_NO_WORD = 12
"""Characters of a key that no honest answer holds by chance; a shorter one may be a word."""
_MOST_READ = 1024 * 1024
_MASK = b"***"


def _spellings(letter: int) -> bytes:
    plain = re.escape(bytes([letter]))
    escape = rb"\x00{0,3}".join((rb"\\", b"u", b"0", b"0", *(rb"(?i:%c)" % digit for digit in b"%02x" % letter)))
    return rb"(?:(?:\\\x00{0,3})?%s|%s)" % (plain, escape)


class Secret:
    """A backend's key."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()
        self._spelled = re.compile(rb"\x00{0,3}".join(map(_spellings, self._key)))

    def stands_in(self, text: bytes) -> bool:
        """Whether it is quoted there as it is, as in a header."""
        return len(self._key) >= _LEAST and self._key in text

    def mask(self, body: bytes, *, error: bool) -> bytes:
        """The body without the key, the same object where it is not in it. In an error also where JSON spells it with
        escapes, or in UTF-16 or UTF-32."""
        if len(self._key) < (_LEAST if error else _NO_WORD):
            return body
        body = body.replace(self._key, _MASK) if self._key in body else body
        if error and len(body) <= _MOST_READ and (b"\\" in body or b"\0" in body):
            return self._spelled.sub(_blank, body)
        return body


NONE = Secret("")


@lru_cache(maxsize=1024)
def _secret(key: str) -> Secret:
    return Secret(key)


def secret_of(api_key: SecretStr | None) -> Secret:
    """That of a backend's settings."""
    return NONE if api_key is None else _secret(api_key.get_secret_value())


def _blank(found: re.Match[bytes]) -> bytes:
    """As many bytes, for in UTF-16 every character has to stay where it is."""
    return re.sub(rb"[^\0]", b"*", found[0]) if b"\0" in found[0] else _MASK
