"""docs/verdicts.md has every verdict, every check and every reason that the code can give, each in its group."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from policies import coverage
from policies.checks import Result, VerdictWord
from tests.docs import pages
from tests.policies.test_pages import codes

PAGE = "docs/verdicts.md"
TEXT = pages.text_of(PAGE)
CHECKS = ("structure", "selection", "distance", "margin", "routing")
_PRODUCT = ("policies", "proxy", "verifier_pool")


def table(heading: str) -> set[str]:
    """Codes in the first column of the table under a heading."""
    below = TEXT.partition(f"### {heading}\n")[2].partition("\n### ")[0]
    rows = [line.split("|")[1] for line in below.splitlines() if line.startswith("| `")]
    return {code for row in rows for code in re.findall(r"`([a-z_]+)…?`", row)}


REJECTS, WITHHELD = table("Rejects"), table("Withheld")
REQUEST, OURS = table("The request's doing"), table("Yours")
BACKEND = table("The backend's, so far undecided")
EVERY = REJECTS | WITHHELD | REQUEST | OURS | BACKEND


def known() -> set[str]:
    """Every code: those of the checks, and those that `policies.coverage` puts down to somebody."""
    return codes() | coverage._BY_REQUEST | coverage._BY_US


def test_every_reason_is_on_the_page() -> None:
    assert len(known()) > 90
    assert sorted(known() - EVERY) == []


def test_no_reason_is_made_up() -> None:
    source = "\n".join(path.read_text() for name in _PRODUCT for path in (pages.ROOT / name).rglob("*.py"))
    missing = [code for code in EVERY if not re.search(rf"[\"' ({{]{code}(?![a-z])", source)]
    assert sorted(missing) == []


def test_no_reason_is_twice_on_it() -> None:
    groups = (REJECTS, WITHHELD, REQUEST, OURS, BACKEND)
    twice = {code for code in EVERY if sum(code in group for group in groups) > 1}
    assert twice == {"bad_ids"}  # in an answer the backend's, in a replay the reference's


@pytest.mark.parametrize(
    ("group", "who"), [(REQUEST, coverage.REQUEST), (OURS, coverage.OURS), (BACKEND, coverage.BACKEND)]
)
def test_reasons_are_put_down_as_coverage_does(group: set[str], who: str) -> None:
    wrong = {code for code in group if coverage.blame_of(code + "500" * (code == "http_")) != who}
    assert wrong - {"model"} == set()


def test_every_verdict_and_result_is_on_the_page() -> None:
    rows = re.findall(r"^\| `([a-z]+)` \|", TEXT.partition("## The words\n")[2].partition("\n## ")[0], re.MULTILINE)
    assert sorted(rows) == sorted(VerdictWord)
    results = TEXT.partition("`checks[].result` | ")[2].partition("|")[0]
    assert sorted(re.findall(r"`([a-z]+)`", results)) == sorted(Result)


def test_every_check_is_on_the_page() -> None:
    part = TEXT.partition("## Which check says what\n")[2]
    assert tuple(re.findall(r"^\| `([a-z]+)` \|", part.partition("\n## ")[0], re.MULTILINE)) == CHECKS
    source = "\n".join(path.read_text() for path in Path(pages.ROOT / "policies").glob("*.py"))
    assert set(re.findall(r"Check\(\s*\"([a-z]+)\"", source)) <= set(CHECKS)
