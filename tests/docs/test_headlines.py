"""The README's figures are those of the committed results."""

from __future__ import annotations

from benchmarks import headlines
from tests.docs import pages

TEXT = pages.text_of("README.md")


def test_every_table_of_the_readme_is_made_of_its_results() -> None:
    made = headlines.tables()
    assert headlines.put(TEXT, made) == TEXT
    for source, tables in made.items():
        assert TEXT.count(f"<!-- source: {source} -->") == len(tables), source


def test_sentences_of_the_readme_say_what_was_measured() -> None:
    assert headlines.missing(TEXT, headlines.sentences()) == []


def test_a_figure_that_drifts_is_found() -> None:
    made = headlines.tables()
    (relay,) = made["benchmarks/results/relay/summary.md"]
    number = relay.splitlines()[2].split(" | ")[1]
    drifted = TEXT.replace(number, f"{float(number) + 1:.2f}")
    assert headlines.put(drifted, made) != drifted
    assert headlines.missing("nothing", headlines.sentences()) == headlines.sentences()
