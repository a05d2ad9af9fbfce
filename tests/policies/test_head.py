"""Heads of the log: vectors, and what a client makes of two of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from policies import head, jws, merkle
from policies.errors import ForkedLog, ReceiptError
from policies.head import Head, follow, verify_head, verify_inclusion
from tests.policies import receipt_vectors

VECTORS: dict[str, Any] = json.loads(receipt_vectors.PATH.read_text())
KEYS = jws.keys_in(VECTORS["keys"])
KEY = jws.key_from(jws.key_bytes(receipt_vectors.SEEDS[0]))
HEADS = {each["statement"]["size"]: verify_head(each["token"], KEYS) for each in VECTORS["heads"]}
PROOFS = {
    (each["first"], each["second"]): [bytes.fromhex(one) for one in each["proof"]] for each in VECTORS["consistency"]
}
SAID = VECTORS["heads"][0]["statement"]


def signed(log: str, size: int, root: bytes, time: float) -> Head:
    """A head by a trusted key."""
    return verify_head(jws.sign(head.encode(log, size, root, time), KEY, head.KIND), KEYS)


def test_vectors() -> None:
    for each in VECTORS["heads"]:
        said, found = each["statement"], verify_head(each["token"], KEYS)
        root = bytes.fromhex(said["root"])
        assert (found.log, found.size, found.root, found.time) == (said["log"], said["size"], root, said["time"])
        assert jws.sign(head.encode(said["log"], said["size"], root, said["time"]), KEY, head.KIND) == each["token"]
    for each in VECTORS["inclusion"]:
        path = [bytes.fromhex(one) for one in each["proof"]]
        leaf = bytes.fromhex(VECTORS["leaves"][each["index"]])
        verify_inclusion(HEADS[each["size"]], leaf, each["index"], path)
        with pytest.raises(ReceiptError, match="does not show the receipt"):
            verify_inclusion(HEADS[each["size"]], merkle.leaf(b"other"), each["index"], path)
    for (first, second), path in PROOFS.items():
        assert follow(HEADS[first], HEADS[second], path) is HEADS[max(first, second)]


@given(st.sampled_from(VECTORS["heads"]), st.data())
def test_no_character_of_a_head_can_be_changed(vector: dict[str, Any], data: st.DataObject) -> None:
    token = vector["token"]
    at = data.draw(st.integers(0, len(token) - 1))
    changed = token[:at] + data.draw(st.characters()) + token[at + data.draw(st.integers(0, 1)) :]
    if changed != token:
        with pytest.raises(ReceiptError):
            verify_head(changed, KEYS)


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "countersign/head/2"},
        {"size": -1},
        {"size": 1.5},
        {"size": True},
        {"size": "1"},
        {"size": 2**53},
        {"root": "A" * 64},
        {"root": ""},
        {"log": ""},
        {"time": None},
        {"more": 1},
    ],
)
def test_heads_of_another_form_are_refused(change: dict[str, Any]) -> None:
    payload = json.dumps(SAID | change, sort_keys=True, separators=(",", ":")).encode()
    with pytest.raises(ReceiptError):
        verify_head(jws.sign(payload, KEY, head.KIND), KEYS)
    with pytest.raises(ReceiptError, match="of the type"):
        verify_head(jws.sign(rfc8785.dumps(SAID), KEY, "countersign-receipt"), KEYS)


def test_the_first_head_is_pinned_and_then_the_larger_one() -> None:
    assert follow(None, HEADS[3]) is HEADS[3]
    assert follow(HEADS[3], HEADS[8], PROOFS[3, 8]) is HEADS[8]
    assert follow(HEADS[8], HEADS[3], PROOFS[3, 8]) is HEADS[8]  # an old one, from a cache
    assert follow(HEADS[8], HEADS[8]) is HEADS[8]


def test_a_log_that_shrinks_is_found() -> None:
    later = signed(HEADS[8].log, 3, HEADS[3].root, HEADS[8].time + 1)
    with pytest.raises(ForkedLog, match="shrank from 8 to 3") as caught:
        follow(HEADS[8], later, PROOFS[3, 8])
    assert (caught.value.before, caught.value.after) == (HEADS[8].token, later.token)


def test_a_log_that_forks_is_found() -> None:
    pinned = HEADS[8]
    with pytest.raises(ForkedLog, match="different hashes"):
        follow(pinned, signed(pinned.log, 8, merkle.leaf(b"x"), pinned.time + 1))
    with pytest.raises(ForkedLog, match="not shown to continue"):
        follow(pinned, signed(pinned.log, 9, merkle.leaf(b"x"), pinned.time + 1), PROOFS[8, 9])
    with pytest.raises(ForkedLog, match="not shown to continue"):
        follow(pinned, HEADS[9], [])
    with pytest.raises(ForkedLog, match="not shown to continue"):
        follow(pinned, signed(pinned.log, 3, merkle.leaf(b"x"), pinned.time - 1), PROOFS[3, 8])
    with pytest.raises(ForkedLog, match="another log is shown"):
        follow(pinned, signed("0" * 32, 9, HEADS[9].root, pinned.time + 1), PROOFS[8, 9])


@given(st.sampled_from(sorted(PROOFS)), st.data())
def test_no_hash_of_a_proof_can_be_changed(sizes: tuple[int, int], data: st.DataObject) -> None:
    first, second = sizes
    path = list(PROOFS[sizes])
    if not path:
        return
    at = data.draw(st.integers(0, len(path) - 1))
    bit = data.draw(st.integers(0, 255))
    path[at] = (int.from_bytes(path[at]) ^ 1 << bit).to_bytes(32)
    with pytest.raises(ForkedLog):
        follow(HEADS[first], HEADS[second], path)
