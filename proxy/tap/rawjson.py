"""JSON objects whose values stay the bytes they came as.

Rewriting one field of an object must not re-spell the others, so objects are read one level deep into
`dict[str, Raw]`, in the order of their keys, and written back with the untouched values byte for byte.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw

Object = dict[str, Raw]

NULL = Raw(b"null")
TRUE = Raw(b"true")
FALSE = Raw(b"false")

UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeError, ValueError, OverflowError, MemoryError)
"""Everything the two JSON readers raise on hostile text."""

_NO_BRACKETS = bytes(set(range(256)) - set(b"{}[]"))
_OPEN_OBJECT, _OPEN_ARRAY = b"{["

_object = msgspec.json.Decoder(Object)
_objects = msgspec.json.Decoder(list[Object])
_encode = msgspec.json.Encoder().encode


def read_object(data: bytes | Raw) -> Object | None:
    """The fields of a JSON object, or None when `data` is not one.

    Python's JSON writer emits `NaN` and `Infinity`, which are not JSON; such an object is still read,
    its values then being re-spelled.
    """
    try:
        return _object.decode(data)
    except UNREADABLE:
        value = _lenient(data)
        return _raw_fields(value) if isinstance(value, dict) else None


def read_objects(data: bytes | Raw) -> list[Object] | None:
    """The objects of a JSON array, or None when `data` is not an array of objects."""
    try:
        return _objects.decode(data)
    except UNREADABLE:
        values = _lenient(data)
        if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
            return None
        return [_raw_fields(value) for value in values]


def read_value(data: bytes | Raw) -> Any:
    """A JSON value as Python objects, `NaN` and `Infinity` included; None when unreadable."""
    return _lenient(data)


def write(value: Any) -> bytes:
    """Compact JSON; Raw values are copied. Lone surrogates, which UTF-8 has no bytes for, are escaped."""
    try:
        return _encode(value)
    except UnicodeEncodeError:
        return _escaped(value)


def raw(value: Any) -> Raw:
    """A value spelled as JSON."""
    return Raw(write(value))


def is_null(value: Raw | None) -> bool:
    """Absent or `null`."""
    return value is None or bytes(value) == b"null"


def is_deeper(data: bytes, limit: int) -> bool:
    """Whether objects and arrays stand more than `limit` deep inside each other; undefined for what is not JSON."""
    if data.count(b"{") + data.count(b"[") <= limit:
        return False
    brackets = np.frombuffer(_outside_strings(data).translate(None, _NO_BRACKETS), np.uint8)
    opening = (brackets == _OPEN_OBJECT) | (brackets == _OPEN_ARRAY)
    return int(np.cumsum(np.where(opening, 1, -1), dtype=np.int64).max(initial=0)) > limit


def has_more_values(data: bytes, limit: int) -> bool:
    """Whether there are more than `limit` values in it, containers included; undefined for what is not JSON."""
    if _count_values(data) <= limit:
        return False
    return _count_values(_outside_strings(data)) > limit


def _count_values(data: bytes) -> int:
    return 1 + data.count(b",") + data.count(b"{") + data.count(b"[")


def _outside_strings(data: bytes) -> bytes:
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in data else data
    return b"".join(plain.split(b'"')[::2])


def _lenient(data: bytes | Raw) -> Any:
    try:
        return json.loads(bytes(data))
    except UNREADABLE:
        return None


def _escaped(value: Any) -> bytes:
    if isinstance(value, Raw):
        return bytes(value)
    if isinstance(value, dict):
        return b"{" + b",".join(_escaped(name) + b":" + _escaped(item) for name, item in value.items()) + b"}"
    if isinstance(value, list):
        return b"[" + b",".join(map(_escaped, value)) + b"]"
    return json.dumps(value).encode() if isinstance(value, str) else _encode(value)


def _raw_fields(value: dict[str, Any]) -> Object:
    return {key: Raw(json.dumps(item, separators=(",", ":")).encode()) for key, item in value.items()}
