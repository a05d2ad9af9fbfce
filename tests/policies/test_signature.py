from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.signature import secret_keys, sign, verify_signature

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OTHER = "whsec_" + base64.b64encode(bytes(range(32))).decode()
NOW = 1_614_265_330


def headers(signature: str, id: str = "msg_1", timestamp: int = NOW) -> dict[str, str]:
    return {"Webhook-Id": id, "Webhook-Timestamp": str(timestamp), "Webhook-Signature": signature}


def test_the_example_of_the_specification() -> None:
    signature = sign(SECRET, "msg_p5jXN8AQM9LWM0D4loKWxJek", NOW, b'{"test": 2432232314}')
    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_a_signature_verifies_for_five_minutes() -> None:
    signed = headers(sign(SECRET, "msg_1", NOW, b"{}"))
    assert verify_signature(SECRET, signed, b"{}", NOW + 299)
    assert verify_signature(SECRET, signed, b"{}", NOW - 299)
    assert not verify_signature(SECRET, signed, b"{}", NOW + 301)
    assert not verify_signature(SECRET, signed, b"{} ", NOW)
    assert not verify_signature(OTHER, signed, b"{}", NOW)
    assert not verify_signature(SECRET, signed | {"Webhook-Id": "msg_2"}, b"{}", NOW)


def test_two_secrets_while_one_is_replaced() -> None:
    both = f"{OTHER} {SECRET}"
    signature = sign(both, "msg_1", NOW, b"{}")
    assert len(signature.split()) == 2
    assert verify_signature(SECRET, headers(signature), b"{}", NOW)
    assert verify_signature(OTHER, headers(signature), b"{}", NOW)
    assert verify_signature(both, headers(sign(SECRET, "msg_1", NOW, b"{}")), b"{}", NOW)


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_YWJj", "whsec_!!!", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"])
def test_bad_secrets_are_refused(secret: str) -> None:
    with pytest.raises(ValueError, match="whsec_"):
        secret_keys(secret)


def test_an_id_with_a_dot_could_move_bytes_between_fields() -> None:
    with pytest.raises(ValueError, match="dot"):
        sign(SECRET, "msg.1", NOW, b"{}")


@given(st.dictionaries(st.sampled_from(["webhook-id", "webhook-timestamp", "webhook-signature"]), st.text(max_size=40)))
def test_strange_headers_never_verify_and_never_raise(strange: dict[str, str]) -> None:
    assert not verify_signature(SECRET, strange, b"{}", NOW)
