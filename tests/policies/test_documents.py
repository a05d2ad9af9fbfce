"""What stands where a JSON object belongs."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.documents import document


@given(st.dictionaries(st.text(), st.none() | st.booleans() | st.text() | st.lists(st.integers(0, 9))))
def test_an_object_is_itself(value: dict[str, object]) -> None:
    assert document(orjson.dumps(value)) == value


@pytest.mark.parametrize("data", [None, b"", b"{", b"[]", b"1", b"null", b'"x"', b"\xff"])
def test_anything_else_is_missing(data: bytes | None) -> None:
    assert document(data) is None


@given(st.binary(max_size=40))
def test_no_bytes_break_it(data: bytes) -> None:
    found = document(data)
    assert found is None or isinstance(found, dict)
