"""Whether evidence is of the answer that a client got, whose body is read here as clients read it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from policies._requested import Compared
from policies.evidence import Evidence
from policies.message import Function, Message

BROKEN = frozenset({"invalid_json", "too_large", "too_deep", "unreadable", "line_too_long", "bad_ids"})
"""Faults of a backend whose answer the proxy did not read to its end, or not all of; none of them passes."""
_LINE = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


@dataclass(slots=True)
class Said:
    """What a choice of an answer says: see `Evidence`."""

    texts: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    calls: dict[int, tuple[list[str], list[str]]] = field(default_factory=dict)
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        """All content."""
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        """All reasoning."""
        return "".join(self.reasons)

    @property
    def tool_calls(self) -> tuple[tuple[str, str], ...]:
        """Name and arguments of each, in the order of their indices."""
        return tuple(("".join(names), "".join(said)) for _, (names, said) in sorted(self.calls.items()))


@dataclass(slots=True)
class Answer:
    """An answer's body as it was read. `usage` is prompt and completion tokens, where it says them; `erred`: an error
    came at its end, or in its place."""

    streamed: bool
    choices: dict[int, Said] = field(default_factory=dict)
    usage: tuple[int, int] | None = None
    erred: bool = False


def read(body: bytes) -> Answer:
    """An answer's body: JSON, or server-sent events. Raises ValueError for what is neither."""
    body = body.removeprefix(_BOM)
    streamed = body.lstrip()[:1] != b"{"
    found = Answer(streamed)
    try:
        for data in _events(body) if streamed else (body,):
            if data.strip() == b"[DONE]":
                break
            if data.strip():
                _take(found, json.loads(data), "delta" if streamed else "message")
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not found.choices and found.usage is None and not found.erred:
        raise ValueError("no answer")
    return found


def compare_answer(choices: Sequence[Evidence], body: bytes, *, hides_reasoning: bool) -> Compared:
    """Hold evidence against the body of an answer, which is the one that was signed.

    Args:
        hides_reasoning: the client asked not to see the reasoning, which is in the evidence all the same.
    """
    found = Compared()
    try:
        answer = read(body)
    except ValueError:
        found.wrong.append("it cannot be read, and the evidence says nothing of that")
    else:
        _compare(found, choices, answer, hides_reasoning)
    faults = BROKEN & {fault for choice in choices for fault in choice.faults}
    if found.wrong and faults:
        why = f"the words of the answer, which its backend broke ({', '.join(sorted(faults))})"
        return Compared(left=[why])
    return found


def _compare(found: Compared, choices: Sequence[Evidence], answer: Answer, hides_reasoning: bool) -> None:
    known = {choice.index: choice for choice in choices}
    for index in sorted(answer.choices.keys() - known.keys()):
        found.wrong.append(f"choice {index} is in the answer alone")
    for index, choice in sorted(known.items()):
        said = answer.choices.get(index, Said())
        where = f" of choice {index}" if len(known) > 1 else ""
        _text(found, f"the text{where}", said.text, choice.text, whole=choice.complete)
        restreamed = answer.streamed and not choice.stream
        if hides_reasoning or (restreamed and not said.reasoning):
            if choice.reasoning:
                found.left.append(f"the reasoning{where}, which the answer does not show")
        else:
            _text(found, f"the reasoning{where}", said.reasoning, choice.reasoning, whole=choice.complete)
        if choice.complete and said.tool_calls != choice.tool_calls:
            found.wrong.append(f"the tool calls{where}")
        if choice.complete and said.finish_reason != choice.finish_reason:
            found.wrong.append(f"the finish reason{where}")
    usage = choices[0].usage
    known_usage = None if usage is None else (usage.prompt_tokens, usage.completion_tokens)
    if None not in (answer.usage, known_usage) and answer.usage != known_usage and choices[0].complete:
        found.wrong.append("the usage")
    if any(not choice.complete for choice in choices):
        found.left.append("the end of the answer, which broke off: only as far as both go")


def _text(found: Compared, what: str, shown: str, known: str, *, whole: bool) -> None:
    same = shown == known if whole else shown.startswith(known) or known.startswith(shown)
    if same:
        return
    if any("\ud800" <= char <= "\udfff" for char in shown):
        found.left.append(f"{what}, which holds half characters")
    else:
        found.wrong.append(what)


def _events(body: bytes) -> Iterator[bytes]:
    """The data of each event; that of the last one may lack its blank line."""
    data: list[bytes] = []
    for line in (*_LINE.split(body), b""):
        if not line:
            if data:
                yield b"\n".join(data)
            data = []
        elif line[:5] == b"data:":
            data.append(line[5:].removeprefix(b" "))


def _take(found: Answer, top: Any, name: str) -> None:
    if not isinstance(top, dict):
        raise ValueError("no object")
    usage = top.get("usage")
    if isinstance(usage, dict):
        counts = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if all(type(count) is int for count in counts):
            found.usage = counts  # type: ignore[assignment]
    if top.get("error") is not None:
        found.erred = True
        return
    choices = top.get("choices")
    if not isinstance(choices, list):
        raise ValueError("no choices")
    for choice in choices:
        if not isinstance(choice, dict):
            raise ValueError("no choice")
        index = choice.get("index", 0)
        if type(index) is not int:
            raise ValueError("no index")
        said = found.choices.setdefault(index, Said())
        _add(said, choice, name)
        if isinstance(choice.get("finish_reason"), str):
            said.finish_reason = choice["finish_reason"]


def _add(said: Said, choice: dict[str, Any], name: str) -> None:
    if name not in choice:
        if isinstance(choice.get("text"), str):
            said.texts.append(choice["text"])
        return
    try:
        message = msgspec.convert(choice[name], Message)
    except msgspec.ValidationError:
        fields = choice[name]
        if isinstance(fields, dict) and isinstance(fields.get("content"), str):
            said.texts.append(fields["content"])
        return
    said.texts += [message.content or "", message.refusal or ""]
    said.reasons += dict.fromkeys(text for text in (message.reasoning, message.reasoning_content) if text)
    for at, call in enumerate(message.tool_calls or ()):
        if call.function is not None:
            _call(said, at if call.index is None else call.index, call.function)
    if message.function_call is not None:
        _call(said, -1, message.function_call)


def _call(said: Said, index: int, function: Function) -> None:
    names, arguments = said.calls.setdefault(index, ([], []))
    names.append(function.name or "")
    arguments.append(function.arguments or "")
