"""The seed-free tests of speculative backends: exact under the null, blind to the seed, not to the law."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import seedfree, selection
from policies.checks import Check, Result
from policies.evidence import Evidence, Sampling
from tests.policies import recorded
from tests.policies.sampler import draw

VOCABULARY = 300


def spoken(seed: int, *, tokens: int = 60, chat: bool = True, **sampling: Any) -> Evidence:
    """An honest speculative answer: right law, other noise."""
    asked = Sampling(**{"temperature": 1.0, "seed": 1, **sampling})
    random, fresh = np.random.default_rng(seed), np.random.default_rng([seed, 1])
    answer = draw(
        asked, recorded.GPU, tokens=tokens, vocabulary=VOCABULARY, random=random, fresh=fresh, chat=chat, eos=(2,)
    )
    return dataclasses.replace(answer, speculative=True, id=f"{seed:032x}")


def checked(answer: Evidence, **changes: Any) -> Check:
    answer = dataclasses.replace(answer, sampling=dataclasses.replace(answer.sampling, **changes))
    return selection.check(answer, vocab_size=VOCABULARY, eos_token_ids=(2,))


@given(
    seed=st.integers(0, 2**20),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.4]),
    top_p=st.sampled_from([1.0, 0.95, 0.6]),
    top_k=st.sampled_from([0, 5, 40]),
    min_p=st.sampled_from([0.0, 0.1]),
    bias=st.sampled_from([(), ((4, 6.0), (9, -3.0))]),
    presence=st.sampled_from([0.0, 1.0]),
    chat=st.booleans(),
)
@settings(max_examples=150)
def test_an_honest_speculative_answer_is_neither_rejected_nor_passed(
    seed: int, temperature: float, top_p: float, top_k: int, min_p: float, bias: Any, presence: float, chat: bool
) -> None:
    cuts = {"top_p": top_p, "top_k": top_k, "min_p": min_p, "logit_bias": bias, "presence_penalty": presence}
    check = checked(spoken(seed, temperature=temperature, chat=chat, **cuts))
    assert check.result is Result.INCONCLUSIVE
    assert check.reason.startswith("speculative: ")
    assert not check.by_request
    assert check.metrics["excluded"] == 0


@pytest.mark.parametrize(("chat", "temperature"), [(True, 0.6), (False, 1.0), (True, 1.5)])
def test_the_levels_hold_under_the_null(chat: bool, temperature: float) -> None:
    checks = [checked(spoken(seed, temperature=temperature, chat=chat, tokens=40)) for seed in range(400)]
    for name in ("pit_log10", "cross_entropy_log10"):
        levels = 10.0 ** np.array([check.metrics[name] for check in checks], float)
        for level in (0.2, 0.05):
            # Four standard deviations over the nominal rate.
            assert np.mean(levels <= level) <= level + 4 * math.sqrt(level / 400)
    assert abs(np.mean([check.metrics["z"] or 0.0 for check in checks])) < 0.3


def test_u_is_uniform_where_everything_is_known() -> None:
    # At T = 1 without a cut the tail's weight is known, so u is exact.
    values = []
    for seed in range(200):
        answer = spoken(seed, tokens=30)
        claim = selection.processed(answer, (), None)
        cells = seedfree.cells_of(answer, claim, VOCABULARY)
        share = cells.low / cells.low.sum(axis=1, keepdims=True)
        before = np.cumsum(share, axis=1) - share
        rows = np.arange(len(share))
        uniform = np.random.default_rng(seed).random(len(share))
        values.append(before[rows, cells.drawn] + uniform * share[rows, cells.drawn])
        assert cells.low.shape[1] == 22
        assert ((cells.high > 0).sum(axis=1) <= 21).all()
    u = np.sort(np.concatenate(values))
    distance = np.abs(u - np.arange(1, len(u) + 1) / len(u)).max()
    assert distance < 1.7 / math.sqrt(len(u))


@pytest.mark.parametrize("asked", [0.5, 2.0])
def test_another_temperature_is_rejected_at_a_tiny_level(asked: float) -> None:
    checks = [checked(spoken(seed, tokens=300), temperature=asked) for seed in range(8)]
    rejected = [check for check in checks if check.result is Result.REJECT]
    assert len(rejected) >= 6
    for check in rejected:
        assert check.level is not None
        assert check.level <= seedfree.LEVEL


@pytest.mark.parametrize("cut", [{"top_k": 2}, {"top_p": 0.3}, {"allowed_token_ids": tuple(range(0, VOCABULARY, 2))}])
def test_tokens_that_the_limits_exclude_are_rejected(cut: dict[str, Any]) -> None:
    # A flat law hides the edge of a nucleus in the unlisted tail.
    checks = [checked(spoken(seed), **cut) for seed in range(8)]
    rejected = [check for check in checks if check.result is Result.REJECT]
    assert len(rejected) >= 4
    assert all(int(check.metrics["excluded"] or 0) > 3 for check in rejected)


def test_recorded_honest_answers_are_not_rejected_and_another_temperature_is() -> None:
    answers = [*recorded.gpu("T1"), *recorded.gpu("T07"), *recorded.cpu("bf16"), *recorded.truncated()]
    answers += [*recorded.gpu_limits().values(), *(answer for answer, _ in recorded.processed().values())]
    sampled = [
        dataclasses.replace(answer, speculative=True)
        for answer in answers
        if answer.sampling.temperature > 0 and not answer.sampling.bad_words
    ]
    for answer in sampled:
        check = selection.check(answer, vocab_size=recorded.VOCABULARY, eos_token_ids=(recorded.EOS,))
        assert check.result is Result.INCONCLUSIVE, check
        assert check.metrics["excluded"] == 0
    colder = [reheated for answer in sampled[:24] for reheated in [checked(answer, temperature=0.4)]]
    assert sum(check.result is Result.REJECT for check in colder) > 12


def test_greedy_speculative_answers_are_checked_as_ever() -> None:
    answer = dataclasses.replace(recorded.gpu("T0")[0], speculative=True)
    assert selection.check(answer).result is Result.PASS
    sampled = dataclasses.replace(recorded.gpu("T1")[0], speculative=True)
    zero = dataclasses.replace(sampled.sampling, temperature=0.0)
    assert selection.check(dataclasses.replace(sampled, sampling=zero)).result is Result.REJECT


def test_neither_seed_nor_runtime_matters_and_the_id_decides_the_draw() -> None:
    answer = spoken(5)
    first = checked(answer)
    assert checked(dataclasses.replace(answer, runtime="unknown"), seed=None).metrics == first.metrics
    assert checked(dataclasses.replace(answer, id="f" * 32)).metrics["pit"] != first.metrics["pit"]


def test_a_speculative_backend_stays_on_trial() -> None:
    assert selection.standing_cap(spoken(1)) == "trial"
    assert selection.standing_cap(recorded.gpu("T1")[0]) is None


def test_an_unusable_claim_says_nothing() -> None:
    answer = spoken(5)
    broken = dataclasses.replace(answer, claim_logprobs=np.full_like(answer.claim_logprobs, np.nan))
    check = selection.check(broken)
    assert check.result is Result.INCONCLUSIVE
    assert check.reason.startswith("speculative: ")


def test_a_request_that_cannot_be_replayed_is_no_excuse_for_a_speculative_backend() -> None:
    answer = recorded.gpu("T07")[0]
    sampling = dataclasses.replace(answer.sampling, repetition_penalty=1.2)
    plain = selection.check(dataclasses.replace(answer, sampling=sampling))
    assert plain.by_request
    assert not selection.check(dataclasses.replace(answer, sampling=sampling, speculative=True)).by_request
    assert not selection.check(dataclasses.replace(answer, sampling=sampling), declaration_expired=True).by_request
