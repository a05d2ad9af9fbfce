"""Figures on the pages stand in the results they come from, and what is reckoned from them is right.

A comment `<!-- source: PATH -->` in front of a table says where its numbers are from: each is one of that file, or one
of them rounded. Tables on capacity.md without it are reckoned, and checked here.
"""

from __future__ import annotations

import re

import pytest

from policies import distance, margin, selection, structure, verdict, verification
from policies.codec import pack
from policies.evidence import Evidence, Replay
from policies.settings import AuditSettings, VerificationSettings
from tests.docs import pages
from tests.policies import recorded
from tests.policies.test_margin import PROFILE

_TABLE = re.compile(r"<!-- source: (\S+) -->\n((?:\|.*\n)+)")
_NUMBER = re.compile(r"(?<![\w.])[-−+]?\d[\d,]*(?:\.\d+)?")
CAPACITY = pages.text_of("docs/capacity.md")
SENTENCES = " ".join(CAPACITY.split())


def constants(formula: str) -> tuple[float, ...]:
    """Numbers of a formula on the page, which stands there with `#` in their places."""
    pattern = re.escape(formula).replace("\\#", r"([\d,.]+)")
    (found,) = re.findall(pattern, CAPACITY)
    return tuple(float(number.replace(",", "")) for number in (found if isinstance(found, tuple) else (found,)))


CHUNK, REQUEST = constants("G × # µs + # ms")
UNAUDITED, AUDITED = constants("(1 − a) × # ms + a × # ms")
(REPLAYED,) = constants("(P + G) ÷ # ÷ 0.8")
EVIDENCE, VERDICT = constants("G × # × evidence_ttl + # × verdict_ttl")
(VALKEY,) = constants("# ms of Valkey per audited answer")
HOUR, WEEK = VerificationSettings().evidence_ttl, VerificationSettings().verdict_ttl


def tables() -> list[tuple[str, str, str]]:
    return [(page, *found) for page in pages.names() for found in _TABLE.findall(pages.text_of(page))]


def numbers(text: str) -> list[str]:
    return [found.replace(",", "").replace("−", "-").lstrip("+") for found in _NUMBER.findall(text)]


def is_in(number: str, source: set[str]) -> bool:
    """Whether a number stands in a file, or is one of its numbers rounded."""
    if number in source:
        return True
    digits = len(number.partition(".")[2])
    wanted = float(number)
    for other in source:
        precision = len(other.partition(".")[2])
        # It was rounded before, too, so that a last 5 may have been less.
        apart = 0.5 * 10.0**-digits + 0.5 * 10.0**-precision
        if (
            precision > digits
            and abs(float(other) - wanted) <= apart * (1 + 1e-9)
            and abs(wanted) >= 10 ** (1 - digits)
        ):
            return True
    return False


@pytest.mark.parametrize(("page", "source", "table"), tables())
def test_numbers_of_a_table_are_in_its_source(page: str, source: str, table: str) -> None:
    path = pages.ROOT / source
    found = set(numbers(path.read_text(encoding="utf-8")))
    cells = [cell for row in table.splitlines()[2:] for cell in row.strip("|").split("|")[1:]]
    shown = [number for cell in cells for number in numbers(cell)]
    assert shown
    assert [number for number in shown if not is_in(number, found)] == []


def test_every_table_of_results_on_capacity_names_its_source() -> None:
    sourced = {table for _, _, table in tables()}
    every = re.findall(r"((?:^\|.*\n)+)", CAPACITY, re.MULTILINE)
    reckoned = [table for table in every if table not in sourced and _NUMBER.search(table)]
    heads = [table.splitlines()[0] for table in reckoned]
    assert heads == ["| | |", "| | at a = 0.05 | while everything is audited |"]


def test_the_constants_are_those_of_the_tables() -> None:
    shown = {number for _, _, table in tables() for number in numbers(table)}
    for constant in (CHUNK, REQUEST, UNAUDITED, AUDITED, REPLAYED, VALKEY):
        assert is_in(f"{constant:g}", shown), constant


def proxy(answers: float, tokens: int) -> float:
    return answers * (tokens * CHUNK / 1e6 + REQUEST / 1e3)


def checks(answers: float, audited: float) -> float:
    return answers * ((1 - audited) * UNAUDITED + audited * AUDITED) / 1e3


def gpus(answers: float, audited: float, tokens: int) -> float:
    return answers * audited * tokens / REPLAYED / 0.8


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("20 answers per second of 128 tokens take {:.2f} cores", proxy(20, 128)),
        ("take {:.2f} cores at a = 0.25", checks(100, 0.25)),
        ("and {:.2f} with all audited", checks(100, 1)),
        ("take {:.2f} of such a GPU", gpus(100, 0.25, 768)),
        ("with all audited, {:.1f}.", gpus(100, 1, 768)),
        ("hold {:.1f} GB of evidence", 10 * 500 * EVIDENCE * HOUR / 1e9),
        ("{:.1f} GB of verdicts", 10 * VERDICT * WEEK / 1e9),
        ("| proxy cores | {0:.2f} | {0:.2f} |", proxy(50, 256)),
        ("| cores for checks | {:.2f} |", checks(50, 0.05)),
        ("| {:.2f} | | GPUs", checks(50, 1)),
        ("| GPUs | {:.2f} |", gpus(50, 0.05, 768)),
        ("| {:.2f} | | Redis", gpus(50, 1, 768)),
        ("| Redis, evidence of an hour | {0:.1f} GB | {0:.1f} GB |", 50 * 256 * EVIDENCE * HOUR / 1e9),
        ("half a day ({:.1f} GB)", 50 * VERDICT * 43_200 / 1e9),
        ("one core at some {:.0f}0 answers", 1e3 / VALKEY / 10),
    ],
)
def test_what_is_reckoned_is_right(words: str, value: float) -> None:
    assert words.format(value) in SENTENCES


def test_the_floor_costs_what_is_said() -> None:
    floor = AuditSettings().floor
    assert f"{100 * floor * 0.235:.1f} to {100 * floor * 0.268:.1f} %" in SENTENCES


def test_evidence_and_verdicts_are_as_large_as_is_said() -> None:
    answers = [answer for setting in ("T1", "T07", "T0") for answer in recorded.gpu(setting)]
    tokens = [len(answer.output_ids) for answer in answers]
    sizes = [len(pack([answer])) / count for answer, count in zip(answers, tokens, strict=True)]
    assert f"{min(tokens)} to {max(tokens)} tokens" in SENTENCES
    assert f"takes {min(sizes):.0f} to {EVIDENCE:.0f} bytes per token" in SENTENCES
    assert EVIDENCE - 2 < max(sizes) <= EVIDENCE
    largest = max(len(verification_of(*pair)) for pair in recorded.replayed("single"))
    assert VERDICT * 0.8 < largest <= VERDICT


def verification_of(answer: Evidence, replay: Replay) -> bytes:
    found = [structure.check(answer), selection.check(answer)]
    found += [distance.check(answer, replay, PROFILE), margin.check(answer, replay, PROFILE)]
    word = verdict.combine(found, audited=True)
    return verification.encode(verification.describe([answer], [word], word, answer.created))
