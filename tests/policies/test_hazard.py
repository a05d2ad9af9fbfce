"""The stop hazard: exact levels on drawn sequences, padding and early stops found, honest answers left alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from policies import hazard, structure
from policies.checks import Result
from policies.evidence import Evidence, Replay, Sampling, Usage
from policies.thinking import UNKNOWN, Tags
from tests.policies import recorded

EOS = 2
WIDTH, VOCABULARY = 21, 400


def drawn(
    rng: np.random.Generator,
    *,
    hazards: Any,
    longest: int,
    temperature: float = 1.0,
    pad: bool = False,
    stop_at: int = -1,
) -> Evidence:
    """An answer drawn from a claim whose end token has the given probabilities; `pad` never lets it stop."""
    rows_ids, rows_logprobs = [], []
    for at in range(longest):
        chance = hazards(at)
        weights = np.sort(rng.dirichlet(np.full(VOCABULARY - 1, 0.05)))[::-1] * (1 - chance)
        ids = np.concatenate([[EOS], 10 + rng.permutation(VOCABULARY - 1)])
        law = np.concatenate([[chance], weights])
        law = np.maximum(law, 1e-30)
        sampled_law = law ** (1 / temperature)
        if pad:
            sampled_law[0] = 0
        at_token = 0 if at == stop_at else int(rng.choice(VOCABULARY, p=sampled_law / sampled_law.sum()))
        order = np.argsort(-law, kind="stable")
        order = order[order != at_token][: WIDTH - 1]
        picked = np.concatenate([[at_token], order])
        rows_ids.append(ids[picked])
        rows_logprobs.append(np.log(law[picked]))
        if ids[at_token] == EOS:
            break
    claim_ids = np.array(rows_ids, np.int32)
    output = np.ascontiguousarray(claim_ids[:, 0])
    return Evidence(
        id="0" * 32,
        endpoint="completions",
        backend="b",
        model="m",
        sampling=Sampling(temperature=temperature, seed=1, max_tokens=longest),
        prompt_ids=np.array([5], np.int32),
        output_ids=output,
        claim_ids=claim_ids,
        claim_logprobs=np.array(rows_logprobs, np.float32),
        finish_reason="stop" if output[-1] == EOS else "length",
        usage=Usage(1, len(output), 1, len(output)),
    )


def judged(evidence: Evidence) -> hazard.Hazard:
    found = hazard.from_claim(evidence, (EOS,), VOCABULARY)
    assert found is not None
    return found


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.4])
def test_levels_hold_and_the_increments_have_mean_zero(temperature: float) -> None:
    rng = np.random.default_rng(7)
    found = [
        judged(drawn(rng, hazards=lambda at: (0.02, 1e-6, 0.3)[at % 3], longest=12, temperature=temperature))
        for _ in range(500)
    ]
    for alpha in (0.3, 0.1, 0.03):
        slack = 3 * (alpha / 500) ** 0.5
        assert np.mean([one.too_long <= alpha for one in found]) <= alpha + slack
        assert np.mean([one.too_early <= alpha for one in found]) <= alpha + slack
    low = np.mean([one.stopped - one.high for one in found])
    high = np.mean([one.stopped - one.low for one in found])
    assert low <= 0.06
    assert high >= -0.06


def test_padding_is_found() -> None:
    rng = np.random.default_rng(1)
    padded = drawn(rng, hazards=lambda at: 0.9 if at > 5 else 0.01, longest=20, pad=True)
    assert judged(padded).too_long < 1e-10
    check = structure.check(padded, vocab_size=VOCABULARY + 10, eos_token_ids=(EOS,), max_model_len=4096)
    assert check.result is Result.REJECT
    assert check.reason.startswith("went_on")
    assert check.level is not None
    assert check.level <= 1e-6
    own_seed = dataclasses.replace(padded, sampling=dataclasses.replace(padded.sampling, client_seed=True))
    check = structure.check(own_seed, vocab_size=VOCABULARY + 10, eos_token_ids=(EOS,), max_model_len=4096)
    assert check.result is Result.PASS
    too_long = check.metrics["too_long"]
    assert too_long is not None
    assert too_long < 1e-10


def test_an_early_stop_is_found_even_after_many_tokens() -> None:
    rng = np.random.default_rng(2)
    cut = drawn(rng, hazards=lambda at: 1e-11 if at == 40 else 1e-3, longest=80, stop_at=40)
    assert cut.output_ids[-1] == EOS
    assert judged(cut).too_early < 1e-6
    check = structure.check(cut, vocab_size=VOCABULARY + 10, eos_token_ids=(EOS,), max_model_len=4096)
    assert check.result is Result.REJECT
    assert check.reason.startswith("stopped_early")


@pytest.mark.parametrize("answers", [*map(recorded.gpu, ("T1", "T07")), *map(recorded.cpu, ("bf16", "fp8sim"))])
def test_recorded_answers_are_neither_early_nor_late(answers: tuple[Evidence, ...]) -> None:
    found = [hazard.from_claim(answer, (recorded.EOS,), recorded.VOCABULARY) for answer in answers]
    assert all(one is not None and one.level > 1e-3 for one in found)


def test_truncated_answers_are_neither_early_nor_late() -> None:
    answers = [*recorded.truncated(), *recorded.gpu_limits().values()]
    found = [hazard.from_claim(answer, (recorded.EOS,), recorded.VOCABULARY) for answer in answers]
    levels = [one.level for one in found if one is not None]
    assert len(levels) > 30
    assert min(levels) > 1e-3


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"grammar": True},
        {"logit_bias": ((EOS, -5.0),)},
        {"allowed_token_ids": (EOS, 11)},
        {"repetition_penalty": 1.2},
        {"bad_words": ("x",)},
        {"ignore_eos": True},
    ],
)
def test_where_the_law_is_not_known_nothing_is_said(sampling: dict[str, Any]) -> None:
    evidence = drawn(np.random.default_rng(3), hazards=lambda at: 0.5, longest=5)
    bent = dataclasses.replace(evidence, sampling=dataclasses.replace(evidence.sampling, **sampling))
    assert hazard.from_claim(bent, (EOS,), VOCABULARY) is None


def test_min_tokens_hold_the_end_back() -> None:
    rng = np.random.default_rng(4)
    evidence = drawn(rng, hazards=lambda at: 0.9, longest=15, pad=True)
    held = dataclasses.replace(evidence, sampling=dataclasses.replace(evidence.sampling, min_tokens=15))
    assert judged(held).too_long == 1.0
    assert judged(evidence).too_long < 1e-10


def test_a_replay_says_the_same_with_slack() -> None:
    rng = np.random.default_rng(5)
    padded = drawn(rng, hazards=lambda at: 0.9, longest=20, pad=True)
    replay = Replay(padded.claim_ids, padded.claim_logprobs)
    found = hazard.from_replay(padded, replay, (EOS,), VOCABULARY)
    assert found is not None
    assert judged(padded).too_long < found.too_long < 1e-4
    listed = Replay(padded.claim_ids, padded.claim_logprobs, form="ids")
    assert hazard.from_replay(padded, listed, (EOS,), VOCABULARY) is None


def test_the_chance_of_the_same_answer_again_is_bounded_from_above() -> None:
    rng = np.random.default_rng(6)
    for temperature in (0.7, 1.0, 1.5):
        evidence = drawn(rng, hazards=lambda at: 0.01, longest=30, temperature=temperature)
        chance = hazard.drawn_again(evidence, VOCABULARY)
        assert chance is not None
        if temperature == 1.0:
            assert chance == pytest.approx(float(evidence.claim_logprobs[:, 0].sum()), abs=0.05)
        assert chance < 0
    assert hazard.drawn_again(recorded.gpu("T0")[0], recorded.VOCABULARY) is None


def test_a_budget_that_is_not_reached_does_not_hide_an_end() -> None:
    tags = Tags(frozenset({49_001}), frozenset({49_002}))
    answer = next(answer for answer in recorded.gpu("T1") if hazard.from_claim(answer, (recorded.EOS,)) is not None)
    plain = hazard.from_claim(answer, (recorded.EOS,), recorded.VOCABULARY)
    for budget, given in ((100_000, UNKNOWN), (100_000, tags), (1, tags)):
        asked = dataclasses.replace(answer, request=b'{"thinking_token_budget": %d}' % budget)
        assert hazard.from_claim(asked, (recorded.EOS,), recorded.VOCABULARY, tags=given) == plain
    asked = dataclasses.replace(answer, request=b'{"thinking_token_budget": 1}')
    assert hazard.from_claim(asked, (recorded.EOS,), recorded.VOCABULARY) is None


def test_a_forced_tag_makes_no_answer_unlikely_to_come_again() -> None:
    tags = Tags(frozenset({49_001}), frozenset({49_002}))
    answer = recorded.gpu("T1")[0]
    output, claim, logprobs = answer.output_ids.copy(), answer.claim_ids.copy(), answer.claim_logprobs.copy()
    output[5] = claim[5, 0] = 49_002
    logprobs[5, 0] = -30
    request = b'{"thinking_token_budget": 5}'
    asked = dataclasses.replace(
        answer,
        request=request,
        prompt_ids=np.array([3, 49_001], np.int32),
        output_ids=output,
        claim_ids=claim,
        claim_logprobs=logprobs,
    )
    forced, drawn = (hazard.drawn_again(asked, recorded.VOCABULARY, tags=given) for given in (tags, UNKNOWN))
    unasked = hazard.drawn_again(dataclasses.replace(asked, request=b"{}"), recorded.VOCABULARY, tags=tags)
    assert forced is not None
    assert unasked is not None
    assert forced - unasked > 20
    assert drawn is not None
