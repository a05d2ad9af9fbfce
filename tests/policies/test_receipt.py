"""Receipts: another implementation's vectors, and that nothing in one can be changed."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from policies import jws, receipt
from policies.errors import ReceiptError
from policies.evidence import Evidence, Sampling
from policies.receipt import Facts, verify_receipt
from policies.unit import declaration_of
from policies.verification import unverified
from tests.policies import receipt_vectors

VECTORS: dict[str, Any] = json.loads(receipt_vectors.PATH.read_text())
KEYS = jws.keys_in(VECTORS["keys"])
RECEIPTS: list[dict[str, Any]] = VECTORS["receipts"]
TOKENS = [each["token"] for each in RECEIPTS]
KEY = jws.key_from(jws.key_bytes(receipt_vectors.SEEDS[0]))
CHARACTERS = st.sampled_from("ABCZabcz0189-_.=+/ \n~é") | st.characters()


def signed(payload: bytes, kind: str = receipt.KIND) -> str:
    """By a key that is trusted."""
    return jws.sign(payload, KEY, kind)


def test_the_file_is_what_the_second_implementation_writes() -> None:
    assert receipt_vectors.PATH.read_text() == receipt_vectors.text()


@pytest.mark.parametrize("vector", RECEIPTS, ids=[each["statement"]["verification"]["verdict"] for each in RECEIPTS])
def test_vectors(vector: dict[str, Any]) -> None:
    said = vector["statement"]
    found = verify_receipt(vector["token"], KEYS, id=said["id"])
    assert found.statement == said
    assert (found.id, found.verdict) == (said["id"], said["verification"]["verdict"])
    assert found.hashes == said["sha256"]
    assert found.leaf.hex() == VECTORS["leaves"][RECEIPTS.index(vector)]
    key = jws.key_from(jws.key_bytes(vector["seed"]))
    assert jws.sign(receipt.encode(said), key, receipt.KIND) == vector["token"]
    assert found.kid == jws.kid_of(jws.public_bytes(key))


def test_keys_are_published_as_others_read_them() -> None:
    # RFC 8037, appendices A.2 and A.3.
    first = VECTORS["keys"]["keys"][0]
    assert (first["x"], first["kid"]) == (
        "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo",
        "kPrK_qmxVWaYVA9wwBF6Iuo3vVzz7TxHCTwXBygrS4k",
    )
    assert jws.jwk_set(KEYS.values()) == VECTORS["keys"]
    assert list(KEYS) == [each["kid"] for each in VECTORS["keys"]["keys"]]


@given(st.sampled_from(TOKENS), st.data())
def test_no_character_can_be_changed(token: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(token)))
    kind = data.draw(st.sampled_from(["change", "insert", "drop", "cut", "double", "swap"]))
    other = data.draw(CHARACTERS)
    changed = {
        "change": token[:at] + other + token[at + 1 :],
        "insert": token[:at] + other + token[at:],
        "drop": token[:at] + token[at + 1 :],
        "cut": token[:at],
        "double": token[:at] + token,
        "swap": token[at:] + token[:at],
    }[kind]
    if changed != token:
        with pytest.raises(ReceiptError):
            verify_receipt(changed, KEYS)


@given(st.sampled_from(TOKENS), st.sampled_from(TOKENS), st.integers(0, 2))
def test_parts_of_two_receipts_make_none(token: str, other: str, part: int) -> None:
    parts, others = token.split("."), other.split(".")
    changed = ".".join([*parts[:part], others[part], *parts[part + 1 :]])
    if changed not in (token, other):
        with pytest.raises(ReceiptError):
            verify_receipt(changed, KEYS)


@given(st.sampled_from(TOKENS), st.data())
def test_the_last_bits_of_a_part_are_no_room(token: str, data: st.DataObject) -> None:
    """base64 has spellings that decode alike."""
    parts = token.split(".")
    part = data.draw(st.integers(0, 2))
    last = data.draw(st.sampled_from("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"))
    changed = ".".join([*parts[:part], parts[part][:-1] + last, *parts[part + 1 :]])
    if changed != token:
        with pytest.raises(ReceiptError):
            verify_receipt(changed, KEYS)


@st.composite
def _changed(draw: st.DrawFn) -> dict[str, Any]:
    """A statement in which one value, somewhere, is another one, or is gone, or one more is there."""
    said: dict[str, Any] = json.loads(json.dumps(draw(st.sampled_from(RECEIPTS))["statement"]))
    node: Any = said
    while True:
        name = draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        if isinstance(node[name], dict | list) and node[name] and draw(st.integers(0, 3)):
            node = node[name]
            continue
        match draw(st.sampled_from(["change", "drop", "add"])):
            case "change":
                node[name] = draw(st.none() | st.integers(-9, 9) | st.floats(-9, 9) | st.text("abc", max_size=3))
            case "drop":
                del node[name]
            case "add" if isinstance(node, dict):
                node[draw(st.text("xyz", min_size=1, max_size=3))] = 1
            case "add":
                node.append(1)
        return said


@given(_changed())
def test_a_changed_statement_needs_a_signature_of_its_own(said: dict[str, Any]) -> None:
    original = next(each for each in RECEIPTS if each["statement"]["verification"]["backend"])
    head, _, signature = original["token"].split(".")
    body = base64.urlsafe_b64encode(rfc8785.dumps(said)).decode().rstrip("=")
    if said != original["statement"]:
        with pytest.raises(ReceiptError):
            verify_receipt(f"{head}.{body}.{signature}", KEYS)
    # Signed again it is another receipt, with another leaf, or none at all.
    try:
        again = verify_receipt(signed(rfc8785.dumps(said)), KEYS)
    except ReceiptError:
        return
    assert all(again.leaf.hex() != leaf for leaf in VECTORS["leaves"]) or again.token in TOKENS


def test_a_signature_is_by_a_trusted_key_over_this_very_type() -> None:
    payload = receipt.encode(RECEIPTS[0]["statement"])
    assert verify_receipt(signed(payload), KEYS).verdict == "pass"
    with pytest.raises(ReceiptError, match="not among those that are trusted"):
        verify_receipt(jws.sign(payload, jws.new_key(), receipt.KIND), KEYS)
    with pytest.raises(ReceiptError, match="of the type countersign-receipt"):
        verify_receipt(signed(payload, "countersign-head"), KEYS)
    with pytest.raises(ReceiptError, match="not among those"):
        verify_receipt(TOKENS[0], {})
    # A kid that is another trusted key's.
    mine, theirs = list(KEYS)
    with pytest.raises(ReceiptError, match="does not hold"):
        verify_receipt(signed(payload), {mine: KEYS[theirs], theirs: KEYS[mine]})


@pytest.mark.parametrize(
    "header",
    [
        b"{}",
        b"null",
        b'{"alg":"none","kid":"%s","typ":"countersign-receipt"}',
        b'{"alg":"HS256","kid":"%s","typ":"countersign-receipt"}',
        b'{"alg":"EdDSA", "kid":"%s","typ":"countersign-receipt"}',
        b'{"alg":"EdDSA","crit":["b64"],"kid":"%s","typ":"countersign-receipt"}',
        b'{"alg":"EdDSA","alg":"EdDSA","kid":"%s","typ":"countersign-receipt"}',
        b'{"alg":"EdDSA","kid":"%s"}',
        b'{"alg":"EdDSA","kid":["%s"],"typ":"countersign-receipt"}',
        b'{"alg":"EdDSA","kid":"\xff%s","typ":"countersign-receipt"}',
        b"[" * 100_000,
    ],
)
def test_no_other_header_will_do(header: bytes) -> None:
    """Although the signature holds, as any library would find."""
    head = header.replace(b"%s", next(iter(KEYS)).encode())
    text = jws._encoded(head) + "." + TOKENS[0].split(".")[1]
    with pytest.raises(ReceiptError, match="header is another one"):
        verify_receipt(f"{text}.{jws._encoded(KEY.sign(text.encode()))}", KEYS)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b'{"schema":"countersign/receipt/2"}',
        b'{"schema":"countersign/receipt/1"}',
        json.dumps(RECEIPTS[0]["statement"]).encode(),
        rfc8785.dumps(RECEIPTS[0]["statement"])[:-1] + b',"id":"x"}',
        rfc8785.dumps(RECEIPTS[0]["statement"]).replace(b'"score":0.0205', b'"score":NaN'),
        rfc8785.dumps(RECEIPTS[0]["statement"] | {"id": "0" * 31 + "9"}),
        rfc8785.dumps(RECEIPTS[0]["statement"] | {"seed": "A" * 64}),
        rfc8785.dumps(RECEIPTS[0]["statement"] | {"issued": True}),
        rfc8785.dumps(RECEIPTS[0]["statement"] | {"times": {"first_token": "0", "total": None}}),
        rfc8785.dumps(RECEIPTS[0]["statement"] | {"sha256": {}}),
        rfc8785.dumps(RECEIPTS[0]["statement"] | {"declared": {}}),
        rfc8785.dumps(RECEIPTS[0]["statement"] | {"verification": None}),
    ],
)
def test_no_other_payload_will_do(payload: bytes) -> None:
    with pytest.raises(ReceiptError):
        verify_receipt(signed(payload), KEYS)


@pytest.mark.parametrize(
    "value", [b"1e999", b"-" + b"1" * 400, b'"\\ud800"', b"[" * 900 + b"]" * 900, b'{"\\ud800":1}']
)
def test_a_payload_without_a_canonical_form_is_refused(value: bytes) -> None:
    payload = rfc8785.dumps(RECEIPTS[0]["statement"])
    assert payload.count(b'"status":"done"') == 1
    with pytest.raises(ReceiptError, match="schema says"):
        verify_receipt(signed(payload.replace(b'"status":"done"', b'"status":' + value)), KEYS)


@pytest.mark.parametrize("text", ["", ".", "..", "a.b.c", "é.é.é", "a" * (jws.LONGEST + 1), b"a.b.c", None, 5])
def test_what_is_no_token_is_refused(text: Any) -> None:
    with pytest.raises(ReceiptError):
        verify_receipt(text, KEYS)


@pytest.mark.parametrize(
    "published",
    [
        None,
        [],
        {},
        {"keys": {}},
        {"keys": [VECTORS["keys"]["keys"][0] | {"kid": "another"}]},
        {"keys": [VECTORS["keys"]["keys"][0] | {"x": "AAAA"}]},
        {"keys": [VECTORS["keys"]["keys"][0] | {"x": None}]},
        {"keys": [VECTORS["keys"]["keys"][0] | {"x": VECTORS["keys"]["keys"][0]["x"] + "="}]},
    ],
)
def test_what_is_no_key_set_is_refused(published: Any) -> None:
    with pytest.raises(ReceiptError):
        jws.keys_in(published)


def test_keys_of_other_kinds_are_left_out() -> None:
    others = [{"kty": "RSA", "n": "AQAB", "e": "AQAB"}, {"kty": "OKP", "crv": "X25519", "x": "AAAA"}, "text", None]
    assert jws.keys_in({"keys": [*others, VECTORS["keys"]["keys"][1]]}) == dict([list(KEYS.items())[1]])


def test_it_is_held_against_what_it_is_about() -> None:
    evidence = Evidence(
        id="a" * 32,
        endpoint="chat",
        backend="b",
        model="m",
        sampling=Sampling(seed=7),
        runtime="vllm-0.32-v2",
        request=b"sent",
        shown_sha256=receipt.digest(b"served"),
        first_token_seconds=0.5,
    )
    intent = {"request_sha256": receipt.digest(b"asked"), "instead_of": "b" * 32}
    case = receipt.digest(b"case")
    facts = receipt.facts_of([evidence], intent, b"packed", declared=declaration_of(evidence), replay=case)
    verification = unverified("a" * 32, "x", None, 5.0) | {"owner": "secret", "trace": "secret", "backend": "b"}
    said = receipt.statement(verification, facts, 6.0)
    token = signed(receipt.encode(said))
    about = {
        "request": b"asked",
        "sent": b"sent",
        "served": b"served",
        "evidence": b"packed",
        "replay": b"case",
    }
    found = verify_receipt(token, KEYS, id="a" * 32, **about)
    assert b"secret" not in receipt.encode(said)
    assert found.statement["declared"]["runtime"] == "vllm-0.32-v2"
    assert found.statement["instead_of"] == "b" * 32
    assert found.statement["times"] == {"first_token": 0.5, "total": None}
    assert found.statement["seed"] == receipt.seed_commitment("a" * 32, [7])
    for name in about:
        with pytest.raises(ReceiptError, match=f"{name} has another hash"):
            verify_receipt(token, KEYS, **{name: b"other"})  # type: ignore[arg-type]
    with pytest.raises(ReceiptError, match="no hash of this: second_replay"):
        verify_receipt(token, KEYS, second_replay=b"")
    with pytest.raises(ReceiptError, match="is about a"):
        verify_receipt(token, KEYS, id="b" * 32)


@given(st.lists(st.none() | st.integers(0, 2**64 - 1), min_size=1, max_size=4), st.data())
def test_seeds_are_committed_to(seeds: list[int | None], data: st.DataObject) -> None:
    known = receipt.seed_commitment("a" * 32, seeds)
    assert bool(known) == any(seed is not None for seed in seeds)
    other = data.draw(st.lists(st.none() | st.integers(0, 2**64 - 1), min_size=1, max_size=4))
    assert not known or other == seeds or receipt.seed_commitment("a" * 32, other) != known
    assert not known or receipt.seed_commitment("b" * 32, seeds) != known


def test_the_vectors_seed_is_committed_to() -> None:
    said = RECEIPTS[0]["statement"]
    assert receipt.seed_commitment(said["id"], [2**61, None]) == said["seed"]


def test_odd_numbers_and_facts_have_a_form() -> None:
    facts = Facts(first_token=float("nan"), total=float("inf"), request="")
    verification = unverified("a" * 32, "x", None, 5.0)
    said = receipt.statement(verification | {"checks": [{"n": 2**63, "x": 1e300}]}, facts, 6.0)
    found = verify_receipt(signed(receipt.encode(said)), KEYS)
    assert found.statement["times"] == {"first_token": None, "total": None}
    assert found.statement["sha256"]["request"] is None
    unknown = receipt.facts_of_intent({"request_sha256": 5, "declaration": "x", "instead_of": None})
    assert unknown == receipt.facts_of_intent(None) == replace(receipt.NOTHING)
