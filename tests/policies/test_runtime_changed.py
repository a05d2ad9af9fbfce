"""A violated noise is told from another known one, and from none."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from policies import noise, selection
from policies.checks import Result
from policies.evidence import Evidence, Sampling
from tests.policies import recorded
from tests.policies.sampler import draw


def declared(answer: Evidence, runtime: str) -> Evidence:
    return dataclasses.replace(answer, runtime=runtime)


def chance(answer: Evidence) -> float:
    """Probability that fresh noise would have crowned the same tokens."""
    outcome = selection.fit(answer, answer.runtime, vocab_size=recorded.VOCABULARY, eos_token_ids=(recorded.EOS,))
    return 1.0 if outcome is None else float(np.exp(outcome.chance.sum()))


@pytest.mark.parametrize(
    ("answers", "wrong"),
    [
        (recorded.cpu("bf16"), recorded.GPU),
        (recorded.gpu("T1"), recorded.CPU),
        (recorded.gpu("T07"), recorded.CPU),
        ([answer for answer, words in recorded.processed().values() if not words][:40], recorded.GPU),
    ],
)
def test_honest_answers_under_the_wrong_declaration_are_no_fraud(answers: list[Evidence], wrong: str) -> None:
    named = 0
    for answer in answers:
        check = selection.check(declared(answer, wrong), vocab_size=recorded.VOCABULARY, eos_token_ids=(recorded.EOS,))
        # What few tokens decide, or all but certain ones, may fit the other noise by accident.
        assert check.result is not Result.REJECT or chance(answer) > selection.DOUBT_LEVEL
        if check.reason.startswith("runtime_changed"):
            named += 1
            assert selection.fitting_runtime(check.reason) == answer.runtime
            assert check.result is Result.INCONCLUSIVE
            assert not check.by_request
            assert float(check.metrics["fit_log10"] or 0) <= -6
    assert named > 0.3 * len(answers)


@pytest.mark.parametrize("name", ["T1", "T07"])
@pytest.mark.parametrize("runtime", sorted(noise.RUNTIMES))
def test_tokens_of_no_known_noise_are_still_rejected(name: str, runtime: str) -> None:
    for answer in recorded.gpu(name):
        if len(answer.output_ids) < 16:
            continue
        sampling = dataclasses.replace(answer.sampling, seed=(answer.sampling.seed or 0) + 1)
        check = selection.check(dataclasses.replace(answer, sampling=sampling, runtime=runtime))
        assert check.result is Result.REJECT


def test_a_fit_that_chance_could_make_excuses_nothing() -> None:
    # Near-certain tokens fit any noise; one edited token violates every one.
    tokens = 60
    ids = np.tile(np.arange(3, dtype=np.int32), (tokens, 1))
    logprobs = np.tile(np.array([-1e-4, -9.5, -12.0], np.float32), (tokens, 1))
    logprobs[7, :2] = logprobs[7, 1::-1]
    sampling = Sampling(temperature=1.0, seed=4)
    answer = recorded.evidence(np.arange(9), ids, logprobs, sampling=sampling, runtime=recorded.GPU)
    assert selection.check(answer).result is Result.REJECT


def test_a_greedy_violation_is_no_change_of_runtime() -> None:
    answer = recorded.gpu("T1")[0]
    greedy = dataclasses.replace(answer, sampling=dataclasses.replace(answer.sampling, temperature=0.0))
    assert selection.check(greedy).result is Result.REJECT


def test_an_expired_declaration_says_nothing_at_t_over_0_and_all_at_t_0() -> None:
    check = selection.check(recorded.gpu("T1")[0], declaration_expired=True)
    assert check.result is Result.INCONCLUSIVE
    assert check.reason.startswith("declaration_expired")
    assert not check.by_request
    assert selection.check(recorded.gpu("T0")[0], declaration_expired=True).result is Result.PASS


def test_the_stated_chance_is_that_of_fresh_noise() -> None:
    # Racing the same tokens under many unrelated seeds, they all win as often as the chance says.
    answer = draw(Sampling(temperature=1.0, seed=1), recorded.GPU, tokens=2, random=np.random.default_rng(3))
    outcome = selection.fit(answer, recorded.GPU, vocab_size=300)
    assert outcome is not None
    chance = float(np.exp(outcome.chance.sum()))
    wins = 0
    for seed in range(2, 3002):
        other = dataclasses.replace(answer, sampling=dataclasses.replace(answer.sampling, seed=seed))
        raced = selection.fit(other, recorded.GPU, vocab_size=300)
        assert raced is not None
        wins += not raced.violation.any()
    assert abs(wins / 3000 - chance) < 5 * np.sqrt(chance * (1 - chance) / 3000)


def test_a_short_answer_that_fits_another_noise_is_in_doubt() -> None:
    answer = recorded.cpu("bf16")[0]
    found = set()
    for length in range(1, 40):
        short = dataclasses.replace(
            answer,
            runtime=recorded.GPU,
            output_ids=answer.output_ids[:length],
            claim_ids=answer.claim_ids[:length],
            claim_logprobs=answer.claim_logprobs[:length],
        )
        check = selection.check(short)
        if check.reason.startswith("runtime_unclear"):
            assert check.result is Result.INCONCLUSIVE
            assert selection.fitting_runtime(check.reason) is None
            assert -6 < float(check.metrics["fit_log10"] or 0) <= -2
        found.add(check.reason.partition(":")[0])
    assert {"runtime_unclear", "runtime_changed"} <= found
