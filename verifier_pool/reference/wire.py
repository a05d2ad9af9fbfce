"""What a vLLM server answers, as far as a reference reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import msgspec
import numpy as np

from policies.errors import ReplayError
from policies.evidence import MASKED, Ids
from verifier_pool.reference.experts import decode_npy
from verifier_pool.reference.rows import NO_RANK, Entries


class Entry(msgspec.Struct):
    logprob: float | None = None
    rank: int | None = None


Rows = list[dict[int, Entry] | None]


class Choice(msgspec.Struct):
    prompt_logprobs: Rows | None = None
    prompt_token_ids: list[int] | None = None
    routed_experts: str | None = None


class Completion(msgspec.Struct):
    """Of `/v1/completions`."""

    choices: list[Choice]


class GeneratedChoice(msgspec.Struct):
    routed_experts: str | None = None


class Generated(msgspec.Struct):
    """Of `/inference/v1/generate`; `prompt_token_id_logprobs` is base64 of a float32 `.npy`."""

    choices: list[GeneratedChoice]
    prompt_logprobs: Rows | None = None
    prompt_token_id_logprobs: str | None = None
    prompt_token_ids: list[int] | None = None


class AnswerLogprobs(msgspec.Struct):
    """With `return_tokens_as_token_ids` a token's text is `token_id:17`."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float] | None]


class AnswerChoice(msgspec.Struct):
    logprobs: AnswerLogprobs
    token_ids: list[int]
    prompt_token_ids: list[int]


class Answer(msgspec.Struct):
    """Of `/v1/completions` where it is asked to answer."""

    choices: list[AnswerChoice]


class Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class Cards(msgspec.Struct):
    data: list[Card]


class Version(msgspec.Struct):
    version: str = "unknown"


class Rendered(msgspec.Struct):
    token_ids: list[int]


class Text(msgspec.Struct):
    prompt: str = ""


def decode(response: httpx.Response, shape: Any) -> Any:
    """The body as `shape`. Raises ReplayError `bad_replay`."""
    try:
        return msgspec.json.decode(response.content, type=shape)
    except (msgspec.DecodeError, ValueError) as error:
        raise ReplayError("bad_replay", f"{response.request.url.path}: {error}") from error


def message(response: httpx.Response) -> str:
    """The words of an OpenAI-shaped error, or the body's beginning."""
    return response.text[:2000]


def entries(rows: Rows | None, length: int, output: int) -> Entries:
    """Entries of the last `output` of `length` rows.

    Raises:
        ReplayError: `bad_replay` when rows are missing.
    """
    if rows is None or len(rows) != length:
        raise ReplayError("bad_replay", "the reference left out rows of prompt logprobs")
    wanted: Sequence[dict[int, Entry] | None] = rows[length - output :]
    filled = [row for row in wanted if row is not None]
    if len(filled) != output:
        raise ReplayError("bad_replay", "the reference left out rows of prompt logprobs")
    values = [value for row in filled for value in row.values()]
    return Entries(
        np.repeat(np.arange(output), [len(row) for row in filled]),
        np.array([id for row in filled for id in row], np.int64),
        np.array([MASKED if value.logprob is None else value.logprob for value in values], np.float64),
        np.array([NO_RANK if value.rank is None else value.rank for value in values], np.int64),
    )


def scores(text: str | None, ids: Ids) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Logprobs of given ids, of the shape of `ids`.

    Raises:
        ReplayError: `bad_replay` for none, or another shape or dtype.
    """
    array = None if text is None else decode_npy(text)
    if array is None or array.shape != ids.shape or array.dtype.kind != "f":
        raise ReplayError("bad_replay", "the reference scored other ids than it was given")
    return array.astype(np.float32)


def answer_entries(choice: AnswerChoice) -> Entries:
    """Entries of every token of an answer. Raises ReplayError `bad_replay`."""
    told, count = choice.logprobs, len(choice.token_ids)
    if len(told.token_logprobs) != count or len(told.top_logprobs) != count:
        raise ReplayError("bad_replay", "an answer with other logprobs than tokens")
    rows = [
        {f"token_id:{token}": logprob} | (top or {})
        for token, logprob, top in zip(choice.token_ids, told.token_logprobs, told.top_logprobs, strict=True)
    ]
    names = [name.removeprefix("token_id:") for row in rows for name in row]
    if not all(name.isdecimal() for name in names):
        raise ReplayError("bad_replay", "an answer whose tokens are no ids")
    return Entries(
        np.repeat(np.arange(count), [len(row) for row in rows]),
        np.array([int(name) for name in names], np.int64),
        np.array([value for row in rows for value in row.values()], np.float64),
        np.full(len(names), NO_RANK, np.int64),
    )
