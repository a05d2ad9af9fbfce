"""Whether JSON names a key twice in one object, which every reader reads in its own way.

The parser used for everything else does not tell, and the one that does takes ten times as long. So it is only asked
about what does not look like what engines write, with each name in its place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Raw

from policies.twice import is_twice, loads
from proxy.tap.rawjson import MOST_LENIENT, UNREADABLE, Object, write

_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_SAID = rb"(?:null|" + _STRING + rb")"
_CALL = (
    rb'\{(?:"id":%b,)?(?:"type":"function",)?(?:"index":\d{1,9},)?' % _SAID
    + rb'"function":\{(?:"name":%b,?)?(?:"arguments":%b)?\}\}' % (_SAID, _SAID)
)
_TOOLS = rb'"tool_calls":\[(?:%b,?)*\],?' % _CALL
_REASONING = rb'"reasoning":%b,?(?:"reasoning_content":%b,?)?' % (_SAID, _SAID)
_FIRST = b"".join(rb'(?:"%b":%b,?)?' % (name, _SAID) for name in (b"role", b"content", b"refusal"))
_NULLS = b"".join(rb'(?:"%b":null,?)?' % name for name in (b"annotations", b"audio", b"function_call"))
_LAST = rb"(?:%b(?:%b)?|%b(?:%b)?)?" % (_REASONING, _TOOLS, _TOOLS, _REASONING)
_MESSAGES = re.compile(rb"(?:\{%b%b%b\},)*+" % (_FIRST, _NULLS, _LAST), re.DOTALL)


def any_repeats(messages: Sequence[bytes | Raw]) -> bool:
    """Whether one of these messages, or deltas, does; what cannot be told does."""
    if _MESSAGES.fullmatch(b",".join([*messages, b""])) is not None:
        return False
    return any(map(repeats, messages)) if len(messages) > 1 else _repeats(bytes(messages[0]))


def repeats(message: bytes | Raw) -> bool:
    """Whether a message, or a delta, does; what cannot be told does."""
    return any_repeats((message,))


def is_ambiguous(data: bytes | Raw, value: Object | list[Object]) -> bool:
    """Whether JSON was spelled so, of which `value` is all that is left to pass on; what cannot be told was."""
    data = bytes(data)
    return write(value) != data and _repeats(data)


def _repeats(data: bytes) -> bool:
    if len(data) > MOST_LENIENT:
        return True
    try:
        return is_twice(loads(data))
    except UNREADABLE:
        return True
