"""Evidence, replays and secrets at rest: AES-256-GCM under the operator's keys, bound to what each value belongs to.

A sealed value is

    00 63 73 01 | id of the key, 8 bytes | salt, 24 bytes | ciphertext with its tag

The key of one value is HMAC-SHA256 of its salt under the operator's key, so that no number of values wears a key out: a
random 96-bit nonce under one key would be safe for 2³² of them only (NIST SP 800-38D, 8.3). Without keys a value stays
as it is; one that begins as a sealed one does gets the mark 00 63 73 00 before it. Nothing that we store begins so.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Sequence
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from policies.errors import NoSealingKey, SealError, SettingsError
from policies.settings import StorageSettings

KEY_BYTES = 32
OVERHEAD = 4 + 8 + 24 + 16
"""Bytes that a sealed value is longer than its plain text."""

_OURS = b"\x00cs"
_PLAIN = _OURS + b"\x00"
_SEALED = _OURS + b"\x01"
_ID, _SALT, _TAG = 8, 24, 16
_NONCE = bytes(12)
"""The same for all: no two values share a key."""
_EXPECTED = "keys of 32 random bytes each in base64, with spaces or line ends between them"


class Sealer:
    """Seals with the first of its keys, and opens with any of them; without keys it seals nothing.

    Safe to use from several threads.
    """

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        """Raises ValueError for a key that has not 32 bytes."""
        if any(len(key) != KEY_BYTES for key in keys):
            raise ValueError("a key of another length than 32 bytes")
        self._keys = {_id_of(key): key for key in reversed(keys)}
        self._first = keys[0] if keys else None

    @classmethod
    def of(cls, settings: StorageSettings) -> Sealer:
        """With the keys of the settings, those of the file after the others. Raises SettingsError."""
        keys = [] if settings.encryption_keys is None else _read(settings.encryption_keys.get_secret_value(), "keys")
        if settings.encryption_keys_file is not None:
            try:
                text = Path(settings.encryption_keys_file).read_text()
            except (OSError, UnicodeDecodeError) as error:
                expected = f"a readable file, not {settings.encryption_keys_file!r} ({type(error).__name__})"
                raise SettingsError("storage.encryption_keys_file", expected) from error
            keys += _read(text, "keys_file")
        return cls(keys)

    @property
    def seals(self) -> bool:
        """Whether there is a key."""
        return self._first is not None

    def is_current(self, value: bytes) -> bool:
        """Whether a stored value is as `seal` would write it, so that no other key is needed for it."""
        return self._first is None or value.startswith(_SEALED + _id_of(self._first))

    def seal(self, plain: bytes, about: bytes) -> bytes:
        """A value as it is stored.

        Args:
            about: what it belongs to, such as the name of its key in Redis; it opens for nothing else.
        """
        if self._first is None:
            return _PLAIN + plain if plain.startswith(_OURS) else plain
        salt = secrets.token_bytes(_SALT)
        head = _SEALED + _id_of(self._first) + salt
        return head + _cipher(self._first, salt).encrypt(_NONCE, plain, about)

    def open(self, sealed: bytes, about: bytes) -> bytes:
        """The value again, also one that was stored when there was no key.

        Raises:
            NoSealingKey: it was sealed with a key that is not here.
            SealError: it was changed, cut off, or belongs to something else.
        """
        if not sealed.startswith(_OURS):
            return sealed
        if sealed.startswith(_PLAIN):
            return sealed[len(_PLAIN) :]
        if not is_sealed(sealed):
            raise SealError("a sealed value is cut off, or of a kind that is not known here")
        at = len(_SEALED)
        id, salt, rest = sealed[at : at + _ID], sealed[at + _ID : at + _ID + _SALT], sealed[at + _ID + _SALT :]
        key = self._keys.get(id)
        if key is None:
            raise NoSealingKey(f"sealed with the key {id.hex()}, which is not among storage.encryption_keys")
        try:
            return _cipher(key, salt).decrypt(_NONCE, rest, about)
        except InvalidTag:
            raise SealError("a sealed value was changed, or belongs to something else") from None


def is_sealed(value: bytes) -> bool:
    """Whether a stored value is sealed, and not plain."""
    return value.startswith(_SEALED) and len(value) >= OVERHEAD


def new_key() -> str:
    """A new key, as the settings take it."""
    return base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode()


def _cipher(key: bytes, salt: bytes) -> AESGCM:
    return AESGCM(hmac.digest(key, b"countersign seal" + salt, "sha256"))


def _id_of(key: bytes) -> bytes:
    """What tells a key from others; says nothing about it."""
    return hashlib.sha256(b"countersign key id" + key).digest()[:_ID]


def _read(text: str, name: str) -> list[bytes]:
    keys = []
    for part in text.split():
        try:
            key = base64.b64decode(part, validate=True)
        except (binascii.Error, ValueError):
            key = b""
        if len(key) != KEY_BYTES:
            raise SettingsError(f"storage.encryption_{name}", _EXPECTED)
        keys.append(key)
    if not keys:
        raise SettingsError(f"storage.encryption_{name}", _EXPECTED)
    return keys
