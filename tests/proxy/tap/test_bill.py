"""What backends bill, whatever number that is."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from proxy.tap.bill import MOST, Bill
from tests.proxy.tap.bodies import body, whole_tap

# More digits than this Python does not even write.
COUNTS = st.integers(-(10**320), 10**320) | st.none()
USAGE = st.dictionaries(
    st.sampled_from(
        [
            "prompt_tokens",
            "completion_tokens",
            "input_tokens",
            "output_tokens",
            "cache_creation_input_tokens",
            "cache_read_input_tokens",
        ]
    ),
    COUNTS,
)


@given(USAGE)
def test_a_bill_is_read_as_far_as_it_can_be_believed(usage: dict[str, int | None]) -> None:
    bill = Bill()
    bill.read(json.dumps({"usage": usage}).encode())
    for count in (bill.prompt, bill.answer):
        assert count is None or 0 <= count <= MOST


@given(COUNTS, COUNTS)
def test_what_a_chat_is_billed_is_too(prompt: int | None, answer: int | None) -> None:
    value = body()
    for choice in value["choices"]:
        choice.pop("token_ids", None)
    value.pop("prompt_token_ids", None)
    value["usage"] = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": 0}
    tap = whole_tap()
    tap.feed(json.dumps(value).encode())
    tap.close()
    for count in tap.used():
        assert count is None or 0 <= count <= MOST


def test_usual_bills_are_as_they_are() -> None:
    bill = Bill()
    bill.read(b'{"usage": {"prompt_tokens": 9, "completion_tokens": 4}}')
    assert (bill.prompt, bill.answer) == (9, 4)
    bill.read(b'{"usage": {"input_tokens": 5, "cache_read_input_tokens": 20}}')
    assert (bill.prompt, bill.answer) == (25, 4)
