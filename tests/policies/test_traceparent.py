"""The header `traceparent`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.traceparent import LENGTH, TraceContext, decode, encode

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"

contexts = st.builds(TraceContext, st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans())


@given(contexts)
def test_it_is_read_as_it_was_written(context: TraceContext) -> None:
    text = encode(context)
    assert len(text) == LENGTH
    assert decode(text) == context


@pytest.mark.parametrize(
    ("text", "sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-fe", False),
        (f"00-{TRACE}-{SPAN}-ff", True),
        (f"cc-{TRACE}-{SPAN}-01", True),
        (f"cc-{TRACE}-{SPAN}-01-what-comes-later", True),
    ],
)
def test_valid_ones(text: str, sampled: bool) -> None:
    assert decode(text) == TraceContext(int(TRACE, 16), int(SPAN, 16), sampled)


@pytest.mark.parametrize(
    "text",
    [
        "",
        None,
        7,
        b"00-" + TRACE.encode(),
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01\n",
        f" 00-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-1",
        f"cc-{TRACE}-{SPAN}-01-" + "x" * 1000,
        f"cc-{TRACE}-{SPAN}-01x",
        f"00-{TRACE.replace('4', '４')}-{SPAN}-01",
    ],
)
def test_what_is_none(text: object) -> None:
    assert decode(text) is None


@given(st.text(alphabet="0123456789abcdef-fg \n", max_size=80) | st.text())
def test_nothing_breaks_it(text: str) -> None:
    found = decode(text)
    if found is not None and text.startswith("00"):
        assert encode(found)[:53] == text[:53]
