"""The fields of packed evidence, listed once: how each is written and how it is read back."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import Any, NamedTuple

import msgspec

from policies import _arrays
from policies._records import PackedSampling, PackedUsage
from policies.evidence import Sampling, Usage

_INT_MIN, _INT_MAX = -(2**63), 2**63 - 1


class Field(NamedTuple):
    """Both directions of one field."""

    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]


class Fields:
    """Fields of a value and of the record that it is written as, under the same names."""

    def __init__(self, fields: Mapping[str, Field]) -> None:
        self.names = tuple(fields)
        self._get = operator.attrgetter(*fields)
        self._pack = [(at, field.pack) for at, field in enumerate(fields.values()) if field.pack is not _same]
        self._unpack = [(at, field.unpack) for at, field in enumerate(fields.values()) if field.unpack is not _same]

    def packed(self, value: object) -> dict[str, Any]:
        """Of a value, as they are written. Raises ValueError."""
        return self._through(self._pack, value)

    def unpacked(self, record: object) -> dict[str, Any]:
        """Of a record, as they were. Raises ValueError."""
        return self._through(self._unpack, record)

    def _through(self, ways: Sequence[tuple[int, Callable[[Any], Any]]], thing: object) -> dict[str, Any]:
        values = list(self._get(thing))
        for at, way in ways:
            values[at] = way(values[at])
        return dict(zip(self.names, values, strict=True))


def _same(value: Any) -> Any:
    return value


def _maybe(field: Field) -> Field:
    unpack = _same if field.unpack is _same else lambda value: None if value is None else field.unpack(value)
    return Field(lambda value: None if value is None else field.pack(value), unpack)


def _each(field: Field) -> Field:
    unpack = _same if field.unpack is _same else lambda values: tuple(map(field.unpack, values))
    return Field(lambda values: tuple(map(field.pack, values)), unpack)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _clipped(value: int) -> int:
    return max(_INT_MIN, min(_INT_MAX, int(value)))


def _wrapped(seed: int) -> int:
    # The seed of a further choice may leave 64 bits; the samplers take it modulo 2⁶⁴.
    return (seed - _INT_MIN) % 2**64 + _INT_MIN


_AS_IT_IS = Field(_same, _same)
_FLAG = Field(bool, _same)
_FLOAT = Field(float, _same)
_INT = Field(_clipped, _same)
_TEXT = Field(_bytes, _text)
_TEXT_OR_INT = Field(
    lambda value: _bytes(value) if isinstance(value, str) else _clipped(value),
    lambda value: _text(value) if isinstance(value, bytes) else value,
)
_USAGE = Field(
    lambda usage: PackedUsage(*map(_maybe(_INT).pack, astuple(usage))),
    lambda record: Usage(*msgspec.structs.astuple(record)),
)

SAMPLING = Fields(
    {
        "temperature": _FLOAT,
        "top_p": _FLOAT,
        "top_k": _INT,
        "min_p": _FLOAT,
        "seed": _maybe(Field(_wrapped, _same)),
        "client_seed": _FLAG,
        "max_tokens": _maybe(_INT),
        "min_tokens": _INT,
        "repetition_penalty": _FLOAT,
        "presence_penalty": _FLOAT,
        "frequency_penalty": _FLOAT,
        "ignore_eos": _FLAG,
        "stop": _each(_TEXT),
        "stop_token_ids": _each(_INT),
        "include_stop_str_in_output": _FLAG,
        "logit_bias": _each(Field(lambda one: (_clipped(one[0]), float(one[1])), _same)),
        "allowed_token_ids": _each(_INT),
        "bad_words": _each(_TEXT),
        "grammar": _FLAG,
    }
)
CHOICE = Fields(
    {
        "id": _TEXT,
        "endpoint": _AS_IT_IS,
        "backend": _TEXT,
        "model": _TEXT,
        "sampling": Field(
            lambda sampling: PackedSampling(**SAMPLING.packed(sampling)),
            lambda record: Sampling(**SAMPLING.unpacked(record)),
        ),
        "index": _INT,
        "owner": _TEXT,
        "runtime": _TEXT,
        "precision": _TEXT,
        "engine": _TEXT,
        "speculative": _FLAG,
        "stream": _FLAG,
        "created": _FLOAT,
        "output_ids": Field(_arrays.pack_ids, _arrays.unpack_ids),
        "text": _TEXT,
        "reasoning": _TEXT,
        "tool_calls": _each(_each(_TEXT)),
        "shown_sha256": _TEXT,
        "finish_reason": _maybe(_TEXT),
        "stop_reason": _maybe(_TEXT_OR_INT),
        "usage": _maybe(_USAGE),
        "routed_experts": _maybe(Field(_arrays.pack_experts, _arrays.unpack_experts)),
        "faults": _each(_TEXT),
        "complete": _FLAG,
        "first_token_seconds": _maybe(_FLOAT),
        "total_seconds": _maybe(_FLOAT),
    }
)
"""Of a choice, all but its claim, which is two arrays in one, and its prompt and request, which it may share."""
