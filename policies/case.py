"""What a verdict rests on beside the evidence, as bytes: enough to judge the response again, offline, without a GPU.

    zstd frame around msgpack: {"v": 1, "rules", "id", "declared", "profile", "added", "tokenizer", "expired",
                                "earlier", "replays", "said"}

What many responses share is not in it but named by its SHA-256: the profile (canonical JSON, `Profile.canonical`) and
the tokenizer's added tokens. Replays are written beside the evidence that they are about (`policies._replayed`), and
what the tokenizer said about the answer word for word (`policies.transcript`). What is read back is checked for
version, types, sizes and shapes, so that bytes from anywhere either give a case or raise `BundleError`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import zstandard

from policies._replayed import PackedReplay, pack_replay, unpack_replay
from policies.errors import BundleError, ReplayError
from policies.evidence import Evidence
from policies.judging import Declared, Grounds, Outcome
from policies.profile import Profile
from policies.spelling import Spelling
from policies.structure import Earlier
from policies.transcript import Added, Recorder, Said, Transcript

VERSION = 1
RULES = 1
"""Of the checks: another number with every change after which the same evidence may be judged differently, which golden
cases meet (`tests/policies/test_rules.py`)."""
MAX_UNPACKED = 256 * 1024 * 1024
"""Bytes that a case may take, uncompressed. A replay of 2¹⁷ tokens with 41 columns takes 27 MB."""
MAX_ADDED = 8 * 1024 * 1024
"""Bytes that a tokenizer's added tokens may take."""
_LEVEL = 3
_UNREADABLE = (msgspec.MsgspecError, zstandard.ZstdError, ValueError, OverflowError, RecursionError, MemoryError)


class _Declared(msgspec.Struct, forbid_unknown_fields=True):
    vocab_size: int | None
    max_model_len: int | None
    eos_token_ids: tuple[int, ...]
    experts: int | None


class _Packed(msgspec.Struct, forbid_unknown_fields=True):
    v: int
    rules: int
    id: str
    declared: _Declared
    profile: str
    added: str
    tokenizer: str
    expired: bool
    earlier: list[tuple[int, int] | None] | None
    replays: list[PackedReplay | str] | None
    said: Said | None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Packed)
_added = msgspec.msgpack.Decoder(Added)


@dataclass(frozen=True, slots=True)
class Shared:
    """What many cases share, each with its SHA-256 in hex; empty where there is none.

    Attributes:
        profile: canonical JSON of the profile that the responses were judged by.
        added: the tokenizer's added tokens, packed.
        tokenizer: SHA-256 of the tokenizer's file.
    """

    profile: bytes = b""
    added: bytes = b""
    tokenizer: str = ""

    @classmethod
    def of(cls, profile: Profile | None, spelling: Spelling | None, tokenizer: str = "") -> Shared:
        """That of a model."""
        said = b"" if spelling is None else _encoder.encode(Added.of(spelling))
        return cls(b"" if profile is None else profile.canonical(), said, tokenizer)

    @property
    def parts(self) -> dict[str, bytes]:
        """What there is of it, by SHA-256."""
        return {sha256(part): part for part in (self.profile, self.added) if part}


@dataclass(frozen=True, slots=True)
class Case:
    """A case as it was read.

    Attributes:
        rules: version of the checks that judged (`RULES`).
        profile, added, tokenizer: SHA-256 (hex) of what belongs to it.
    """

    id: str
    rules: int
    profile: str
    added: str
    tokenizer: str
    _packed: _Packed

    @property
    def named(self) -> tuple[str, ...]:
        """What has to lie beside it."""
        return tuple(name for name in (self.profile, self.added) if name)

    @property
    def audited(self) -> bool:
        """Whether the response was replayed."""
        return self._packed.replays is not None

    def grounds(
        self, choices: Sequence[Evidence], parts: dict[str, bytes], spelling: Spelling | None = None
    ) -> Grounds:
        """What the choices were judged by.

        Args:
            parts: what belongs to the case, by SHA-256.
            spelling: the declared tokenizer itself, where it is at hand; else what it said then is said again.

        Raises:
            BundleError: something is missing, damaged, or not about these choices.
        """
        packed = self._packed
        if any(choice.id != self.id for choice in choices):
            raise BundleError("the replay is of another response")
        profile, added = (_part(parts, name) for name in (self.profile, self.added))
        try:
            replays = None
            if packed.replays is not None:
                replays = [_outcome(each, choice) for each, choice in zip(packed.replays, choices, strict=True)]
            earlier = packed.earlier
            if earlier is not None and len(earlier) != len(choices):
                raise ValueError("another number of memories than of choices")
            if spelling is None and packed.said is not None:
                spelling = Transcript(_added.decode(added), packed.said)
            return Grounds(
                declared=Declared(**msgspec.structs.asdict(packed.declared)),
                spelling=spelling if packed.said is not None else None,
                profile=Profile.from_json(profile) if self.profile else None,
                replays=replays,
                declaration_expired=packed.expired,
                earlier=None if earlier is None else [None if one is None else Earlier(*one) for one in earlier],
            )
        except _UNREADABLE as error:
            raise BundleError(f"the replay cannot be read: {error}") from error


def pack(choices: Sequence[Evidence], grounds: Grounds, shared: Shared) -> bytes:
    """The case of a response.

    Args:
        grounds: what its verdict was derived from; a `Recorder` for `spelling` where the tokenizer was asked.

    Raises:
        BundleError: it would be over `MAX_UNPACKED`, or an array has an impossible dtype or shape.
    """
    spelling = grounds.spelling
    if spelling is not None and not isinstance(spelling, Recorder):
        raise TypeError("what the tokenizer said has to be recorded")
    earlier = grounds.earlier
    try:
        replays = None if grounds.replays is None else _outcomes(grounds.replays, choices)
        record = _encoder.encode(
            _Packed(
                v=VERSION,
                rules=RULES,
                id=choices[0].id,
                declared=_Declared(**{name: getattr(grounds.declared, name) for name in _Declared.__struct_fields__}),
                profile=sha256(shared.profile),
                added=sha256(shared.added) if spelling is not None else "",
                tokenizer=shared.tokenizer if spelling is not None else "",
                expired=grounds.declaration_expired,
                earlier=None
                if earlier is None
                else [None if one is None else (one.answers, one.same) for one in earlier],
                replays=replays,
                said=None if spelling is None else spelling.said,
            )
        )
    except (msgspec.MsgspecError, ValueError, OverflowError) as error:
        raise BundleError(f"a replay cannot be written: {error}") from error
    if len(record) > MAX_UNPACKED:
        raise BundleError(f"a replay of {len(record)} bytes is over the limit of {MAX_UNPACKED}")
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True, write_content_size=True).compress(record)


def unpack(data: bytes) -> Case:
    """A case from its bytes. Raises BundleError."""
    try:
        if not 0 <= zstandard.frame_content_size(data) <= MAX_UNPACKED:
            raise ValueError("no stated size, or one over the limit")
        raw = zstandard.ZstdDecompressor().decompress(data, max_output_size=MAX_UNPACKED, allow_extra_data=False)
        packed = _decoder.decode(raw)
        if packed.v != VERSION:
            raise ValueError(f"version {packed.v}, this is version {VERSION}")
    except _UNREADABLE as error:
        raise BundleError(f"the replay cannot be read: {error}") from error
    return Case(packed.id, packed.rules, packed.profile, packed.added, packed.tokenizer, packed)


def sha256(data: bytes) -> str:
    """SHA-256 in hex; empty for nothing."""
    return hashlib.sha256(data).hexdigest() if data else ""


def _part(parts: dict[str, bytes], name: str) -> bytes:
    if not name:
        return b""
    part = parts.get(name)
    if part is None or sha256(part) != name:
        raise BundleError("what the verdict was judged by is missing, or is not what it was")
    return part


def _outcomes(replays: Sequence[Outcome], choices: Sequence[Evidence]) -> list[PackedReplay | str]:
    return [
        came.reason if isinstance(came, ReplayError) else pack_replay(came, choice)
        for came, choice in zip(replays, choices, strict=True)
    ]


def _outcome(packed: PackedReplay | str, choice: Evidence) -> Outcome:
    return ReplayError(packed) if isinstance(packed, str) else unpack_replay(packed, choice)
