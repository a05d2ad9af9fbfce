"""What a choice says to its reader, as clients and engines name it: whole, or delta by delta.

Whatever a client could show is read, or is a fault: who shows text in a field that nobody reads would otherwise have
another text verified than the one that is read.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeGuard

import msgspec

from policies.evidence import Endpoint

ODD = "odd_answer"
"""Fault of what no engine writes: text under another name, or as something else than text; a name, or an index, twice;
a refusal, or a call of the old kind, which clients read apart from the rest."""
UNKNOWN = "unknown_fields"
"""Fault of fields that nothing here can check, some of which engines write, such as citations."""
MAX_CALLS = 4096
"""Tool calls kept of a choice, and of a response."""

Place = Literal["text", "message", "delta"]
"""Where a choice shows something: of completions, of chat, and of chat's streams."""
_PLACES: tuple[Place, ...] = ("text", "message", "delta")
_BESIDE = ("index", "logprobs", "finish_reason", "stop_reason", "token_ids", "routed_experts")
_PROMPT = ("prompt_token_ids", "prompt_logprobs")
KNOWN: dict[Place, frozenset[str]] = {place: frozenset({place, *_BESIDE, *_PROMPT}) for place in _PLACES}
"""Fields of a choice, by where it shows something."""
_OURS = "countersign"
_FOR_SHOW = frozenset({"annotations", "audio"})


class Function(msgspec.Struct, forbid_unknown_fields=True):
    """What is called, and with what."""

    name: str | None = None
    arguments: str | None = None


class Call(msgspec.Struct, forbid_unknown_fields=True):
    """One call of a tool, or a part of it."""

    index: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: Function | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """Every field that engines write. They name the reasoning `reasoning`, older ones `reasoning_content`, some both
    with the same text. Where something else than null stands in what is null here, it is for clients of others."""

    role: str | None = None
    content: str | None = None
    refusal: str | None = None
    annotations: None = None
    audio: None = None
    function_call: Function | None = None
    tool_calls: list[Call] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


_FIELDS = frozenset(Message.__struct_fields__) - _FOR_SHOW


class Shown(NamedTuple):
    """What one choice, or one delta of it, adds. Calls are (index, name, arguments); `older` is reasoning under the
    name that older engines give it; `fault` is ODD, UNKNOWN or empty."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[int, str, str], ...] = ()
    older: str = ""
    fault: str = ""

    @property
    def characters(self) -> int:
        """How much there is to keep."""
        calls = sum(len(name) + len(said) for _, name, said in self.calls) if self.calls else 0
        return len(self.text) + max(len(self.reasoning), len(self.older)) + calls


NOTHING = Shown()


def place_of(endpoint: Endpoint, *, whole: bool) -> Place:
    """Where a choice of an answer in one piece (`whole`), or of a stream, shows something."""
    if endpoint == "completions":
        return "text"
    return "message" if whole else "delta"


def of_message(message: Message, place: Place) -> Shown:
    """What a message, or a delta of one, shows."""
    seldom = (message.reasoning, message.reasoning_content, message.tool_calls, message.refusal, message.function_call)
    if not any(seldom):
        # Nearly every delta of a stream.
        return Shown(message.content or "")
    calls, odd = _calls(message.tool_calls or [], whole=place == "message")
    if message.function_call is not None:
        calls += ((-1, message.function_call.name or "", message.function_call.arguments or ""),)
    odd |= bool(message.refusal) or message.function_call is not None
    text = (message.content or "") + (message.refusal or "")
    return Shown(text, message.reasoning or "", calls, message.reasoning_content or "", ODD if odd else "")


def of_value(value: Any, place: Place) -> Shown:
    """What stands in such a place shows, whatever it is: JSON as Python reads it."""
    if value is None:
        return NOTHING
    if place == "text" or not isinstance(value, dict):
        if not _is_text(value):
            return Shown(fault=ODD)
        return Shown(value, fault="" if place == "text" else ODD)
    others = {name for name, item in value.items() if name not in _FIELDS and says(item)} - {_OURS}
    known = {name: _bare(item) for name, item in value.items() if name in _FIELDS}
    try:
        said = of_message(msgspec.convert(known, Message), place)
    except (msgspec.ValidationError, UnicodeError):
        content = known.get("content")
        return Shown(content if _is_text(content) else "", fault=ODD)
    if not all(map(_is_text, (said.text, said.reasoning, said.older, *_texts(said.calls)))):
        return Shown(said.text if _is_text(said.text) else "", fault=ODD)
    if not others:
        return said
    return said._replace(fault=worse(said.fault, ODD if others & _FOR_SHOW else UNKNOWN))


def beside(choice: Mapping[str, Any], place: Place) -> str:
    """Fault of a choice, as Python reads it, for what stands beside that which it shows; empty where it has none."""
    others = {name for name in choice.keys() - KNOWN[place] - {_OURS} if says(choice[name])}
    if not others:
        return ""
    return ODD if others.intersection(_PLACES) else UNKNOWN


def says(value: Any) -> bool:
    """Whether the value of an unknown field could say anything, as a single number, or nothing, does not."""
    if isinstance(value, (dict, list)):
        items = value.values() if isinstance(value, dict) else value
        return any(says(item) or type(item) in (int, float) for item in items)
    return isinstance(value, str) and value != ""


def worse(one: str, other: str) -> str:
    """Of two faults."""
    return ODD if ODD in (one, other) else one or other


def _calls(calls: list[Call], *, whole: bool) -> tuple[tuple[tuple[int, str, str], ...], bool]:
    """Calls, and whether their places are odd: in one piece they stand in order, in a stream each has its index."""
    found: list[tuple[int, str, str]] = []
    odd = False
    for at, call in enumerate(calls):
        odd |= call.index not in (None, at) if whole else call.index is None
        function = call.function or Function()
        index = at if whole or call.index is None else call.index
        found.append((index, function.name or "", function.arguments or ""))
    return tuple(found), odd


def _texts(calls: tuple[tuple[int, str, str], ...]) -> list[str]:
    return [text for _, name, said in calls for text in (name, said)]


def _is_text(value: Any) -> TypeGuard[str]:
    """Whether a value is text without half characters, which no engine writes."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _bare(value: Any) -> Any:
    """A value without what is null in it."""
    if isinstance(value, dict):
        return {name: _bare(item) for name, item in value.items() if item is not None}
    return [_bare(item) for item in value] if isinstance(value, list) else value


class Transcript:
    """Everything one choice showed."""

    def __init__(self) -> None:
        self._text = io.StringIO()
        self._reasoning = io.StringIO()
        self._older = io.StringIO()
        self._calls: dict[int, tuple[io.StringIO, io.StringIO]] = {}

    def __bool__(self) -> bool:
        return bool(self._text.tell() or self._reasoning.tell() or self._older.tell() or self._calls)

    def add(self, said: Shown, most_calls: int = MAX_CALLS) -> int:
        """Appends a delta, without calls that would be more than `most_calls`; returns how many it begins."""
        if said.text:
            self._text.write(said.text)
        if said.reasoning:
            self._reasoning.write(said.reasoning)
        if said.older:
            self._older.write(said.older)
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
        """All reasoning, under the one name or the other."""
        return self._reasoning.getvalue() or self._older.getvalue()

    @property
    def torn(self) -> bool:
        """Whether it reasons in other words under the one name than under the other."""
        return bool(self._older.tell() and self._reasoning.tell()) and self._older.getvalue() != self.reasoning

    @property
    def tool_calls(self) -> tuple[tuple[str, str], ...]:
        """Name and arguments of each call, in the order of their indices."""
        return tuple((names.getvalue(), parts.getvalue()) for _, (names, parts) in sorted(self._calls.items()))
