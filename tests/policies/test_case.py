from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from policies import case
from policies._replayed import PackedReplay, pack_replay, unpack_replay
from policies.case import Shared
from policies.errors import BundleError, ReplayError
from policies.evidence import Evidence, Replay, Sampling
from policies.judging import Declared, Grounds, judge
from policies.structure import Earlier
from policies.transcript import Added, NotSaid, Recorder, Transcript
from tests.policies.profiles import profile
from tests.policies.recorded import replayed
from verifier_pool.profiles import name_of


def evidence(rng: np.random.Generator, tokens: int, width: int, **more: Any) -> Evidence:
    ids = rng.integers(-1, 40, (tokens, width)).astype(np.int32)
    logprobs = np.where(ids < 0, -np.inf, -rng.exponential(3, (tokens, width))).astype(np.float32)
    return Evidence(
        id="a" * 32,
        endpoint="chat",
        backend="b",
        model="m",
        sampling=Sampling(),
        prompt_ids=np.arange(3, dtype=np.int32),
        output_ids=rng.integers(0, 40, tokens).astype(np.int32),
        claim_ids=ids,
        claim_logprobs=logprobs,
        **more,
    )


def same_bits(one: Replay, other: Replay) -> bool:
    experts = one.routed_experts, other.routed_experts
    prompts = one.prompt_ids, other.prompt_ids
    return (
        np.array_equal(one.ids, other.ids)
        and np.array_equal(one.logprobs.view(np.uint32), other.logprobs.view(np.uint32))
        and (one.form, one.reference, one.own) == (other.form, other.reference, other.own)
        and all(a is b if a is None or b is None else np.array_equal(a, b) for a, b in (experts, prompts))
        and (experts[0] is None or experts[0].dtype == experts[1].dtype)  # type: ignore[union-attr]
    )


@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(0, 6), st.integers(1, 9))
def test_a_replay_comes_back_bit_for_bit(seed: int, tokens: int, claimed: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    known = evidence(rng, tokens, claimed)
    if rng.random() < 0.5:
        known = replace(known, routed_experts=rng.integers(0, 200, (tokens + 2, 3, 2)).astype(np.uint8))
    ids = rng.integers(-2, 60, (tokens, width)).astype(np.int32)
    logprobs = np.where(ids < 0, -np.inf, -rng.exponential(3, (tokens, width))).astype(np.float32)
    rows = int(rng.choice([tokens - 1, tokens, tokens + 2, tokens + 3]))
    experts = rng.integers(0, 300, (rows, 3, 2)).astype(str(rng.choice(["u1", "u2", "i2", "i4"])))
    prompt, some = known.prompt_ids[: rng.integers(0, 4)], rng.random(4) < 0.5
    replay = Replay(
        ids,
        logprobs,
        "full" if some[0] else "ids",
        prompt if some[1] else None,
        "reference 1",
        1 if some[2] else None,
        experts if some[3] else None,
    )
    packed = msgspec.msgpack.decode(msgspec.msgpack.encode(pack_replay(replay, known)), type=PackedReplay)
    assert same_bits(unpack_replay(packed, known), replay)


def test_recorded_replays_take_a_third_of_their_size() -> None:
    for known, replay in replayed("single"):
        packed = case.pack([known], Grounds(replays=[replay]), Shared())
        assert len(packed) < (replay.ids.nbytes + replay.logprobs.nbytes) / 2.5
        (back,) = case.unpack(packed).grounds([known], {}).replays or ()
        assert isinstance(back, Replay)
        assert same_bits(back, replay)


GROUNDS = Grounds(
    Declared(40, 100, (2,), 4),
    None,
    profile(),
    [ReplayError("too_long: words")],
    True,
    [Earlier(3, 1)],
)


def test_everything_comes_back() -> None:
    known = evidence(np.random.default_rng(1), 5, 3)
    shared = Shared.of(GROUNDS.profile, None)
    found = case.unpack(case.pack([known], GROUNDS, shared))
    assert (found.id, found.audited, found.named) == (known.id, True, (found.profile,))
    assert found.profile[:16] == name_of(profile())
    back = found.grounds([known], shared.parts)
    assert (back.declared, back.profile, back.declaration_expired, back.earlier) == (
        GROUNDS.declared,
        GROUNDS.profile,
        True,
        GROUNDS.earlier,
    )
    assert [str(each) for each in back.replays or ()] == ["too_long: words"]
    assert judge([known], back) == judge([known], GROUNDS)


def test_what_does_not_belong_to_it_is_refused() -> None:
    known = evidence(np.random.default_rng(1), 5, 3)
    shared = Shared.of(GROUNDS.profile, None)
    found = case.unpack(case.pack([known], GROUNDS, shared))
    for choices, parts in (
        ([known], {}),
        ([known], {found.profile: b"{}"}),
        ([replace(known, id="b" * 32)], shared.parts),
        ([known, known], shared.parts),
    ):
        with pytest.raises(BundleError):
            found.grounds(choices, parts)
    one, replay = replayed("single")[0]
    about = case.unpack(case.pack([one], Grounds(replays=[replay]), Shared()))
    with pytest.raises(BundleError):
        about.grounds([replace(one, output_ids=one.output_ids[:-1])], {})


@given(st.binary(max_size=200), st.data())
def test_garbage_is_refused(junk: bytes, data: st.DataObject) -> None:
    known = evidence(np.random.default_rng(1), 5, 3)
    whole = bytearray(case.pack([known], GROUNDS, Shared.of(GROUNDS.profile, None)))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    for each in (junk, zstandard.ZstdCompressor().compress(junk), bytes(whole)):
        try:
            case.unpack(each).grounds([known], Shared.of(GROUNDS.profile, None).parts)
        except BundleError:
            continue
        assert each == bytes(whole), "zstd itself ignores some bits; the receipt's hash does not"


class Toy:
    """A tokenizer of letters."""

    added = {3: "<end>", 1: "\ud800"}  # noqa: RUF012
    special_ids = frozenset({3})

    def decode(self, ids: Any, *, skip_special_tokens: bool) -> str:
        return "".join(chr(97 + id) for id in ids)

    def steps(self, ids: Any, *, context: Any, skip_special_tokens: bool) -> list[str] | None:
        return [chr(97 + id) for id in ids] if len(ids) < 4 else None

    def encode(self, text: str) -> Any:
        text.encode()
        return np.array([ord(letter) - 97 for letter in text], np.int32)

    def pieces(self, ids: Any) -> list[bytes]:
        return [bytes([97 + id]) for id in ids]


def test_a_tokenizer_is_quoted_word_for_word() -> None:
    toy, recorder = Toy(), Recorder(Toy())
    ids = np.array([1, 2], np.int32)

    def asked(spelling: Any) -> list[Any]:
        found = [
            spelling.decode(ids, skip_special_tokens=True),
            spelling.steps(ids, context=ids[:1], skip_special_tokens=False),
            spelling.steps(np.zeros(5, np.int32), context=ids, skip_special_tokens=False),
            spelling.encode("bc").tolist(),
            list(spelling.pieces(ids)),
            dict(spelling.added),
            spelling.special_ids,
        ]
        with pytest.raises(UnicodeError):
            spelling.encode("\ud800")
        return found

    first = asked(recorder)
    again = Transcript(Added.of(toy), recorder.said)
    assert asked(again) == first == asked(toy)
    for ask in (
        lambda: again.decode(ids, skip_special_tokens=False),
        lambda: again.steps(ids, context=ids, skip_special_tokens=False),
        lambda: again.encode("x"),
        lambda: again.pieces(ids[:1]),
    ):
        with pytest.raises(NotSaid):
            ask()
