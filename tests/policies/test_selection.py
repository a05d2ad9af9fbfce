"""The selection check on recorded evidence and on evidence sampled by a model of vLLM's sampler."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

from policies import selection
from policies.checks import Check, Result
from policies.evidence import Evidence, Sampling
from policies.thinking import UNKNOWN, Tags
from tests.policies import recorded


def reseeded(answer: Evidence, **changes: Any) -> Evidence:
    return dataclasses.replace(answer, sampling=dataclasses.replace(answer.sampling, **changes))


def calls_of(function: Callable[[Evidence], object], answer: Evidence) -> int:
    """How many functions are called, in Python and C."""
    count = 0

    def called(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(called)
    try:
        function(answer)
    finally:
        sys.setprofile(None)
    return count


def totals(checks: list[Check]) -> tuple[int, int]:
    return sum(int(c.metrics["violations"] or 0) for c in checks), sum(int(c.metrics["tokens"] or 0) for c in checks)


HONEST = {
    "T1": recorded.gpu("T1"),
    "T07": recorded.gpu("T07"),
    "T0": recorded.gpu("T0"),
    "cpu bf16": recorded.cpu("bf16"),
    "cpu fp8": recorded.cpu("fp8sim"),
    "cpu truncated": recorded.truncated(),
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_answers_have_no_violation(name: str) -> None:
    checks = [selection.check(answer, vocab_size=recorded.VOCABULARY) for answer in HONEST[name]]
    assert totals(checks)[0] == 0
    assert all(check.result is not Result.REJECT for check in checks)
    if name != "cpu truncated":
        assert all(check.result is Result.PASS and check.metrics["skipped"] == 0 for check in checks)


@pytest.mark.parametrize("name", ["T1", "T07", "cpu bf16", "cpu fp8"])
@pytest.mark.parametrize("shift", [-1, 1])
def test_a_seed_off_by_one_shows_in_a_third_of_the_tokens(name: str, shift: int) -> None:
    answers = [answer for answer in HONEST[name] if len(answer.output_ids) >= 16]
    checks = [selection.check(reseeded(a, seed=(a.sampling.seed or 0) + shift)) for a in answers]
    violations, tokens = totals(checks)
    assert violations > 0.3 * tokens
    for check in checks:
        assert check.result is Result.REJECT
        assert check.level is not None
        assert check.level < 0.01
        assert check.reason.startswith("not_sampled_from_claim")


def test_the_prompt_length_matters_on_a_gpu_and_not_on_a_cpu() -> None:
    longer = [dataclasses.replace(a, prompt_ids=np.append(a.prompt_ids, np.int32(5))) for a in recorded.gpu("T1")]
    violations, tokens = totals([selection.check(answer) for answer in longer])
    assert violations > 0.3 * tokens
    unknown = dataclasses.replace(recorded.gpu("T1")[0], prompt_ids=np.zeros(0, np.int32))
    assert selection.check(unknown).reason.startswith("no_prompt_ids")
    assert selection.check(dataclasses.replace(recorded.cpu("bf16")[0], prompt_ids=np.zeros(0, np.int32))).result is (
        Result.PASS
    )


@pytest.mark.parametrize(
    ("name", "temperature"), [("T1", 0.7), ("T1", 1.2), ("T07", 1.0), ("cpu bf16", 1.4), ("cpu bf16", 0.0)]
)
def test_another_temperature_is_caught(name: str, temperature: float) -> None:
    checks = [selection.check(reseeded(answer, temperature=temperature)) for answer in HONEST[name]]
    violations, tokens = totals(checks)
    assert violations > 0.01 * tokens
    assert sum(check.result is Result.REJECT for check in checks) > 0.5 * len(checks)


@pytest.mark.parametrize("cut", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.3}])
def test_a_truncation_that_was_not_applied_is_caught(cut: dict[str, Any]) -> None:
    checks = [selection.check(reseeded(answer, **cut)) for answer in recorded.gpu("T1")]
    assert totals(checks)[0] > 0.05 * totals(checks)[1]


@pytest.mark.parametrize("lost", ["top_k", "top_p", "min_p"])
def test_a_truncation_that_was_not_asked_for_is_caught(lost: str) -> None:
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    cut = [a for a in recorded.truncated() if getattr(a.sampling, lost) != neutral[lost]]
    checks = [selection.check(reseeded(answer, **neutral)) for answer in cut]
    assert totals(checks)[0] > 0


def test_an_edited_token_is_found_at_its_place() -> None:
    answer = recorded.gpu("T07")[0]
    ids, logprobs = answer.claim_ids.copy(), answer.claim_logprobs.copy()
    ids[5, [0, 1]], logprobs[5, [0, 1]] = ids[5, [1, 0]], logprobs[5, [1, 0]]
    check = selection.check(dataclasses.replace(answer, claim_ids=ids, claim_logprobs=logprobs, output_ids=ids[:, 0]))
    assert check.result is Result.REJECT
    assert check.metrics["violations"] == 1
    assert check.metrics["first_violation"] == 5
    # One violation among n tokens has probability 1 − (1 − 1e-4)ⁿ under the contaminated null.
    assert check.level == pytest.approx(1 - (1 - 1e-4) ** len(answer.output_ids), rel=1e-6)
    assert float(check.metrics["worst_margin"] or 0) > 1e-3


def test_greedy_accepts_ties_and_rejects_the_second_best() -> None:
    ids = np.array([[4, 9, 2], [4, 9, 2]], np.int32)
    logprobs = np.log(np.array([[0.4, 0.4, 0.1], [0.3, 0.4, 0.1]], np.float32))
    answer = recorded.evidence(np.arange(3), ids, logprobs, sampling=Sampling(temperature=0.0))
    check = selection.check(answer)
    assert check.metrics["violations"] == 1
    assert check.metrics["first_violation"] == 1
    tie = dataclasses.replace(answer, output_ids=answer.output_ids[:1], claim_ids=ids[:1], claim_logprobs=logprobs[:1])
    assert selection.check(tie).result is Result.PASS


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"bad_words": ("no",), "presence_penalty": 0.5}, "bad_words"),
        ({"min_tokens": 4}, "min_tokens"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_parameters_that_are_not_replayed_are_named(changes: dict[str, Any], word: str, temperature: float) -> None:
    check = selection.check(reseeded(recorded.gpu("T1")[0], temperature=temperature, **changes))
    assert check.result is Result.INCONCLUSIVE
    assert check.by_request
    assert word in check.reason


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (rb'{"water\u006darking": true}', "watermarking"),
        (b'{"messages": [], "watermarking": true}', "watermarking"),
    ],
)
def test_request_fields_that_change_the_noise_are_named(body: bytes, word: str) -> None:
    wrong = reseeded(recorded.gpu("T1")[0], seed=1)
    check = selection.check(dataclasses.replace(wrong, request=body))
    assert check.result is Result.INCONCLUSIVE
    assert check.by_request
    assert word in check.reason
    for other in (b"", b"{", b'"watermarking"', b'{"watermarking": false, "thinking_token_budget": null}'):
        assert selection.check(dataclasses.replace(wrong, request=other)).result is Result.REJECT


OPEN, CLOSE = 8001, 8002
ROWS = ("output_ids", "claim_ids", "claim_logprobs")
TAGS = Tags(frozenset({OPEN}), frozenset({CLOSE}))


def budgeted(answer: Evidence, budget: int, prompt: list[int]) -> Evidence:
    request = json.dumps({"thinking_token_budget": budget}).encode()
    return dataclasses.replace(answer, request=request, prompt_ids=np.array(prompt, np.int32))


def losing(answer: Evidence, tokens: dict[int, int]) -> Evidence:
    """The answer with these tokens at these places, which lose by far under its claim."""
    output, claim, logprobs = answer.output_ids.copy(), answer.claim_ids.copy(), answer.claim_logprobs.copy()
    for row, token in tokens.items():
        output[row] = claim[row, 0] = token
        logprobs[row, 0] = -15
    return dataclasses.replace(answer, output_ids=output, claim_ids=claim, claim_logprobs=logprobs)


def test_the_tag_that_a_budget_forces_is_excused_at_its_place_and_nowhere_else() -> None:
    honest = budgeted(recorded.gpu("T0")[0], 40, [5, OPEN])
    assert selection.check(honest, tags=TAGS).result is Result.PASS
    forced = losing(honest, {40: CLOSE})
    assert selection.check(forced, tags=TAGS).result is Result.PASS
    assert selection.check(dataclasses.replace(forced, request=b"{}"), tags=TAGS).result is Result.REJECT
    for place in (0, 30, 39, 41 + 32, 90):
        assert selection.check(losing(honest, {place: CLOSE}), tags=TAGS).result is Result.REJECT, place
    # Reasoning that was never opened, or that had ended, has no end to force.
    for prompt in ([5], [OPEN, CLOSE], [CLOSE]):
        assert selection.check(budgeted(forced, 40, prompt), tags=TAGS).result is Result.REJECT
    # What the prompt holds of the reasoning counts.
    assert selection.check(budgeted(losing(honest, {38: CLOSE}), 40, [OPEN, 6, 7]), tags=TAGS).result is Result.PASS
    assert selection.check(budgeted(losing(honest, {0: CLOSE}), 2, [OPEN, 6, 7, 8]), tags=TAGS).result is Result.PASS


def test_words_before_a_forced_tag_are_open_and_what_stands_elsewhere_is_not() -> None:
    honest = budgeted(recorded.gpu("T0")[0], 40, [5, OPEN])
    words = {40: 7000, 41: 7001, 42: 7002}
    check = selection.check(losing(honest, {**words, 43: CLOSE}), tags=TAGS)
    assert (check.result, check.by_request, check.reason[:14]) == (Result.INCONCLUSIVE, False, "forced_unclear")
    assert selection.check(losing(honest, words), tags=TAGS).result is Result.REJECT
    for place in (39, 44):
        more = losing(honest, {**words, 43: CLOSE, place: 7003})
        assert selection.check(more, tags=TAGS).result is Result.REJECT
    broken = dataclasses.replace(
        losing(honest, words), **{name: getattr(losing(honest, words), name)[:43] for name in ROWS}
    )
    assert selection.check(broken, tags=TAGS).reason.startswith("forced_unclear")


def test_without_tags_only_as_much_as_a_budget_can_have_forced_is_open() -> None:
    honest = budgeted(recorded.gpu("T0")[0], 20, [1, 2, 3])
    once, twice = {40: 7000, 41: 7001}, {40: 7000, 41: 7001, 90: 7000, 91: 7001}
    for words in (once, twice):
        check = selection.check(losing(honest, words))
        assert (check.result, check.by_request, check.reason[:14]) == (Result.INCONCLUSIVE, False, "forced_unclear")
    assert selection.check(losing(honest, {**twice, 91: 7005})).result is Result.REJECT
    assert selection.check(losing(honest, {17: 7000})).result is Result.REJECT
    assert selection.check(losing(honest, {18: 7000})).result is Result.INCONCLUSIVE


@pytest.mark.parametrize("tokens", [8, 16, 32, 64])
@pytest.mark.parametrize("tags", [UNKNOWN, TAGS])
def test_a_budget_that_is_not_reached_excuses_nothing(tokens: int, tags: Tags) -> None:
    for answer in recorded.gpu("T1"):
        short = dataclasses.replace(answer, **{name: getattr(answer, name)[:tokens] for name in ROWS})
        wrong = reseeded(short, seed=12345)
        found = selection.check(wrong)
        for budget in (100_000, -1, "20", True, 2**70):
            request = json.dumps({"thinking_token_budget": budget}).encode()
            check = selection.check(dataclasses.replace(wrong, request=request), tags=tags)
            assert (check.result, check.reason) == (found.result, found.reason)


@pytest.mark.parametrize(
    ("tokens", "edits", "result"),
    [(512, 1, Result.REJECT), (520, 1, Result.INCONCLUSIVE), (520, 2, Result.REJECT), (4096, 2, Result.INCONCLUSIVE)],
)
def test_no_reject_is_stated_at_a_high_level(tokens: int, edits: int, result: Result) -> None:
    ids = np.tile(np.arange(21, dtype=np.int32), (tokens, 1))
    logprobs = np.tile(np.linspace(-1, -9, 21, dtype=np.float32), (tokens, 1))
    for row in range(edits):
        logprobs[row, :2] = logprobs[row, 1::-1]
    answer = recorded.evidence(
        np.arange(5), ids, logprobs, sampling=Sampling(temperature=0.0, max_tokens=tokens), runtime=recorded.GPU
    )
    check = selection.check(answer)
    assert check.metrics["violations"] == edits
    assert check.result is result
    assert not check.by_request
    if result is Result.REJECT:
        assert check.level is not None
        assert check.level <= selection.REJECT_LEVEL
    else:
        assert check.reason.startswith("few_violations")


def test_what_cannot_be_tested_is_inconclusive_and_not_the_requests_doing() -> None:
    answer = recorded.gpu("T1")[0]
    none = np.zeros((0, 0))
    for changed, code in [
        (dataclasses.replace(answer, runtime="vllm-0.20-v2"), "unknown_runtime"),
        (dataclasses.replace(answer, runtime=""), "unknown_runtime"),
        (reseeded(answer, seed=None), "no_seed"),
        (reseeded(answer, seed=-1), "no_seed"),
        (dataclasses.replace(answer, output_ids=np.zeros(0, np.int32)), "no_tokens"),
        (
            dataclasses.replace(answer, claim_ids=none.astype(np.int32), claim_logprobs=none.astype(np.float32)),
            "no_claim",
        ),
        (reseeded(answer, temperature=float("nan")), "bad_temperature"),
        (reseeded(answer, temperature=-1.0), "bad_temperature"),
    ]:
        check = selection.check(changed)
        assert check.result is Result.INCONCLUSIVE
        assert not check.by_request
        assert check.reason.startswith(code)


def test_an_unknown_runtime_can_still_be_tested_at_temperature_zero() -> None:
    assert selection.check(dataclasses.replace(recorded.gpu("T0")[0], runtime="")).result is Result.PASS


def test_a_prefix_with_claims_is_tested_and_the_rest_is_skipped() -> None:
    answer = recorded.gpu("T1")[0]
    half = len(answer.output_ids) // 2
    check = selection.check(
        dataclasses.replace(answer, claim_ids=answer.claim_ids[:half], claim_logprobs=answer.claim_logprobs[:half])
    )
    assert check.result is Result.INCONCLUSIVE
    assert check.reason.startswith("undecided")
    assert check.metrics["checked"] == half
    logprobs = answer.claim_logprobs.copy()
    logprobs[3, 0] = np.nan
    check = selection.check(dataclasses.replace(answer, claim_logprobs=logprobs))
    assert check.result is Result.PASS
    assert check.metrics["skipped"] == 1


@pytest.mark.parametrize(("runtime", "cut"), [(recorded.GPU, {}), (recorded.CPU, {}), (recorded.GPU, {"top_p": 0.9})])
def test_a_token_costs_few_calls(runtime: str, cut: dict[str, Any]) -> None:
    answers = recorded.gpu("T1")
    whole = dataclasses.replace(
        reseeded(answers[0], **cut),
        runtime=runtime,
        output_ids=np.concatenate([a.output_ids for a in answers])[:1000],
        claim_ids=np.concatenate([a.claim_ids for a in answers])[:1000],
        claim_logprobs=np.concatenate([a.claim_logprobs for a in answers])[:1000],
    )
    assert len(whole.output_ids) == 1000
    selection.check(whole)
    # A loop over tokens would take dozens each; milliseconds in all are a few calls of numpy.
    assert calls_of(selection.check, whole) < 5 * 1000


@pytest.mark.parametrize("name", sorted(recorded.gpu_limits()))
def test_several_cuts_at_once_on_a_gpu_find_no_violation(name: str) -> None:
    check = selection.check(recorded.gpu_limits()[name], vocab_size=recorded.VOCABULARY)
    assert check.metrics["violations"] == 0
    assert check.result is not Result.REJECT


def test_several_cuts_at_once_still_catch_a_wrong_seed() -> None:
    caught = 0
    for answer in recorded.gpu_limits().values():
        sampling = dataclasses.replace(answer.sampling, seed=(answer.sampling.seed or 0) + 1)
        check = selection.check(dataclasses.replace(answer, sampling=sampling), vocab_size=recorded.VOCABULARY)
        caught += check.result is Result.REJECT
    assert caught == len(recorded.gpu_limits())
