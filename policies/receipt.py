"""A receipt: what was asked, served and found, in one signed statement (docs/receipts.md has it for readers).

    {"schema": "countersign/receipt/1",
     "id": …, "issued": Unix seconds, "instead_of": id or null,
     "verification": {…}             as `GET /v1/verifications/{id}` answers it
     "declared": {"backend", "model", "runtime", "precision", "engine", "speculative"},
     "sha256": {"request", "sent", "served", "evidence", "replay", "second_replay", "profile", "second_profile"},
     "seed": SHA-256 or null,
     "times": {"first_token", "total"}}

Every hash is SHA-256 in hex, null where there is nothing to hash or nobody knows it. The payload is canonical JSON
(RFC 8785), the token a compact JWS (`policies.jws`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from policies import jws, merkle
from policies._jcs import canonical, is_canonical
from policies.errors import ReceiptError
from policies.evidence import Evidence
from policies.verification import Verification, public

SCHEMA = "countersign/receipt/1"
KIND = "countersign-receipt"
"""The `typ` of its JWS."""
SEED_SCHEMA = "countersign/seed/1"
HASHES = ("request", "sent", "served", "evidence", "replay", "second_replay", "profile", "second_profile")
DECLARED = ("backend", "model", "runtime", "precision", "engine", "speculative")
_NAMES = {"schema", "id", "issued", "instead_of", "verification", "declared", "sha256", "seed", "times"}
_HEX = re.compile(r"[0-9a-f]{64}")
_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Facts:
    """What a receipt says besides the verification. Hashes are SHA-256 in hex, empty where there is nothing.

    Attributes:
        request: of the client's request body, as it came.
        sent: of the request body as it went to the backend.
        served: of the answer's body as it went to the client, less what is the proxy's own in it (`served_part`).
        evidence: of the packed evidence (`policies.codec`).
        replay: of what the verdict rests on beside the evidence, above all the replay, packed (`policies.case`).
        second_replay: of the packed outcome of the second reference's replay.
        profile, second_profile: of the canonical JSON of the profiles that the checks were held against.
        declared: what the backend was declared to run (`policies.unit.declaration_of`).
        seed: commitment to the seeds (`seed_commitment`).
        instead_of: id of the answer to the same request that this one took the place of.
        first_token, total: seconds after the request went up.
    """

    request: str = ""
    sent: str = ""
    served: str = ""
    evidence: str = ""
    replay: str = ""
    second_replay: str = ""
    profile: str = ""
    second_profile: str = ""
    declared: Mapping[str, str] = field(default_factory=dict)
    seed: str = ""
    instead_of: str = ""
    first_token: float | None = None
    total: float | None = None


NOTHING = Facts()


@dataclass(frozen=True, slots=True)
class Receipt:
    """A receipt whose signature holds. `leaf` is its hash in the log, 32 bytes."""

    token: str
    kid: str
    statement: Mapping[str, Any]

    @property
    def id(self) -> str:
        """Of the response, 32 hex digits."""
        return str(self.statement["id"])

    @property
    def verification(self) -> Mapping[str, Any]:
        """The verification as it was made."""
        found = self.statement["verification"]
        assert isinstance(found, Mapping)
        return found

    @property
    def verdict(self) -> str:
        """Its word."""
        return str(self.verification["verdict"])

    @property
    def hashes(self) -> Mapping[str, str | None]:
        """By name (`HASHES`)."""
        found = self.statement["sha256"]
        assert isinstance(found, Mapping)
        return found

    @property
    def leaf(self) -> bytes:
        """Its hash in the log."""
        return leaf_of(self.token)


def facts_of_intent(intent: Mapping[str, Any] | None) -> Facts:
    """What is known before anything of an answer is."""
    known = intent or {}
    declared = known.get("declaration")
    return Facts(
        request=_text(known, "request_sha256"),
        declared=declared if isinstance(declared, Mapping) else {},
        instead_of=_text(known, "instead_of"),
    )


def facts_of(
    choices: Sequence[Evidence],
    intent: Mapping[str, Any] | None,
    evidence: bytes,
    *,
    declared: Mapping[str, str],
    replay: str = "",
    second_replay: str = "",
    profile: str = "",
    second_profile: str = "",
) -> Facts:
    """What is known of an answer with evidence.

    Args:
        choices: at least one. evidence: the bytes they were packed in, before any encryption.
        replay, second_replay, profile, second_profile: hashes of what they were judged by, as `Facts` has them.
    """
    first, before = choices[0], facts_of_intent(intent)
    return Facts(
        request=before.request,
        sent=digest(first.request) if first.request else "",
        served=first.shown_sha256,
        evidence=digest(evidence),
        replay=replay,
        second_replay=second_replay,
        profile=profile,
        second_profile=second_profile,
        declared=declared,
        seed=seed_commitment(first.id, [choice.sampling.seed for choice in choices]),
        instead_of=before.instead_of,
        first_token=first.first_token_seconds,
        total=first.total_seconds,
    )


def statement(verification: Verification, facts: Facts, issued: float) -> dict[str, Any]:
    """What a receipt says. `issued` in Unix seconds; `verification` may still hold what clients are not shown."""
    declared = {"backend": str(verification["backend"]), "model": str(verification["model"])}
    for name in DECLARED:
        declared.setdefault(name, str(facts.declared.get(name, "")))
    return {
        "schema": SCHEMA,
        "id": verification["id"],
        "issued": issued,
        "instead_of": facts.instead_of or None,
        "verification": public(verification),
        "declared": declared,
        "sha256": {name: getattr(facts, name) or None for name in HASHES},
        "seed": facts.seed or None,
        "times": {"first_token": _seconds(facts.first_token), "total": _seconds(facts.total)},
    }


def encode(statement: Mapping[str, Any]) -> bytes:
    """The bytes that are signed. Raises ValueError for what has no canonical JSON."""
    return canonical(statement)


def decode(payload: bytes) -> dict[str, Any]:
    """The statement in signed bytes.

    Raises:
        ReceiptError: they hold another kind of statement, or one of another version.
    """
    found = parsed(payload)
    if found.get("schema") != SCHEMA:
        raise ReceiptError(f"a receipt of the schema {str(found.get('schema'))[:64]!r}, this reads {SCHEMA!r}")
    if set(found) != _NAMES or not _sound(found) or not is_canonical(found, payload):
        raise ReceiptError("a receipt that is not written as its schema says")
    return found


def verify_receipt(
    token: str,
    keys: jws.Keys,
    *,
    id: str | None = None,
    request: bytes | None = None,
    sent: bytes | None = None,
    served: bytes | None = None,
    evidence: bytes | None = None,
    replay: bytes | None = None,
    second_replay: bytes | None = None,
) -> Receipt:
    """The receipt in a token, once its signature holds and it is about what is given.

    Args:
        keys: that are trusted, by `kid` (`policies.jws.keys_in`).
        id: of the response that it must be about.
        request, sent, served, evidence, replay, second_replay: what its hashes must be of; None is not compared.

    Raises:
        ReceiptError: says what does not hold.
    """
    kid, payload = jws.opened(token, keys, KIND)
    receipt = Receipt(token, kid, decode(payload))
    if id is not None and receipt.id != id:
        raise ReceiptError(f"the receipt is about {receipt.id}, not about {id}")
    given = {
        "request": request,
        "sent": sent,
        "served": served,
        "evidence": evidence,
        "replay": replay,
        "second_replay": second_replay,
    }
    for name, data in given.items():
        if data is not None:
            compare(receipt, name, data)
    return receipt


def compare(receipt: Receipt, name: str, data: bytes) -> None:
    """Hold bytes against one of the receipt's hashes. Raises ReceiptError."""
    known = receipt.hashes[name]
    if known is None:
        raise ReceiptError(f"the receipt has no hash of this: {name}")
    if known != digest(data):
        raise ReceiptError(f"not what the receipt is about: {name} has another hash")


def compare_verification(receipt: Receipt, verification: Mapping[str, Any]) -> None:
    """Hold a verification, as the API shows it, against the receipt's. Raises ReceiptError."""
    if not is_canonical(verification, canonical(receipt.verification)):
        shown = str(verification.get("verdict"))[:64]
        raise ReceiptError(
            f"the receipt is of another verification than is shown: {receipt.verdict!r}, and {shown!r} there"
        )


def leaf_of(token: str) -> bytes:
    """The hash of a receipt in the log, 32 bytes: that of a leaf that holds the token (RFC 6962)."""
    return merkle.leaf(token.encode())


def digest(data: bytes) -> str:
    """SHA-256, hex."""
    return sha256(data).hexdigest()


def seed_commitment(id: str, seeds: Sequence[int | None]) -> str:
    """Hash of the seeds of a response's choices, in their order, with its id; '' where there are none.

    A seed of the proxy's own has 62 random bits, so its hash tells nothing of it to whoever cannot try them all; one
    that the client chose is as secret as the client made it.
    """
    if all(seed is None for seed in seeds):
        return ""
    return digest(canonical([SEED_SCHEMA, id, [None if seed is None else str(seed) for seed in seeds]]))


def parsed(payload: bytes) -> dict[str, Any]:
    """The JSON object that was signed. Raises ReceiptError."""
    try:
        found = json.loads(payload, parse_constant=_refuse, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise ReceiptError("not a statement: no JSON") from error
    if not isinstance(found, dict):
        raise ReceiptError("not a statement: no JSON object")
    return found


def _refuse(name: str) -> Any:
    raise ValueError(name)


def _integer(text: str) -> float | int:
    """Beyond what doubles count, what it was written for: a double."""
    return int(text) if len(text) < 16 else _near(float(text))


def _near(value: float) -> float | int:
    return int(value) if abs(value) < 2**53 else value


def _sound(found: Mapping[str, Any]) -> bool:
    """Whether everything has the type that readers count on."""
    verification, hashes, times = found["verification"], found["sha256"], found["times"]
    if not (isinstance(verification, dict) and isinstance(hashes, dict) and isinstance(times, dict)):
        return False
    declared = found["declared"]
    return (
        isinstance(declared, dict)
        and set(declared) == set(DECLARED)
        and all(isinstance(each, str) for each in declared.values())
        and set(hashes) == set(HASHES)
        and all(map(_is_hash, [*hashes.values(), found["seed"]]))
        and set(times) == {"first_token", "total"}
        and all(each is None or _is_number(each) for each in times.values())
        and _is_number(found["issued"])
        and _is_id(found["id"])
        and (found["instead_of"] is None or _is_id(found["instead_of"]))
        and verification.get("id") == found["id"]
        and isinstance(verification.get("verdict"), str)
        and isinstance(verification.get("checks"), list)
        and isinstance(verification.get("reasons"), list)
    )


def _is_hash(value: Any) -> bool:
    return value is None or (isinstance(value, str) and _HEX.fullmatch(value) is not None)


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and _ID.fullmatch(value) is not None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _seconds(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _text(known: Mapping[str, Any], name: str) -> str:
    value = known.get(name)
    return value if isinstance(value, str) else ""
