"""Requests to endpoints whose answers carry no evidence, and the words in which an error ends a stream of theirs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from policies.settings import BackendSettings
from proxy.tap.rawjson import raw, write
from proxy.tap.types import Asked
from proxy.tap.words import MESSAGES, said_in_a_stream

if TYPE_CHECKING:
    from proxy.relay.body import Body

RESPONSES = "/v1/responses"


@dataclass(frozen=True, slots=True)
class Passed:
    """A request ready to go up as it came; only another name of the model is put in.

    Attributes:
        path: the endpoint's.
        model: the model's public name. `served_model`: the backend's.
        tokens: output tokens asked for in all; None when the request does not say.
    """

    path: str
    body: bytes
    asked: Asked
    model: str
    served_model: str
    tokens: int | None = None

    @property
    def upstream_stream(self) -> bool:
        """Whether the backend is asked to stream."""
        return self.asked.stream


def pass_on(body: Body, backend: BackendSettings) -> Passed:
    """The request as it goes up."""
    served = backend.served_model or backend.model
    data = body.data if served == backend.model else write({**body.raws, "model": raw(served)})
    tokens = None if body.most_tokens is None else body.most_tokens * body.choices
    return Passed(body.endpoint, data, Asked(stream=body.stream), backend.model, served, tokens)


def error_event(path: str, body: dict[str, Any], number: int = 0) -> bytes:
    """An OpenAI-shaped error as the last event of a stream of that path; `number` events came before it."""
    if path == MESSAGES:
        return b"event: error\ndata: " + write(said_in_a_stream(body)) + b"\n\n"
    if path == RESPONSES:
        said = {name: body["error"][name] for name in ("code", "message", "param")}
        return b"event: error\ndata: " + write({"type": "error", **said, "sequence_number": number}) + b"\n\n"
    return b"data: " + write(body) + b"\n\n"
