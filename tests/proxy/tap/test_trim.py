"""Evidence within its bound: what goes first, what stays, and a prompt that choices share is kept once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import codec
from policies.evidence import Evidence, Sampling
from proxy.tap.trim import TRIMMED, trimmed

TOKENS = 100
CLAIM, EXPERTS = TOKENS * 21 * 8, TOKENS * 4 * 8


def _choice(index: int, prompt: int = 10, experts: bool = True, **more: object) -> Evidence:
    noise = np.random.default_rng(index)
    one = Evidence(
        id="a" * 32,
        endpoint="chat",
        backend="b",
        model="m",
        sampling=Sampling(),
        index=index,
        prompt_ids=noise.integers(0, 2**31 - 1, prompt, np.int32),
        output_ids=noise.integers(0, 2**31 - 1, TOKENS, np.int32),
        claim_ids=noise.integers(0, 2**31 - 1, (TOKENS, 21), np.int32),
        claim_logprobs=noise.standard_normal((TOKENS, 21)).astype(np.float32),
        routed_experts=noise.integers(0, 256, (TOKENS, 4, 8)).astype(np.uint8) if experts else None,
    )
    return replace(one, **more)  # type: ignore[arg-type]


@given(st.integers(1, 4), st.integers(0, 200_000), st.booleans())
def test_within_the_bound(choices: int, most: int, experts: bool) -> None:
    whole = [_choice(index, experts=experts) for index in range(choices)]
    kept = trimmed(whole, most)
    least = choices * (TOKENS * 4 + 10 * 4)
    # A record has a few hundred bytes of its own for each choice.
    assert len(codec.pack(kept)) <= max(most, least) + 1024 * choices
    for one, before in zip(kept, whole, strict=True):
        assert one.output_ids is before.output_ids
        assert one.prompt_ids is before.prompt_ids
        less = one.claim_ids.size < before.claim_ids.size or (one.routed_experts is None) is experts
        assert one.faults.count(TRIMMED) == int(less)


def test_expert_ids_go_first() -> None:
    (one,) = trimmed([_choice(0)], CLAIM + EXPERTS)
    assert one.routed_experts is None
    assert one.claim_ids.shape == one.claim_logprobs.shape == (TOKENS, 21)
    (one,) = trimmed([_choice(0)], CLAIM)
    assert one.claim_ids.size == one.claim_logprobs.size == 0
    assert one.faults == (TRIMMED,)
    codec.unpack(codec.pack([one]))


def test_the_request_as_it_came_counts_and_goes_first() -> None:
    """No check reads it: however much of it a client sends, an answer is checked as another one is."""
    asked = np.random.default_rng(2).bytes(1 << 20)
    whole = [_choice(index, request=b"{}", asked=asked) for index in range(2)]
    most = len(asked) + 3 * (CLAIM + EXPERTS)
    assert all(one.asked is asked and one.routed_experts is not None for one in trimmed(whole, most))
    kept = trimmed(whole, most - len(asked))
    assert len(codec.pack(kept)) <= most - len(asked) + 2 * 1024
    assert all(one.asked == b"" and one.routed_experts is not None and not one.faults for one in kept)
    # Where it is the very body that went up, it counts once, and takes no room of its own.
    (one,) = trimmed([_choice(0, request=asked, asked=asked)], len(asked) + CLAIM + EXPERTS + 1024)
    assert one.routed_experts is not None
    (one,) = trimmed([_choice(0, request=asked, asked=asked)], len(asked) // 2)
    assert (one.asked, one.claim_ids.size, one.routed_experts) == (asked, 0, None)
    (one,) = trimmed([_choice(0, request=b"{}", asked=asked)], CLAIM)
    assert (one.asked, one.request, one.claim_ids.size) == (b"", b"{}", 0)


def test_what_fits_stays() -> None:
    whole = [_choice(index) for index in range(3)]
    assert all(one is before for one, before in zip(trimmed(whole, 2**20), whole, strict=True))


@pytest.mark.parametrize("equal", ["same", "copies"])
def test_a_prompt_that_choices_share_is_kept_once(equal: str) -> None:
    prompt = np.random.default_rng(1).integers(0, 2**31 - 1, 50_000, np.int32)
    whole = [
        _choice(index, prompt_ids=prompt if equal == "same" else prompt.copy(), request=b"r" * 1000)
        for index in range(8)
    ]
    packed = codec.pack(whole)
    assert len(packed) < prompt.nbytes + 8 * (CLAIM + EXPERTS + TOKENS * 4 + 1024)
    for one in codec.unpack(packed):
        assert np.array_equal(one.prompt_ids, prompt)
        assert one.request == b"r" * 1000
    if equal == "same":
        assert all(one.claim_ids.size for one in trimmed(whole, prompt.nbytes + 8 * (CLAIM + EXPERTS + 2048)))
