"""Section of the settings about receipts: what signs them, and who may look at their log."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, SecretStr

from policies._sections import Section


class ReceiptSettings(Section):
    """Every verdict's signed receipt, and the log that all of them are in.

    Attributes:
        signing_keys: private keys (Ed25519, 32 bytes in base64url, as `countersign receipts keygen` prints them), with
            spaces between. The first one signs, the public keys of all of them are published. The proxy and every
            worker need them. Without any, one is made and kept in Redis, where whoever can read Redis can sign.
        signing_keys_file: path of a file with such keys, one a line; those come after `signing_keys`.
        public_keys: further public keys that are published (as `countersign receipts keygen` prints them): those of
            keys that signed earlier, so that their receipts can still be checked.
        head_seconds: how often a head of the log is signed while it grows, besides those that somebody asks for.
        public_log: the log's heads, proofs and entries (hashes) are shown to anybody, not only to client keys.
    """

    signing_keys: SecretStr | None = None
    signing_keys_file: str | None = None
    public_keys: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{43}$")], ...] = ()
    head_seconds: float = Field(10.0, gt=0, le=3600)
    public_log: bool = False
