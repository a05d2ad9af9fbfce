"""The structure check, rule by rule, each broken on otherwise honest evidence."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from policies import structure
from policies._claimed import claim_findings
from policies.checks import Check, Result
from policies.evidence import EXCUSED_FAULTS, MASKED, WITHHELD_FAULTS, Evidence, Sampling, Usage
from tests.policies import recorded

LIMITS: dict[str, Any] = {"vocab_size": recorded.VOCABULARY, "max_model_len": 2048, "eos_token_ids": (recorded.EOS,)}
ANSWER = next(answer for answer in recorded.cpu("bf16") if answer.finish_reason == "length")
STOPPED = next(answer for answer in recorded.cpu("bf16") if answer.finish_reason == "stop")


def checked(answer: Evidence, **changes: Any) -> Check:
    return structure.check(dataclasses.replace(answer, **changes), **LIMITS)


def sampling(answer: Evidence, **changes: Any) -> Sampling:
    return dataclasses.replace(answer.sampling, **changes)


def claim(row: int, column: int, *, id: int | None = None, logprob: float | None = None) -> dict[str, Any]:
    ids, logprobs = ANSWER.claim_ids.copy(), ANSWER.claim_logprobs.copy()
    if id is not None:
        ids[row, column] = id
    if logprob is not None:
        logprobs[row, column] = logprob
    return {"claim_ids": ids, "claim_logprobs": logprobs}


def assert_withheld(check: Check, code: str) -> None:
    assert check.result is Result.WITHHELD, check
    assert code in [part.split(":")[0] for part in check.reason.split("; ")]
    assert check.level is None


def assert_rejected(check: Check, code: str) -> None:
    assert check.result is Result.REJECT, check
    assert code in [part.split(":")[0] for part in check.reason.split("; ")]
    assert check.level == 0.0


@pytest.mark.parametrize(
    "answers",
    [
        recorded.gpu("T1"),
        recorded.gpu("T07"),
        recorded.gpu("T0"),
        recorded.cpu("bf16"),
        recorded.cpu("fp8sim"),
        recorded.truncated(),
    ],
)
def test_recorded_answers_pass(answers: tuple[Evidence, ...]) -> None:
    for answer in answers:
        for limits in (LIMITS, {}):
            check = structure.check(answer, rendered_prompt=answer.prompt_ids.copy(), **limits)
            assert check.result is Result.PASS, check
            assert check.metrics["tokens"] == len(answer.output_ids)


@pytest.mark.parametrize("code", sorted(WITHHELD_FAULTS))
def test_a_withheld_fault_is_the_reason(code: str) -> None:
    assert_withheld(checked(ANSWER, faults=(code,)), code)
    assert_withheld(checked(ANSWER, faults=("client_left", code), complete=False), code)


@pytest.mark.parametrize("code", sorted(EXCUSED_FAULTS))
def test_an_excused_fault_is_inconclusive(code: str) -> None:
    check = checked(ANSWER, faults=(code,), complete=False, usage=None, finish_reason=None)
    assert check.result is Result.INCONCLUSIVE
    assert check.reason.startswith(code)
    assert not check.by_request


def test_an_unknown_fault_is_inconclusive() -> None:
    assert checked(ANSWER, faults=("cosmic_ray",)).result is Result.INCONCLUSIVE


def test_a_prefix_is_still_checked_and_its_end_is_not() -> None:
    half = len(ANSWER.output_ids) // 2
    prefix: dict[str, Any] = {
        "output_ids": ANSWER.output_ids[:half],
        "claim_ids": ANSWER.claim_ids[:half],
        "claim_logprobs": ANSWER.claim_logprobs[:half],
        "complete": False,
        "finish_reason": None,
        "usage": None,
        "faults": ("upstream_closed",),
    }
    assert checked(ANSWER, **prefix).result is Result.INCONCLUSIVE
    assert checked(ANSWER, **{**prefix, "faults": ()}).reason.startswith("incomplete")
    bad = ANSWER.claim_logprobs[:half].copy()
    bad[1, 1] = 0.5
    assert_rejected(checked(ANSWER, **{**prefix, "claim_logprobs": bad}), "positive_logprob")


def test_nothing_arrived() -> None:
    empty = {
        "output_ids": np.zeros(0, np.int32),
        "claim_ids": np.zeros((0, 21), np.int32),
        "claim_logprobs": np.zeros((0, 21), np.float32),
    }
    assert_withheld(checked(ANSWER, **empty), "no_token_ids")
    gone = checked(ANSWER, **empty, faults=("upstream_error",), complete=False, prompt_ids=np.zeros(0, np.int32))
    assert gone.result is Result.INCONCLUSIVE


def test_without_a_tokenizer_a_missing_claim_is_not_the_backends_doing() -> None:
    empty = {"claim_ids": np.zeros((0, 21), np.int32), "claim_logprobs": np.zeros((0, 21), np.float32)}
    check = checked(ANSWER, **empty, faults=("no_tokenizer",))
    assert check.result is Result.INCONCLUSIVE
    assert_withheld(checked(ANSWER, **empty), "no_logprobs")


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        (claim(3, 0, id=-1, logprob=-np.inf), "bad_logprobs"),
        (claim(3, 0, logprob=np.nan), "bad_logprobs"),
        (claim(3, 4, logprob=np.inf), "bad_logprobs"),
        (claim(3, 4, logprob=-np.inf), "bad_logprobs"),
        (claim(3, 0, id=int(ANSWER.output_ids[3]) + 1), "bad_ids"),
        (claim(3, 4, id=recorded.VOCABULARY), "bad_ids"),
        (claim(3, 4, id=-2), "bad_ids"),
        (claim(3, 19, logprob=MASKED), "masked_without_grammar"),
        (claim(3, 4, id=int(ANSWER.claim_ids[3, 5])), "duplicate_entries"),
        (claim(3, 4, id=int(ANSWER.claim_ids[3, 0])), "duplicate_entries"),
        (claim(3, 9, logprob=float(ANSWER.claim_logprobs[3, 8]) + 1e-3), "unsorted_claim"),
        (
            {"claim_ids": ANSWER.claim_ids[:, :6], "claim_logprobs": ANSWER.claim_logprobs[:, :6]},
            "short_claim",
        ),
        (
            {"claim_ids": ANSWER.claim_ids[:-1], "claim_logprobs": ANSWER.claim_logprobs[:-1]},
            "no_logprobs",
        ),
        ({"output_ids": ANSWER.output_ids[:-1], "sampling": sampling(ANSWER, max_tokens=159)}, "bad_ids"),
        ({"prompt_ids": np.zeros(0, np.int32)}, "no_prompt_ids"),
        ({"prompt_ids": np.array([recorded.VOCABULARY], np.int32)}, "bad_ids"),
        ({"usage": None}, "no_usage"),
        ({"finish_reason": None}, "bad_finish_reason"),
        ({"finish_reason": "content_filter"}, "bad_finish_reason"),
        ({"finish_reason": "repetition"}, "bad_finish_reason"),
        ({"finish_reason": "repetition", "request": b'{"repetition_detection":null}'}, "bad_finish_reason"),
        ({"claim_logprobs": ANSWER.claim_logprobs[:, :3]}, "bad_logprobs"),
    ],
)
def test_missing_or_unusable_evidence_is_withheld(changes: dict[str, Any], code: str) -> None:
    assert_withheld(checked(ANSWER, **changes), code)


@pytest.mark.parametrize("fault", ["no_tokenizer", "evidence_too_large"])
def test_a_claim_that_was_not_kept_is_nobodys_lie(fault: str) -> None:
    none = {"claim_ids": np.zeros((0, 0), np.int32), "claim_logprobs": np.zeros((0, 0), np.float32)}
    found = checked(ANSWER, **none, faults=(fault,))
    assert (found.result, found.reason.partition(":")[0]) == (Result.INCONCLUSIVE, fault)
    assert_withheld(checked(ANSWER, **none), "no_logprobs")


def test_masked_entries_are_fine_under_a_grammar_unless_sampled() -> None:
    hole = claim(3, 19, logprob=MASKED)
    grammar = sampling(ANSWER, grammar=True)
    assert "masked_mass" in checked(ANSWER, **hole, sampling=grammar).reason
    row = hole["claim_logprobs"][3]
    row[row > MASKED] -= np.log(np.exp(row[row > MASKED], dtype=np.float64).sum())
    assert checked(ANSWER, **hole, sampling=grammar).result is Result.PASS
    assert_withheld(checked(ANSWER, **claim(3, 0, logprob=MASKED), sampling=grammar), "sampled_masked")


@pytest.mark.parametrize(
    ("asked", "honest"),
    [
        ({"min_tokens": 4, "stop_token_ids": tuple(ANSWER.claim_ids[3, 1:].tolist())}, True),
        ({"min_tokens": 4, "stop_token_ids": tuple(ANSWER.claim_ids[3, 2:].tolist())}, False),
        ({"min_tokens": 3, "stop_token_ids": tuple(ANSWER.claim_ids[3, 1:].tolist())}, False),
        ({"bad_words": ("x",)}, True),
        ({"allowed_token_ids": (1_000_000,)}, True),
        ({"allowed_token_ids": (int(ANSWER.claim_ids[3, 1]),)}, False),
    ],
)
def test_a_masked_token_is_sampled_where_nothing_is_left(asked: dict[str, Any], honest: bool) -> None:
    masked = dataclasses.replace(
        ANSWER, **claim(3, 0, logprob=MASKED), sampling=sampling(ANSWER, grammar=True, **asked)
    )
    stops = frozenset(masked.sampling.stop_token_ids)
    (found,), _ = claim_findings(masked, None, stops)
    assert found.code == "sampled_masked"
    assert (found.result is Result.WITHHELD) is not honest


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        (claim(3, 1, logprob=0.001), "positive_logprob"),
        (claim(3, 0, logprob=3e38), "positive_logprob"),
        ({"claim_logprobs": np.minimum(ANSWER.claim_logprobs + 0.5, 0)}, "mass_over_one"),
        ({"usage": Usage(37, 999, 37, 160)}, "usage_mismatch"),
        ({"usage": Usage(38, 160, 37, 160)}, "usage_mismatch"),
        ({"usage": Usage(10**30, -1, 37, 160)}, "usage_mismatch"),
        ({"finish_reason": "stop"}, "finish_mismatch"),
        ({"finish_reason": "tool_calls", "sampling": sampling(ANSWER, max_tokens=400)}, "finish_mismatch"),
        ({"sampling": sampling(ANSWER, max_tokens=400)}, "finish_mismatch"),
        ({"sampling": sampling(ANSWER, max_tokens=100)}, "too_many_tokens"),
        ({"sampling": sampling(ANSWER, max_tokens=100), "complete": False}, "too_many_tokens"),
        ({"sampling": sampling(ANSWER, stop_token_ids=(int(ANSWER.output_ids[8]),))}, "tokens_after_stop"),
    ],
)
def test_contradictions_are_rejected(changes: dict[str, Any], code: str) -> None:
    assert_rejected(checked(ANSWER, **changes), code)


def test_rounding_is_allowed_for() -> None:
    assert checked(ANSWER, **claim(3, 0, logprob=5e-5)).result in (Result.PASS, Result.REJECT)
    ids = np.arange(21, dtype=np.int32)[None]
    logprobs = np.full((1, 21), -30.0, np.float32)
    logprobs[0, 0] = 5e-5
    one = recorded.evidence(np.arange(3), ids, logprobs, sampling=Sampling(max_tokens=1), finish_reason="length")
    assert structure.check(one).result is Result.PASS
    logprobs[0, 0] = 2e-4
    assert_rejected(structure.check(dataclasses.replace(one, claim_logprobs=logprobs)), "positive_logprob")
    logprobs[0, :2] = np.log([0.6, 0.409])
    assert structure.check(dataclasses.replace(one, claim_logprobs=logprobs)).result is Result.PASS
    logprobs[0, :2] = np.log([0.6, 0.42])
    assert_rejected(structure.check(dataclasses.replace(one, claim_logprobs=logprobs)), "mass_over_one")


def test_the_prompt_must_be_the_references_own_rendering() -> None:
    other = ANSWER.prompt_ids.copy()
    other[4] += 1
    for rendered in (other, ANSWER.prompt_ids[:-1], np.append(ANSWER.prompt_ids, np.int32(1)), other[:0]):
        assert_rejected(structure.check(ANSWER, rendered_prompt=rendered, **LIMITS), "prompt_mismatch")
    assert "position 4" in structure.check(ANSWER, rendered_prompt=other).reason


@pytest.mark.parametrize(
    ("changes", "result"),
    [
        ({}, Result.PASS),
        ({"finish_reason": "tool_calls"}, Result.PASS),
        ({"finish_reason": "length", "sampling": sampling(STOPPED, max_tokens=len(STOPPED.output_ids))}, Result.REJECT),
        ({"finish_reason": "length", "sampling": sampling(STOPPED, max_tokens=4000)}, Result.REJECT),
        ({"sampling": sampling(STOPPED, max_tokens=4000, ignore_eos=True)}, Result.REJECT),
        ({"sampling": sampling(STOPPED, max_tokens=4000, min_tokens=3000)}, Result.REJECT),
        ({"sampling": sampling(STOPPED, max_tokens=4000, min_tokens=3000, grammar=True)}, Result.INCONCLUSIVE),
        ({"stop_reason": 77}, Result.REJECT),
        ({"stop_reason": recorded.EOS}, Result.PASS),
        ({"sampling": sampling(STOPPED, ignore_eos=True, stop_token_ids=(recorded.EOS,))}, Result.PASS),
    ],
)
def test_an_answer_that_ends_on_a_stop_token(changes: dict[str, Any], result: Result) -> None:
    assert STOPPED.output_ids[-1] == recorded.EOS
    assert checked(STOPPED, **changes).result is result


@pytest.mark.parametrize(
    ("stop_reason", "result"), [("END", Result.PASS), ("other", Result.REJECT), (None, Result.PASS)]
)
def test_an_answer_that_ends_on_a_stop_string(stop_reason: str | None, result: Result) -> None:
    check = checked(
        ANSWER, finish_reason="stop", stop_reason=stop_reason, sampling=sampling(ANSWER, max_tokens=999, stop=("END",))
    )
    assert check.result is result


def test_an_answer_that_fills_the_context() -> None:
    free = dataclasses.replace(ANSWER, sampling=sampling(ANSWER, max_tokens=None))
    length = len(ANSWER.prompt_ids) + len(ANSWER.output_ids)
    assert structure.check(free, max_model_len=length).result is Result.PASS
    assert_rejected(structure.check(free, max_model_len=length + 1), "finish_mismatch")
    # Undeclared: too short for any model's context, or perhaps cut by it.
    assert_rejected(structure.check(free), "finish_mismatch")
    long = dataclasses.replace(free, prompt_ids=np.ones(300, np.int32), usage=Usage(300, 160, 300, 160))
    check = structure.check(long)
    assert check.result is Result.INCONCLUSIVE
    assert check.reason.startswith("no_max_model_len")


def test_an_aborted_answer_is_inconclusive_and_its_prefix_still_checked() -> None:
    # A vLLM server that is told to stop ends every request in flight like this.
    cut = checked(ANSWER, finish_reason="abort", sampling=sampling(ANSWER, max_tokens=999))
    assert cut.result is Result.INCONCLUSIVE
    assert cut.reason.startswith("aborted")
    assert_rejected(checked(ANSWER, finish_reason="abort", **claim(3, 1, logprob=0.001)), "positive_logprob")
    nothing: dict[str, Any] = {
        "output_ids": ANSWER.output_ids[:0],
        "claim_ids": ANSWER.claim_ids[:0],
        "claim_logprobs": ANSWER.claim_logprobs[:0],
        "finish_reason": "abort",
        "usage": Usage(37, 0, 37, 0),
    }
    assert checked(ANSWER, **nothing).result is Result.INCONCLUSIVE
    faults = ("no_token_ids", "no_logprobs")
    assert checked(ANSWER, **nothing, faults=faults).result is Result.INCONCLUSIVE
    assert_withheld(checked(ANSWER, **nothing, faults=faults, text="words without ids"), "no_token_ids")


@pytest.mark.parametrize(
    ("ids", "asked", "result"),
    [
        ((5, 7, 8, 7, 8, 7, 8), {"max_pattern_size": 4, "min_count": 3}, Result.PASS),
        ((5, 6, 8, 8, 8), {"max_pattern_size": 1, "min_pattern_size": 1, "min_count": 3}, Result.PASS),
        ((5, 7, 8, 7, 8, 7, 8), {"max_pattern_size": 4, "min_count": 4}, Result.REJECT),
        ((5, 8, 8, 8, 8), {"max_pattern_size": 4, "min_pattern_size": 3, "min_count": 2}, Result.REJECT),
        ((5, 6, 7), {"max_pattern_size": 0}, Result.REJECT),
        ((5, 6, 7), {"max_pattern_size": 10**12, "min_count": 2}, Result.PASS),  # not looked for that far
        ((5, 6, 7), "yes", Result.PASS),
    ],
)
@pytest.mark.parametrize("reason", ["repetition", "tool_calls"])
def test_an_answer_that_ends_for_repeating_itself(
    ids: tuple[int, ...], asked: Any, result: Result, reason: str
) -> None:
    answer = dataclasses.replace(
        ANSWER,
        output_ids=np.array(ids, np.int32),
        claim_ids=np.concatenate([np.array(ids, np.int32)[:, None], 100 + np.tile(np.arange(20), (len(ids), 1))], 1),
        claim_logprobs=np.tile(np.linspace(-2.5, -9, 21), (len(ids), 1)),
        request=json.dumps({"repetition_detection": asked}).encode(),
        usage=Usage(37, len(ids), 37, len(ids)),
        stop_reason="repetition_detected",
    )
    # A tool call in an unstreamed answer replaces the reason, so what ended it is not known.
    expected = result if reason == "repetition" else Result.PASS
    assert checked(answer, finish_reason=reason).result is expected
    short = sampling(answer, min_tokens=50)
    if reason == "repetition":
        assert_rejected(checked(answer, finish_reason=reason, sampling=short), "finish_mismatch")


def test_usage_spans_the_whole_response() -> None:
    assert checked(ANSWER, usage=Usage(37, 500, 37, 500)).result is Result.PASS
