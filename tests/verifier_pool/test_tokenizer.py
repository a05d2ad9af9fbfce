"""Texts of ids, token by token: as the library's own stream gives them, in linear time whatever the ids."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.decoders import DecodeStream

from policies import _canonical, _delivered
from tests.policies.test_delivered import TOOLS, answer, codes
from tests.support.pace import pace
from tests.support.spellings import END_THINK, EOS, THINK, byte_level, space_marked
from verifier_pool.tokenizer import TokenizerSpelling

MOST = 262_144
SECONDS = 20.0
"""What took hours takes one or two, on a machine that does nothing else."""
UNKNOWN = 10**6


def every_id(spelling: TokenizerSpelling, ids: list[int], context: list[int], *, skip: bool) -> list[str]:
    """As vLLM does it: every id into the stream, after the whole prompt."""
    stream = DecodeStream(ids=context, skip_special_tokens=skip)
    texts = []
    for id in ids:
        try:
            text = stream.step(spelling._tokenizer, id)
        except Exception:
            stream = DecodeStream(skip_special_tokens=skip)
            text = stream.step(spelling._tokenizer, id)
        texts.append(text or "")
    return texts


def steps(spelling: TokenizerSpelling, ids: list[int], context: list[int], *, skip: bool) -> list[str] | None:
    return spelling.steps(np.array(ids, np.int32), context=np.array(context, np.int32), skip_special_tokens=skip)


def byte(spelling: TokenizerSpelling, value: int) -> int:
    """The token of a single byte."""
    pieces = spelling.pieces(np.arange(1200, dtype=np.int32))
    assert pieces is not None
    return list(pieces).index(bytes([value]))


ODD = st.sampled_from([EOS, THINK, END_THINK, 3, UNKNOWN])
HALVES = st.sampled_from([0xF0, 0x9F, 0x8E, 0x89, 0xE2, 0x80, 0xC3])


@pytest.mark.parametrize("make", [byte_level, space_marked])
@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_steps_are_those_of_a_stream_of_all_ids(make: Any, data: Any, skip: bool) -> None:
    spelling = make()
    one = st.one_of(st.integers(0, 1600), ODD, HALVES.map(lambda value: byte(spelling, value)))
    ids, context = data.draw(st.lists(one, max_size=40)), data.draw(st.lists(one, max_size=10))
    assert steps(spelling, ids, context, skip=skip) == every_id(spelling, ids, context, skip=skip)


@pytest.mark.parametrize("make", [byte_level, space_marked])
@pytest.mark.parametrize("text", ["the licence of the work ", "🎉👩‍👩‍👧", "你好 wörld\n"])
def test_long_honest_answers_after_long_prompts_are_decided(make: Any, text: str) -> None:
    spelling = make()
    ids = spelling.encode(text * 2000).tolist()[:6000]
    context = [THINK, *spelling.encode(text * 2000).tolist()[:9000]]
    assert steps(spelling, ids, context, skip=True) == every_id(spelling, ids, context, skip=True)


@pytest.mark.parametrize(("make", "reasoning"), [(byte_level, ""), (space_marked, "r")])
@pytest.mark.parametrize("kind", ["skipped", "unknown", "half", "halves that end", "four to a character"])
def test_no_ids_take_more_than_linear_time(make: Any, kind: str, reasoning: str) -> None:
    spelling = make()
    half = byte(spelling, 0xF0)
    unit = {
        "skipped": [THINK],
        "unknown": [UNKNOWN],
        "half": [half],
        "halves that end": [*[half] * 500, *spelling.encode("x").tolist()],
        "four to a character": [byte(spelling, value) for value in "🎉".encode()],
    }[kind]
    ids = [*(unit * MOST)[: MOST - 9], *spelling.encode("r").tolist(), EOS]
    evidence = answer(ids, "x", reasoning=reasoning, request={"tools": TOOLS})
    began = time.thread_time()
    delivered = _delivered.check(evidence, spelling, frozenset({EOS}), known=True)
    _canonical.compare(evidence.output_ids, spelling)
    assert time.thread_time() - began < SECONDS * pace()
    assert codes(delivered) == ["text_undecided"]


@pytest.mark.parametrize("make", [byte_level, space_marked])
def test_long_prompts_that_end_in_half_a_character_are_undecided(make: Any) -> None:
    """Their whole text would be the answer's first, decoded again with each of its tokens."""
    spelling = make()
    words, answer = spelling.encode("the licence of the work "), spelling.encode("x")
    for length, decided in ((200, True), (131_072, True), (131_073, False), (2 * 1024 * 1024, False)):
        half = np.append(np.resize(words, length - 1), np.int32(byte(spelling, 0xF0)))
        found = spelling.steps(answer, context=half, skip_special_tokens=True)
        assert (found is not None) == decided
        whole = np.append(half[:-1], words[:1])
        assert spelling.steps(answer, context=whole, skip_special_tokens=True) is not None


@pytest.mark.parametrize("skip", [True, False])
def test_too_many_ids_that_make_no_character_are_undecided(skip: bool) -> None:
    spelling = byte_level()
    half = byte(spelling, 0xF0)
    assert steps(spelling, [half] * 20_000, [THINK], skip=skip) is None
    assert steps(spelling, [half] * 100, [THINK], skip=skip) == [""] * 100
