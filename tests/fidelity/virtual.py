"""A vLLM made of its recordings: one generation, and what vLLM would send of it to whoever asks in whatever way.

A recording holds everything vLLM can be asked for (ids, the top 20, usage). For any other request the same generation
is rendered with less: that is what the recordings made without our additions show, and a test holds the two against
each other. Token strings come from the plain recording of the same answer, so only as many as it has can be asked for.
"""

from __future__ import annotations

import copy
import json
from typing import Any

from tests.fidelity.recordings import Recording

Frame = dict[str, Any]
Strings = dict[tuple[int, int, str], tuple[str, list[int] | None]]
"""String and bytes of a token, by choice, position and its `token_id:N`."""

DONE: Frame = {"done": True}


class Generation:
    """One recorded answer, streamed (a frame each) or whole (one frame)."""

    def __init__(self, recording: Recording) -> None:
        self.chat = recording.chat
        self.path = "/v1/chat/completions" if self.chat else "/v1/completions"
        self.stream = recording.stream
        self.frames = _frames(recording.body, self.stream)
        self.request = recording.plain_request
        plain = _frames(recording.plain, self.stream)
        self.strings: Strings = {}
        self.named = _named(self.frames, plain, self.chat, self.strings)

    @property
    def choices(self) -> int:
        """How many answers it has."""
        return len({choice.get("index") for frame in self.frames for choice in frame.get("choices", [])})

    def render(self, request: Frame) -> list[bytes]:
        """The events (or the one body) of this generation for a request."""
        shown = [frame for frame in (self._shown(frame, request) for frame in self._counted(request)) if frame]
        if not self.stream:
            return [_spell(shown[0])]
        return [_event(frame) for frame in shown]

    def _counted(self, request: Frame) -> list[Frame]:
        """Copies of the frames, each logprob entry with its choice and position."""
        frames = copy.deepcopy(self.frames)
        positions: dict[int, int] = {}
        for frame in frames:
            for choice in frame.get("choices", []):
                index = choice.get("index", 0)
                rows = _rows(choice.get("logprobs"), self.chat)
                choice["at"] = (index, positions.get(index, 0))
                positions[index] = positions.get(index, 0) + rows
        return frames

    def _shown(self, frame: Frame, request: Frame) -> Frame | None:
        if "done" in frame or "comment" in frame or "error" in frame:
            return frame
        options = request.get("stream_options") or {}
        usage = bool(options.get("include_usage"))
        ids = bool(request.get("return_token_ids"))
        if not frame.get("choices") and "usage" in frame:
            return frame | {"model": request["model"]} if usage else None
        frame["model"] = request["model"]
        if self.chat and not ids and "prompt_token_ids" in frame:
            frame["prompt_token_ids"] = None
        choices = [choice for choice in frame["choices"] if self._choice(choice, request, ids)]
        if self.stream:
            if not choices:
                return None
            if usage and options.get("continuous_usage_stats"):
                frame["usage"] = {"prompt_tokens": 1, "total_tokens": 2, "completion_tokens": 1}
            if not usage and any(choice.get("finish_reason") for choice in choices) and self._fingerprint:
                frame["system_fingerprint"] = self._fingerprint
        frame["choices"] = choices
        return frame

    @property
    def _fingerprint(self) -> str | None:
        return next((f.get("system_fingerprint") for f in self.frames if "usage" in f and not f.get("choices")), None)

    def _choice(self, choice: Frame, request: Frame, ids: bool) -> bool:
        index, position = choice.pop("at")
        if not ids:
            for name in ("token_ids", "prompt_token_ids"):
                if name in choice:
                    choice[name] = None
        wanted = _wanted(request, self.chat)
        if wanted is None:
            if "logprobs" in choice:
                choice["logprobs"] = None
        elif choice.get("logprobs"):
            names = bool(request.get("return_tokens_as_token_ids"))
            self._logprobs(choice["logprobs"], wanted, None if names else (index, position))
        if not self.stream or choice.get("delta") != {} or choice.get("finish_reason"):
            return True
        return bool(ids and choice.get("token_ids") is not None) or bool(choice.get("logprobs"))

    def _logprobs(self, logprobs: Frame, count: int, at: tuple[int, int] | None) -> None:
        if self.chat:
            for row, entry in enumerate(logprobs["content"]):
                entry["top_logprobs"] = entry["top_logprobs"][:count]
                if at is not None:
                    entry["token"], _ = self.strings[at[0], at[1] + row, entry["token"]]
                    for top in entry["top_logprobs"]:
                        top["token"], top["bytes"] = self.strings[at[0], at[1] + row, top["token"]]
            return
        for row, (token, value, top) in enumerate(
            zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
        ):
            values = list(top.values())
            kept = count if count and (len(values) <= count or value >= values[count]) else count + 1
            short = dict(list(top.items())[:kept])
            if at is not None:
                named = {name: self.strings[at[0], at[1] + row, name][0] for name in (token, *short)}
                logprobs["tokens"][row] = named[token]
                short = {named[name]: item for name, item in short.items()}
            logprobs["top_logprobs"][row] = short
        if at is not None:
            before = sum(len(text) for text in self._texts(at))
            for row, text in enumerate(logprobs["tokens"]):
                logprobs["text_offset"][row] = before
                before += len(text)

    def _texts(self, at: tuple[int, int]) -> list[str]:
        """Strings of the tokens of a choice before a position."""
        texts: list[str] = []
        for frame in self.frames:
            for choice in frame.get("choices", []):
                if choice.get("index") == at[0] and choice.get("logprobs"):
                    for token in choice["logprobs"]["tokens"]:
                        if len(texts) < at[1]:
                            texts.append(self.strings[at[0], len(texts), token][0])
        return texts


def _frames(body: bytes, stream: bool) -> list[Frame]:
    if not stream:
        return [json.loads(body)]
    events = body.decode().removesuffix("\n\n").split("\n\n")
    return [DONE if event == "data: [DONE]" else json.loads(event.removeprefix("data: ")) for event in events]


def _spell(frame: Frame) -> bytes:
    return json.dumps(frame, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


def _event(frame: Frame) -> bytes:
    if "done" in frame:
        return b"data: [DONE]\n\n"
    if "comment" in frame:
        return f": {frame['comment']}\n\n".encode()
    return b"data: " + _spell(frame) + b"\n\n"


def _rows(logprobs: Frame | None, chat: bool) -> int:
    return len(logprobs["content"] if chat else logprobs["tokens"]) if logprobs else 0


def _wanted(request: Frame, chat: bool) -> int | None:
    if not chat:
        count: int | None = request.get("logprobs")
        return count
    return (request.get("top_logprobs") or 0) if request.get("logprobs") else None


def _entries(frames: list[Frame], chat: bool) -> dict[tuple[int, int], tuple[Frame, list[Frame]]]:
    """Each position's sampled token and its list, in one form for both endpoints."""
    found: dict[tuple[int, int], tuple[Frame, list[Frame]]] = {}
    positions: dict[int, int] = {}
    for frame in frames:
        for choice in frame.get("choices", []):
            logprobs = choice.get("logprobs")
            for row in range(_rows(logprobs, chat)):
                index = choice["index"]
                if chat:
                    entry = logprobs["content"][row]
                    pair = entry, entry["top_logprobs"]
                else:
                    top = [{"token": name, "logprob": lp} for name, lp in logprobs["top_logprobs"][row].items()]
                    pair = {"token": logprobs["tokens"][row], "logprob": logprobs["token_logprobs"][row]}, top
                found[index, positions.get(index, 0)] = pair
                positions[index] = positions.get(index, 0) + 1
    return found


def _named(full: list[Frame], plain: list[Frame], chat: bool, strings: Strings) -> int:
    """Collects token strings where both recordings agree beyond ties; returns how many alternatives all have."""
    theirs = _entries(plain, chat)
    most = 20
    for (index, position), (entry, top) in _entries(full, chat).items():
        other = theirs.get((index, position))
        if other is None or other[0]["logprob"] != entry["logprob"]:
            return -1
        strings[index, position, entry["token"]] = other[0]["token"], other[0].get("bytes")
        agreed = 0
        for at, (mine, their) in enumerate(zip(top, other[1], strict=False)):
            values = [item["logprob"] for item in top]
            if mine["logprob"] != their["logprob"] or values.count(mine["logprob"]) > 1:
                break
            strings[index, position, mine["token"]] = their["token"], their.get("bytes")
            agreed = at + 1
        most = min(most, agreed)
    return most if strings else -1
