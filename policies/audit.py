"""Which generations are replayed: a secret choice that nobody can foresee or steer.

The choice depends on a secret and our own random id, never on the answer, so a backend that knows
everything else still cannot tell an audited generation from another.
"""

from __future__ import annotations

import hashlib
import hmac

_SPAN = 2**64


def chosen(secret: bytes, id: str, rate: float) -> bool:
    """Whether the generation `id` is audited at `rate`.

    HMAC-SHA256 of the id under the secret, its first eight bytes read as a fraction of 2⁶⁴, lies below
    `rate`. Deterministic: the same secret and id are chosen at every rate above that fraction. A rate of 0
    (or anything that is not a number above 0) chooses nothing, 1 and more choose everything.
    """
    if not rate > 0:
        return False
    if rate >= 1:
        return True
    digest = hmac.new(secret, id.encode("utf-8", "surrogatepass"), hashlib.sha256).digest()
    return int.from_bytes(digest[:8], "big") < rate * _SPAN


def wants_full(secret: bytes, id: str, share: float) -> bool:
    """Whether an audit of `id` also takes the reference's own top 20: a draw of its own, at `share`.

    Independent of `chosen`, which hashes the bare id: a backend that learns which generations are audited still does
    not learn in which of them an omitted rival shows.
    """
    return chosen(secret, f"full/{id}", share)
