"""What preparing a request remembers, and what a tap does. The seam between `relay` and `tap`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from policies.evidence import Endpoint, Evidence, Sampling


@dataclass(frozen=True, slots=True)
class Asked:
    """What the client itself asked for, so that everything else can be hidden from it.

    `logprobs` is None when the client wants none; otherwise the number of alternatives per token
    (chat: `top_logprobs`, completions: `logprobs`), which may be 0, or −1 for the whole vocabulary.
    """

    stream: bool = False
    logprobs: int | None = None
    token_ids: bool = False
    tokens_as_ids: bool = False
    usage: bool = False
    reasoning: bool = True


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request ready to go up.

    Attributes:
        body: JSON for the backend; its `model` is the backend's name for the model.
        upstream_stream: whether the backend is asked to stream (it is not when `buffer` re-streams).
        sampling: parameters as sent, with the request's seed (the tap adds the choice's index).
        prompts: number of prompts (completions may carry several), `n` choices each.
        served_model: the backend's name for the model, as sent.
        ids_as_tokens: the backend was asked to spell tokens as `token_id:N`. Not so when the client wants
            logprobs and the model has no tokenizer to rebuild their strings: then no claim can be read.
        media: the prompt holds more than text, so that its length in tokens cannot be told from its bytes.
    """

    endpoint: Endpoint
    body: bytes
    asked: Asked
    sampling: Sampling
    upstream_stream: bool = False
    prompts: int = 1
    n: int = 1
    served_model: str = ""
    ids_as_tokens: bool = True
    media: bool = False


class Tap(Protocol):
    """Reads one response along, hides what we added, and keeps the evidence.

    Feed it the backend's body as it arrives and send on what it returns. A tap never raises on what a
    backend sends: it passes through what it cannot read and remembers a fault.
    """

    done: bytes
    """The terminal frame (`data: [DONE]`), held back so that a verdict can go before it; empty until seen."""

    failed: bool
    """The tap has given up (`line_too_long`, `too_large`): stop reading the backend, then `close()`."""

    begun: bool
    """Something of an answer has arrived: in a stream an event with data, which comments and errors are not."""

    fault: str | None
    """What the error frame says that the tap itself put at the end of a stream; None when it put none."""

    erred: bool
    """The backend itself said, in a stream, that something went wrong."""

    cut: bool
    """The body broke off, and there was nothing that could be said of it in the body itself."""

    refusal: bytes | None
    """The first event of a stream, where it is an error: a JSON object. Nothing was shown before it, so it can still
    become an answer with a status of its own."""

    streamed: bool
    """What `feed` returns goes to the client at once; otherwise there is one body, complete after `close`."""

    content_type: str | None
    """Content type for the client where it is not the backend's own (a re-streamed answer), else None."""

    @property
    def held(self) -> int:
        """Bytes it holds, roughly."""

    @property
    def large(self) -> bool:
        """What it holds of a body, or of an event, takes long to read: it is fed the end of that, and closed, off the
        event loop."""

    def feed(self, data: bytes) -> bytes:
        """Bytes from the backend in, bytes for the client out (may be empty)."""

    def pass_on(self, data: bytes) -> bytes | None:
        """What `feed` returns, of a stream that goes on as it did before; None, and nothing is done, where it does not,
        or that cannot be told at once."""

    def settle(self) -> None:
        """What `feed` returned is on its way: do what it put off for that. Not to be called is no harm."""

    def close(self, fault: str | None = None) -> bytes:
        """The backend ended, cleanly or with a fault such as `upstream_closed`; what is left for the client.

        In a stream that ended without its terminal frame this includes an OpenAI-shaped error frame and
        never a `[DONE]`. A stream that ended cleanly after every choice's finish reason but without
        `[DONE]` is no error.
        """

    def used(self) -> tuple[int | None, int | None]:
        """Tokens of the prompt and of what arrived of the answer: as counted, else as billed, None where neither."""

    def evidence(self, **meta: Any) -> list[Evidence]:
        """One Evidence per choice, for whatever arrived; `meta` fills in id, backend, model, timings, …"""
