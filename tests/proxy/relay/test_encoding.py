"""Compressed answers: any split gives the same bytes, rubbish is told, a bomb comes in bounded pieces."""

from __future__ import annotations

import gzip
import itertools
import zlib
from collections.abc import Callable

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import UpstreamFailed
from proxy.relay.encoding import Decoder, decoder_for

CODINGS: list[tuple[bytes, Callable[[bytes], bytes]]] = [
    (b"", bytes),
    (b"identity", bytes),
    (b"gzip", gzip.compress),
    (b"deflate", zlib.compress),
    (b"zstd", zstandard.compress),
    (b"identity, GZIP", gzip.compress),
    (b"deflate", lambda data: zlib.compress(data, wbits=-zlib.MAX_WBITS)),
]
MEMBERS = [CODINGS[2], CODINGS[4]]


def _decode_all(decoder: Decoder, data: bytes) -> bytes:
    out = b"".join(decoder.decode(data))
    decoder.flush()
    return out


@pytest.mark.parametrize(("coding", "compress"), CODINGS)
@given(data=st.binary(max_size=5000), size=st.integers(1, 100))
def test_any_split(coding: bytes, compress: Callable[[bytes], bytes], data: bytes, size: int) -> None:
    packed = compress(data)
    decoder = decoder_for(coding)
    out = b"".join(piece for at in range(0, len(packed), size) for piece in decoder.decode(packed[at : at + size]))
    decoder.flush()
    assert out == data


@pytest.mark.parametrize(("coding", "compress"), CODINGS[2:])
def test_cut_short(coding: bytes, compress: Callable[[bytes], bytes]) -> None:
    decoder = decoder_for(coding)
    list(decoder.decode(compress(b"x" * 1000)[:-5]))
    with pytest.raises(UpstreamFailed):
        decoder.flush()


@pytest.mark.parametrize("coding", [b"gzip", b"deflate", b"zstd"])
@given(data=st.binary(min_size=20))
def test_rubbish(coding: bytes, data: bytes) -> None:
    decoder = decoder_for(coding)
    with pytest.raises(UpstreamFailed):
        _decode_all(decoder, b"\xfe" + data)


@pytest.mark.parametrize(("coding", "compress"), CODINGS[2:])
def test_bomb(coding: bytes, compress: Callable[[bytes], bytes]) -> None:
    """A read of 64 KiB that would become hundreds of megabytes is never in memory at once."""
    longest = total = 0
    for piece in decoder_for(coding).decode(compress(bytes(200_000_000))[:65536]):
        longest, total = max(longest, len(piece)), total + len(piece)
    assert total > 5_000_000
    assert longest <= 40_000_000


def test_unknown() -> None:
    with pytest.raises(UpstreamFailed):
        decoder_for(b"br")


@pytest.mark.parametrize(("coding", "compress"), MEMBERS)
@given(parts=st.lists(st.binary(max_size=300), min_size=1, max_size=20), size=st.integers(1, 5000), junk=st.booleans())
def test_streams_one_after_the_other_are_one(
    coding: bytes, compress: Callable[[bytes], bytes], parts: list[bytes], size: int, junk: bool
) -> None:
    """What is none of them, behind the last, is dropped."""
    packed = b"".join(map(compress, parts)) + (b"\0 and more" if junk else b"")
    decoder = decoder_for(coding)
    out = b"".join(piece for at in range(0, len(packed), size) for piece in decoder.decode(packed[at : at + size]))
    decoder.flush()
    assert out == b"".join(parts)


@pytest.mark.parametrize(("coding", "compress"), CODINGS[2:])
def test_what_follows_without_end_is_not_kept(coding: bytes, compress: Callable[[bytes], bytes]) -> None:
    decoder = decoder_for(coding)
    assert b"".join(decoder.decode(compress(b"x") + bytes(1000))) == b"x"
    assert all(list(decoder.decode(bytes(1000))) == [] for _ in range(60))
    with pytest.raises(UpstreamFailed):
        list(decoder.decode(bytes(10_000)))


NOTHING = {
    "gzip": (b"gzip", gzip.compress(b"")),
    "zstd": (b"zstd", zstandard.compress(b"")),
    "skipped": (b"zstd", b"\x50\x2a\x4d\x18" + bytes(4)),
}


@pytest.mark.parametrize("kind", NOTHING)
def test_streams_with_nothing_in_them_are_no_work_in_one_go(kind: str) -> None:
    """Whoever works on them can look up after each of them; and they come to an end."""
    coding, nothing = NOTHING[kind]
    pieces = iter(decoder_for(coding).decode(nothing * 5000))
    assert set(itertools.islice(pieces, 990)) == {b""}
    with pytest.raises(UpstreamFailed, match="says nothing"):
        list(itertools.islice(pieces, 20))


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_streams_with_something_in_them_may_be_many(kind: str) -> None:
    coding, nothing = NOTHING[kind]
    compress = gzip.compress if kind == "gzip" else zstandard.compress
    assert _decode_all(decoder_for(coding), (nothing * 5 + compress(b"x") * 50) * 50) == b"x" * 2500


@pytest.mark.parametrize(
    ("coding", "data"),
    [
        (b"gzip", b"\x1f\x8b\x08\x08" + bytes(6) + b"x" * 2_000_000),
        (b"zstd", b"\x50\x2a\x4d\x18\xff\xff\xff\x7f" + bytes(2_000_000)),
    ],
    ids=["a name without end", "skipped"],
)
def test_what_nothing_comes_of_comes_to_an_end(coding: bytes, data: bytes) -> None:
    with pytest.raises(UpstreamFailed, match="says nothing"):
        _decode_all(decoder_for(coding), data)
