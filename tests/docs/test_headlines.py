"""The README's figures are those of the committed results, and none stands there that is not."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from benchmarks import headlines, served
from benchmarks.harness.rows import Row
from benchmarks.overhead.report import ROWS
from benchmarks.overhead.samples import Samples
from benchmarks.overhead.steps import BYTES, DIRECT
from benchmarks.overhead.witness import OURS, THEIRS
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


def test_tables_and_sentences_of_capacity_are_those_of_the_results() -> None:
    page = pages.text_of("docs/capacity.md")
    made = headlines.capacities()
    assert headlines.put(page, made) == page
    for source, (table,) in made.items():
        assert f"<!-- source: {source} -->\n{table}" in page
    assert headlines.missing(page, [*served.sentences(headlines.ROOT), *served.remarks(headlines.ROOT)]) == []


def measured(folder: Path, **more: float) -> served.Results:
    """A folder of made-up rows; `more` is the CPU of either proxy, milliseconds a step."""
    found: list[Row] = [
        overhead_rows.step(arm, number, audit=audit, gpu_percent=50.0)
        for number in range(1, 6)
        for audit in (0.0, 1.0)
        for arm in overhead_rows.ADDS
    ]
    for row in found:
        row["cpu_ms"] |= more
    found += [row for row in overhead_rows.rows() if row["what"] == BYTES]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ROWS).write_text("".join(json.dumps(row) + "\n" for row in found))
    return served.Results(Samples(found), found)


def test_servers_that_were_measured_have_a_table_where_their_source_is_named(tmp_path: Path) -> None:
    results = measured(tmp_path)
    table = served.latency(results, "what was asked")
    assert table.splitlines()[0] == "| what was asked; milliseconds added, median | 4 at once |"
    assert "| first token, relayed only | 1.0 |" in table
    assert "| first token, 100% of answers replayed | 2.0 |" in table
    assert "| whole answer with the verdict of its replay in it | 7.5 |" in table
    assert "| from the answer's end to the verdict of its replay | 12.0 |" in table
    plan = served.capacity(results, "what was asked")
    assert "| whole answer, verified after, ms added | 2.0 |" in plan
    assert "| verdict of a replay, p50, ms after the answer | 12.0 |" in plan
    assert "| proxy, µs per token, verified after | 147 |" in plan
    assert "| CPU workers, seconds per 1,000 requests, verified after | 2 |" in plan
    assert "| GPU at work, %, asked directly | 50 |" in plan
    assert "| the backend sends, bytes per token, verified | 47 |" in plan
    source = "benchmarks/results/overhead/h200/summary.md"
    page = f"before\n\n<!-- source: {source} -->\n\nafter\n"
    assert headlines.put(page, {}) == page
    assert headlines.put(page, {source: [table]}) == f"before\n\n<!-- source: {source} -->\n{table}\nafter\n"


def test_what_cannot_be_told_from_nothing_says_so(tmp_path: Path) -> None:
    results = measured(tmp_path)
    for row in results.samples.rows:
        if row["arm"] == "async":
            shift = 3.0 if row["round"] % 2 else -4.0
            row["ttft_ms"] = [value + shift for value in row["ttft_ms"]]
    assert "| first token, verified after | 5.0 (noise) |" in served.latency(results, "it")
    assert "| first token, relayed only | 1.0 |" in served.latency(results, "it")


def test_where_the_time_goes_is_told_only_as_far_as_rows_tell(tmp_path: Path) -> None:
    assert served.sentences(tmp_path) == []
    folder = tmp_path / served.RESULTS
    shutil.copytree(headlines.ROOT / served.RESULTS / served.SCRIPTED, folder / served.SCRIPTED)
    for name in served.ON_GPU:
        measured(folder / name, proxy=50.0, plain=400.0)
    told = " ".join(served.sentences(tmp_path))
    assert "The proxy had time left: it used 3 and 3 % of one core then, and 20 and 20 %" in told
    assert "at work 50 and 50 % of the time instead of 50 and 50 %" in told
    measured(folder / "h200", proxy=500.0, plain=400.0)
    told = " ".join(served.sentences(tmp_path))
    assert "time left" not in told
    assert "Of the proxy: it used 25 and 3 % of one core then" in told


def test_the_witness_is_told_of_where_it_disagrees() -> None:
    found = [
        overhead_rows.heard(tool, DIRECT, number, 30.0 + shift + number / 10)
        for number in range(1, 6)
        for tool, shift in ((OURS, 0.0), (THEIRS, 5.0))
    ]
    assert served.witness(found) == [
        "agree within the noise of both on 1 of 3 times; not on: first token (direct), whole answer (direct)."
    ]
    alike = [row for row in found if row["tool"] == OURS]
    alike += [row | {"tool": THEIRS} for row in alike]
    assert served.witness(alike) == ["agree within the noise of both on all 3 times."]
    assert served.witness(overhead_rows.rows()) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.00"), (0.034, "0.03"), (0.83, "0.83"), (3.04, "3.0"), (-12.4, "-12"), (1234.5, "1,234")],
)
def test_two_digits(value: float, text: str) -> None:
    assert served.two(value) == text
