"""Only the request, and what the operator declared, keep a check from applying "by the request": no answer can."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import distance, margin, selection, structure
from policies.checks import Check, VerdictWord
from policies.evidence import MASKED, WITHHELD_FAULTS, Evidence, Replay
from policies.verdict import combine
from tests.policies import recorded

ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "repetition": {"repetition_penalty": 1.2},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": -0.5},
    "bias": {"logit_bias": ((28, 5.0),)},
    "allowed": {"allowed_token_ids": (28, 30, 253)},
    "min": {"min_tokens": 5},
    "words": {"bad_words": ("a",)},
    "grammar": {"grammar": True},
    "seedless": {"seed": None},
}
EXCUSED = {"repetition", "grammar"}
"""What of these nobody can replay, whatever is declared."""
DECLARED: dict[str, Any] = {"eos_token_ids": [recorded.EOS], "bad_words": [[28]]}
REQUESTS: tuple[dict[str, Any], ...] = (
    {},
    {"tools": [{"type": "function"}]},
    {"thinking_token_budget": 4},
    {"watermarking": True},
)


@st.composite
def answers(draw: st.DrawFn, honest: Evidence) -> Evidence:
    """An answer as a backend may make it up: everything that comes from it may be something else."""
    rows = draw(st.integers(0, len(honest.output_ids)))
    claim = honest.claim_logprobs[:rows].copy()
    ids = honest.claim_ids[:rows].copy()
    output = honest.output_ids[: draw(st.integers(0, len(honest.output_ids)))].copy()
    for _ in range(draw(st.integers(0, 4))):
        if rows:
            row, column = draw(st.integers(0, rows - 1)), draw(st.integers(0, claim.shape[1] - 1))
            claim[row, column] = draw(st.sampled_from([0.0, -50.0, MASKED, float("nan"), -np.inf, 3.0]))
            ids[row, column] = draw(st.integers(-1, 49_151))
        if len(output):
            output[draw(st.integers(0, len(output) - 1))] = draw(st.integers(-1, 49_151))
    return dataclasses.replace(
        honest,
        output_ids=output,
        claim_ids=ids,
        claim_logprobs=claim,
        prompt_ids=honest.prompt_ids[: draw(st.integers(0, 8))],
        text=draw(st.text(max_size=5)),
        reasoning=draw(st.sampled_from(["", "so"])),
        finish_reason=draw(st.sampled_from([None, "stop", "length", "tool_calls"])),
        stop_reason=draw(st.sampled_from([None, 2, "x"])),
        usage=draw(st.sampled_from([None, honest.usage])),
        faults=tuple(draw(st.lists(st.sampled_from(sorted(WITHHELD_FAULTS)), max_size=2))),
        complete=draw(st.booleans()),
    )


def asking(kind: str, fields: dict[str, Any], temperature: float) -> Evidence:
    honest = recorded.gpu("T1" if temperature else "T0")[0]
    sampling = dataclasses.replace(honest.sampling, **ASKED[kind])
    return dataclasses.replace(honest, sampling=sampling, request=json.dumps({"messages": [], **fields}).encode())


def checks(evidence: Evidence, declared: dict[str, Any]) -> list[Check]:
    found = [structure.check(evidence, vocab_size=recorded.VOCABULARY, eos_token_ids=declared.get("eos_token_ids", ()))]
    found.append(selection.check(evidence, **declared))
    if len(evidence.output_ids):
        logprobs = np.full((len(evidence.output_ids), 1), -0.1, np.float32)
        replay = Replay(evidence.output_ids[:, None], logprobs)
        found += [distance.check(evidence, replay, None), margin.check(evidence, replay, None, **declared)]
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ASKED)
@given(st.data())
@settings(max_examples=25, deadline=None)
def test_no_answer_is_excused_by_a_request_that_excuses_nothing(
    temperature: float, kind: str, data: st.DataObject
) -> None:
    fields = data.draw(st.sampled_from(REQUESTS))
    declared = data.draw(st.sampled_from([DECLARED, {}]))
    asked = asking(kind, fields, temperature)
    excused = kind in EXCUSED or "watermarking" in fields or (not declared and kind in ("min", "words"))
    answer = data.draw(answers(asked))
    found = checks(answer, declared)
    by_request = {check.name for check in found if check.by_request}
    if not excused:
        assert by_request == set()
    # Whoever leaves evidence out gains nothing by a request that excuses.
    word = combine(found, audited=len(found) > 2).word
    if not answer.claim_ids.size or not len(answer.output_ids):
        assert word not in (VerdictWord.PASS, VerdictWord.UNAUDITED)


@pytest.mark.parametrize("kind", sorted(EXCUSED))
def test_a_request_that_excuses_does_so_for_every_honest_answer(kind: str) -> None:
    for temperature in (0.0, 1.0):
        found = selection.check(asking(kind, {}, temperature), **DECLARED)
        assert found.by_request or found.result == "reject"  # a grammar excuses from no violation
