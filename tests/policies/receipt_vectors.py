"""Receipts and heads by a second implementation, which shares no line with ours.

Canonical JSON is by `rfc8785`, signatures are by PyJWT, trees by the definition in RFC 6962.

`python -m tests.policies.receipt_vectors` writes `tests/data/receipts/vectors.json` again.
"""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import rfc8785
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from jwt.api_jws import PyJWS

PATH = Path(__file__).resolve().parents[1] / "data" / "receipts" / "vectors.json"
# RFC 8037, appendix A.1: its key, whose thumbprint is in A.3.
SEEDS = ("nWGxne_9WmC6hEr0kuwsxERJxWl7MmkZcDusAxyuf2A", "A" * 42 + "E")
LOG = "5f" * 16
SIZES = (1, 2, 3, 7, 8, 9)


def b64(raw: bytes) -> str:
    """base64url without padding."""
    return base64.urlsafe_b64encode(raw).decode().replace("=", "")


def key(seed: str) -> Ed25519PrivateKey:
    """The key with this seed."""
    return Ed25519PrivateKey.from_private_bytes(base64.urlsafe_b64decode(seed + "="))


def jwk(seed: str) -> dict[str, str]:
    """Its public part."""
    x = b64(key(seed).public_key().public_bytes_raw())
    required = f'{{"crv":"Ed25519","kty":"OKP","x":"{x}"}}'
    kid = b64(hashlib.sha256(required.encode()).digest())
    return {"kty": "OKP", "crv": "Ed25519", "x": x, "kid": kid, "use": "sig", "alg": "EdDSA"}


def token(statement: Any, seed: str, kind: str) -> str:
    """A statement, signed."""
    head = {"kid": jwk(seed)["kid"], "typ": kind}
    signed: str = PyJWS().encode(rfc8785.dumps(statement), key(seed), "EdDSA", head, sort_headers=True)
    return signed


def tree(leaves: list[bytes]) -> bytes:
    """MTH of RFC 6962 2.1."""
    if len(leaves) < 2:
        return leaves[0] if leaves else hashlib.sha256().digest()
    k = max(2**n for n in range(32) if 2**n < len(leaves))
    return hashlib.sha256(b"\x01" + tree(leaves[:k]) + tree(leaves[k:])).digest()


def path(m: int, leaves: list[bytes]) -> list[bytes]:
    """PATH of RFC 6962 2.1.1."""
    if len(leaves) < 2:
        return []
    k = max(2**n for n in range(32) if 2**n < len(leaves))
    if m < k:
        return [*path(m, leaves[:k]), tree(leaves[k:])]
    return [*path(m - k, leaves[k:]), tree(leaves[:k])]


def proof(m: int, leaves: list[bytes], whole: bool = True) -> list[bytes]:
    """PROOF and SUBPROOF of RFC 6962 2.1.2."""
    if m == len(leaves):
        return [] if whole else [tree(leaves)]
    k = max(2**n for n in range(32) if 2**n < len(leaves))
    if m <= k:
        return [*proof(m, leaves[:k], whole), tree(leaves[k:])]
    return [*proof(m - k, leaves[k:], False), tree(leaves[:k])]


def check(name: str, result: str, reason: str = "", level: float | None = None, **metrics: Any) -> dict[str, Any]:
    """One check as a verification has it."""
    return {"name": name, "result": result, "reason": reason, "level": level, "metrics": metrics}


def statements() -> list[dict[str, Any]]:
    """Receipts of every word, with the oddest values that may be in one."""
    checks = {
        "pass": [
            check("structure", "pass", tokens=24, findings=0),
            check("selection", "pass", checked=24, violations=0, worst_margin=-0.0),
            check("distance", "pass", score=0.0205, p=0.179, n=150),
            check("margin", "pass", score=1e-7, tiny=5e-324, large=1e21, long=123456789012345680000.0),
        ],
        "reject": [check("selection", "reject", "not_sampled_from_claim: 10 of 24 <script>\u202e\x07", 2.5e-38)],
        "unverified": [],
        "withheld": [check("structure", "withheld", "no_logprobs: \U0001f600 \u2028", metric=None)],
        "inconclusive": [check("distance", "inconclusive", "too_long")],
        "unaudited": [check("structure", "pass", tokens=1)],
    }
    return [_statement(number, word, found) for number, (word, found) in enumerate(checks.items())]


def _statement(number: int, word: str, checks: list[dict[str, Any]]) -> dict[str, Any]:
    id = f"{number:032x}"
    bare = word == "unverified"
    hashes = {
        name: None
        if bare or (name.startswith("second") and word != "reject")
        else hashlib.sha256(name.encode()).hexdigest()
        for name in ("sent", "served", "evidence", "replay", "second_replay", "profile", "second_profile")
    }
    seed = ["countersign/seed/1", id, [str(2**61 + number), None]]
    return {
        "schema": "countersign/receipt/1",
        "id": id,
        "issued": 1796021131.25 + number,
        "instead_of": f"{number - 1:032x}" if word == "reject" else None,
        "verification": {
            "id": id,
            "object": "verification",
            "status": "done",
            "verdict": word,
            "reasons": [each["reason"] for each in checks if each["reason"]] or (["backlog"] if bare else []),
            "checks": checks,
            "backend": "cheap-gpu-farm",
            "model": "my-model",
            "audited": word in ("pass", "reject"),
            "created": 1796021129.853,
            "decided": 1796021131.0,
        },
        "declared": {
            "backend": "cheap-gpu-farm",
            "model": "my-model",
            "runtime": "vllm-0.32-v2",
            "precision": "bf16",
            "engine": "",
            "speculative": "",
        },
        "sha256": {"request": hashlib.sha256(b'{"model":"my-model"}').hexdigest(), **hashes},
        "seed": None if bare else hashlib.sha256(rfc8785.dumps(seed)).hexdigest(),
        "times": {"first_token": None if bare else 0.0425, "total": None if bare else 1.5},
    }


def vectors() -> dict[str, Any]:
    """Everything in the file."""
    receipts: list[dict[str, Any]] = [
        {"statement": each, "seed": SEEDS[number % 2], "token": token(each, SEEDS[number % 2], "countersign-receipt")}
        for number, each in enumerate(statements())
    ]
    leaves = [hashlib.sha256(b"\x00" + each["token"].encode()).digest() for each in receipts]
    leaves += [hashlib.sha256(b"\x00" + bytes([number])).digest() for number in range(max(SIZES) - len(leaves))]
    heads = []
    for size in SIZES:
        time = 1796021140 + size / 8
        said = {
            "schema": "countersign/head/1",
            "log": LOG,
            "size": size,
            "root": tree(leaves[:size]).hex(),
            "time": time,
        }
        heads.append({"statement": said, "token": token(said, SEEDS[0], "countersign-head")})
    return {
        "keys": {"keys": [jwk(seed) for seed in SEEDS]},
        "receipts": receipts,
        "leaves": [leaf.hex() for leaf in leaves],
        "heads": heads,
        "inclusion": [
            {"index": index, "size": size, "proof": [each.hex() for each in path(index, leaves[:size])]}
            for size in SIZES
            for index in range(size)
        ],
        "consistency": [
            {"first": first, "second": second, "proof": [each.hex() for each in proof(first, leaves[:second])]}
            for second in SIZES
            for first in SIZES
            if first <= second
        ],
    }


def text() -> str:
    """The file."""
    return json.dumps(vectors(), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    PATH.write_text(text())
    print(f"wrote {PATH}")
