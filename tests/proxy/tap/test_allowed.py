"""What one answer may bring follows from what was asked for, and never exceeds the operator's bounds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.settings import BoundsSettings
from proxy.tap.allowed import allowed
from tests.proxy.tap.bodies import prepared

BOUNDS = BoundsSettings()


@given(st.integers(1, 100_000), st.integers(1, 16), st.sampled_from([None, 0, 5, 20]))
def test_never_over_the_bounds(tokens: int, choices: int, logprobs: int | None) -> None:
    asked: dict[str, Any] = {} if logprobs is None else {"logprobs": True, "top_logprobs": logprobs}
    most = allowed(prepared(max_tokens=tokens, n=choices, **asked), BOUNDS)
    assert choices * tokens <= most.tokens or most.tokens == BOUNDS.answer_tokens
    assert most.tokens <= BOUNDS.answer_tokens
    # The longest that a token with its alternatives was seen to take is five thousand bytes.
    assert most.body >= min(BOUNDS.answer_bytes, tokens * choices * 5000)
    assert most.body <= BOUNDS.answer_bytes
    # A stream is no body: every token may have its own event, however many there are.
    assert most.stream >= most.tokens * 8000
    assert most.stream <= 4 * 1024 * 1024 + most.tokens * 16 * 1024 + choices * BOUNDS.line_bytes


def test_a_short_answer_may_be_short() -> None:
    most = allowed(prepared(max_tokens=10), BOUNDS)
    assert most.tokens < 100
    assert most.body < 8 * 1024 * 1024


@pytest.mark.parametrize("fields", [{"logprobs": True, "top_logprobs": -1, "max_tokens": 10}, {}])
def test_what_cannot_be_foretold_has_the_operators_bound(fields: dict[str, Any]) -> None:
    assert allowed(prepared(**fields), BOUNDS).body == BOUNDS.answer_bytes


def test_the_rest_is_the_operators() -> None:
    bounds = BoundsSettings(line_bytes=7, json_depth=9, prompt_tokens=11, answer_characters=13, evidence_bytes=17)
    most = allowed(prepared(max_tokens=10), bounds)
    assert (most.line, most.depth, most.prompt_tokens, most.characters, most.evidence) == (7, 9, 11, 13, 17)
