"""The proxy's own part of an answer is found in it again, and nothing else is."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import jws, receipt, withheld
from policies.errors import ReceiptError, VerificationFailed
from policies.receipt import Facts, Receipt, verify_receipt
from policies.served import compare_served, parts, without_field
from policies.verification import pending, public, unverified
from proxy.relay.downlink import PING
from proxy.relay.inline import add_verdict, comment
from proxy.tap.rawjson import write

KEY = jws.new_key()
KEYS = jws.keys_in(jws.jwk_set([jws.public_bytes(KEY)]))
VERDICT: Any = public(unverified("a" * 32, 'odd: "countersign": } \n\n: countersign {}', None, 5.0))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)

FRAMES = st.binary(max_size=20).map(lambda raw: b"data: " + raw.hex().encode() + b"\n\n")


def about(served: bytes, verdict: str = "unverified") -> Receipt:
    """A receipt of this answer."""
    facts = Facts(served=receipt.digest(served))
    verification: Any = VERDICT | {"verdict": verdict}
    said = receipt.statement(verification, facts, 6.0)
    return verify_receipt(jws.sign(receipt.encode(said), KEY, receipt.KIND), KEYS)


@given(st.dictionaries(st.text(max_size=8), JSON, max_size=4), st.sampled_from(["", " ", "\n"]), st.booleans())
def test_the_field_of_an_inline_answer(fields: dict[str, Any], end: str, spaced: bool) -> None:
    body = json.dumps(fields, indent=2 if spaced else None).encode() + end.encode()
    shown = add_verdict(body, VERDICT)
    assert shown is not None
    assert without_field(shown) == body
    compare_served(about(body), shown)
    compare_served(about(body), body)
    with pytest.raises(ReceiptError, match="another hash"):
        compare_served(about(body), shown.replace(b"{", b"{ ", 1))


@given(
    st.lists(st.binary(max_size=20).map(lambda raw: b"data: " + raw.hex().encode() + b"\n\n"), max_size=5), st.data()
)
def test_the_comments_of_a_stream(frames: list[bytes], data: st.DataObject) -> None:
    done = b"data: [DONE]\n\n"
    shown = list(frames)
    for _ in range(data.draw(st.integers(0, 3))):
        shown.insert(data.draw(st.integers(0, len(shown))), PING)
    told = b"".join([*shown, comment(VERDICT), done])
    served = b"".join([*frames, done])
    compare_served(about(served), told)
    for changed in (told + b"x", told.replace(b"data: [DONE]", b"data: [DONE ]"), told[:-1]):
        with pytest.raises(ReceiptError, match="another hash"):
            compare_served(about(served), changed)


@given(st.lists(st.sampled_from([b": ping\n\n", PING, b"data: {}\n\n"]), max_size=8))
def test_a_backends_own_comments_are_part_of_the_answer(shown: list[bytes]) -> None:
    served = b"".join(part for part in shown if part != PING)
    compare_served(about(served), b"".join(shown))


def test_a_stream_of_an_earlier_release() -> None:
    served = b"data: {}\n\ndata: [DONE]\n\n"
    compare_served(about(served), b": ping\n\ndata: {}\n\n: ping\n\n" + comment(VERDICT) + b"data: [DONE]\n\n")


def test_what_only_looks_like_it_stays() -> None:
    body = b'data: {"a": ": countersign {}"}\n\ndata: : ping\n\n'
    assert list(parts(body)) == [body]
    for text in (b'{"countersign":', b'"countersign":1', b'{"countersign":1]', b"[" * 9 + b'"countersign":'):
        assert without_field(text) is None
    said = receipt.statement(unverified("a" * 32, "x", None, 5.0), receipt.NOTHING, 6.0)
    without = verify_receipt(jws.sign(receipt.encode(said), KEY, receipt.KIND), KEYS)
    with pytest.raises(ReceiptError, match="no hash of this"):
        compare_served(without, b"")


@pytest.mark.parametrize(
    "told",
    [
        withheld.rejected("a" * 32),
        withheld.not_taken_over("a" * 32),
        withheld.both_rejected("a" * 32, "b" * 32),
        withheld.both_rejected("b" * 32, "a" * 32),
    ],
)
def test_what_a_client_got_in_place_of_a_rejected_answer(told: VerificationFailed) -> None:
    body = write(told.body())
    compare_served(about(b"{}", "reject"), body)
    for verdict, shown in [
        ("pass", body),
        ("unverified", body),
        ("reject", body + b" "),
        ("reject", body.replace(b"a" * 32, b"c" * 32)),
        ("reject", b""),
    ]:
        with pytest.raises(ReceiptError, match="another hash"):
            compare_served(about(b"{}", verdict), shown)


INTENT = {"id": "a" * 32}


@pytest.mark.parametrize(
    ("shown", "holds"),
    [
        (VERDICT, True),
        (VERDICT | {"decided": 6.0}, False),
        (VERDICT | {"verdict": "pass"}, False),
        ({}, False),
        (pending(INTENT), True),
        (pending(INTENT) | {"verdict": "pass"}, False),
        (unverified("a" * 32, "store_unavailable", INTENT, 7.0), True),
        (unverified("a" * 32, "store_unavailable", INTENT, 7.0) | {"verdict": "pass"}, False),
    ],
)
def test_what_an_answer_says_of_itself_is_what_the_receipt_says(shown: dict[str, Any], holds: bool) -> None:
    told = public(shown)
    body, stream = b'{"a": 1}', b"data: {}\n\ndata: [DONE]\n\n"
    inline = add_verdict(body, told)
    assert inline is not None
    for served, seen in ((body, inline), (inline, inline), (stream, b"data: {}\n\n" + comment(told) + stream[10:])):
        with nullcontext() if holds else pytest.raises(ReceiptError, match="another verification"):
            compare_served(about(served), seen)


def test_a_nested_field_says_nothing_of_an_answer() -> None:
    body = b'{"choices": [{"a": {"countersign":{"verdict": "pass"}}}]}'
    compare_served(about(body), body)
