"""A bundle beside what a client pinned: what is the same, what convicts whoever signed both, and what takes a proof."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from policies import head, jws, merkle, pins, receipt
from policies.errors import ReceiptError
from policies.examination import Examination, Outcome, examine
from policies.head import Head, verify_head
from policies.pins import Pinned
from tests.policies.test_examination import audited
from tests.support.bundles import BEFORE, KEY, LOG, OTHER_KEY, Made

KEYS = {jws.kid_of(jws.public_bytes(KEY)): jws.public_bytes(KEY)}
AT = 1_700_000_002.0
"""When the head of a bundle was signed."""


def leaves(made: Made, more: int = 0) -> list[bytes]:
    """Those of the log that a bundle is from, and some that came later."""
    own = receipt.leaf_of(made.bundle.receipt)
    return [*BEFORE, own, merkle.leaf(b"after"), *(merkle.leaf(b"%d" % number) for number in range(more))]


def headed(hashes: Sequence[bytes], *, log: str = LOG, at: float = AT) -> Head:
    return verify_head(jws.sign(head.encode(log, len(hashes), merkle.root(hashes), at), KEY, head.KIND), KEYS)


def proof(hashes: Sequence[bytes], first: int, second: int) -> list[bytes]:
    return [merkle.root(hashes[start:end]) for start, end in merkle.consistency(first, second)]


def held(made: Made, pinned: Pinned, **more: Any) -> Examination:
    return examine(made.bytes, KEYS, pins=pinned, **more)


def words(found: Examination, about: str) -> list[str]:
    return [each.words for each in found.findings if each.about == about]


def test_the_receipt_that_was_pinned() -> None:
    made = audited()
    id = made.choices[0].id
    same = held(made, Pinned(leaves={id: receipt.leaf_of(made.bundle.receipt).hex()}))
    assert same.outcome is Outcome.VERIFIED
    assert words(same, "pinned receipt")
    assert any("no head" in each for each in same.left)
    other = held(made, Pinned(leaves={id: "0" * 64}))
    assert other.outcome is Outcome.CONTRADICTS_PINS
    none = held(made, Pinned(leaves={"f" * 32: "0" * 64}))
    assert none.outcome is Outcome.VERIFIED
    assert any("none of this answer" in each for each in none.left)


def test_a_verdict_that_was_written_anew_and_put_into_the_log_instead() -> None:
    """Signed with the right key, derivable or not: who saw the first one knows."""
    first = audited()
    second = first.saying(decided=1_700_000_001.25)
    pinned = Pinned(headed(leaves(first)), KEYS, {first.choices[0].id: receipt.leaf_of(first.bundle.receipt).hex()})
    assert held(first, pinned).outcome is Outcome.VERIFIED
    found = held(second, pinned)
    assert found.outcome is Outcome.CONTRADICTS_PINS
    assert {each.about for each in found.faults} >= {"pinned receipt", "pinned head"}


@pytest.mark.parametrize("size", range(8))
def test_an_older_head_of_the_same_log(size: int) -> None:
    made = audited()
    pinned = Pinned(headed(leaves(made)[:size], at=AT - 1))
    known = held(made, pinned)
    assert known.outcome is Outcome.VERIFIED
    # What the receipt's own proof tells of the log before it; of the others it takes one more.
    assert bool(words(known, "pinned head")) == (size in (0, 4, 5, 6, 7))
    assert any("--consistency" in each for each in known.left) == (size not in (0, 4, 5, 6, 7))
    proven = held(made, pinned, growth=proof(leaves(made), size, 7))
    assert words(proven, "pinned head")
    assert proven.outcome is Outcome.VERIFIED


@pytest.mark.parametrize("size", range(1, 8))
def test_an_older_head_of_another_past(size: int) -> None:
    made = audited()
    pinned = Pinned(headed([merkle.leaf(b"another"), *leaves(made)[1:]][:size], at=AT - 1))
    expected = Outcome.VERIFIED if size in (1, 2, 3) else Outcome.CONTRADICTS_PINS
    assert held(made, pinned).outcome is expected
    found = held(made, pinned, growth=proof(leaves(made), size, 7))
    assert found.outcome is Outcome.CONTRADICTS_PINS


def test_a_newer_head() -> None:
    made = audited()
    later = leaves(made, 4)
    pinned = Pinned(headed(later, at=AT + 1))
    assert any("first=7&second=11" in each for each in held(made, pinned).left)
    assert words(held(made, pinned, growth=proof(later, 7, 11)), "pinned head")
    forked = Pinned(headed([*BEFORE, *later[6:]], at=AT + 1))
    assert held(made, forked).outcome is Outcome.VERIFIED
    assert held(made, forked, growth=proof(later, 7, 10)).outcome is Outcome.CONTRADICTS_PINS


@pytest.mark.parametrize("other", [{"log": "11" * 16}, {"hashes": 9, "at": AT - 1}], ids=["another log", "taken back"])
def test_what_takes_no_proof_to_be_a_fork(other: dict[str, Any]) -> None:
    made = audited()
    more = other.pop("hashes", 7) - 7
    found = held(made, Pinned(headed(leaves(made, more), **other)))
    assert found.outcome is Outcome.CONTRADICTS_PINS


def test_what_others_sign_contradicts_nobody() -> None:
    made = replace(audited(), key=OTHER_KEY)
    pinned = Pinned(headed(leaves(made)), KEYS, {made.choices[0].id: "0" * 64})
    for trusted, any_key, outcome in (
        (KEYS, False, Outcome.UNTRUSTED_KEY),
        ({}, False, Outcome.UNTRUSTED_KEY),
        ({}, True, Outcome.CONTRADICTS_PINS),
    ):
        found = examine(made.bytes, trusted, any_key=any_key, pins=pinned)
        assert found.outcome is outcome
        assert any("contradicts nobody" in each for each in found.left) == (outcome is Outcome.UNTRUSTED_KEY)


def test_pins_are_written_and_read() -> None:
    for pinned in (Pinned(), Pinned(headed(BEFORE), KEYS, {"a" * 32: "b" * 64})):
        assert pins.read(pins.written(pinned)) == pinned
    for text in ("", "{", "[]", "{}", '{"head": 5, "keys": {"keys": []}}', '{"head": null, "keys": 5}'):
        with pytest.raises(ReceiptError, match="no pins"):
            pins.read(text)
    with pytest.raises(ReceiptError, match="no pins"):
        pins.read(pins.written(Pinned(leaves={"a": "b"})))
