"""The bundles that the pages offer to try."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from policies.examination import Outcome, examine
from policies.jws import keys_in

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.mark.parametrize(("name", "verdict"), [("honest", "pass"), ("impostor", "reject")])
def test_examples_are_derived_again(name: str, verdict: str) -> None:
    trusted = keys_in(json.loads((EXAMPLES / "keys.json").read_bytes()))
    found = examine((EXAMPLES / f"{name}.countersign").read_bytes(), trusted)
    assert found.outcome is Outcome.VERIFIED, found.faults
    assert found.receipt is not None
    assert found.receipt.verdict == verdict
