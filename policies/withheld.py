"""What a client is told in place of an answer that was rejected, where the policy is not to deliver it.

The receipt of such an answer is signed before, and about the answer. What its client gets says nothing but whose
verification that is, so that it is known from the receipt.
"""

from __future__ import annotations

import json
import re

from policies.errors import VerificationFailed

_ID = re.compile(rb"[0-9a-f]{32}")


def rejected(id: str) -> VerificationFailed:
    """The answer with this id was rejected."""
    return VerificationFailed(f"the answer was rejected by its verification {id}")


def not_taken_over(id: str) -> VerificationFailed:
    """So it was, and there is no other in its place."""
    return VerificationFailed(f"the answer was rejected by its verification {id}, and no other backend took over")


def both_rejected(first: str, second: str) -> VerificationFailed:
    """So were two, one after the other."""
    return VerificationFailed(f"two backends' answers were rejected by their verifications {first} and {second}")


def stands_for(id: str, body: bytes) -> bool:
    """Whether a body is, byte for byte, what a client gets in place of this answer, or of it and another one."""
    told = [rejected(id), not_taken_over(id)]
    ids = [each.decode() for each in _ID.findall(body)]
    if len(ids) == 2 and id in ids:
        told.append(both_rejected(*ids))
    return body in [json.dumps(each.body(), separators=(",", ":")).encode() for each in told]
