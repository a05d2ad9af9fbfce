"""Whoever verifies a bundle judges by rules of their own: where these change, their number must.

Each golden case was judged by the rules of its folder's number.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from policies import bundle, case, codec, jws
from policies.case import RULES
from policies.receipt import verify_receipt
from policies.rederivation import derive, differences
from tests.policies.goldens import FOLDER, cases
from tests.support.bundles import KEY

KEYS = {jws.kid_of(jws.public_bytes(KEY)): jws.public_bytes(KEY)}
RAISE = (
    "The same evidence is judged differently now, so that bundles made before cannot be verified. "
    "Is that meant, raise policies.case.RULES and write the golden cases of the new rules by "
    "`python -m tests.policies.goldens`; verifiers then say which release they need."
)
WRITE = "These rules have no golden cases: write them by `python -m tests.policies.goldens`."


def test_these_rules_have_golden_cases() -> None:
    assert [path.name for path in FOLDER.iterdir()] == [str(RULES)], WRITE
    assert {path.stem for path in golden()} == {name for name, _ in cases()}, WRITE


def golden() -> list[Path]:
    return sorted((FOLDER / str(RULES)).glob("*.countersign"))


@cache
def judged(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The verification that was signed, and the one that these rules make of the same."""
    kept, whole = bundle.unpack(path.read_bytes())
    assert whole
    known, choices = case.unpack(kept.case), codec.unpack(kept.evidence)
    assert known.rules == RULES
    return dict(verify_receipt(kept.receipt, KEYS).verification), derive(
        choices, known.grounds(choices, kept.named_parts)
    )


@pytest.mark.parametrize("path", golden(), ids=lambda path: path.stem)
def test_the_same_evidence_is_judged_as_it_was(path: Path) -> None:
    signed, derived = judged(path)
    found = differences(signed, derived)
    assert not found, f"{RAISE}\n{found}"


def test_they_meet_every_check_and_verdict() -> None:
    signed = [judged(path)[0] for path in golden()]
    assert {each["verdict"] for each in signed} >= {"pass", "reject", "withheld", "inconclusive", "unaudited"}
    assert {check["name"] for each in signed for check in each["checks"]} >= {
        "structure",
        "selection",
        "distance",
        "margin",
        "routing",
    }
    routed = {check["result"] for each in signed for check in each["checks"] if check["name"] == "routing"}
    assert routed == {"pass", "reject", "withheld", "inconclusive"}


def test_they_meet_a_tokenizer() -> None:
    """What it said is asked for in them, for answers whose text fits and for others."""
    spelled = {path: judged(path)[0] for path in golden() if path.stem.startswith("spelled-")}
    assert all(case.unpack(bundle.unpack(path.read_bytes())[0].case).added for path in spelled)
    found = {check["result"] for each in spelled.values() for check in each["checks"] if check["name"] == "structure"}
    assert found >= {"pass", "reject"}
