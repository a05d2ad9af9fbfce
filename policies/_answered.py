"""Whether evidence is of the answer that a client got, whose body is read here as clients read it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from policies._requested import Compared
from policies.evidence import Endpoint, Evidence
from policies.message import ODD, Place, Transcript, beside, of_value, place_of
from policies.twice import Twice, is_twice, loads

BROKEN = frozenset({"invalid_json", "too_large", "too_deep", "unreadable", "line_too_long", "bad_ids", ODD})
"""Faults of a backend whose answer the proxy did not read to its end, or not all of; none of them passes."""
Calls = Sequence[tuple[str, str]]
_LINE = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


@dataclass(slots=True)
class Said:
    """What a choice of an answer says: see `Evidence`."""

    transcript: Transcript = field(default_factory=Transcript)
    faults: set[str] = field(default_factory=set)
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        """All content."""
        return self.transcript.text

    @property
    def reasoning(self) -> str:
        """All reasoning."""
        return self.transcript.reasoning

    @property
    def tool_calls(self) -> tuple[tuple[str, str], ...]:
        """Name and arguments of each, in the order of their indices."""
        return self.transcript.tool_calls

    def unread(self, faults: Collection[str]) -> bool:
        """Whether it shows something else, too, of which evidence with these faults says nothing."""
        found = self.faults | ({ODD} if self.transcript.torn else set())
        return not found <= set(faults)


@dataclass(slots=True)
class Answer:
    """An answer's body as it was read. `usage` is prompt and completion tokens, where it says them; `erred`: an error
    came at its end, or in its place; `ended`: nothing is missing at its end."""

    streamed: bool
    choices: dict[int, Said] = field(default_factory=dict)
    usage: tuple[int, int] | None = None
    erred: bool = False
    ended: bool = False


def read(body: bytes, endpoint: Endpoint = "chat") -> Answer:
    """An answer's body: JSON, or server-sent events. Raises ValueError for what is neither."""
    body = body.removeprefix(_BOM)
    streamed = body.lstrip()[:1] != b"{"
    found = Answer(streamed, ended=not streamed)
    place = place_of(endpoint, whole=not streamed)
    try:
        for data in _events(body) if streamed else (body,):
            if data.strip() == b"[DONE]":
                found.ended = True
                break
            if data.strip():
                _take(found, loads(data), place)
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
        answer = read(body, choices[0].endpoint)
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
        if said.unread(choice.faults):
            found.wrong.append(f"what else{where} is shown, of which the evidence says nothing")
        _text(found, f"the text{where}", said.text, choice.text, whole=choice.complete)
        restreamed = answer.streamed and not choice.stream
        if hides_reasoning or (restreamed and not said.reasoning):
            if choice.reasoning:
                found.left.append(f"the reasoning{where}, which the answer does not show")
        else:
            _text(found, f"the reasoning{where}", said.reasoning, choice.reasoning, whole=choice.complete)
        if not _called(said.tool_calls, choice.tool_calls, whole=choice.complete):
            found.wrong.append(f"the tool calls{where}")
        if (choice.complete or said.finish_reason is not None) and said.finish_reason != choice.finish_reason:
            found.wrong.append(f"the finish reason{where}")
        if not choice.complete and answer.ended and said.finish_reason is not None:
            found.wrong.append(f"the end{where}: the answer has one")
    usage = choices[0].usage
    known_usage = None if usage is None else (usage.prompt_tokens, usage.completion_tokens)
    if None not in (answer.usage, known_usage) and answer.usage != known_usage and choices[0].complete:
        found.wrong.append("the usage")
    if any(not choice.complete for choice in choices):
        found.left.append("the end of the answer, which broke off: only as far as both go")


def _text(found: Compared, what: str, shown: str, known: str, *, whole: bool) -> None:
    # Of what broke off the client has seen some, or all of it.
    same = shown == known if whole else known.startswith(shown)
    if same:
        return
    if any("\ud800" <= char <= "\udfff" for char in shown):
        found.left.append(f"{what}, which holds half characters")
    else:
        found.wrong.append(what)


def _called(shown: Calls, known: Calls, *, whole: bool) -> bool:
    if whole:
        return shown == known
    rest = iter(known)
    return all(any(name.startswith(begun) and said.startswith(part) for name, said in rest) for begun, part in shown)


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


def _take(found: Answer, top: Any, place: Place) -> None:
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
    if isinstance(top, Twice):
        raise ValueError("a name twice")
    told: set[int] = set()
    for choice in choices:
        if not isinstance(choice, dict) or isinstance(choice, Twice):
            raise ValueError("no choice")
        index = choice.get("index", 0)
        if type(index) is not int:
            raise ValueError("no index")
        said = found.choices.setdefault(index, Said())
        _add(said, choice, place)
        if index in told:
            said.faults.add(ODD)
        told.add(index)
        if isinstance(choice.get("finish_reason"), str):
            said.finish_reason = choice["finish_reason"]


def _add(said: Said, choice: dict[str, Any], place: Place) -> None:
    shown = of_value(choice.get(place), place)
    said.transcript.add(shown)
    said.faults |= {fault for fault in (shown.fault, beside(choice, place)) if fault}
    if is_twice(choice.get(place)):
        said.faults.add(ODD)
