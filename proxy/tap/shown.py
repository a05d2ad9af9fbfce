"""What a choice says to its reader: content, reasoning and tool calls, whole or delta by delta."""

from __future__ import annotations

import io
from typing import NamedTuple

import msgspec
from msgspec import Raw

from policies.message import ELSEWHERE, Message, Place
from proxy.tap.rawjson import UNREADABLE, Object, is_null

MAX_CALLS = 4096
"""Tool calls kept of a choice, and of a response."""


class _Content(msgspec.Struct):
    content: str | None = None


_message = msgspec.json.Decoder(Message)
_content = msgspec.json.Decoder(_Content)
_string = msgspec.json.Decoder(str)


class Shown(NamedTuple):
    """What one choice, or one delta of it, adds. Calls are (index, name, arguments). `unread`: it has something beside
    that which a client may show."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[int, str, str], ...] = ()
    unread: bool = False

    @property
    def characters(self) -> int:
        """How much there is to keep."""
        calls = sum(len(name) + len(said) for _, name, said in self.calls) if self.calls else 0
        return len(self.text) + len(self.reasoning) + calls


NOTHING = Shown()
_UNREAD = Shown(unread=True)


def shown(choice: Object, place: Place) -> Shown:
    """What a choice shows there. Where that cannot be read, its content alone, and that there may be more; so it is
    where something stands that clients of its endpoint do not read."""
    said = _shown(choice, place)
    return said._replace(unread=True) if stands_elsewhere(choice, place) else said


def stands_elsewhere(choice: Object, place: Place) -> bool:
    """Whether a choice says something where its endpoint's choices say nothing."""
    first, second = ELSEWHERE[place]
    return (first in choice and not is_null(choice[first])) or (second in choice and not is_null(choice[second]))


def _shown(choice: Object, place: Place) -> Shown:
    found = choice.get(place)
    if found is None or is_null(found):
        return NOTHING
    try:
        return Shown(_string.decode(found)) if place == "text" else of_message(_message.decode(found))
    except UNREADABLE:
        return _UNREAD if place == "text" else _content_alone(found)


def of_message(message: Message) -> Shown:
    """What a message, or a delta of one, shows."""
    reasons_or_calls = (message.reasoning, message.reasoning_content, message.tool_calls, message.function_call)
    if not any(reasons_or_calls):
        # Nearly every delta of a stream.
        return Shown((message.content or "") + (message.refusal or ""), unread=message.audio is not None)
    reasons = dict.fromkeys(text for text in (message.reasoning, message.reasoning_content) if text)
    calls = tuple(
        (at if call.index is None else call.index, call.function.name or "", call.function.arguments or "")
        for at, call in enumerate(message.tool_calls or ())
        if call.function is not None
    )
    if message.function_call is not None:
        calls += ((-1, message.function_call.name or "", message.function_call.arguments or ""),)
    return Shown((message.content or "") + (message.refusal or ""), "".join(reasons), calls, message.unread)


def _content_alone(message: Raw) -> Shown:
    try:
        return Shown(_content.decode(message).content or "", unread=True)
    except UNREADABLE:
        return _UNREAD


class Transcript:
    """Everything one choice showed."""

    def __init__(self) -> None:
        self._text = io.StringIO()
        self._reasoning = io.StringIO()
        self._calls: dict[int, tuple[io.StringIO, io.StringIO]] = {}

    def __bool__(self) -> bool:
        return bool(self._text.tell() or self._reasoning.tell() or self._calls)

    def add(self, said: Shown, most_calls: int = MAX_CALLS) -> int:
        """Appends a delta, without calls that would be more than `most_calls`; returns how many it begins."""
        if said.text:
            self._text.write(said.text)
        if said.reasoning:
            self._reasoning.write(said.reasoning)
        before = len(self._calls)
        for index, name, arguments in said.calls:
            if index in self._calls or len(self._calls) < before + most_calls:
                names, parts = self._calls.setdefault(index, (io.StringIO(), io.StringIO()))
                names.write(name)
                parts.write(arguments)
        return len(self._calls) - before

    @property
    def text(self) -> str:
        """All content."""
        return self._text.getvalue()

    @property
    def reasoning(self) -> str:
        """All reasoning."""
        return self._reasoning.getvalue()

    @property
    def tool_calls(self) -> tuple[tuple[str, str], ...]:
        """Name and arguments of each call, in the order of their indices."""
        return tuple((names.getvalue(), parts.getvalue()) for _, (names, parts) in sorted(self._calls.items()))
