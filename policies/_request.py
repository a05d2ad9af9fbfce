"""Fields of a request that bear on its answer and that `Sampling` has no room for.

They are read from the body as it went to the backend, so they are the client's doing and never the backend's.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec
import numpy as np

from policies.evidence import Evidence, Ids

LONGEST_PATTERN = 4096
"""Tokens up to which a repeated pattern is looked for; a client may ask for any length."""


class Extras(msgspec.Struct, frozen=True):
    """Fields of vLLM 0.32's requests, as JSON had them; None when absent.

    Attributes:
        thinking_token_budget: tokens of reasoning after which vLLM forces its end.
        watermarking: turns on the engine's watermark, which draws by other noise.
        repetition_detection: ends an answer that repeats itself, with finish reason `repetition`.
        tools: functions that the model may call, by chat.
        prompt, prompt_embeds, truncate_prompt_tokens, n: what a completion's prompt ids follow from.
    """

    thinking_token_budget: Any = None
    watermarking: Any = None
    repetition_detection: Any = None
    tools: Any = None
    prompt: Any = None
    prompt_embeds: Any = None
    truncate_prompt_tokens: Any = None
    n: Any = None


_decoder = msgspec.json.Decoder(Extras)

_Fields = TypeVar("_Fields", bound=msgspec.Struct)


def read(request: bytes, decoder: msgspec.json.Decoder[_Fields]) -> _Fields | None:
    """The fields of a request that the decoder's struct names, all of which may be missing and hold anything; None
    where it is no object.

    What is fast to read is stricter than proxy and vLLM: they take half a surrogate pair, and numbers beyond a double,
    in fields that nobody looks at. Those must not hide the others.
    """
    try:
        return decoder.decode(request)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        pass
    found, kind = read_leniently(request), decoder.type
    return None if found is None else kind(**{name: found[name] for name in kind.__struct_fields__ if name in found})


def read_leniently(request: bytes) -> dict[str, Any] | None:
    """All fields of a request as the proxy reads them; None where it is no object."""
    try:
        found = json.loads(request)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def extras(evidence: Evidence) -> Extras:
    """The extra fields of the request; all None when it cannot be read."""
    return read(evidence.request, _decoder) or Extras()


def prompt_given(evidence: Evidence) -> Ids | None:
    """The prompt's ids where a completion's request gave them as ids, which need no rendering; None elsewhere.

    vLLM numbers choices prompt by prompt, `n` of them each.
    """
    asked = extras(evidence)
    prompt = asked.prompt
    if (
        evidence.endpoint != "completions"
        or asked.truncate_prompt_tokens is not None
        or asked.prompt_embeds is not None
    ):
        return None
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        place = evidence.index // (asked.n if isinstance(asked.n, int) and asked.n > 0 else 1)
        prompt = prompt[place] if 0 <= place < len(prompt) else None
    if not isinstance(prompt, list) or not prompt or not all(type(id) is int and 0 <= id < 2**31 for id in prompt):
        return None
    return np.asarray(prompt, np.int32)


def repeats(ids: Ids, asked: Any) -> bool | None:
    """Whether the answer ends in a pattern as often as `repetition_detection` asked for; None when undecided.

    A pattern is `min_pattern_size` (at least 1) to `max_pattern_size` tokens long and stands `min_count` times in a
    row at the end.
    """
    if not isinstance(asked, dict):
        return None
    least, most, times = (asked.get(name, 0) for name in ("min_pattern_size", "max_pattern_size", "min_count"))
    if not all(isinstance(value, int) for value in (least, most, times)):
        return None
    if times < 2:
        return False
    for size in range(max(1, least), min(most, LONGEST_PATTERN, len(ids) // times) + 1):
        tail = ids[-size * times :].reshape(times, size)
        if bool(np.all(tail == tail[0])):
            return True
    return None if most > LONGEST_PATTERN else False
