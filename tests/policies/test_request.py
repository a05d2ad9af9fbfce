"""Prompts that a completion's request gives as ids need no rendering to be compared."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from policies import structure
from tests.policies import recorded


@pytest.mark.parametrize(
    ("request_", "index", "mismatch"),
    [
        ({"prompt": [5, 6, 7]}, 0, False),
        ({"prompt": [5, 6, 8]}, 0, True),
        ({"prompt": [[1, 2], [5, 6, 7]], "n": 2}, 3, False),
        ({"prompt": [[5, 6, 7], [1, 2]], "n": 2}, 2, True),
        ({"prompt": [5, 6, 8], "truncate_prompt_tokens": 2}, 0, None),
        ({"prompt": "text"}, 0, None),
        ({"prompt": [[5, 6, 7]]}, 1, None),
        ({"prompt": [5, -6]}, 0, None),
    ],
)
def test_prompt_ids_that_the_request_gave_are_compared(
    request_: dict[str, Any], index: int, mismatch: bool | None
) -> None:
    answer = recorded.gpu("T0")[0]
    tampered = dataclasses.replace(
        answer, endpoint="completions", request=json.dumps(request_).encode(), index=index,
        prompt_ids=np.array([5, 6, 7], np.int32), usage=None,
    )  # fmt: skip
    found = structure.check(tampered)
    assert found.metrics["prompt_compared"] == int(mismatch is not None)
    assert ("prompt_mismatch" in found.reason) == bool(mismatch)
