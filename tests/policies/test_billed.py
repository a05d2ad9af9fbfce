"""Details of usage: parts are no larger than wholes, and sums are right."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from policies import structure
from policies.checks import Result
from policies.evidence import Usage
from tests.policies import recorded

ANSWER = recorded.cpu("bf16")[0]
P, G = len(ANSWER.prompt_ids), len(ANSWER.output_ids)


@pytest.mark.parametrize(
    ("details", "result"),
    [
        ({"total_tokens": P + G, "cached_tokens": P, "reasoning_tokens": 0}, Result.PASS),
        ({"total_tokens": P + G + 1}, Result.REJECT),
        ({"cached_tokens": P + 1}, Result.REJECT),
        ({"cached_tokens": -1}, Result.REJECT),
        ({"reasoning_tokens": G + 1}, Result.REJECT),
    ],
)
def test_billed_details(details: dict[str, Any], result: Result) -> None:
    evidence = dataclasses.replace(ANSWER, usage=Usage(P, G, P, G, **details))
    check = structure.check(evidence, vocab_size=recorded.VOCABULARY, eos_token_ids=(recorded.EOS,), max_model_len=2048)
    assert check.result is result
    assert (result is Result.PASS) or check.reason.startswith("usage_mismatch")
