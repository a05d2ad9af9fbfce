"""What is written, from rows made by hand."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.overhead.report import Result, summary, write
from benchmarks.overhead.rounds import Cost, Row

TOKENS = 64


def row(arm: str, number: int, ttft: float, **other: Any) -> Row:
    values: dict[str, Any] = {
        "round": number,
        "burst": number,
        "concurrency": 1,
        "asked_tokens": TOKENS,
        "arm": arm,
        "chunks": TOKENS,
        "ttft_ms": ttft,
        "total_ms": ttft + 640,
        "gap_p50_ms": 10.0,
        "gap_p99_ms": 11.0,
        "gap_max_ms": 12.0,
        "verdict": "" if arm == "direct" else "unaudited",
        "error": "",
    }
    return Row(**values | other)


def cost(arm: str, number: int, tokens: int, cpu: float, undecided: int = 0) -> Cost:
    return Cost(number, number, 1, tokens, arm, 2, 2 * tokens, cpu, 6.0, 5.0, undecided, 80.0)


def result(*, extra: tuple[Row, ...] = (), **meta: Any) -> Result:
    rows = [
        row(arm, number, 20 + number + added)
        for number in range(1, 8)
        for arm, added in (("direct", 0.0), ("async", 0.5), ("inline", 0.75))
    ]
    costs = [
        cost(arm, number, tokens, 2 * (1.5 + 0.05 * tokens))
        for number in range(1, 8)
        for arm in ("async", "inline")
        for tokens in (4, TOKENS)
    ]
    metadata = {
        "started": "2026-01-01 00:00 UTC",
        "seconds": 12.3,
        "load_before": 0.1,
        "busy": False,
        "arguments": {
            "rounds": 7,
            "quick": False,
            "upstream": None,
            "reference": None,
            "first_ms": 20.0,
            "interval_ms": 10.0,
        },
        "machine": {
            "cpu": "Abacus",
            "cores": 2,
            "kernel": "6.1",
            "python": "3.11",
            "commit": "f" * 40,
            "modified": False,
        },
    }
    return Result([*rows, *extra], costs, TOKENS, metadata | meta)


def cells(text: str, start: str) -> list[str]:
    (found,) = [part for part in text.splitlines() if part.startswith(f"| {start} |")]
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_summary_says_what_each_arm_adds() -> None:
    text = summary(result())
    assert cells(text, "first token, p50") == [
        "first token, p50",
        "24.00",
        "0.50 (0.50 to 0.50)",
        "0.75 (0.75 to 0.75)",
    ]
    assert cells(text, "whole answer, p50")[2] == "0.50 (0.50 to 0.50)"
    assert cells(text, "gap between tokens, p50")[1:] == ["10.00", "0.00 (0.00 to 0.00)", "0.00 (0.00 to 0.00)"]
    cpu = cells(text, "proxied (async)")
    assert cpu[2:6] == ["73 (73 to 73)", "50 (50 to 50)", "1.50 (1.50 to 1.50)", "3.0 (3.0 to 3.0)"]
    assert "0 errors in 21 requests" in text
    assert "14 unaudited" in text
    assert "CPU checks" in text
    assert "Busy" not in text
    assert "Quick" not in text


def test_summary_marks_what_must_not_be_quoted() -> None:
    base = result()
    marked = result(busy=True, load_before=3.2, arguments=base.metadata["arguments"] | {"quick": True})
    text = summary(marked)
    assert "**Busy machine**: load 3.20" in text
    assert "**Quick run**" in text


def test_real_backend_and_reference_are_named_as_what_they_are() -> None:
    arguments = result().metadata["arguments"] | {"upstream": "http://a", "reference": "http://b"}
    text = summary(result(arguments=arguments))
    assert "real vLLM" in text
    assert "replayed by the reference" in text
    assert "script" not in text.split("## How to read this")[1].split("real vLLM")[0]


def test_failed_requests_are_counted_and_not_timed() -> None:
    bad = row("async", 3, 9999.0, error="status 502")
    text = summary(result(extra=(bad,)))
    assert "1 errors in 22 requests" in text
    assert "* async: status 502, 1 times" in text
    assert cells(text, "first token, p99")[2].startswith("0.50")


def test_missing_verdicts_are_errors() -> None:
    base = result()
    costs = [*base.costs, cost("async", 3, TOKENS, 1.0, undecided=2)]
    text = summary(Result(base.rows, costs, TOKENS, base.metadata))
    assert "1 errors in 21 requests" in text
    assert "async: burst ended without all verdicts" in text


def test_an_arm_that_only_failed_has_no_figures() -> None:
    base = result()
    rows = [row(one.arm, one.round, one.ttft_ms, error="timeout" if one.arm == "inline" else "") for one in base.rows]
    text = summary(Result(rows, base.costs, TOKENS, base.metadata))
    assert cells(text, "first token, p50")[3] == "none"


def test_files(tmp_path: Path) -> None:
    made = result()
    text = write(made, tmp_path / "deep" / "overhead")
    folder = tmp_path / "deep" / "overhead"
    assert (folder / "summary.md").read_text() == text
    assert json.loads((folder / "metadata.json").read_text()) == made.metadata
    with open(folder / "rows.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 21
    assert float(rows[0]["ttft_ms"]) == pytest.approx(21)
    with open(folder / "bursts.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == 28
