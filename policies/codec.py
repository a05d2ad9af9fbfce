"""Evidence as compact bytes: a zstd frame around one msgpack map that holds every choice of a response.

    {"v": 1, "choices": [{"id": …, "sampling": {…}, "output_ids": bytes, "claim": {rows, width, ids, logprobs}, …}]}

Arrays are raw little-endian bytes: ids int32, logprobs float32, expert ids in the dtype they came in. Free text
travels as UTF-8 bytes in which lone surrogates are kept. A frame carries its size and a checksum; what is read
back is checked for version, types, sizes and shapes, so that bytes from anywhere either give evidence or raise
`EvidenceError`.

At k = 20 a token costs 172 bytes before compression (its id, 21 claimed ids, 21 logprobs) and a dense model's
whole record of 128 and more tokens stays under 250 bytes per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray

from policies._records import PackedChoice, PackedClaim, PackedExperts, PackedSampling, PackedUsage, Record
from policies.errors import EvidenceError
from policies.evidence import Evidence, Ids, Sampling, Usage

VERSION = 1
MAX_UNPACKED = 256 * 1024 * 1024
"""Bytes one record may take before compression. Claims of 2¹⁸ tokens take 45 MB; expert ids fill the rest."""

_LEVEL = 3
_INT_MIN, _INT_MAX = -(2**63), 2**63 - 1
_EXPERT_DTYPES = {"u1": np.uint8, "u2": np.uint16, "i2": np.int16, "i4": np.int32}


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


def pack(choices: Sequence[Evidence]) -> bytes:
    """One record of all choices of a response.

    Integers beyond 64 bits (which only a broken backend sends) are clipped to the nearest that fits, seeds are taken
    modulo 2⁶⁴.

    Raises:
        EvidenceError: the record would be over `MAX_UNPACKED`, or an array has an impossible dtype or shape.
    """
    record = _encode(choices)
    if len(record) > MAX_UNPACKED:
        raise EvidenceError(f"evidence of {len(record)} bytes is over the limit of {MAX_UNPACKED}")
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True, write_content_size=True).compress(record)


def unpack(data: bytes) -> list[Evidence]:
    """The choices of a packed record. Their arrays are read-only.

    Raises:
        EvidenceError: the bytes are not a record, are damaged, or would unpack to more than `MAX_UNPACKED`.
    """
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= MAX_UNPACKED:
            raise EvidenceError("evidence has no stated size or one over the limit")
        raw = zstandard.ZstdDecompressor().decompress(data, max_output_size=MAX_UNPACKED, allow_extra_data=False)
        record = _decoder.decode(raw)
        if record.v != VERSION:
            raise EvidenceError(f"evidence of version {record.v}, this is version {VERSION}")
        return _evidences(record.choices)
    except (zstandard.ZstdError, msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise EvidenceError(f"evidence cannot be read back: {error}") from error


def bytes_per_token(evidence: Evidence) -> float:
    """Bytes of the whole record before compression, divided by its output tokens.

    Prompt ids, the request body and the text are counted too; expert ids are not, their size is the model's.
    NaN for an empty answer.
    """
    tokens = len(evidence.output_ids)
    if not tokens:
        return float("nan")
    size = len(_encode([evidence]))
    experts = evidence.routed_experts
    return (size - (experts.nbytes if experts is not None else 0)) / tokens


def _encode(choices: Sequence[Evidence]) -> bytes:
    try:
        return _encoder.encode(Record(VERSION, _packed_choices(choices)))
    except (msgspec.MsgspecError, ValueError, OverflowError) as error:
        raise EvidenceError(f"evidence cannot be written: {error}") from error


def _packed_choices(choices: Sequence[Evidence]) -> list[PackedChoice]:
    """The request is packed once, not with every choice, and so is a prompt: they may be megabytes, and the choices a
    hundred."""
    return [_choice(one, choices[at - 1] if at else None) for at, one in enumerate(choices)]


def _evidences(packed: Sequence[PackedChoice]) -> list[Evidence]:
    request: bytes | None = None
    prompt_ids: bytes | None = None
    for choice in packed:
        request = choice.request = request if choice.request is None else choice.request
        prompt_ids = choice.prompt_ids = prompt_ids if choice.prompt_ids is None else choice.prompt_ids
    return [_evidence(choice) for choice in packed]


def _choice(evidence: Evidence, before: Evidence | None) -> PackedChoice:
    stop_reason = evidence.stop_reason
    usage = evidence.usage
    return PackedChoice(
        id=_bytes(evidence.id),
        endpoint=evidence.endpoint,
        backend=_bytes(evidence.backend),
        model=_bytes(evidence.model),
        sampling=_packed_sampling(evidence.sampling),
        index=_int(evidence.index),
        owner=_bytes(evidence.owner),
        runtime=_bytes(evidence.runtime),
        precision=_bytes(evidence.precision),
        engine=_bytes(evidence.engine),
        speculative=bool(evidence.speculative),
        stream=evidence.stream,
        created=float(evidence.created),
        request=None if before is not None and evidence.request == before.request else evidence.request,
        prompt_ids=None if _same_prompt(evidence, before) else _id_bytes(evidence.prompt_ids, 1),
        output_ids=_id_bytes(evidence.output_ids, 1),
        claim=_packed_claim(evidence),
        text=_bytes(evidence.text),
        reasoning=_bytes(evidence.reasoning),
        tool_calls=tuple((_bytes(name), _bytes(arguments)) for name, arguments in evidence.tool_calls),
        shown_sha256=_bytes(evidence.shown_sha256),
        finish_reason=None if evidence.finish_reason is None else _bytes(evidence.finish_reason),
        stop_reason=_bytes(stop_reason) if isinstance(stop_reason, str) else _maybe_int(stop_reason),
        usage=None
        if usage is None
        else PackedUsage(
            _int(usage.prompt_tokens),
            _int(usage.completion_tokens),
            _int(usage.counted_prompt_tokens),
            _int(usage.counted_completion_tokens),
            _maybe_int(usage.total_tokens),
            _maybe_int(usage.cached_tokens),
            _maybe_int(usage.reasoning_tokens),
        ),
        routed_experts=_packed_experts(evidence.routed_experts),
        faults=tuple(map(_bytes, evidence.faults)),
        complete=evidence.complete,
        first_token_seconds=evidence.first_token_seconds,
        total_seconds=evidence.total_seconds,
    )


def _same_prompt(evidence: Evidence, before: Evidence | None) -> bool:
    if before is None:
        return False
    ids, others = evidence.prompt_ids, before.prompt_ids
    return ids is others or (ids.dtype == others.dtype and np.array_equal(ids, others))


def _evidence(choice: PackedChoice) -> Evidence:
    stop_reason = choice.stop_reason
    usage = choice.usage
    claim_ids, claim_logprobs = _claim(choice.claim)
    return Evidence(
        id=_text(choice.id),
        endpoint=choice.endpoint,
        backend=_text(choice.backend),
        model=_text(choice.model),
        sampling=_sampling(choice.sampling),
        index=choice.index,
        owner=_text(choice.owner),
        runtime=_text(choice.runtime),
        precision=_text(choice.precision),
        engine=_text(choice.engine),
        speculative=choice.speculative,
        stream=choice.stream,
        created=choice.created,
        request=choice.request or b"",
        prompt_ids=_ids(choice.prompt_ids or b""),
        output_ids=_ids(choice.output_ids),
        claim_ids=claim_ids,
        claim_logprobs=claim_logprobs,
        text=_text(choice.text),
        reasoning=_text(choice.reasoning),
        tool_calls=tuple((_text(name), _text(arguments)) for name, arguments in choice.tool_calls),
        shown_sha256=_text(choice.shown_sha256),
        finish_reason=None if choice.finish_reason is None else _text(choice.finish_reason),
        stop_reason=_text(stop_reason) if isinstance(stop_reason, bytes) else stop_reason,
        usage=None if usage is None else Usage(*msgspec.structs.astuple(usage)),
        routed_experts=_experts(choice.routed_experts),
        faults=tuple(map(_text, choice.faults)),
        complete=choice.complete,
        first_token_seconds=choice.first_token_seconds,
        total_seconds=choice.total_seconds,
    )


def _packed_sampling(sampling: Sampling) -> PackedSampling:
    return PackedSampling(
        temperature=float(sampling.temperature),
        top_p=float(sampling.top_p),
        top_k=_int(sampling.top_k),
        min_p=float(sampling.min_p),
        seed=None if sampling.seed is None else _wrapped(sampling.seed),
        client_seed=sampling.client_seed,
        max_tokens=_maybe_int(sampling.max_tokens),
        min_tokens=_int(sampling.min_tokens),
        repetition_penalty=float(sampling.repetition_penalty),
        presence_penalty=float(sampling.presence_penalty),
        frequency_penalty=float(sampling.frequency_penalty),
        ignore_eos=sampling.ignore_eos,
        stop=tuple(map(_bytes, sampling.stop)),
        stop_token_ids=tuple(map(_int, sampling.stop_token_ids)),
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        logit_bias=tuple((_int(token), float(bias)) for token, bias in sampling.logit_bias),
        allowed_token_ids=tuple(map(_int, sampling.allowed_token_ids)),
        bad_words=tuple(map(_bytes, sampling.bad_words)),
        grammar=sampling.grammar,
    )


def _sampling(packed: PackedSampling) -> Sampling:
    fields: dict[str, Any] = msgspec.structs.asdict(packed)
    fields["stop"] = tuple(map(_text, packed.stop))
    fields["bad_words"] = tuple(map(_text, packed.bad_words))
    return Sampling(**fields)


def _packed_claim(evidence: Evidence) -> PackedClaim:
    if evidence.claim_ids.shape != evidence.claim_logprobs.shape:
        raise ValueError("claimed ids and logprobs differ in shape")
    ids = _id_bytes(evidence.claim_ids, 2)
    rows, width = evidence.claim_ids.shape
    if evidence.claim_logprobs.dtype.kind != "f":
        raise ValueError("claimed logprobs are not floating point")
    return PackedClaim(rows, width, ids, np.ascontiguousarray(evidence.claim_logprobs, "<f4").tobytes())


def _claim(packed: PackedClaim) -> tuple[Ids, NDArray[np.float32]]:
    shape = _sized((packed.rows, packed.width), 4, packed.ids)
    _sized(shape, 4, packed.logprobs)
    ids = np.frombuffer(packed.ids, "<i4").reshape(shape)
    logprobs = np.frombuffer(packed.logprobs, "<f4").reshape(shape)
    return ids.astype(np.int32, copy=False), logprobs.astype(np.float32, copy=False)


def _packed_experts(experts: NDArray[np.integer] | None) -> PackedExperts | None:
    if experts is None:
        return None
    name = f"{experts.dtype.kind}{experts.dtype.itemsize}"
    if name not in _EXPERT_DTYPES or experts.ndim != 3:
        raise ValueError(f"expert ids of dtype {experts.dtype} and {experts.ndim} dimensions")
    rows, layers, per_token = experts.shape
    return PackedExperts(name, (rows, layers, per_token), np.ascontiguousarray(experts, f"<{name}").tobytes())


def _experts(packed: PackedExperts | None) -> NDArray[np.integer] | None:
    if packed is None:
        return None
    if packed.dtype not in _EXPERT_DTYPES:
        raise ValueError(f"expert ids of dtype {packed.dtype!r}")
    dtype = np.dtype(_EXPERT_DTYPES[packed.dtype])
    shape = _sized(packed.shape, dtype.itemsize, packed.data)
    array: NDArray[np.integer] = np.frombuffer(packed.data, f"<{packed.dtype}").reshape(shape)
    return array.astype(dtype, copy=False)


def _sized(shape: tuple[int, ...], itemsize: int, data: bytes) -> tuple[int, ...]:
    if any(not 0 <= length <= MAX_UNPACKED for length in shape):
        raise ValueError(f"impossible shape {shape}")
    count = 1
    for length in shape:
        count *= length
    if count * itemsize != len(data):
        raise ValueError(f"{len(data)} bytes do not fill an array of shape {shape}")
    return shape


def _id_bytes(ids: Ids, dimensions: int) -> bytes:
    if ids.ndim != dimensions or ids.dtype.kind not in "iu":
        raise ValueError(f"ids of dtype {ids.dtype} and {ids.ndim} dimensions")
    if ids.dtype != np.int32 and ids.size and (ids.min() < -(2**31) or ids.max() >= 2**31):
        raise ValueError("an id does not fit 32 bits")
    return np.ascontiguousarray(ids, "<i4").tobytes()


def _ids(data: bytes) -> Ids:
    return np.frombuffer(data, "<i4").astype(np.int32, copy=False)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _int(value: int) -> int:
    return max(_INT_MIN, min(_INT_MAX, int(value)))


def _wrapped(seed: int) -> int:
    # The seed of a further choice may leave 64 bits; the samplers take it modulo 2⁶⁴.
    return (seed - _INT_MIN) % 2**64 + _INT_MIN


def _maybe_int(value: int | None) -> int | None:
    return None if value is None else _int(value)
