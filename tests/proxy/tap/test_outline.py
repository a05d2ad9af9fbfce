"""What can be said of JSON without reading it, against what reading it says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.tap import outline
from proxy.tap.outline import has_more_values, is_deeper, is_wider

TEXT = st.text(st.sampled_from(list('{}[],:"\\ aé\n')), max_size=6)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.integers(-9, 9) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=30,
)


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)


def _count(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(_count, inner))


def _empty(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else sum(map(_empty, inner)) if inner else 1


def _members(value: Any, depth: int) -> int:
    """Commas up to that depth."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    if not inner or not depth:
        return 0
    return len(inner) - 1 + sum(_members(one, depth - 1) for one in inner)


@pytest.fixture(params=[1, 2, 3, 7, 1000])
def piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Pieces so small that everything is cut everywhere."""
    monkeypatch.setattr(outline, "_PIECE", request.param)
    size: int = request.param
    return size


@pytest.mark.usefixtures("piece")
def test_as_reading_it_says() -> None:
    @given(VALUES, st.booleans(), st.sampled_from([None, 1]))
    def check(value: Any, ascii: bool, indent: int | None) -> None:
        text = json.dumps(value, ensure_ascii=ascii, indent=indent).encode("utf-8", "surrogatepass")
        depth, count = _depth(value), _count(value)
        assert not depth or is_deeper(text, depth - 1)
        assert not is_deeper(text, depth)
        assert has_more_values(text, count - 1)
        # An empty container is taken to hold something.
        assert not has_more_values(text, count + _empty(value))
        for level in (1, 2):
            members = _members(value, level)
            assert not is_wider(text, level, members)
            assert not members or is_wider(text, level, members - 1)

    check()


def test_large() -> None:
    assert is_wider(b"[" + b"[1,2]," * 100_000 + b"1]", 1, 99_999)
    assert not is_wider(b"[" + b"[1,2]," * 100_000 + b"1]", 1, 100_000)
