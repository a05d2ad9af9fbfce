"""No arrays that a backend could make structure of crash it, and none with a fault passes."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from policies import structure
from policies.checks import Result
from policies.evidence import EXCUSED_FAULTS, WITHHELD_FAULTS, Evidence, Sampling, Usage

GARBAGE = arrays.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=6).flatmap(
    lambda shape: st.tuples(
        arrays.arrays(np.int32, shape), arrays.arrays(np.float32, shape, elements=st.floats(width=32))
    )
)

IDS = st.integers(0, 6).flatmap(lambda n: arrays.arrays(np.int32, n))


@given(
    claim=GARBAGE,
    output=IDS,
    prompt=IDS,
    rendered=st.none() | IDS,
    faults=st.lists(st.sampled_from(sorted(WITHHELD_FAULTS | EXCUSED_FAULTS)) | st.text(), max_size=2).map(tuple),
    finish=st.none() | st.sampled_from(["stop", "length", "tool_calls"]) | st.text(),
    stop_reason=st.none() | st.text() | st.integers(),
    usage=st.none() | st.builds(Usage, st.integers(), st.integers(), st.integers(), st.integers()),
    complete=st.booleans(),
    asked=st.builds(
        Sampling,
        max_tokens=st.none() | st.integers(),
        min_tokens=st.integers(0, 9),
        stop=st.lists(st.text(), max_size=1).map(tuple),
        stop_token_ids=st.lists(st.integers(), max_size=2).map(tuple),
        ignore_eos=st.booleans(),
        grammar=st.booleans(),
    ),
    vocab_size=st.none() | st.integers(1, 2**31 - 1),
)
@settings(max_examples=100)
def test_garbage_never_crashes_and_never_passes_with_a_fault(
    claim: tuple[Any, Any],
    output: Any,
    prompt: Any,
    rendered: Any,
    faults: tuple[str, ...],
    finish: str | None,
    stop_reason: int | str | None,
    usage: Usage | None,
    complete: bool,
    asked: Sampling,
    vocab_size: int | None,
) -> None:
    answer = Evidence(
        id="",
        endpoint="completions",
        backend="",
        model="",
        sampling=asked,
        prompt_ids=prompt,
        output_ids=output,
        claim_ids=claim[0],
        claim_logprobs=claim[1],
        finish_reason=finish,
        stop_reason=stop_reason,
        usage=usage,
        faults=faults,
        complete=complete,
    )
    check = structure.check(answer, vocab_size=vocab_size, eos_token_ids=[2], rendered_prompt=rendered)
    if faults or not complete:
        assert check.result is not Result.PASS
    assert (check.level == 0.0) == (check.result is Result.REJECT)
    assert bool(check.reason) == (check.result is not Result.PASS)
