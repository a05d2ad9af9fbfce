"""Whether two answers are the same after ids, times, and what the engine leaves to chance.

Chance is: which of several equal logprobs comes first (and so which makes it into the top k), how many
tokens the engine puts into one chunk, and how the chunks of several choices interleave.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

Frame = dict[str, Any]
_KEYED_BY_TOKENS = ".top_logprobs[]"


def frames(body: bytes) -> list[Frame]:
    """The JSON objects of a stream, `[DONE]` as `{"done": true}`."""
    out = []
    for event in body.decode().split("\n\n"):
        if event:
            assert event.startswith("data: "), event
            out.append({"done": True} if event == "data: [DONE]" else json.loads(event[6:]))
    return out


def assert_same(plain: bytes, shown: bytes, *, stream: bool) -> None:
    """Asserts that a client could not tell the two bodies apart."""
    if not stream:
        assert _cleaned(json.loads(shown)) == _cleaned(json.loads(plain))
        assert list(_keys(json.loads(shown))) == list(_keys(json.loads(plain)))
        return
    plain_frames, shown_frames = frames(plain), frames(shown)
    want, got = _by_choice(plain_frames), _by_choice(shown_frames)
    assert got.keys() == want.keys()
    for index in want:
        if got[index] != want[index]:
            assert _merged(got[index]) == _merged(want[index])
            assert _shapes(got[index]) <= _shapes(want[index])
    assert _key_orders(shown_frames) <= _key_orders(plain_frames)


def text(body: bytes, *, stream: bool) -> dict[int, str]:
    """Text of each choice, tool calls and reasoning included."""
    found: dict[int, str] = {}
    for frame in frames(body) if stream else [json.loads(body)]:
        for choice in frame.get("choices", []):
            part = choice.get("delta") or choice.get("message") or {}
            calls = "".join(
                (call.get("function") or {}).get("arguments") or "" for call in part.get("tool_calls") or []
            )
            piece = (part.get("content") or "") + (part.get("reasoning") or "") + calls + (choice.get("text") or "")
            found[choice["index"]] = found.get(choice["index"], "") + piece
    return found


def _cleaned(frame: Frame) -> Frame:
    frame = {name: value for name, value in frame.items() if name not in ("id", "created")}
    frame["choices"] = [_cleaned_choice(choice) for choice in frame.get("choices", [])]
    return frame


def _cleaned_choice(choice: Frame) -> Frame:
    choice = dict(choice)
    for name in ("message", "delta"):
        if choice.get(name):
            part = dict(choice[name])
            if part.get("tool_calls"):
                part["tool_calls"] = [_without_id(call) for call in part["tool_calls"]]
            choice[name] = part
    if choice.get("logprobs"):
        choice["logprobs"] = _untied(choice["logprobs"])
    return choice


def _without_id(call: Frame) -> Frame:
    return {**call, "id": "?"} if "id" in call else call


def _untied(logprobs: Frame) -> Frame:
    if "content" in logprobs:
        return {"content": [_untied_entry(entry) for entry in logprobs["content"]]}
    return {**logprobs, "top_logprobs": [top and _untied_dict(top) for top in logprobs["top_logprobs"]]}


def _untied_entry(entry: Frame) -> Frame:
    values = [top["logprob"] for top in entry["top_logprobs"]]
    top = [
        {"logprob": item["logprob"]} if at and _is_tied(values, item["logprob"]) else item
        for at, item in enumerate(entry["top_logprobs"])
    ]
    return {**entry, "top_logprobs": top}


def _untied_dict(top: dict[str, float]) -> dict[str, float]:
    values = list(top.values())
    return {token: value for token, value in top.items() if token and not _is_tied(values, value)}


def _is_tied(values: list[float], value: float) -> bool:
    return values.count(value) > 1 or value in (values[-1], min(values))


def _by_choice(stream: list[Frame]) -> dict[Any, list[Frame]]:
    found: dict[Any, list[Frame]] = {}
    for frame in stream:
        key = frame["choices"][0]["index"] if frame.get("choices") else "rest"
        found.setdefault(key, []).append(_cleaned(frame))
    return found


def _merged(stream: list[Frame]) -> dict[str, Any]:
    """All chunks of a choice as one: text, logprobs and ids joined, the last chunk's other fields."""
    joined: dict[str, Any] = {"text": "", "logprobs": [], "ids": [], "calls": ""}
    for frame in stream:
        for choice in frame["choices"]:
            delta = choice.get("delta") or {}
            joined["text"] += (delta.get("content") or "") + (choice.get("text") or "") + (delta.get("reasoning") or "")
            for call in delta.get("tool_calls") or []:
                function = call.get("function") or {}
                joined["calls"] += f"{function.get('name') or ''}{function.get('arguments') or ''}"
            joined["ids"] += choice.get("token_ids") or []
            logprobs = choice.get("logprobs") or {}
            joined["logprobs"] += logprobs.get("content") or logprobs.get("token_logprobs") or []
    last = dict(stream[-1])
    last["choices"] = [{k: v for k, v in c.items() if k in ("finish_reason", "stop_reason")} for c in last["choices"]]
    return {**joined, "last": last}


def _shapes(stream: list[Frame]) -> set[tuple[str, str]]:
    """Where in a chunk something stands, and of what type it is, over all chunks: a chunk may hold several tokens."""
    return {place for frame in stream for place in _places("", frame)}


def _places(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and not path.endswith(_KEYED_BY_TOKENS):
        for key, item in value.items():
            # Text moves between chunks with the tokens, so what a delta holds differs where chunks do.
            if key != "delta" or "role" in item:
                yield from _places(f"{path}.{key}", item)
        return
    yield path, "null" if value is None else type(value).__name__
    if isinstance(value, list):
        for item in value:
            yield from _places(f"{path}[]", item)


def _key_orders(stream: list[Frame]) -> set[tuple[str, ...]]:
    return {tuple(_keys(frame)) for frame in stream}


def _keys(value: Any) -> list[str]:
    """Keys in the order they come, outside of logprobs and deltas."""
    if isinstance(value, dict):
        hidden = ("logprobs", "delta")
        return [key for name, item in value.items() for key in (name, *([] if name in hidden else _keys(item)))]
    if isinstance(value, list):
        return [key for item in value[:1] for key in _keys(item)]
    return []
