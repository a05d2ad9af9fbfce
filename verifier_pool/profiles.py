"""Profiles as files: plain, or in an envelope whose Ed25519 signature says who measured them.

A signed profile is `{"profile": {…}, "signature": {"alg": "EdDSA", "key": …, "value": …}}`, key and value in base64
(32 and 64 bytes, RFC 8032). What is signed is a label and the profile as canonical JSON: keys sorted, no spaces, no
name twice, finite numbers, ASCII. The profile is then read from those very bytes, so that a signature covers what is
used and not merely what looks like it. Reformatting the file does no harm; changing a digit does.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from policies.errors import ProfileError
from policies.profile import Profile

ALGORITHM = "EdDSA"
_LABEL = b"countersign profile\n"
"""Goes before what is signed, so that no other signature by the same key can pass for a profile's."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A profile read from a file. `signer` is the base64 public key of a signature that holds, None without one."""

    profile: Profile
    signer: str | None


def open_profile(text: str | bytes) -> Opened:
    """Reads a profile, signed or plain.

    Raises:
        ProfileError: malformed, or the signature does not hold.
    """
    top = _object(text)
    if "profile" not in top and "signature" not in top:
        return Opened(Profile.from_json(canonical(top)), None)
    if set(top) != {"profile", "signature"} or not isinstance(top["profile"], dict):
        raise ProfileError("a signed profile holds `profile` and `signature`, and nothing else")
    body = canonical(top["profile"])
    return Opened(Profile.from_json(body), _signer(top["signature"], body))


def read_profile(path: Path, keys: Collection[str] = ()) -> Profile:
    """The profile in a file. With `keys` (base64 public keys), only one signed by one of them.

    Raises:
        OSError: the file cannot be read.
        ProfileError: no profile, a signature that does not hold, or none by a trusted key.
    """
    opened = open_profile(path.read_bytes())
    if keys and opened.signer is None:
        raise ProfileError("it is not signed, and profile_keys asks for a signature")
    if keys and opened.signer not in keys:
        raise ProfileError(f"it is signed by {opened.signer}, which is not among profile_keys")
    return opened.profile


def name_of(profile: Profile) -> str:
    """Names what a profile measured, signed or not: 16 hex digits of the SHA-256 of its contents."""
    return hashlib.sha256(canonical(_object(profile.to_json()))).hexdigest()[:16]


def sign(profile: Profile, key: Ed25519PrivateKey) -> str:
    """The profile in a signed envelope: indented JSON."""
    tree = _object(profile.to_json())
    value = base64.b64encode(key.sign(_LABEL + canonical(tree))).decode()
    signature = {"alg": ALGORITHM, "key": public_text(key.public_key()), "value": value}
    return json.dumps({"profile": tree, "signature": signature}, indent=2) + "\n"


def canonical(tree: dict[str, Any]) -> bytes:
    """The bytes that are signed. Raises ProfileError for what has no such form."""
    try:
        return json.dumps(tree, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
    except (ValueError, RecursionError) as error:
        raise ProfileError("not a profile: numbers must be finite") from error


def new_key(path: Path) -> str:
    """Make a signing key in a new file that only its owner can read; returns the base64 public key.

    Raises:
        OSError: the file exists or cannot be written.
    """
    key = Ed25519PrivateKey.generate()
    kinds = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(key.private_bytes(*kinds))
    return public_text(key.public_key())


def read_key(path: Path) -> Ed25519PrivateKey:
    """The signing key in a file.

    Raises:
        OSError: the file cannot be read.
        ProfileError: it holds no Ed25519 private key as unencrypted PEM.
    """
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ProfileError(f"{path}: not a private key as unencrypted PEM") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ProfileError(f"{path}: not an Ed25519 key")
    return key


def public_text(key: Ed25519PublicKey) -> str:
    """A public key as settings spell it: 32 bytes in base64."""
    return base64.b64encode(key.public_bytes_raw()).decode()


def _signer(signature: Any, body: bytes) -> str:
    if not isinstance(signature, dict) or set(signature) != {"alg", "key", "value"}:
        raise ProfileError("a signature holds `alg`, `key` and `value`")
    if signature["alg"] != ALGORITHM:
        raise ProfileError(f"the signature's `alg` is {signature['alg']!r}, not {ALGORITHM!r}")
    try:
        key = Ed25519PublicKey.from_public_bytes(_decoded(signature["key"]))
        key.verify(_decoded(signature["value"]), _LABEL + body)
    except InvalidSignature:
        raise ProfileError("the signature does not hold: it or the profile was changed after signing") from None
    except ValueError as error:
        raise ProfileError("the signature's `key` or `value` is not what Ed25519 uses") from error
    return public_text(key)


def _decoded(text: Any) -> bytes:
    if not isinstance(text, str):
        raise ValueError("no text")
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError("no base64") from error


def _object(text: str | bytes) -> dict[str, Any]:
    try:
        tree = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"not a profile: {error}") from error
    if not isinstance(tree, dict):
        raise ProfileError("not a profile: no JSON object")
    return tree


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return found
