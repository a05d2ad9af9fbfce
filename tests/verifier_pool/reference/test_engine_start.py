from __future__ import annotations

import pytest

from verifier_pool.reference.engine_start import engine_arguments, step_limits

GIB = 1 << 30


@pytest.mark.parametrize(
    ("v2", "vocab_size", "memory", "tokens", "sequences"),
    [
        (True, 152_064, 139 * GIB, 16_384, 256),
        (True, 152_064, 24 * GIB, 8_192, 256),
        (False, 49_152, 0, 2_048, 16),
        (False, 152_064, 0, 882, 16),
        (False, 1_000_000, 0, 256, 16),
        (False, 0, 0, 2_048, 16),
    ],
)
def test_what_bounds_a_step(v2: bool, vocab_size: int, memory: int, tokens: int, sequences: int) -> None:
    assert step_limits(v2, vocab_size, memory) == {"max_num_batched_tokens": tokens, "max_num_seqs": sequences}


def test_the_operators_word_is_the_last() -> None:
    given = {"max_num_seqs": 7, "worker_extension_cls": "mine.Own", "enable_prefix_caching": True, "chat_template": "x"}
    arguments = engine_arguments(given)
    assert {name: arguments[name] for name in given if name != "chat_template"} == {
        name: value for name, value in given.items() if name != "chat_template"
    }
    # That one is for the rendering alone.
    assert "chat_template" not in arguments


def test_what_replays_cannot_do_without() -> None:
    assert engine_arguments({"max_logprobs": 20})["max_logprobs"] == 64
    assert engine_arguments({"max_logprobs": 100})["max_logprobs"] == 100
    assert engine_arguments({"max_logprobs": -1})["max_logprobs"] == -1
    assert engine_arguments({})["enable_prefix_caching"] is False
    assert engine_arguments({"enable_return_routed_experts": True})["enable_prefix_caching"] is True
