"""What endpoints that carry no evidence say that an answer took, in whichever words."""

from __future__ import annotations

import msgspec

from proxy.tap.rawjson import UNREADABLE


class _Usage(msgspec.Struct):
    """OpenAI's words, those of its Responses API, and the Messages API's, which counts cached prompts apart."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None


class _Within(msgspec.Struct):
    usage: _Usage | None = None


class _Billed(msgspec.Struct):
    usage: _Usage | None = None
    response: _Within | None = None
    message: _Within | None = None


_billed = msgspec.json.Decoder(_Billed)

MOST = 2**31 - 1
"""Tokens of one answer, or of one prompt, beyond which nobody is believed."""


def believed(tokens: int) -> int:
    """What a backend bills, as far as it can be: a number of any size is its to say."""
    return min(max(tokens, 0), MOST)


class Bill:
    """Tokens of the prompt and of the answer by whatever was read last of each; None until something was."""

    def __init__(self) -> None:
        self.prompt: int | None = None
        self.answer: int | None = None

    def read(self, data: bytes) -> None:
        """A body, or the data of an event. One that says nothing of it, or is no JSON, changes nothing."""
        try:
            found = _billed.decode(data)
        except UNREADABLE:
            return
        for usage in (found.usage, *(each.usage for each in (found.response, found.message) if each is not None)):
            if usage is not None:
                self._take(usage)

    def _take(self, usage: _Usage) -> None:
        prompt = usage.prompt_tokens if usage.input_tokens is None else usage.input_tokens
        cached = (usage.cache_creation_input_tokens or 0) + (usage.cache_read_input_tokens or 0)
        answer = usage.completion_tokens if usage.output_tokens is None else usage.output_tokens
        self.prompt = self.prompt if prompt is None else believed(prompt + cached)
        self.answer = self.answer if answer is None else believed(answer)
