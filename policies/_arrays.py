"""The arrays of packed evidence as raw little-endian bytes, and back."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from policies._records import PackedClaim, PackedExperts
from policies.evidence import Ids, Logprobs

MAX_UNPACKED = 256 * 1024 * 1024
"""Bytes one record may take before compression. Claims of 2¹⁸ tokens take 45 MB; expert ids fill the rest."""
_EXPERT_DTYPES = {"u1": np.uint8, "u2": np.uint16, "i2": np.int16, "i4": np.int32}


def pack_claim(ids: Ids, logprobs: Logprobs) -> PackedClaim:
    """Claimed ids and logprobs, (G, W) each. Raises ValueError."""
    if ids.shape != logprobs.shape:
        raise ValueError("claimed ids and logprobs differ in shape")
    packed = pack_ids(ids, 2)
    rows, width = ids.shape
    if logprobs.dtype.kind != "f":
        raise ValueError("claimed logprobs are not floating point")
    return PackedClaim(rows, width, packed, np.ascontiguousarray(logprobs, "<f4").tobytes())


def unpack_claim(packed: PackedClaim) -> tuple[Ids, Logprobs]:
    """The same back. Raises ValueError."""
    shape = _sized((packed.rows, packed.width), 4, packed.ids)
    _sized(shape, 4, packed.logprobs)
    ids = np.frombuffer(packed.ids, "<i4").reshape(shape)
    logprobs = np.frombuffer(packed.logprobs, "<f4").reshape(shape)
    return ids.astype(np.int32, copy=False), logprobs.astype(np.float32, copy=False)


def pack_experts(experts: NDArray[np.integer]) -> PackedExperts:
    """Expert ids, (rows, layers, experts per token), in the dtype they came in. Raises ValueError."""
    name = f"{experts.dtype.kind}{experts.dtype.itemsize}"
    if name not in _EXPERT_DTYPES or experts.ndim != 3:
        raise ValueError(f"expert ids of dtype {experts.dtype} and {experts.ndim} dimensions")
    rows, layers, per_token = experts.shape
    return PackedExperts(name, (rows, layers, per_token), np.ascontiguousarray(experts, f"<{name}").tobytes())


def unpack_experts(packed: PackedExperts) -> NDArray[np.integer]:
    """The same back. Raises ValueError."""
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


def pack_ids(ids: Ids, dimensions: int = 1) -> bytes:
    """Ids as int32. Raises ValueError."""
    if ids.ndim != dimensions or ids.dtype.kind not in "iu":
        raise ValueError(f"ids of dtype {ids.dtype} and {ids.ndim} dimensions")
    if ids.dtype != np.int32 and ids.size and (ids.min() < -(2**31) or ids.max() >= 2**31):
        raise ValueError("an id does not fit 32 bits")
    return np.ascontiguousarray(ids, "<i4").tobytes()


def unpack_ids(data: bytes) -> Ids:
    """The same of one dimension back. Raises ValueError."""
    return np.frombuffer(data, "<i4").astype(np.int32, copy=False)
