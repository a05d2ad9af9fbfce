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

import msgspec
import numpy as np
import zstandard

from policies._arrays import MAX_UNPACKED, pack_claim, pack_ids, unpack_claim, unpack_ids
from policies._fields import CHOICE
from policies._records import PackedChoice, Record
from policies.errors import EvidenceError, OtherVersion
from policies.evidence import Evidence

VERSION = 1
_LEVEL = 3

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
        OtherVersion: the bytes are a record with fields or a version that are not known here.
        EvidenceError: the bytes are not a record, are damaged, or would unpack to more than `MAX_UNPACKED`.
    """
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= MAX_UNPACKED:
            raise EvidenceError("evidence has no stated size or one over the limit")
        raw = zstandard.ZstdDecompressor().decompress(data, max_output_size=MAX_UNPACKED, allow_extra_data=False)
        record = _decoder.decode(raw)
        if record.v != VERSION:
            raise OtherVersion(f"evidence of version {record.v}, this is version {VERSION}")
        return _evidences(record.choices)
    except msgspec.ValidationError as error:
        raise OtherVersion(f"evidence of another version: {error}") from error
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
    """A request is packed once, not with every choice, and so is a prompt: they may be megabytes, and the choices a
    hundred. What the client sent is much the same as what the backend got, which compression sees."""
    return [_choice(one, choices[at - 1] if at else None) for at, one in enumerate(choices)]


def _evidences(packed: Sequence[PackedChoice]) -> list[Evidence]:
    request: bytes | None = None
    asked: bytes | None = None
    prompt_ids: bytes | None = None
    for choice in packed:
        asked = choice.asked = asked if choice.asked is None else choice.asked
        request = choice.request = request if choice.request is None else choice.request
        prompt_ids = choice.prompt_ids = prompt_ids if choice.prompt_ids is None else choice.prompt_ids
    return [_evidence(choice) for choice in packed]


def _same_prompt(evidence: Evidence, before: Evidence | None) -> bool:
    if before is None:
        return False
    ids, others = evidence.prompt_ids, before.prompt_ids
    return ids is others or (ids.dtype == others.dtype and np.array_equal(ids, others))


def _choice(evidence: Evidence, before: Evidence | None) -> PackedChoice:
    return PackedChoice(
        request=None if before is not None and evidence.request == before.request else evidence.request,
        asked=None if evidence.asked == (b"" if before is None else before.asked) else evidence.asked,
        prompt_ids=None if _same_prompt(evidence, before) else pack_ids(evidence.prompt_ids),
        claim=pack_claim(evidence.claim_ids, evidence.claim_logprobs),
        **CHOICE.packed(evidence),
    )


def _evidence(choice: PackedChoice) -> Evidence:
    claim_ids, claim_logprobs = unpack_claim(choice.claim)
    return Evidence(
        request=choice.request or b"",
        asked=choice.asked or b"",
        prompt_ids=unpack_ids(choice.prompt_ids or b""),
        claim_ids=claim_ids,
        claim_logprobs=claim_logprobs,
        **CHOICE.unpacked(choice),
    )
