"""A request's body, read once for everybody who decides something by it."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from policies import lax
from policies.errors import InvalidRequest, RequestTooLarge
from policies.settings import BoundsSettings
from proxy.tap.outline import has_more_values
from proxy.tap.rawjson import Object, read_object

LARGE = 256 * 1024
"""Bytes from which a body is not read on the event loop: others' streams would stand still meanwhile."""

_DEFAULT = BoundsSettings()
_MOST_IN_ALL = 4 * 1024 * 1024
_NO_JSON = "The request body is not valid JSON."
_TEXTS = ("stop", "bad_words")
_IDS = ("logit_bias", "stop_token_ids", "allowed_token_ids")
_LIMITS = {
    "chat": ("max_completion_tokens", "max_tokens"),
    "completions": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
    "/v1/messages": ("max_tokens",),
}
_PROMPTS = {"completions": "prompt", "/v1/embeddings": "input"}


@dataclass(frozen=True, slots=True)
class Body:
    """A JSON object with unique keys, within its bounds.

    Attributes:
        endpoint: `chat`, `completions`, or the path of another one.
        data: the bytes as they came.
        raws: the fields in their order, each with the bytes it came as. Shared by everybody: copy before changing.
        fields: the same, decoded. Never changed.
        model: what the client calls the model; empty when it names none.
        stream: whether a stream is asked for.
        n: choices asked for per prompt, at least 1. `prompts`: how many prompts there are, at least 1.
        most_tokens: output tokens allowed per choice; None when the request does not say.
        sha256: of `data`, hex.
    """

    endpoint: str
    data: bytes
    raws: Object
    fields: dict[str, Any]
    model: str
    stream: bool
    n: int
    prompts: int
    most_tokens: int | None
    sha256: str

    @property
    def choices(self) -> int:
        """Choices asked for in all."""
        return self.n * self.prompts

    @classmethod
    def read(cls, endpoint: str, data: bytes, bounds: BoundsSettings = _DEFAULT) -> Body:
        """The body in `data`. Raises InvalidRequest and RequestTooLarge."""
        if has_more_values(data, bounds.json_values):
            raise RequestTooLarge(f"The request body holds more than {bounds.json_values} JSON values.")
        try:
            fields = _parse(data)
        except RecursionError as error:
            raise _too_deep(bounds) from error
        if _is_deeper(data, fields, bounds.json_depth):
            raise _too_deep(bounds)
        raws = read_object(data)
        if raws is None:
            raise InvalidRequest(_NO_JSON)
        model = fields.get("model")
        body = cls(
            endpoint=endpoint,
            data=data,
            raws=raws,
            fields=fields,
            model=model if isinstance(model, str) else "",
            stream=bool(lax.boolean(fields.get("stream"))),
            n=max(1, lax.integer(fields.get("n")) or 1),
            prompts=_count_prompts(fields.get(_PROMPTS.get(endpoint, ""))),
            most_tokens=_most_tokens(endpoint, fields),
            sha256=hashlib.sha256(data).hexdigest(),
        )
        body._check(bounds)
        return body

    def _check(self, bounds: BoundsSettings) -> None:
        if self.choices > bounds.choices:
            param = "n" if self.n > 1 else _PROMPTS[self.endpoint]
            raise InvalidRequest(f"More than {bounds.choices} choices are asked for.", param=param, code="too_many")
        for names, most in ((_TEXTS, bounds.stop_strings), (_IDS, bounds.token_ids)):
            for name in names:
                value = self.fields.get(name)
                # Each choice's evidence has a list of its own.
                if isinstance(value, list | dict) and len(value) > min(most, _MOST_IN_ALL // self.choices):
                    raise InvalidRequest(f"`{name}` has too many entries.", param=name, code="too_many")


def _parse(data: bytes) -> dict[str, Any]:
    try:
        fields = _decode(data.decode())
    except (ValueError, OverflowError) as error:
        raise InvalidRequest(_NO_JSON) from error
    if not isinstance(fields, dict):
        raise InvalidRequest("The request body must be a JSON object.")
    return fields


def _is_deeper(data: bytes, fields: dict[str, Any], limit: int) -> bool:
    if data.count(b"{") + data.count(b"[") <= limit:
        return False
    level: list[Any] = [fields]
    for _ in range(limit):
        inner = (value for one in level for value in (one.values() if isinstance(one, dict) else one))
        level = [value for value in inner if isinstance(value, dict | list)]
        if not level:
            return False
    return True


def _too_deep(bounds: BoundsSettings) -> InvalidRequest:
    text = f"The request body nests JSON deeper than {bounds.json_depth} levels."
    return InvalidRequest(text, code="json_too_deep")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise InvalidRequest(f"The request body names {twice[:64]!r} twice.", param=twice[:64])
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


# json.loads would make a decoder for every request.
_decode = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant).decode


def _count_prompts(prompt: Any) -> int:
    """How many prompts `prompt` holds: a string or a list of ids is one."""
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return len(prompt)
    return 1


def _most_tokens(endpoint: str, fields: dict[str, Any]) -> int | None:
    given = (fields[name] for name in _LIMITS.get(endpoint, ()) if fields.get(name) is not None)
    return lax.integer(next(given, None))
