"""What a receipt's hash of the answer was made of, given the bytes that its client got.

The hash is made of every byte that went to the client, less what is the proxy's own in it, which comes later than the
hash or is no part of the answer: the verdict of an inline answer (in JSON the last field, `countersign`; in a stream a
comment), and the comments that keep a silent stream alive (`: countersign-ping`; in answers of earlier releases
`: ping`, which is also what backends send, and then part of the answer). Where a rejected answer was withheld, the
hash is of that answer, and the client has the error that took its place (`policies.withheld`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from policies._jcs import canonical, is_canonical
from policies.errors import ReceiptError
from policies.receipt import Receipt, digest
from policies.withheld import stands_for

_NAME = b'"countersign":'
_COMMENT = re.compile(rb"(?:(?<=[\r\n])|\A): countersign(?:-ping| [^\r\n]*)\n\n")
_TOLD = re.compile(rb"(?:(?<=[\r\n])|\A): ?countersign +([^\r\n]*)")
_PING = re.compile(rb"(?:(?<=[\r\n])|\A): ping\n\n")


def compare_served(receipt: Receipt, body: bytes) -> None:
    """Hold an answer's body, as its client got it, against the receipt: its hash, and what it says its verification
    is, where it says that. Raises ReceiptError."""
    if was_withheld(receipt, body):
        return
    known = receipt.hashes["served"]
    if known is None:
        raise ReceiptError("the receipt has no hash of this: served")
    if all(known != digest(part) for part in parts(body)):
        raise ReceiptError("not what the receipt is about: served has another hash")
    for shown in told(body):
        if not _is_provisional(shown) and not is_canonical(shown, canonical(receipt.verification)):
            words = f"{str(shown.get('verdict'))[:64]!r}, and {receipt.verdict!r} in the receipt"
            raise ReceiptError(f"not what the receipt is about: it tells of another verification ({words})")


def was_withheld(receipt: Receipt, body: bytes) -> bool:
    """Whether that is what its client got in place of the answer, which was rejected."""
    return receipt.verdict == "reject" and stands_for(receipt.id, body)


def parts(body: bytes) -> Iterator[bytes]:
    """What the hash may be of: the body as it is, without what says it is ours, without an earlier one's pings."""
    yield body
    field = without_field(body)
    if field is not None:
        yield field
    stream = _COMMENT.sub(b"", body)
    if stream != body:
        yield stream
    quiet = _PING.sub(b"", stream)
    if quiet != stream:
        yield quiet


def told(body: bytes) -> Iterator[Mapping[str, Any]]:
    """The verifications that an answer's body tells of itself; an empty one for what is none."""
    said = [_json(text) for text in _TOLD.findall(body)]
    top = _json(body) if body.lstrip()[:1] == b"{" else None
    if isinstance(top, dict) and "countersign" in top:
        said.append(top["countersign"])
    yield from (each if isinstance(each, Mapping) else {} for each in said)


def without_field(body: bytes) -> bytes | None:
    """A JSON object without its last field, `countersign`, all other bytes as they are; None where it has none."""
    at = body.rfind(_NAME)
    if at < 0:
        return None
    try:
        text = body[at + len(_NAME) :].decode()
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None
    rest = text[end:].encode()
    if rest.lstrip()[:1] != b"}":
        return None
    before = body[:at]
    return (before[:-1] if before.endswith(b",") else before) + rest


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_provisional(verification: Mapping[str, Any]) -> bool:
    """Whether it says no more than that there is no verdict: not yet, or not that this proxy could be told."""
    told = verification.get("verdict"), verification.get("status"), verification.get("reasons")
    return told[:2] == (None, "pending") or told[::2] == ("unverified", ["store_unavailable"])
