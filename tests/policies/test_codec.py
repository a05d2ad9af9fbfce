"""Packed evidence: exact round trips, sizes, and bytes from anywhere."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from policies import _fields, codec
from policies._records import PackedChoice, PackedSampling
from policies.errors import EvidenceError
from policies.evidence import Evidence, Sampling, Usage
from tests.policies import recorded

# Hypothesis leaves lone surrogates out of plain text; backends do not.
TEXT = st.text(st.characters(exclude_categories=()), max_size=20)
INTS = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(allow_nan=True, allow_infinity=True)
IDS = st.integers(0, 40).flatmap(lambda n: arrays.arrays(np.int32, n))


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


SAMPLING = st.builds(
    Sampling,
    temperature=FLOATS,
    top_p=FLOATS,
    top_k=INTS,
    min_p=FLOATS,
    seed=maybe(INTS),
    client_seed=st.booleans(),
    max_tokens=maybe(INTS),
    min_tokens=INTS,
    repetition_penalty=FLOATS,
    presence_penalty=FLOATS,
    frequency_penalty=FLOATS,
    ignore_eos=st.booleans(),
    stop=st.lists(TEXT, max_size=3).map(tuple),
    stop_token_ids=st.lists(INTS, max_size=3).map(tuple),
    include_stop_str_in_output=st.booleans(),
    logit_bias=st.lists(st.tuples(INTS, FLOATS), max_size=3).map(tuple),
    allowed_token_ids=st.lists(INTS, max_size=3).map(tuple),
    bad_words=st.lists(TEXT, max_size=3).map(tuple),
    grammar=st.booleans(),
)
CLAIMS = arrays.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=6).flatmap(
    lambda shape: st.tuples(arrays.arrays(np.int32, shape), arrays.arrays(np.float32, shape))
)
EXPERTS = st.sampled_from([np.uint8, np.uint16, np.int16, np.int32]).flatmap(
    lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=3, max_dims=3, min_side=0, max_side=4))
)


@st.composite
def evidences(draw: st.DrawFn) -> Evidence:
    claim_ids, claim_logprobs = draw(CLAIMS)
    return Evidence(
        id=draw(TEXT),
        endpoint=draw(st.sampled_from(["chat", "completions"])),
        backend=draw(TEXT),
        model=draw(TEXT),
        sampling=draw(SAMPLING),
        index=draw(INTS),
        owner=draw(TEXT),
        runtime=draw(TEXT),
        precision=draw(TEXT),
        stream=draw(st.booleans()),
        created=draw(FLOATS),
        request=draw(st.binary(max_size=30)),
        asked=draw(st.binary(max_size=30)),
        prompt_ids=draw(IDS),
        output_ids=draw(IDS),
        claim_ids=claim_ids,
        claim_logprobs=claim_logprobs,
        text=draw(TEXT),
        reasoning=draw(TEXT),
        tool_calls=draw(st.lists(st.tuples(TEXT, TEXT), max_size=3).map(tuple)),
        shown_sha256=draw(TEXT),
        finish_reason=draw(maybe(TEXT)),
        stop_reason=draw(maybe(TEXT | INTS)),
        usage=draw(maybe(st.builds(Usage, *[INTS] * 4, *[maybe(INTS)] * 3))),
        routed_experts=draw(maybe(EXPERTS)),
        faults=draw(st.lists(TEXT, max_size=3).map(tuple)),
        complete=draw(st.booleans()),
        first_token_seconds=draw(maybe(FLOATS)),
        total_seconds=draw(maybe(FLOATS)),
    )


def same(one: Any, two: Any) -> bool:
    if isinstance(one, np.ndarray):
        return (
            isinstance(two, np.ndarray)
            and one.dtype == two.dtype
            and one.tobytes() == two.tobytes()
            and (one.shape == two.shape)
        )
    if isinstance(one, float):
        return (isinstance(two, float) and np.float64(one).tobytes() == np.float64(two).tobytes()) or one != one != two
    if dataclasses.is_dataclass(one):
        return type(one) is type(two) and all(
            same(getattr(one, field.name), getattr(two, field.name)) for field in dataclasses.fields(one)
        )
    if isinstance(one, tuple):
        return isinstance(two, tuple) and len(one) == len(two) and all(map(same, one, two))
    return type(one) is type(two) and one == two


def test_every_field_is_listed() -> None:
    apart = {"request", "asked", "prompt_ids"}
    names = {*_fields.CHOICE.names, *apart}
    assert names | {"claim_ids", "claim_logprobs"} == {field.name for field in dataclasses.fields(Evidence)}
    assert names | {"claim"} == set(PackedChoice.__struct_fields__)
    sampling = {field.name for field in dataclasses.fields(Sampling)}
    assert set(_fields.SAMPLING.names) == sampling == set(PackedSampling.__struct_fields__)


@given(st.lists(evidences(), max_size=2))
@settings(max_examples=40)
def test_round_trip_is_exact(choices: list[Evidence]) -> None:
    back = codec.unpack(codec.pack(choices))
    assert len(back) == len(choices)
    assert all(map(same, choices, back))


def test_recorded_evidence_round_trips_and_its_size_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    answers = [*recorded.gpu("T1"), *recorded.cpu("bf16")]
    packed = codec.pack(answers)
    assert all(map(same, answers, codec.unpack(packed)))
    long = [answer for answer in answers if len(answer.output_ids) >= 128]
    assert all(answer.claim_ids.shape[1] == 21 for answer in long)
    worst = max(codec.bytes_per_token(answer) for answer in long)
    with capsys.disabled():
        tokens = sum(len(answer.output_ids) for answer in answers)
        print(
            f"\nevidence at k = 20: at most {worst:.0f} B/token packed, {len(packed) / tokens:.0f} B/token compressed"
        )
    assert worst < 250
    assert np.isnan(codec.bytes_per_token(Evidence("", "chat", "", "", Sampling())))


PACKED = codec.pack(recorded.cpu("bf16")[:2])
PLAIN = zstandard.ZstdDecompressor().decompress(PACKED)


def squeeze(record: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(record)


def read(data: bytes) -> list[Evidence] | None:
    try:
        return codec.unpack(data)
    except EvidenceError:
        return None


@given(st.integers(0, len(PACKED) - 1))
def test_truncated_bytes_raise(length: int) -> None:
    with pytest.raises(EvidenceError):
        codec.unpack(PACKED[:length])


@given(st.integers(0, len(PACKED) - 1), st.integers(1, 255))
def test_a_changed_byte_is_noticed(at: int, flip: int) -> None:
    damaged = bytearray(PACKED)
    damaged[at] ^= flip
    got = read(bytes(damaged))
    # A frame's descriptor has a bit without meaning; whatever still reads must be the very same evidence.
    assert got is None or all(map(same, got, recorded.cpu("bf16")[:2]))


@given(st.integers(0, len(PLAIN) - 1), st.binary(min_size=0, max_size=9), st.integers(0, 9))
@settings(max_examples=100)
def test_a_well_framed_but_broken_record_gives_evidence_or_an_evidence_error(at: int, new: bytes, cut: int) -> None:
    read(squeeze(PLAIN[:at] + new + PLAIN[at + cut :]))


@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise(data: bytes) -> None:
    with pytest.raises(EvidenceError):
        codec.unpack(data)


@given(st.recursive(st.none() | st.booleans() | INTS | FLOATS | st.binary() | TEXT.filter(str.isascii), st.lists))
def test_arbitrary_msgpack_raises(value: Any) -> None:
    with pytest.raises(EvidenceError):
        codec.unpack(squeeze(msgspec.msgpack.encode(value)))


def changed(**fields: Any) -> bytes:
    record = msgspec.msgpack.decode(PLAIN)
    record["choices"][0].update(fields)
    return squeeze(msgspec.msgpack.encode(record))


@pytest.mark.parametrize(
    "fields",
    [
        {"claim": {"rows": -1, "width": -1, "ids": b"\0" * 4, "logprobs": b"\0" * 4}},
        {"claim": {"rows": 2, "width": 1, "ids": b"\0" * 8, "logprobs": b"\0" * 4}},
        {"claim": {"rows": 0, "width": 2**62, "ids": b"", "logprobs": b""}},
        {"claim": {"rows": 2**62, "width": 4, "ids": b"", "logprobs": b""}},
        {"prompt_ids": b"\0" * 5},
        {"output_ids": b"\0"},
        {"routed_experts": {"dtype": "O8", "shape": [1, 1, 1], "data": b"\0" * 8}},
        {"routed_experts": {"dtype": "u1", "shape": [1, 1], "data": b"\0"}},
        {"routed_experts": {"dtype": "u2", "shape": [1, -1, -2], "data": b"\0" * 4}},
        {"text": b"\xff"},
        {"endpoint": "embeddings"},
        {"complete": 1},
        {"surprise": 1},
        {"sampling": {}},
    ],
)
def test_inconsistent_records_raise(fields: dict[str, Any]) -> None:
    with pytest.raises(EvidenceError):
        codec.unpack(changed(**fields))


def test_another_version_raises() -> None:
    record = msgspec.msgpack.decode(PLAIN)
    record["v"] = 2
    with pytest.raises(EvidenceError, match="version 2"):
        codec.unpack(squeeze(msgspec.msgpack.encode(record)))


def test_a_bomb_is_refused_before_it_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_UNPACKED", 1_000_000)
    with pytest.raises(EvidenceError):
        codec.unpack(squeeze(b"\0" * 1_000_001))
    # A frame that does not state its size.
    stream = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    with pytest.raises(EvidenceError):
        codec.unpack(stream.compress(PLAIN) + stream.flush())
    with pytest.raises(EvidenceError):
        codec.unpack(PACKED + b"more")
    with pytest.raises(EvidenceError):
        codec.pack([recorded.cpu("bf16")[0]] * 100)


@pytest.mark.parametrize(
    "fields",
    [
        {"claim_ids": np.zeros((2, 3), np.int32), "claim_logprobs": np.zeros((3, 2), np.float32)},
        {"output_ids": np.array([2**31], np.int64)},
        {"output_ids": np.zeros((1, 1), np.int32)},
        {"prompt_ids": np.zeros(1, np.float32)},
        {"routed_experts": np.zeros((1, 1, 1), np.int64)},
        {"routed_experts": np.zeros((1, 1), np.uint8)},
        {"claim_ids": np.zeros((1, 1), np.int32), "claim_logprobs": np.zeros((1, 1), np.int32)},
    ],
)
def test_impossible_arrays_are_refused_when_written(fields: dict[str, Any]) -> None:
    with pytest.raises(EvidenceError):
        codec.pack([dataclasses.replace(recorded.cpu("bf16")[0], **fields)])


@pytest.mark.parametrize(
    ("seed", "kept"), [(2**63, -(2**63)), (2**63 + 4, 4 - 2**63), (-1, -1), (2**63 - 1, 2**63 - 1)]
)
def test_seeds_are_kept_modulo_64_bits_as_samplers_take_them(seed: int, kept: int) -> None:
    back = codec.unpack(codec.pack([Evidence("", "chat", "", "", Sampling(seed=seed))]))[0]
    assert back.sampling.seed == kept


def test_integers_beyond_64_bits_are_clipped() -> None:
    usage = Usage(10**30, -(10**30), 3, 4)
    back = codec.unpack(codec.pack([Evidence("", "chat", "", "", Sampling(), usage=usage, stop_reason=10**40)]))[0]
    assert back.usage == Usage(2**63 - 1, -(2**63), 3, 4)
    assert back.stop_reason == 2**63 - 1


def test_a_large_request_is_packed_once_whatever_the_number_of_choices() -> None:
    body = bytes(np.random.default_rng(0).integers(0, 256, 50_000, dtype=np.uint8))
    choice = Evidence(id="0" * 32, endpoint="chat", backend="b", model="m", sampling=Sampling(), request=body)
    choices = [dataclasses.replace(choice, index=index) for index in range(20)]
    packed = codec.pack([*choices, dataclasses.replace(choice, index=20, request=b"another")])
    assert len(packed) < 2 * len(body)
    assert [found.request for found in codec.unpack(packed)] == [body] * 20 + [b"another"]
