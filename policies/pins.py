"""What a client remembers of an operator's log from one time to the next, as it is written down.

{"head": the last signed head that was seen, or null, "keys": a JWK set, "leaves": {id: its receipt's leaf hash}}
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from policies import jws
from policies.errors import ReceiptError
from policies.head import Head, verify_head

_ID, _LEAF = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Pinned:
    """The last head of the log that was seen, the keys it was signed with by `kid`, and by id the leaves (hex) of the
    receipts that were."""

    head: Head | None = None
    keys: Mapping[str, bytes] = field(default_factory=dict)
    leaves: Mapping[str, str] = field(default_factory=dict)


def read(text: str | bytes) -> Pinned:
    """What was pinned. Raises ReceiptError where the text holds no pins."""
    try:
        found = json.loads(text)
        keys, leaves = jws.keys_in(found["keys"]), dict(found.get("leaves", {}))
        head = None if found["head"] is None else verify_head(found["head"], keys)
        if not all(_ID.fullmatch(id) and _LEAF.fullmatch(leaf) for id, leaf in leaves.items()):
            raise ValueError("no leaves")
    except (ReceiptError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ReceiptError("there are no pins in it") from error
    return Pinned(head, keys, leaves)


def written(pinned: Pinned) -> str:
    """The text that `read` reads."""
    return json.dumps(
        {
            "head": None if pinned.head is None else pinned.head.token,
            "keys": jws.jwk_set(pinned.keys.values()),
            "leaves": dict(pinned.leaves),
        }
    )
