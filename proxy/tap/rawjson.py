"""JSON objects whose values stay the bytes they came as.

Rewriting one field of an object must not re-spell the others, so objects are read one level deep into
`dict[str, Raw]`, in the order of their keys, and written back with the untouched values byte for byte.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
from msgspec import Raw

from proxy.tap.outline import is_wider

Object = dict[str, Raw]

NULL = Raw(b"null")
TRUE = Raw(b"true")
FALSE = Raw(b"false")

UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeError, ValueError, OverflowError, MemoryError)
"""Everything the two JSON readers raise on hostile text."""

_LARGE = 256 * 1024
_AS_DEEP = 5
_MOST_MEMBERS = 2 * 1024 * 1024 + 512 * 1024
MOST_LENIENT = 2 * 1024 * 1024
"""Bytes that Python's own parser reads, which holds the interpreter for as long as it takes: two hundredths of a second
for each megabyte of numbers."""

_object = msgspec.json.Decoder(Object)
_objects = msgspec.json.Decoder(list[Object])
_encode = msgspec.json.Encoder().encode


def read_object(data: bytes | Raw) -> Object | None:
    """The fields of a JSON object, or None when `data` is not one.

    Python's JSON writer emits `NaN` and `Infinity`, which are not JSON; such an object of up to two megabytes is still
    read, its values then being re-spelled. One with over 2.6 million members five levels deep is none: as deep as
    anybody reads it at once, and more than the longest prompt has ids.
    """
    if isinstance(data, bytes) and len(data) > _LARGE and is_wider(data, _AS_DEEP, _MOST_MEMBERS):
        return None
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


def _lenient(data: bytes | Raw) -> Any:
    text = bytes(data)
    if len(text) > MOST_LENIENT:
        return None
    try:
        return json.loads(text)
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
