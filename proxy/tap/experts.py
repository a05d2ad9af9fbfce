"""Routed experts: base64 of a `.npy` file, from a server nobody trusts."""

from __future__ import annotations

import base64
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_BYTES = 128 * 1024 * 1024
"""48 layers × 8 experts × 1 byte × 262,144 tokens would be 96 MiB."""

_MAGIC = b"\x93NUMPY"
_LENGTHS = {b"\x01\x00": 2, b"\x02\x00": 4}
"""Bytes of the header's length, by the format's version."""
_LONGEST_HEADER = 4096
_HEADER = re.compile(
    rb"\{ *'descr': *'[<|=]?(u1|u2|i2|i4)', *'fortran_order': *False, "
    rb"*'shape': *\(([0-9]{1,9}), *([0-9]{1,5}), *([0-9]{1,5})\),? *\}[ \n]*"
)
"""As numpy writes it. numpy reads it as Python, which a backend could make cost any memory."""
_DTYPES: dict[bytes, np.dtype[Any]] = {
    b"u1": np.dtype(np.uint8),
    b"u2": np.dtype("<u2"),
    b"i2": np.dtype("<i2"),
    b"i4": np.dtype("<i4"),
}


def decode_experts(text: str, rows: int | None) -> NDArray[np.integer] | None:
    """The expert ids, shape (rows, layers, experts per token), or None when anything is off.

    `rows` is P + G − 1 (the last sampled token was never fed back); None accepts any number. The size is
    checked against the header before the data is read, so a small text cannot ask for much memory.
    """
    if len(text) > MAX_BYTES * 4 // 3 + 4:
        return None
    try:
        return _read(base64.b64decode(text, validate=True), rows)
    except ValueError:
        return None


def _read(data: bytes, rows: int | None) -> NDArray[np.integer] | None:
    """Raises ValueError for a shape that numpy does not take."""
    at = len(_MAGIC) + 2
    size = _LENGTHS.get(data[len(_MAGIC) : at])
    if size is None or not data.startswith(_MAGIC):
        return None
    start = at + size + int.from_bytes(data[at : at + size], "little")
    found = _HEADER.fullmatch(data, at + size, start) if start - at - size <= _LONGEST_HEADER else None
    if found is None or found.end() != start:
        return None
    dtype = _DTYPES[found[1]]
    shape = int(found[2]), int(found[3]), int(found[4])
    count = shape[0] * shape[1] * shape[2]
    if count * dtype.itemsize != len(data) - start or (rows is not None and shape[0] != rows):
        return None
    return np.frombuffer(data, dtype, count, start).reshape(shape)
