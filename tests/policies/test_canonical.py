"""Re-tokenised answers: honest spelling passes, splitting to bill more does not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import _canonical, structure
from policies.checks import Result
from policies.evidence import Evidence, Ids, Sampling, Usage
from policies.spelling import Spelling
from tests.policies import recorded
from tests.support.spellings import EOS, TEXT, byte_level, space_marked

BOTH = [byte_level, space_marked]
PROSE = " ".join(TEXT.split()[40:160])


def split(ids: Ids, spelling: Spelling, *, every: int = 1) -> Ids:
    """Each `every`-th token as two, where its bytes allow that."""
    one_byte = {piece: id for id in range(1400) if len(piece := (spelling.pieces(np.array([id])) or [b""])[0]) >= 1}
    out: list[int] = []
    for at, id in enumerate(ids.tolist()):
        piece = (spelling.pieces(np.array([id])) or [b""])[0]
        cuts = [c for c in range(1, len(piece)) if piece[:c] in one_byte and piece[c:] in one_byte]
        if at % every or not cuts:
            out.append(id)
        else:
            out += [one_byte[piece[: cuts[0]]], one_byte[piece[cuts[0] :]]]
    return np.array(out, np.int32)


@pytest.mark.parametrize("make", BOTH)
def test_what_the_tokenizer_says_is_canonical(make: Any) -> None:
    spelling = make()
    found = _canonical.compare(np.append(spelling.encode(PROSE), EOS).astype(np.int32), spelling)
    assert found is not None
    assert (found.extra, found.spellings, found.split) == (0, 0, 0)
    assert found.tokens > 100


@pytest.mark.parametrize("make", BOTH)
def test_splitting_tokens_is_counted_exactly_and_rejected(make: Any) -> None:
    spelling = make()
    honest = spelling.encode(PROSE)
    ids = split(honest, spelling, every=2)
    extra = len(ids) - len(honest)
    assert extra > 0.25 * len(honest)
    found = _canonical.compare(ids, spelling)
    assert found is not None
    assert extra - 2 <= found.extra <= extra
    level = _canonical.level(found, evidence(ids, PROSE))
    assert level is not None
    assert level < _canonical.REJECT_LEVEL


def evidence(ids: Ids, text: str, **sampling: Any) -> Evidence:
    claim = np.zeros((len(ids), 1), np.int32)
    claim[:, 0] = ids
    return Evidence(
        id="0" * 32,
        endpoint="completions",
        backend="b",
        model="m",
        sampling=Sampling(**sampling),
        request=json.dumps({"model": "m"}).encode(),
        prompt_ids=np.array([EOS], np.int32),
        output_ids=ids,
        claim_ids=claim,
        claim_logprobs=np.full(claim.shape, -0.1, np.float32),
        text=text,
        finish_reason="length",
        usage=Usage(1, len(ids), 1, len(ids)),
    )


def test_the_structure_check_rejects_a_retokenised_answer() -> None:
    spelling = byte_level()
    ids = split(spelling.encode(PROSE), spelling)
    answer = evidence(ids, PROSE, max_tokens=len(ids))
    check = structure.check(answer, vocab_size=1, spelling=spelling, max_model_len=4096)
    assert check.result is not Result.PASS
    wide = np.arange(21, dtype=np.int32) + 2000 + np.zeros((len(ids), 1), np.int32)
    wide[:, 0] = ids
    logprobs = np.tile(np.concatenate([[-1.0], np.full(20, -5.0)]).astype(np.float32), (len(ids), 1))
    values = {name: getattr(answer, name) for name in Evidence.__slots__}
    whole = Evidence(**{**values, "claim_ids": wide, "claim_logprobs": logprobs})
    check = structure.check(whole, spelling=spelling, max_model_len=4096)
    assert check.result is Result.REJECT
    assert check.reason.startswith("retokenised")
    assert check.level is not None
    assert 0 < check.level < 1e-9
    extra = check.metrics["extra_tokens"]
    assert extra is not None
    assert extra > 50


@settings(max_examples=100, deadline=None)
@given(text=st.text(min_size=1, max_size=60), make=st.sampled_from(BOTH), cut=st.integers(1, 80))
def test_canonical_ids_of_any_text_cut_anywhere_are_canonical(text: str, make: Any, cut: int) -> None:
    spelling = make()
    found = _canonical.compare(spelling.encode(text)[:cut], spelling)
    assert found is not None
    assert (found.extra, found.spellings) == (0, 0)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 3000), max_size=60), make=st.sampled_from(BOTH))
def test_any_ids_can_be_compared(ids: list[int], make: Any) -> None:
    found = _canonical.compare(np.array(ids, np.int32), make())
    assert found is not None
    assert 0 <= found.split <= found.spellings <= found.tokens


def test_a_loop_counts_its_odd_word_once() -> None:
    spelling = byte_level()
    odd = split(spelling.encode(" License"), spelling)
    assert len(odd) > len(spelling.encode(" License"))
    found = _canonical.compare(np.tile(odd, 60), spelling)
    assert found is not None
    assert found.spellings <= 2
    level = _canonical.level(found, evidence(odd, ""))
    assert level is not None
    assert level > _canonical.REJECT_LEVEL


@pytest.mark.parametrize("fields", [{"grammar": True}, {"allowed_token_ids": (1,)}, {"temperature": 1.7}])
def test_forced_or_hot_answers_have_no_level(fields: dict[str, Any]) -> None:
    assert (
        _canonical.level(_canonical.Canonical(100, 90, 90, 90), evidence(np.array([5], np.int32), "", **fields)) is None
    )


def test_the_rates_hold_what_was_measured() -> None:
    # 7 new split spellings in 1,981 tokens at T = 1, and 22 in 2,054 at T = 1.3; Wilson's upper bounds at z = 1.96.
    for (_, rate), (count, tokens) in zip(_canonical.HONEST_RATES, ((7, 1981), (22, 2054)), strict=True):
        p, z = count / tokens, 1.96
        upper = (p + z * z / 2 / tokens + z * (p * (1 - p) / tokens + z * z / 4 / tokens**2) ** 0.5) / (
            1 + z * z / tokens
        )
        assert upper < rate


def test_recorded_answers_know_no_tokenizer() -> None:
    check = structure.check(recorded.cpu("bf16")[0], vocab_size=recorded.VOCABULARY, eos_token_ids=(recorded.EOS,))
    assert check.metrics["text_compared"] == 0
    assert check.metrics["extra_tokens"] is None


@given(st.lists(st.sampled_from([b"\x80\xc2", b"\x80", b"\xc2", b"a", b"\xe2\x80", b"\x99s", b"\xff"]), max_size=30))
def test_tokens_that_begin_and_end_within_characters(pieces: list[bytes]) -> None:
    class Torn:
        added: Mapping[int, str] = {}
        special_ids: frozenset[int] = frozenset()

        def pieces(self, ids: Ids) -> list[bytes]:
            return [pieces[id] if id < len(pieces) else bytes([id - len(pieces)]) for id in ids.tolist()]

        def encode(self, text: str) -> Ids:
            return np.frombuffer(text.encode(), np.uint8).astype(np.int32) + len(pieces)

    found = _canonical.compare(np.arange(len(pieces), dtype=np.int32), Torn())  # type: ignore[arg-type]
    assert found is not None
