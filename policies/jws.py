"""Statements signed with Ed25519, as compact JWS (RFC 7515, RFC 8037), and the keys they are checked with (RFC 7517).

The header is always `{"alg":"EdDSA","kid":…,"typ":…}` in canonical JSON, and `kid` the key's thumbprint (RFC 7638), so
that of one payload, key and type an honest signer makes exactly one token: whatever is spelled otherwise is refused,
even where its signature holds. (Ed25519 takes its nonce from key and payload; who does not keep to that has as many as
he likes.)
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from hashlib import sha256
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from policies._jcs import canonical
from policies.errors import ReceiptError

LONGEST = 4 * 1024 * 1024
"""Characters of a token beyond which nobody looks further."""
KEY_BYTES = 32
_ALGORITHM = "EdDSA"
_SIGNATURE_BYTES = 64

Keys = Mapping[str, bytes]
"""Public keys, 32 bytes each, by `kid`."""


def sign(payload: bytes, key: Ed25519PrivateKey, kind: str) -> str:
    """A token that says this, of this type."""
    signed = f"{_head_of(public_bytes(key), kind)}.{_encoded(payload)}"
    return f"{signed}.{_encoded(key.sign(signed.encode()))}"


def opened(token: str, keys: Keys, kind: str) -> tuple[str, bytes]:
    """The `kid` and the payload of a token whose signature by one of these keys holds.

    Raises:
        ReceiptError: it is none of this type, by none of these keys, or anything in it was changed.
    """
    if not isinstance(token, str) or len(token) > LONGEST:
        raise ReceiptError("not a signed statement: no text, or too much of it")
    parts = token.split(".")
    if len(parts) != 3:
        raise ReceiptError("not a signed statement: a compact JWS has three parts")
    head, payload, signature = map(_decoded, parts)
    kid = _kid_in(head, kind)
    known = keys.get(kid)
    if known is None:
        raise ReceiptError(f"signed by the key {kid[:64]!r}, which is not among those that are trusted here")
    if len(signature) != _SIGNATURE_BYTES:
        raise ReceiptError("the signature is no Ed25519 signature")
    try:
        Ed25519PublicKey.from_public_bytes(known).verify(signature, f"{parts[0]}.{parts[1]}".encode())
    except InvalidSignature:
        raise ReceiptError("the signature does not hold: something was changed after signing") from None
    except ValueError as error:
        raise ReceiptError(f"the key {kid!r} is no Ed25519 key") from error
    return kid, payload


def kid_in(token: str, kind: str) -> str:
    """Which key a token says it is signed by, unchecked. Raises ReceiptError for what is no token of this type."""
    return _kid_in(_decoded(token.partition(".")[0]), kind)


def new_key() -> Ed25519PrivateKey:
    """A new signing key."""
    return Ed25519PrivateKey.generate()


def key_from(seed: bytes) -> Ed25519PrivateKey:
    """The signing key with this seed, 32 bytes. Raises ValueError."""
    return Ed25519PrivateKey.from_private_bytes(seed)


def public_bytes(key: Ed25519PrivateKey) -> bytes:
    """Its public key, 32 bytes."""
    return key.public_key().public_bytes_raw()


def kid_of(public: bytes) -> str:
    """The thumbprint of a public key (RFC 7638, RFC 8037 appendix A.3), 43 characters."""
    return _encoded(sha256(canonical({"crv": "Ed25519", "kty": "OKP", "x": _encoded(public)})).digest())


def jwk(public: bytes) -> dict[str, str]:
    """A public key as others read it."""
    return {
        "kty": "OKP",
        "crv": "Ed25519",
        "x": _encoded(public),
        "kid": kid_of(public),
        "use": "sig",
        "alg": _ALGORITHM,
    }


def jwk_set(keys: Iterable[bytes]) -> dict[str, Any]:
    """Public keys as `/.well-known/countersign-keys.json` holds them."""
    return {"keys": [jwk(public) for public in dict.fromkeys(keys)]}


def keys_in(published: Any) -> dict[str, bytes]:
    """The Ed25519 keys of a JWK set; keys of other kinds are left out.

    Raises:
        ReceiptError: it is no JWK set, or a key is called by another name than its own thumbprint.
    """
    listed = published.get("keys") if isinstance(published, Mapping) else None
    if not isinstance(listed, list):
        raise ReceiptError("not a JWK set: it has no list of keys")
    found: dict[str, bytes] = {}
    for each in listed:
        if not isinstance(each, Mapping) or (each.get("kty"), each.get("crv")) != ("OKP", "Ed25519"):
            continue
        public = _decoded(each.get("x"))
        if len(public) != KEY_BYTES:
            raise ReceiptError("a published key is no Ed25519 key")
        kid = kid_of(public)
        if each.get("kid", kid) != kid:
            raise ReceiptError("a published key is called by another name than its thumbprint")
        found[kid] = public
    return found


def key_text(raw: bytes) -> str:
    """32 bytes of a key as settings spell them, base64url without padding."""
    return _encoded(raw)


def key_bytes(text: str) -> bytes:
    """The 32 bytes that settings spell so. Raises ReceiptError."""
    raw = _decoded(text)
    if len(raw) != KEY_BYTES:
        raise ReceiptError("a key has 32 bytes")
    return raw


@lru_cache(maxsize=64)
def _head_of(public: bytes, kind: str) -> str:
    return _encoded(_header(kid_of(public), kind))


def _header(kid: str, kind: str) -> bytes:
    return canonical({"alg": _ALGORITHM, "kid": kid, "typ": kind})


def _kid_in(head: bytes, kind: str) -> str:
    try:
        fields = json.loads(head)
    except (ValueError, RecursionError):
        fields = None
    kid = fields.get("kid") if isinstance(fields, dict) else None
    try:
        good = isinstance(kid, str) and head == _header(kid, kind)
    except ValueError:
        good = False
    if not good:
        raise ReceiptError(f"not a signed statement of the type {kind}: its header is another one")
    assert isinstance(kid, str)
    return kid


def _encoded(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _decoded(text: Any) -> bytes:
    """Raises ReceiptError for what is not the one spelling of its bytes."""
    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (TypeError, ValueError, binascii.Error):
        raw = None
    if raw is None or _encoded(raw) != text:
        raise ReceiptError("not a signed statement: a part of it is no base64url")
    return raw
