"""Token strings against small tokenizers whose right answers are plain to see."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from proxy.tap import TokenStrings


def byte_level() -> TokenStrings:
    """Every byte is a token: id = position in the sorted byte alphabet; then one word and one special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: at for at, symbol in enumerate(alphabet)} | {"Ġhi": 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return TokenStrings(tokenizer)


def ids_of(strings: TokenStrings, text: str) -> list[int]:
    """One id per byte."""
    table = {symbol: at for at, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    return [table[symbol] for symbol in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)[0][0]]


def test_whole_characters() -> None:
    strings = byte_level()
    assert strings.at([256, 257, *ids_of(strings, "A")], []) == [" hi", "<|end|>", "A"]


def test_character_over_several_tokens() -> None:
    strings = byte_level()
    ids = ids_of(strings, "😀")
    assert len(ids) == 4
    texts = [strings.at([id], ids[:at])[0] for at, id in enumerate(ids)]
    assert texts == ["", "", "", "😀"]


def test_character_completed_behind_other_text() -> None:
    strings = byte_level()
    ids = ids_of(strings, "é")
    assert strings.at([ids[1]], [256, ids[0]]) == ["é"]
    assert strings.at([ids[1]], [256]) == [""]
    assert strings.alone(ids[0]) == "\ufffd"


def test_only_four_tokens_of_context() -> None:
    strings = byte_level()
    ids = ids_of(strings, "é")
    assert strings.at([ids[1]], [ids[0], 256, 256, 256, 256]) == [""]


@pytest.mark.parametrize("id", [100_000, -1, 2**40])
def test_ids_outside_the_vocabulary(id: int) -> None:
    assert byte_level().at([id], [1]) == [""]


def test_ids_outside_the_vocabulary_are_not_remembered() -> None:
    strings = byte_level()
    strings.at([7, *range(1000, 3000)], [1])
    assert list(strings._alone) == [7]


def test_sentencepiece_keeps_its_leading_space() -> None:
    vocab = [("<unk>", 0.0), ("▁hi", -1.0), ("hi", -1.0), ("▁▁", -1.0)]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    assert TokenStrings(tokenizer).at([1, 2, 3], []) == [" hi", "hi", "  "]


def test_load(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert TokenStrings.load(tmp_path).alone(0) == "a"
    assert TokenStrings.load(tmp_path / "tokenizer.json").alone(0) == "a"
    with pytest.raises(OSError, match="missing"):
        TokenStrings.load(tmp_path / "missing")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"bad\.json"):
        TokenStrings.load(tmp_path / "bad.json")
