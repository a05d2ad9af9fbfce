"""Evidence bundles as the product makes them, from evidence at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policies import bundle, case, codec, head, jws, merkle, receipt
from policies.bundle import Bundle, Place
from policies.evidence import Evidence
from policies.judging import Grounds, judge
from policies.receipt import Facts, facts_of, statement
from policies.transcript import Recorder
from policies.unit import declaration_of
from policies.verification import describe

KEY = jws.key_from(bytes(range(32)))
OTHER_KEY = jws.key_from(bytes(range(1, 33)))
LOG = "10" * 16
BEFORE = [merkle.leaf(bytes([number])) for number in range(5)]
"""Leaves of the log before the receipt."""


@dataclass(frozen=True)
class Made:
    """A bundle, and what it was made of."""

    choices: Sequence[Evidence]
    grounds: Grounds
    shared: case.Shared
    statement: dict[str, Any]
    key: Ed25519PrivateKey = field(default=KEY, repr=False)

    @property
    def bundle(self) -> Bundle:
        """Its members."""
        token = jws.sign(receipt.encode(self.statement), self.key, receipt.KIND)
        keys = (jws.public_bytes(self.key),)
        evidence, found = codec.pack(self.choices), case.pack(self.choices, self.grounds, self.shared)
        named = case.unpack(found).named
        return Bundle(token, placed(token, self.key), keys, evidence, found, tuple(map(self.shared.parts.get, named)))  # type: ignore[arg-type]

    @property
    def bytes(self) -> bytes:
        """The file."""
        return bundle.pack(self.bundle)

    def saying(self, key: Ed25519PrivateKey = KEY, **verification: Any) -> Made:
        """The same with another verification, signed all the same."""
        said = {**self.statement, "verification": {**self.statement["verification"], **verification}}
        return replace(self, statement=said, key=key)


def placed(token: str, key: Ed25519PrivateKey = KEY) -> Place:
    """Where a receipt is in a log that begins with `BEFORE`, and has one more leaf after it."""
    leaves = [*BEFORE, receipt.leaf_of(token), merkle.leaf(b"after")]
    path = [merkle.root(leaves[start:end]) for start, end in merkle.inclusion(len(BEFORE), len(leaves))]
    signed = jws.sign(head.encode(LOG, len(leaves), merkle.root(leaves), 1_700_000_002.0), key, head.KIND)
    return Place(len(BEFORE), signed, tuple(path))


def asking(choice: Evidence, **more: Any) -> bytes:
    """The request, as a proxy sends it on, that this is evidence of."""
    said = choice.sampling
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    fields: dict[str, Any] = {"model": choice.model, "messages": [], **{name: getattr(said, name) for name in names}}
    for name in ("seed", "max_tokens"):
        if getattr(said, name) is not None:
            fields[name] = getattr(said, name)
    return msgspec.json.encode(fields | more)


def made(choices: Sequence[Evidence], grounds: Grounds = Grounds(), **says: Any) -> Made:  # noqa: B008
    """The bundle of these choices, judged."""
    if grounds.spelling is not None:
        grounds = replace(grounds, spelling=Recorder(grounds.spelling))
    verdicts, overall = judge(choices, grounds)
    if isinstance(grounds.spelling, Recorder):
        for choice in choices:
            grounds.spelling.pieces(choice.output_ids)
    verification = describe(choices, verdicts, overall, 1_700_000_001.0) | says
    shared = case.Shared.of(grounds.profile, grounds.spelling, getattr(grounds.spelling, "sha256", ""))
    facts: Facts = facts_of(
        choices,
        {"request_sha256": "7" * 64},
        codec.pack(choices),
        declared=declaration_of(choices[0]),
        replay=case.sha256(case.pack(choices, grounds, shared)),
        profile=case.sha256(shared.profile),
    )
    return Made(choices, grounds, shared, statement(verification, facts, 1_700_000_001.5))
