"""The page of the fidelity suite says what its lines say, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fidelity import command, report
from benchmarks.fidelity.cases import CASES
from benchmarks.fidelity.gateways import Plan, litellm, ours, vllm_router
from benchmarks.fidelity.run import run

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "fidelity"


def _test(gateway: str, outcome: str, *cases: int) -> dict[str, Any]:
    row = {"kind": "test", "gateway": gateway, "test": "test_x.py::test_y", "cases": list(cases), "outcome": outcome}
    return row | {"seconds": 0.1, "why": "because | of `this`"}


def _run(gateway: str) -> dict[str, Any]:
    head = {"kind": "run", "gateway": gateway, "version": "1.2", "started": "2026-01-01 00:00 UTC", "seconds": 3.0}
    return head | {"machine": {"commit": "a" * 40}, "commands": {}, "lacks": {"drain": "none"}, "remarks": []}


def test_there_are_65_cases() -> None:
    assert list(CASES) == list(range(1, 66))


def test_the_page_is_made_of_its_lines() -> None:
    rows = report.read(RESULTS.with_suffix(".jsonl"))
    assert RESULTS.with_suffix(".md").read_text() == report.render(rows)
    runs = {row["gateway"] for row in rows if row["kind"] == "run"}
    assert ours().name in runs
    for name in runs:
        tests = [row for row in rows if row["kind"] == "test" and row["gateway"] == name]
        assert all(report.by_case(tests).values()), f"{name} was not asked every case"


def test_every_case_holds_of_our_own() -> None:
    rows = report.read(RESULTS.with_suffix(".jsonl"))
    mine = [row for row in rows if row["kind"] == "test" and row["gateway"] == ours().name]
    assert report.held(mine) == (65, 65)


def test_a_cell_names_the_worst() -> None:
    assert report.cell([]) == "not run"
    assert report.cell(["holds", "holds"]) == "holds"
    assert report.cell(["holds", "other bytes"]) == "other bytes (1 of 2)"
    assert report.cell(["lacking", "other bytes"]) == "lacking (1 of 2)"
    assert report.cell(["lacking", "wrong", "wrong"]) == "wrong (2 of 3)"


def test_a_case_that_was_not_run_does_not_hold() -> None:
    assert report.held([_test("a", "holds", 1, 2), _test("a", "other bytes", 2)]) == (1, 2)


def test_a_gateway_that_ran_again_replaces_its_lines() -> None:
    old = [_run("A"), _test("A", "wrong", 1), _run("Countersign"), _test("Countersign", "wrong", 1)]
    rows = report.merged(old, [_run("Countersign"), _test("Countersign", "holds", 1)])
    assert [(row["gateway"], row.get("outcome")) for row in rows] == [
        ("Countersign", None),
        ("Countersign", "holds"),
        ("A", None),
        ("A", "wrong"),
    ]


def test_the_page_says_why() -> None:
    page = report.render([_run("A"), _test("A", "wrong", 7, 9), _test("A", "lacking", 7), _test("A", "holds")])
    assert "| A | 0 | 0 | 0 | 2 |" in page
    assert "- 7, 9: `test_y`: wrong; `because \\| of 'this'`" in page
    assert "- lacks *drain*: none" in page
    assert "| 8 | leaving is seen through whatever lies around the endpoint | not run |" in page


def test_it_runs_the_suite_against_our_own() -> None:
    head, *tests = run(ours(), 0, "test_what_is_no_stream_passes_as_it_is")
    assert (head["kind"], head["gateway"]) == ("run", "Countersign")
    assert "tests/fidelity" in head["suite"]
    assert {(tuple(row["cases"]), row["outcome"]) for row in tests} == {((23,), "holds")}


@pytest.mark.parametrize("plan", [litellm("/opt/x/bin/litellm"), vllm_router("/opt/x/bin/vllm-router")])
def test_others_are_started_with_the_suites_upstream(plan: Plan, tmp_path: Path) -> None:
    assert plan.start is not None
    for variant in ("plain", *plan.variants):
        words = plan.start(tmp_path, variant, 9310, 9300)
        assert words[0] == plan.binary
        assert "9310" in words
        text = "".join(path.read_text() for path in tmp_path.glob(f"{variant}.yaml")) or " ".join(words)
        assert ("http://127.0.0.1:9301" in text) == (variant == "pair")
        assert ("http://127.0.0.1:9302" in text) == (variant == "unreachable")


def test_the_page_alone_needs_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [_run("Countersign"), _test("Countersign", "holds", 1)]
    (tmp_path / "f.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    assert command.main(["--page", "--output", str(tmp_path / "f")]) == 0
    assert capsys.readouterr().out.strip() == (tmp_path / "f.md").read_text().strip()
