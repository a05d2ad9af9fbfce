"""Signed heads of the log of receipts, and what a client makes of two of them.

    {"schema": "countersign/head/1", "log": id, "size": leaves, "root": SHA-256 in hex, "time": Unix seconds}

as canonical JSON in a compact JWS (`policies.jws`). A head says that the log with this id had so many receipts, and
which; two heads of one log either continue each other, which `policies.merkle.consistency` proves, or convict whoever
signed both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from policies import jws, merkle
from policies._jcs import canonical, is_canonical
from policies.errors import ForkedLog, ReceiptError
from policies.receipt import parsed

SCHEMA = "countersign/head/1"
KIND = "countersign-head"
"""The `typ` of its JWS."""
LARGEST = 2**53 - 1
_NAMES = {"schema", "log", "size", "root", "time"}
_HEX = re.compile(r"[0-9a-f]{64}")
_LOG = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Head:
    """A head whose signature holds: `size` leaves with the hash `root` (32 bytes) at `time` (Unix seconds)."""

    token: str
    kid: str
    log: str
    size: int
    root: bytes
    time: float


def encode(log: str, size: int, root: bytes, time: float) -> bytes:
    """The bytes that are signed. `log` is the log's id, 32 hex digits."""
    return canonical({"schema": SCHEMA, "log": log, "size": size, "root": root.hex(), "time": time})


def verify_head(token: str, keys: jws.Keys) -> Head:
    """The head in a token. Raises ReceiptError, which says what does not hold."""
    kid, payload = jws.opened(token, keys, KIND)
    found = parsed(payload)
    if found.get("schema") != SCHEMA:
        raise ReceiptError(f"a head of the schema {str(found.get('schema'))[:64]!r}, this reads {SCHEMA!r}")
    if set(found) != _NAMES or not _sound(found) or not is_canonical(found, payload):
        raise ReceiptError("a head that is not written as its schema says")
    return Head(token, kid, found["log"], found["size"], bytes.fromhex(found["root"]), float(found["time"]))


def verify_inclusion(head: Head, leaf: bytes, index: int, path: Sequence[bytes]) -> None:
    """Hold the proof that a receipt (`policies.receipt.Receipt.leaf`) is in the log. Raises ReceiptError."""
    if not merkle.includes(head.root, head.size, index, leaf, path):
        raise ReceiptError(f"the proof does not show the receipt at {index} of the log of {head.size}")


def follow(before: Head | None, after: Head, path: Sequence[bytes] = ()) -> Head:
    """The head to pin from here on, once it is shown that the log of `after` continues that of `before`.

    Args:
        before: the last head that was seen; None is nothing yet.
        path: the proof of consistency from the first of the two to the second.

    Returns:
        The larger one. An older head that is part of the pinned one, from a cache, say, is no fault.

    Raises:
        ForkedLog: it is another log, or does not continue; both heads are in the error.
    """
    if before is None:
        return after
    if after.log != before.log:
        what = f"another log is shown: {after.log} in place of {before.log}, of which {before.size} receipts were seen"
        raise ForkedLog(what, before.token, after.token)
    if after.size < before.size and after.time > before.time:
        # A head is as old as the size in it, so one that is later and smaller takes something back.
        raise ForkedLog(f"the log shrank from {before.size} to {after.size} receipts", before.token, after.token)
    small, large = (before, after) if before.size <= after.size else (after, before)
    if not merkle.grows(small.size, small.root, large.size, large.root, path):
        what = f"the log of {large.size} receipts is not shown to continue the one of {small.size}"
        if small.size == large.size:
            what = f"two logs of {small.size} receipts under one id have different hashes"
        raise ForkedLog(what, before.token, after.token)
    return after if after.size > before.size else before


def _sound(found: dict[str, Any]) -> bool:
    log, size, root, time = found["log"], found["size"], found["root"], found["time"]
    return (
        isinstance(log, str)
        and _LOG.fullmatch(log) is not None
        and isinstance(size, int)
        and not isinstance(size, bool)
        and 0 <= size <= LARGEST
        and isinstance(root, str)
        and _HEX.fullmatch(root) is not None
        and isinstance(time, int | float)
        and not isinstance(time, bool)
        and math.isfinite(time)
    )
