"""What a request may cost, and times as headers write them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.limits import ASSUMED_LENGTH, MOST_TOKENS, cost, duration

SIZES = st.integers(0, 10**7)
COUNTS = st.integers(1, 64)
ANSWERS = st.none() | st.integers(0, 10**6)
CONTEXTS = st.none() | st.integers(1, 10**6)


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (-5, "0s"),
        (0, "0s"),
        (17, "17ms"),
        (999, "999ms"),
        (1000, "1s"),
        (1500, "1.5s"),
        (59_870, "59.87s"),
        (60_000, "1m0s"),
        (360_000, "6m0s"),
        (3_600_000, "1h0m0s"),
        (90_061_001, "25h1m1.001s"),
    ],
)
def test_durations(milliseconds: int, text: str) -> None:
    assert duration(milliseconds) == text


@given(st.integers(1, 10**12))
def test_durations_can_be_read_back(milliseconds: int) -> None:
    text = duration(milliseconds)
    if found := re.fullmatch(r"(\d+)ms", text):
        assert int(found[1]) == milliseconds
        return
    found = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(\d+)(?:\.(\d{1,3}))?s", text)
    assert found is not None
    hours, minutes, seconds = (int(found[at] or 0) for at in (1, 2, 3))
    rest = int((found[4] or "0").ljust(3, "0"))
    assert ((hours * 60 + minutes) * 60 + seconds) * 1000 + rest == milliseconds


def test_prompt_and_every_answer() -> None:
    found = cost(400, n=3, answer=50)
    assert (found.likely, found.most, found.least, found.open) == (250, 550, 100, False)


def test_what_the_client_leaves_open_is_as_long_as_the_model_lets_it() -> None:
    found = cost(400, n=2, answer=None, context=1000)
    assert (found.likely, found.most, found.open) == (2000, 2000, True)
    found = cost(400, n=2, answer=None)
    assert (found.likely, found.open, found.known) == (100 + 2 * ASSUMED_LENGTH, True, False)


def test_no_answer_is_longer_than_the_model_lets_it() -> None:
    assert cost(40, answer=10**9, context=1000).most == 1000


def test_the_template_is_held_beside_the_text() -> None:
    found = cost(400, template=64, answer=50)
    assert (found.likely, found.most, found.least) == (150, 514, 100)


def test_what_nobody_sees_is_as_long_as_the_model_lets_it() -> None:
    found = cost(400, unseen=2, answer=50, context=10_000)
    assert (found.likely, found.most, found.known) == (100 + 2048 + 50, 10_000, True)
    found = cost(400, unseen=2, answer=50)
    assert (found.likely, found.most, found.known) == (100 + 2048 + 50, 400 + ASSUMED_LENGTH + 50, False)


def test_nobody_is_charged_for_what_the_request_cannot_explain() -> None:
    assert cost(40, answer=0).taken(10**9, None) == 40
    assert cost(40, template=9, prompts=3, answer=0).taken(10**9, None) == 49
    assert cost(40, n=2, answer=50).taken(100_000, 100) == 140
    assert cost(40, answer=None).taken(10**9, 10**9) == 40 + ASSUMED_LENGTH
    assert cost(40, unseen=1, answer=50).taken(100_000, 50) == 100_050


@given(
    *(SIZES, COUNTS, COUNTS, ANSWERS, CONTEXTS),
    st.integers(0, 200),
    st.integers(0, 5000),
    *(st.none() | st.integers(0, 10**8),) * 2,
)
def test_bounds(
    size: int,
    prompts: int,
    n: int,
    answer: int | None,
    context: int | None,
    unseen: int,
    template: int,
    read: int | None,
    written: int | None,
) -> None:
    found = cost(size, template=template, unseen=unseen, prompts=prompts, n=n, answer=answer, context=context)
    assert found.least >= 0
    assert found.open == (answer is None)
    assert found.known == (context is not None or (answer is not None and not unseen))
    assert found.least <= found.likely <= found.most
    assert 0 <= found.taken(read, written) <= min(found.most, MOST_TOKENS)
    if context is not None:
        assert found.most <= prompts * context * n
    if answer is not None:
        assert found.likely >= min(found.least + prompts * n * min(answer, context or answer), prompts * (context or 1))


@given(st.none() | st.integers(-(10**20), 10**20), st.none() | st.integers(-(10**20), 10**20), CONTEXTS)
def test_a_bill_is_believed_as_far_as_the_request_explains_it(
    prompt: int | None, answer: int | None, context: int | None
) -> None:
    taken = cost(400, answer=10, context=context).taken(prompt, answer)
    assert 0 <= taken <= min(410, context or 410)
    if prompt is None and answer is None and context is None:
        assert taken == 100
