"""Section of the settings about how much of anything is taken from clients and from backends."""

from __future__ import annotations

from pydantic import Field

from policies._sections import Section

_KIB, _MIB = 1024, 1024 * 1024


class BoundsSettings(Section):
    """The most that is taken. A client over a bound gets an error that names it; a backend's answer over one ends as an
    error, and evidence says `too_large`, `line_too_long` or `too_deep`, which only the backend can cause.

    Attributes:
        connections: clients' connections to one process at a time.
        head_bytes: a request's line and headers, and whatever else is neither head nor body: trailers, chunk
            extensions.
        url_bytes: a request's URL.
        headers: headers of a request.
        head_seconds: until the head is whole, from its first byte on; and until a body is that was answered before it
            was whole, from its answer on.
        body_seconds: until any other body is whole.
        request_bytes: a request's body.
        json_depth: objects and arrays inside each other, in a request or in an answer.
        json_values: values in a request's body; each takes up to a hundred bytes while the body is read.
        choices: choices of one response: `n` of each prompt.
        stop_strings: entries of `stop`, and of `bad_words`.
        token_ids: entries of `logit_bias`, `stop_token_ids` and `allowed_token_ids`.
        line_bytes: a line, and an event, of a stream.
        answer_bytes: an answer that is not streamed. What was asked for bounds it more tightly, and a stream as well:
            see `proxy.tap.allowed`.
        error_bytes: the body of an error.
        held_bytes: lines, answers and errors together that one process waits for the end of, and the bodies of requests
            that it serves. Where it is not enough, the largest answer of the backend that holds the most is given up.
            Bodies have half of it; a key that would hold more than is then left for other keys is answered 503.
        answer_tokens: tokens of one response, over all its choices.
        prompt_tokens: tokens of its prompts.
        answer_characters: what one response shows, over all its choices.
        evidence_bytes: evidence of one response before compression; what is too much of it is left out.
    """

    connections: int = Field(16_384, gt=0)
    head_bytes: int = Field(64 * _KIB, ge=1024)
    url_bytes: int = Field(8 * _KIB, ge=256)
    headers: int = Field(256, ge=16)
    head_seconds: float = Field(15.0, gt=0)
    body_seconds: float = Field(300.0, gt=0)
    request_bytes: int = Field(32 * _MIB, gt=0)
    json_depth: int = Field(128, ge=8, le=512)
    json_values: int = Field(2 * _MIB, gt=0)
    choices: int = Field(4096, gt=0, le=65_536)
    stop_strings: int = Field(256, gt=0)
    token_ids: int = Field(262_144, gt=0)
    line_bytes: int = Field(16 * _MIB, gt=0)
    answer_bytes: int = Field(256 * _MIB, gt=0)
    error_bytes: int = Field(_MIB, gt=0)
    held_bytes: int = Field(1024 * _MIB, gt=0)
    answer_tokens: int = Field(262_144, gt=0, le=524_288)
    prompt_tokens: int = Field(2 * _MIB, gt=0, le=8 * _MIB)
    answer_characters: int = Field(16 * _MIB, gt=0, le=32 * _MIB)
    evidence_bytes: int = Field(192 * _MIB, gt=0, le=224 * _MIB)
