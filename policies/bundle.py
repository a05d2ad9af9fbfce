"""An evidence bundle: one file that a third party can judge by itself (docs/evidence.md has it for readers).

    "countersign bundle 1\\n" | msgpack map | SHA-256 of all before, 32 bytes

The map holds, in this order: `receipt`, the signed statement (`policies.receipt`); `log`, what shows it in the log, or
nil; `keys`, the public keys that both are signed with, 32 bytes each; `evidence` (`policies.codec`); `case`, what the
verdict rests on besides (`policies.case`); `parts`, what the case names by hash. There is exactly one way to write a
bundle: bytes that are spelled otherwise are none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256

import msgspec

from policies import case as cases
from policies import head, jws, receipt
from policies.errors import BundleError, ReceiptError

MAGIC = b"countersign bundle 1\n"
SUFFIX = ".countersign"
MEDIA_TYPE = "application/vnd.countersign.bundle"
MAX_BYTES = 64 * 1024 * 1024
"""Bytes of a whole bundle. Evidence and replay of an answer of 2¹⁷ tokens take some 40 MB."""
_DIGEST = 32
_MOST_KEYS = 8
_MOST_PARTS = 8
_MOST_PATH = 64


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the receipt is in the log: its number, a signed head (`policies.head`), and the hashes that lead there."""

    index: int
    head: str
    path: tuple[bytes, ...]


class Bundle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The members of a bundle; see the module."""

    receipt: str
    log: Place | None
    keys: tuple[bytes, ...]
    evidence: bytes
    case: bytes
    parts: tuple[bytes, ...]

    @property
    def known_keys(self) -> dict[str, bytes]:
        """Its keys by `kid`. Anybody can put keys into a bundle."""
        return {jws.kid_of(key): key for key in self.keys}

    @property
    def named_parts(self) -> dict[str, bytes]:
        """Its parts by their SHA-256."""
        return {cases.sha256(part): part for part in self.parts}


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Bundle)


def make(
    token: str, log: Place | None, published: Iterable[bytes], evidence: bytes, case: bytes, parts: Sequence[bytes]
) -> bytes:
    """A bundle of these members.

    Args:
        published: public keys, of which it takes those that receipt and head are signed with.

    Raises:
        BundleError: it would be over `MAX_BYTES`, or a key is not among those that are published.
    """
    known = {jws.kid_of(key): key for key in published}
    try:
        kids = [jws.kid_in(token, receipt.KIND)]
        kids += [] if log is None else [jws.kid_in(log.head, head.KIND)]
        keys = tuple(known[kid] for kid in dict.fromkeys(kids))
    except ReceiptError as error:
        raise BundleError(str(error)) from error
    except KeyError as error:
        raise BundleError("the key of the receipt is not published any more") from error
    return pack(Bundle(token, log, keys, evidence, case, tuple(parts)))


def pack(bundle: Bundle) -> bytes:
    """The bytes of a bundle. Raises BundleError where there would be more than `MAX_BYTES`."""
    body = MAGIC + _encoder.encode(bundle)
    if len(body) + _DIGEST > MAX_BYTES:
        raise BundleError(f"a bundle of {len(body)} bytes is over the limit of {MAX_BYTES}")
    return body + sha256(body).digest()


def is_bundle(data: bytes) -> bool:
    """Whether these bytes begin as a bundle does."""
    return data.startswith(MAGIC)


def unpack(data: bytes) -> tuple[Bundle, bool]:
    """The members of a bundle, and whether its checksum holds.

    Raises:
        BundleError: it is none, is cut off, or is not spelled as bundles are.
    """
    if not is_bundle(data):
        raise BundleError("not an evidence bundle: it does not begin as one")
    if len(data) > MAX_BYTES:
        raise BundleError(f"an evidence bundle of more than {MAX_BYTES} bytes")
    body = data[:-_DIGEST]
    try:
        bundle = _decoder.decode(body[len(MAGIC) :])
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise BundleError(f"the bundle is damaged or cut off: {error}") from error
    if MAGIC + _encoder.encode(bundle) != body:
        raise BundleError("the bundle is not spelled as bundles are: something was added, doubled or moved")
    too_many = len(bundle.keys) > _MOST_KEYS or len(bundle.parts) > _MOST_PARTS
    if too_many or any(len(key) != jws.KEY_BYTES for key in bundle.keys):
        raise BundleError("the bundle holds keys or parts that no bundle has")
    if bundle.log is not None and (bundle.log.index < 0 or len(bundle.log.path) > _MOST_PATH):
        raise BundleError("the bundle holds a proof that no log gives")
    return bundle, sha256(body).digest() == data[-_DIGEST:]
