"""Standard Webhooks signatures: HMAC-SHA256 over `id.timestamp.body`, base64, under a `whsec_` secret."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Mapping

TOLERANCE_SECONDS = 300


def secret_keys(secret: str) -> list[bytes]:
    """The keys in a secret; several, separated by spaces, sign side by side while one is being replaced.

    Raises:
        ValueError: a part is not `whsec_` and the base64 of 24 to 64 bytes.
    """
    keys = []
    for part in secret.split():
        try:
            key = base64.b64decode(part.removeprefix("whsec_"), validate=True) if part.startswith("whsec_") else b""
        except binascii.Error:
            key = b""
        if not 24 <= len(key) <= 64:
            raise ValueError("expected whsec_ and the base64 of 24 to 64 random bytes")
        keys.append(key)
    if not keys:
        raise ValueError("expected whsec_ and the base64 of 24 to 64 random bytes")
    return keys


def sign(secret: str, id: str, timestamp: int, body: bytes) -> str:
    """Value of `webhook-signature`. `timestamp` in Unix seconds; `id` holds no dot. Raises ValueError."""
    if "." in id:
        raise ValueError("a webhook id must not contain a dot")
    return " ".join(f"v1,{_digest(key, id, str(timestamp), body)}" for key in secret_keys(secret))


def verify_signature(secret: str, headers: Mapping[str, str], body: bytes, now: float) -> bool:
    """For receivers: whether body and headers carry a signature under the secret, at most five minutes old.

    Args:
        headers: the request's headers, in any case.
        body: the raw request body.
        now: Unix seconds.
    """
    lower = {name.lower(): value for name, value in headers.items()}
    id, timestamp = lower.get("webhook-id", ""), lower.get("webhook-timestamp", "")
    if not id or not timestamp.isascii() or not timestamp.isdigit() or len(timestamp) > 12:
        return False
    if abs(now - int(timestamp)) > TOLERANCE_SECONDS:
        return False
    offered = [part.partition(",") for part in lower.get("webhook-signature", "").split()]
    given = [value.encode() for version, _, value in offered if version == "v1"]
    wanted = [_digest(key, id, timestamp, body).encode() for key in secret_keys(secret)]
    # Every pair is compared, so that the time taken does not tell which one came close.
    return sum(hmac.compare_digest(one, other) for one in given for other in wanted) > 0


def _digest(key: bytes, id: str, timestamp: str, body: bytes) -> str:
    text = f"{id}.{timestamp}.".encode() + body
    return base64.b64encode(hmac.new(key, text, hashlib.sha256).digest()).decode()
