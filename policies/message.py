"""What a choice says to its reader, as clients and engines name it: whole, or delta by delta."""

from __future__ import annotations

import msgspec


class Function(msgspec.Struct):
    """What is called, and with what."""

    name: str | None = None
    arguments: str | None = None


class Call(msgspec.Struct):
    """One call of a tool, or a part of it."""

    function: Function | None = None
    index: int | None = None


class Message(msgspec.Struct):
    """Every field that clients show. Engines name the reasoning `reasoning`, older ones `reasoning_content`, some
    both with the same text."""

    content: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None
    function_call: Function | None = None
