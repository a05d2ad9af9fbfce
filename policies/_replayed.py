"""A replay in few bytes, beside the evidence that it is about.

A replay lists mostly the claim's own ids, with logprobs that differ from the claim's in their last bits, if at all. So
an id is the column of the claim that holds it, and a logprob is what its bits differ by from the claim's (XOR), in four
planes of bytes, which compress well: sign and exponent hardly ever differ. Nothing is rounded: what comes back is what
went in, bit for bit.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from policies._arrays import pack_ids, unpack_ids
from policies.evidence import PAD_ID, Evidence, Replay, ReplayForm

_LITERAL, _PAD = 255, 254
_WIDEST = 254
"""Columns of a claim that an index of one byte can name."""
_ROWS = 2048
"""Rows that are looked up at once."""
_MOST = 256 * 1024 * 1024
_EXPERTS = {"u1": np.uint8, "u2": np.uint16, "i2": np.int16, "i4": np.int32}
_NOTHING = np.float32(-np.inf).view(np.uint32)

_Bits = NDArray[np.uint32]


class PackedExperts(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Expert ids less the evidence's, as integers modulo their size; whether they begin at the output."""

    dtype: str
    shape: tuple[int, int, int]
    output_only: bool
    data: bytes


class PackedReplay(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """See the module. `prompt` is True where the reference rendered the very ids that the backend reported, None where
    it rendered none."""

    width: int
    columns: bytes
    literals: bytes
    planes: bytes
    form: ReplayForm
    prompt: bytes | bool | None
    reference: str
    own: int | None
    experts: PackedExperts | None


def pack_replay(replay: Replay, evidence: Evidence) -> PackedReplay:
    """A replay of the evidence's tokens. Raises ValueError where an array has an impossible dtype or shape."""
    ids, logprobs = np.asarray(replay.ids), np.ascontiguousarray(replay.logprobs, np.float32)
    if ids.ndim != 2 or ids.shape != logprobs.shape:
        raise ValueError("replayed ids and logprobs differ in shape")
    columns = _columns(ids, _claimed(evidence, len(ids))[0])
    literals = ids[columns == _LITERAL].astype(np.int64)
    bits = logprobs.view(np.uint32) ^ _expected(columns, evidence)
    prompt: bytes | bool | None = None
    if replay.prompt_ids is not None:
        same = np.array_equal(replay.prompt_ids, evidence.prompt_ids)
        prompt = True if same else pack_ids(replay.prompt_ids)
    return PackedReplay(
        width=ids.shape[1],
        columns=np.ascontiguousarray(columns.T).tobytes(),
        literals=pack_ids(literals),
        planes=np.ascontiguousarray(bits.T.astype("<u4")).reshape(-1, 1).view(np.uint8).T.tobytes(),
        form=replay.form,
        prompt=prompt,
        reference=replay.reference,
        own=replay.own,
        experts=None if replay.routed_experts is None else _pack_experts(replay.routed_experts, evidence),
    )


def unpack_replay(packed: PackedReplay, evidence: Evidence) -> Replay:
    """The replay again. Raises ValueError for what is none of this evidence's."""
    rows, width = len(evidence.output_ids), packed.width
    if not 0 < width <= _MOST or rows * width > _MOST or len(packed.columns) != rows * width:
        raise ValueError("a replay of another shape than its answer")
    if len(packed.planes) != 4 * rows * width or packed.prompt is False:
        raise ValueError("bytes that do not fill a replay")
    columns = np.frombuffer(packed.columns, np.uint8).reshape(width, rows).T
    claimed = _claimed(evidence, rows)[0]
    literal, pad = columns == _LITERAL, columns == _PAD
    if bool((~literal & ~pad & (columns >= claimed.shape[1])).any()):
        raise ValueError("a column that the claim does not have")
    ids = np.take_along_axis(claimed, np.where(literal | pad, 0, columns).astype(np.intp), axis=1)
    ids = np.where(pad, PAD_ID, ids).astype(np.int32)
    literals = unpack_ids(packed.literals)
    if len(literals) != int(literal.sum()):
        raise ValueError("another number of ids than of places for them")
    ids[literal] = literals
    planes = np.frombuffer(packed.planes, np.uint8).reshape(4, -1).T
    bits = np.ascontiguousarray(planes).view("<u4").reshape(width, rows).T.astype(np.uint32)
    logprobs = np.ascontiguousarray(bits ^ _expected(columns, evidence)).view(np.float32)
    if bool(np.isnan(logprobs).any()) or bool(np.isposinf(logprobs).any()):
        raise ValueError("logprobs that are none")
    if packed.own is not None and not 0 <= packed.own <= width:
        raise ValueError("impossible columns")
    prompt = evidence.prompt_ids if packed.prompt is True else packed.prompt
    return Replay(
        ids=ids,
        logprobs=logprobs,
        form=packed.form,
        prompt_ids=unpack_ids(prompt) if isinstance(prompt, bytes) else prompt,
        reference=packed.reference,
        own=packed.own,
        routed_experts=None if packed.experts is None else _unpack_experts(packed.experts, evidence),
    )


def _claimed(evidence: Evidence, rows: int) -> tuple[NDArray[np.int32], _Bits]:
    """The claim's ids and the bits of its logprobs, of at least one column, cut or padded to so many rows."""
    ids, logprobs = evidence.claim_ids, evidence.claim_logprobs
    width = min(ids.shape[1] if ids.ndim == 2 else 0, _WIDEST)
    found = np.full((rows, max(width, 1)), PAD_ID, np.int32)
    bits = np.full((rows, max(width, 1)), _NOTHING, np.uint32)
    least = min(rows, len(ids))
    if width:
        found[:least, :width] = ids[:least, :width]
        bits[:least, :width] = np.ascontiguousarray(logprobs[:least, :width], np.float32).view(np.uint32)
    return found, bits


def _columns(ids: NDArray[Any], claimed: NDArray[np.int32]) -> NDArray[np.uint8]:
    """In which column of the claim each id stands, (G, X)."""
    columns = np.full(ids.shape, _LITERAL, np.uint8)
    for start in range(0, len(ids), _ROWS):
        part = slice(start, start + _ROWS)
        same = ids[part, :, None] == claimed[part, None, :]
        columns[part] = np.where(same.any(axis=2), same.argmax(axis=2), _LITERAL)
    columns[ids == PAD_ID] = _PAD
    return columns


def _expected(columns: NDArray[np.uint8], evidence: Evidence) -> _Bits:
    """The bits that a logprob is likeliest to have: the claim's of the same id, −inf of a pad, else none."""
    bits = _claimed(evidence, len(columns))[1]
    known = columns < _PAD
    found = np.take_along_axis(bits, np.where(known, columns, 0).astype(np.intp), axis=1)
    expected: _Bits = np.where(known, found, np.where(columns == _PAD, _NOTHING, 0)).astype(np.uint32)
    return expected


def _pack_experts(experts: NDArray[np.integer], evidence: Evidence) -> PackedExperts:
    if experts.ndim != 3:
        raise ValueError("expert ids of another number of dimensions")
    name = f"{experts.dtype.kind}{experts.dtype.itemsize}"
    dtype = np.dtype(_EXPERTS.get(name, np.int32))
    output_only = len(experts) <= len(evidence.output_ids) < len(evidence.output_ids) + len(evidence.prompt_ids) - 1
    apart = experts.astype(dtype) - _claimed_experts(experts.shape, dtype, output_only, evidence)
    first, second, third = experts.shape
    name = f"{dtype.kind}{dtype.itemsize}"
    return PackedExperts(name, (first, second, third), output_only, apart.astype(f"<{name}").tobytes())


def _unpack_experts(packed: PackedExperts, evidence: Evidence) -> NDArray[np.integer]:
    rows, layers, slots = packed.shape
    tokens, prompt = len(evidence.output_ids), len(evidence.prompt_ids)
    if packed.dtype not in _EXPERTS or rows not in {tokens - 1, tokens, tokens + prompt - 1, tokens + prompt}:
        raise ValueError("experts of another number of tokens, or of no known kind")
    dtype = np.dtype(_EXPERTS[packed.dtype])
    if not (0 <= layers <= _MOST and 0 <= slots <= _MOST) or rows * layers * slots * dtype.itemsize != len(packed.data):
        raise ValueError("bytes that do not fill their shape")
    apart: NDArray[np.integer] = np.frombuffer(packed.data, f"<{packed.dtype}").reshape(packed.shape).astype(dtype)
    return apart + _claimed_experts(packed.shape, dtype, packed.output_only, evidence)


def _claimed_experts(
    shape: tuple[int, ...], dtype: np.dtype[Any], output_only: bool, evidence: Evidence
) -> NDArray[np.integer]:
    """The evidence's experts at the same tokens, 0 where it has none."""
    found = np.zeros(shape, dtype)
    claimed = evidence.routed_experts
    if claimed is not None and claimed.ndim == 3 and claimed.shape[1:] == shape[1:]:
        theirs = claimed[len(evidence.prompt_ids) if output_only else 0 :][: shape[0]]
        found[: len(theirs)] = theirs.astype(dtype)
    return found
