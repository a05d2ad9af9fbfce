"""Statuses for errors that streams begin with."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.relay.refusal import retryable, status_of

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["error", "code", "type", "x"]), inner),
)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ({"error": {"code": 400}}, 400),
        ({"error": {"code": "429"}}, 429),
        ({"error": {"code": 599}}, 599),
        ({"error": {"code": 200, "type": "BadRequestError"}}, 400),
        ({"error": {"code": None, "type": "rate_limit_error"}}, 429),
        ({"error": {"code": "context_length_exceeded", "type": "invalid_request_error"}}, 400),
        ({"type": "error", "error": {"type": "overloaded_error"}}, 503),
        ({"type": "error", "code": "rate_limit_error"}, 429),
        ({"error": {"status": 503}}, 503),
        ({"error": "broken"}, 502),
        ({"error": {"code": True}}, 502),
        ([], 502),
    ],
)
def test_status_of(error: Any, status: int) -> None:
    assert status_of(json.dumps(error).encode()) == status


@given(JSON)
def test_always_an_error(error: Any) -> None:
    assert 400 <= status_of(json.dumps(error).encode()) < 600


def test_what_is_no_json() -> None:
    assert status_of(b'{"error": NaN}') == 502


def test_who_may_do_better() -> None:
    assert [status for status in range(400, 600) if retryable(status)] == [408, 429, 500, 502, 503, 504]
