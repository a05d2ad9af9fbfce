"""Section of the settings about how much of anything is taken from clients and from backends."""

from __future__ import annotations

from pydantic import Field

from policies._sections import Section


class BoundsSettings(Section):
    """The most that is taken. A client that exceeds a bound gets an error that names it.

    Attributes:
        request_bytes: a request's body.
        json_depth: objects and arrays inside each other.
        json_values: values in a request's body; each takes up to a hundred bytes while the body is read.
        choices: choices of one response: `n` of each prompt.
        stop_strings: entries of `stop`, and of `bad_words`.
        token_ids: entries of `logit_bias`, `stop_token_ids` and `allowed_token_ids`.
    """

    request_bytes: int = Field(32 * 1024 * 1024, gt=0)
    json_depth: int = Field(128, ge=8, le=512)
    json_values: int = Field(2 * 1024 * 1024, gt=0)
    choices: int = Field(4096, gt=0, le=65_536)
    stop_strings: int = Field(256, gt=0)
    token_ids: int = Field(262_144, gt=0)
