"""The README's figures are those of the committed results, and none stands there that is not."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from benchmarks import headlines
from benchmarks.harness.rows import Row
from benchmarks.overhead.samples import Samples
from policies.errors import CountersignError
from tests.benchmarks import overhead_rows
from tests.docs import pages

TEXT = pages.text_of("README.md")
MEASURED = ("See it work", "Standing", "What it catches", "Nobody can tell it from the backend", "What it costs")
"""Sections that tell of results."""
STATED = ("Python 3.11", "about 9 GB", "--port 8790", "top-20", "99th percentile", "one worker process")
"""Figures in them that were not measured: what is needed, and what things are called."""


@pytest.fixture(scope="module")
def made() -> dict[str, list[str]]:
    return headlines.tables()


@pytest.fixture(scope="module")
def said() -> list[str]:
    return headlines.sentences()


def test_every_table_of_the_readme_is_made_of_its_results(made: dict[str, list[str]]) -> None:
    assert headlines.put(TEXT, made) == TEXT
    for source, tables in made.items():
        assert TEXT.count(f"<!-- source: {source} -->") == len(tables), source


def test_sentences_of_the_readme_say_what_was_measured(said: list[str]) -> None:
    assert headlines.missing(TEXT, said) == []


def test_no_figure_stands_there_that_is_in_no_result(made: dict[str, list[str]], said: list[str]) -> None:
    left = "".join(section(name) for name in MEASURED)
    for table in (table for tables in made.values() for table in tables):
        left = left.replace(table, "")
    left = " ".join(re.sub(r"\]\([^)]*\)|<!--.*?-->|```sh.*?```", "", left, flags=re.DOTALL).split())
    for sentence in sorted([*said, *STATED], key=len, reverse=True):
        left = left.replace(re.sub(r"\]\([^)]*\)", "", sentence), "")
    assert re.findall(r".{0,40}(?<![\w.])\d.{0,40}", left) == []


def section(name: str) -> str:
    found = re.search(rf"^## {re.escape(name)}\n(.*?)(?=^## )", TEXT, re.MULTILINE | re.DOTALL)
    assert found is not None, name
    return found[1]


def test_a_figure_that_drifts_is_found(made: dict[str, list[str]], said: list[str]) -> None:
    (relay,) = made["benchmarks/results/relay/summary.md"]
    number = relay.splitlines()[2].split(" | ")[1]
    drifted = TEXT.replace(number, f"{float(number) + 1:.2f}")
    assert headlines.put(drifted, made) != drifted
    assert headlines.missing("nothing", said) == said


def test_results_that_come_to_say_otherwise_are_found(tmp_path: Path) -> None:
    results = tmp_path / "benchmarks" / "results"
    shutil.copytree(headlines.ROOT / "benchmarks" / "results", results)
    chaos = results / "chaos.md"
    chaos.write_text(chaos.read_text().replace("| **lost** | **0** |", "| **lost** | **1** |"))
    demo = results / "demo.md"
    demo.write_text(demo.read_text().replace("12 pass", "11 pass"))
    stale = headlines.missing(TEXT, headlines.sentences(tmp_path))
    assert len(stale) == 2
    assert "11 pass" in stale[0]
    assert stale[1].endswith("1 were lost and 0 doubled")
    demo.write_text("nothing")
    with pytest.raises(CountersignError, match="in the results"):
        headlines.sentences(tmp_path)


def test_servers_that_were_measured_have_a_table_where_their_source_is_named() -> None:
    found: list[Row] = [
        overhead_rows.step(arm, number, audit=audit, tokens=tokens)
        for number in range(1, 6)
        for audit in (0.0, 1.0)
        for arm in overhead_rows.ADDS
        for tokens in (64,)
    ]
    table = headlines.served(Samples(found), "what was asked")
    assert table.splitlines()[0] == "| what was asked | 4 at once |"
    assert "| first token, relayed only | 1.0 |" in table
    assert "| first token, 100% of answers replayed | 2.0 |" in table
    assert "| whole answer with the verdict of its replay in it | 7.5 |" in table
    assert "| from the answer's end to the verdict of its replay | 12.0 |" in table
    source = "benchmarks/results/overhead/h200/summary.md"
    page = f"before\n\n<!-- source: {source} -->\n\nafter\n"
    assert headlines.put(page, {}) == page
    assert headlines.put(page, {source: [table]}) == f"before\n\n<!-- source: {source} -->\n{table}\nafter\n"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.00"), (0.034, "0.03"), (0.83, "0.83"), (3.04, "3.0"), (-12.4, "-12"), (1234.5, "1,234")],
)
def test_two_digits(value: float, text: str) -> None:
    assert headlines._two(value) == text
