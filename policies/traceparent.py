"""The header `traceparent` as text: which trace something belongs to, and which span it hangs on.

Source: W3C Trace Context, level 2 (https://www.w3.org/TR/trace-context-2/), section 3.2.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LENGTH = 55
"""Characters of a `traceparent` of version 00."""
_MOST = 512
_FORM = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A place in a trace. `trace_id` has 128 bits, `span_id` 64, neither is 0."""

    trace_id: int
    span_id: int
    sampled: bool = True


def encode(context: TraceContext) -> str:
    """As a `traceparent` of version 00."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.sampled):02x}"


def decode(text: object) -> TraceContext | None:
    """What a `traceparent` says; None where it is none. Those of later versions may be longer."""
    if not isinstance(text, str) or len(text) > _MOST:
        return None
    found = _FORM.fullmatch(text)
    if found is None or (found[1] == "00" and found[5] is not None):
        return None
    return TraceContext(int(found[2], 16), int(found[3], 16), bool(int(found[4], 16) & 1))
