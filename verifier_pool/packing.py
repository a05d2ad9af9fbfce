"""Replays as bytes: what a reference is asked, and what came of it.

A request holds token ids, candidate ids and the client's own request, and never a logprob: that a replay is blind is a
fact of the data. Arrays travel as raw little-endian bytes in msgpack. What is read back is checked for version, types,
sizes and shapes, so that bytes from anywhere either give a value or raise `ReplayError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray

from policies.errors import ReplayError
from policies.evidence import Endpoint, Evidence, Replay, ReplayForm
from verifier_pool.reference.base import ReplayRequest
from verifier_pool.replays import UNREADABLE, Stamp

VERSION = 1
MAX_UNPACKED = 256 * 1024 * 1024
"""Bytes that a request or an outcome may take, uncompressed. A replay of 2¹⁷ tokens with 41 columns takes 43 MB."""

_LEVEL = 1
_DTYPES = {"i4": np.int32, "f4": np.float32, "u1": np.uint8, "u2": np.uint16, "i2": np.int16}


class _Array(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class _Request(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    prompt: _Array
    output: _Array
    endpoint: Endpoint
    request: bytes | None
    choice: int
    candidates: _Array | None
    form: ReplayForm
    experts: bool


class _Replay(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    ids: _Array
    logprobs: _Array
    form: ReplayForm
    prompt: _Array | None
    reference: str
    own: int | None
    experts: _Array | None


class _Requests(msgspec.Struct, forbid_unknown_fields=True):
    v: int
    requests: list[_Request]


class _Outcomes(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    v: int
    outcomes: list[_Replay | str]
    stamp: Stamp | None = None


class _Stamped(msgspec.Struct):
    stamp: Stamp | None = None


_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(_Requests)
_outcomes = msgspec.msgpack.Decoder(_Outcomes)
_stamped = msgspec.msgpack.Decoder(_Stamped)
_UNREADABLE = (msgspec.MsgspecError, zstandard.ZstdError, ValueError, OverflowError, RecursionError, MemoryError)


def pack_requests(requests: Sequence[ReplayRequest]) -> bytes:
    """What a reference is asked about one response, a request per choice.

    Raises:
        ReplayError: `too_long` when it would be over `MAX_UNPACKED`.
    """
    packed = [
        _Request(
            _packed(each.prompt_ids, "i4"),
            _packed(each.output_ids, "i4"),
            each.endpoint,
            # Packed once for all choices of a response.
            None if number and each.request == requests[number - 1].request else each.request,
            each.choice,
            None if each.candidate_ids is None else _packed(each.candidate_ids, "i4"),
            each.form,
            each.experts,
        )
        for number, each in enumerate(requests)
    ]
    data = _bounded(_encoder.encode(_Requests(VERSION, packed)))
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True, write_content_size=True).compress(data)


def unpack_requests(data: bytes) -> list[ReplayRequest]:
    """The requests again; their arrays are read-only.

    Raises:
        ReplayError: `bad_replay` for bytes that are no requests.
    """
    try:
        if not 0 <= zstandard.frame_content_size(data) <= MAX_UNPACKED:
            raise ValueError("no stated size, or one over the limit")
        raw = zstandard.ZstdDecompressor().decompress(data, max_output_size=MAX_UNPACKED, allow_extra_data=False)
        record = _requests.decode(raw)
        if record.v != VERSION or not record.requests:
            raise ValueError("another version, or no request")
        found: list[ReplayRequest] = []
        for each in record.requests:
            request = found[-1].request if each.request is None and found else each.request or b""
            found.append(_request(each, request))
    except _UNREADABLE as error:
        raise ReplayError(UNREADABLE, type(error).__name__) from error
    return found


def pack_outcomes(outcomes: Sequence[Replay | ReplayError], stamp: Stamp | None = None) -> bytes:
    """What came of each choice's request: a replay, or the reason why there is none.

    Args:
        stamp: who made the replays; None where that one has no canaries.
    """
    packed = [each.reason if isinstance(each, ReplayError) else _packed_replay(each) for each in outcomes]
    try:
        return _bounded(_encoder.encode(_Outcomes(VERSION, packed, stamp)))
    except ReplayError as error:
        return _encoder.encode(_Outcomes(VERSION, [error.reason] * len(packed)))


def unpack_outcomes(data: bytes, expected: Sequence[Evidence]) -> list[Replay | ReplayError]:
    """What came of the choices that were asked about, in their order; `bad_replay` where it does not fit its choice.

    A lone reason is that of all choices.
    """
    try:
        if len(data) > MAX_UNPACKED:
            raise ValueError("over the limit")
        record = _outcomes.decode(data)
        outcomes = record.outcomes
        if len(outcomes) == 1 and isinstance(outcomes[0], str):
            outcomes = outcomes * len(expected)
        if record.v != VERSION or len(outcomes) != len(expected):
            raise ValueError("another version, or another number of choices")
    except _UNREADABLE as error:
        return [ReplayError(UNREADABLE, type(error).__name__) for _ in expected]
    return [_outcome(each, choice) for each, choice in zip(outcomes, expected, strict=True)]


def stamp_of(data: bytes) -> Stamp | None:
    """Who made the replays of an outcome; None where it does not say, or cannot be read."""
    try:
        return _stamped.decode(data).stamp
    except _UNREADABLE:
        return None


def _request(packed: _Request, request: bytes) -> ReplayRequest:
    prompt, output = _array(packed.prompt, 1, "i4"), _array(packed.output, 1, "i4")
    candidates = None if packed.candidates is None else _array(packed.candidates, 2, "i4")
    if candidates is not None and len(candidates) not in (0, len(output)):
        raise ValueError("candidates of another number of tokens")
    if not len(prompt) or not len(output) or packed.choice < 0:
        raise ValueError("nothing to replay")
    return ReplayRequest(
        prompt, output, packed.endpoint, request, packed.choice, candidates, packed.form, packed.experts
    )


def _packed_replay(replay: Replay) -> _Replay:
    experts = replay.routed_experts
    return _Replay(
        _packed(replay.ids, "i4"),
        _packed(replay.logprobs, "f4"),
        replay.form,
        None if replay.prompt_ids is None else _packed(replay.prompt_ids, "i4"),
        replay.reference,
        replay.own,
        None if experts is None else _packed(experts, _dtype_of(experts)),
    )


def _outcome(packed: _Replay | str, choice: Evidence) -> Replay | ReplayError:
    if isinstance(packed, str):
        return ReplayError(packed[:200])
    try:
        ids, logprobs = _array(packed.ids, 2, "i4"), _array(packed.logprobs, 2, "f4")
        if ids.shape != logprobs.shape or len(ids) != len(choice.output_ids) or not ids.shape[1]:
            raise ValueError("of another shape than its choice")
        if packed.own is not None and not 0 <= packed.own <= ids.shape[1]:
            raise ValueError("impossible columns")
        if np.isnan(logprobs).any() or np.isposinf(logprobs).any():
            raise ValueError("logprobs that are none")
        experts = None if packed.experts is None else _array(packed.experts, 3, packed.experts.dtype)
        if experts is not None and not _of_tokens(len(experts), choice):
            raise ValueError("experts of another number of tokens")
        return Replay(
            ids=ids,
            logprobs=logprobs,
            form=packed.form,
            prompt_ids=None if packed.prompt is None else _array(packed.prompt, 1, "i4"),
            reference=packed.reference,
            own=packed.own,
            routed_experts=experts,
        )
    except _UNREADABLE as error:
        return ReplayError(UNREADABLE, type(error).__name__)


def _of_tokens(rows: int, choice: Evidence) -> bool:
    """Whether so many rows are of all tokens or of the output's, the last one with or without."""
    output = len(choice.output_ids)
    return any(rows in (tokens - 1, tokens) for tokens in (output, output + len(choice.prompt_ids)))


def _packed(array: NDArray[Any], dtype: str) -> _Array:
    return _Array(dtype, array.shape, np.ascontiguousarray(array, "<" + dtype).tobytes())


def _dtype_of(experts: NDArray[Any]) -> str:
    name = f"{experts.dtype.kind}{experts.dtype.itemsize}"
    return name if name in _DTYPES else "i4"


def _array(packed: _Array, dimensions: int, dtype: str) -> NDArray[Any]:
    if packed.dtype != dtype or dtype not in _DTYPES or len(packed.shape) != dimensions:
        raise ValueError("an array of another kind")
    count = 1
    for length in packed.shape:
        if not 0 <= length <= MAX_UNPACKED:
            raise ValueError("an impossible shape")
        count *= length
    if count * np.dtype(dtype).itemsize != len(packed.data):
        raise ValueError("bytes that do not fill their shape")
    return np.frombuffer(packed.data, "<" + dtype).reshape(packed.shape).astype(_DTYPES[dtype], copy=False)


def _bounded(data: bytes) -> bytes:
    if len(data) > MAX_UNPACKED:
        raise ReplayError("too_long", f"{len(data)} bytes are over the limit of {MAX_UNPACKED}")
    return data
