"""How the tests of this suite came out, for a table: by case, and as a file."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

import pytest

from tests.fidelity.meaning import Lacking, OtherBytes

HOLDS, BYTES, LACKS, WRONG = "holds", "other bytes", "lacking", "wrong"
MOST = 300


class Outcomes:
    """A plugin that classes every report and sums up in the end."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._rows: list[dict[str, Any]] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Reports know the cases of their tests and how they came out."""
        report = yield
        cases = sorted({number for mark in item.iter_markers("cases") for number in mark.args})
        if "tests/fidelity" not in item.nodeid or not (report.when == "call" or report.failed):
            return report
        test, seconds = item.nodeid.rpartition("tests/fidelity/")[2], round(call.duration, 2)
        row = {"test": test, "cases": cases, "outcome": HOLDS, "seconds": seconds}
        if call.excinfo is not None and not report.skipped:
            row["outcome"] = self._kind(item, call.excinfo.value)
            row["why"] = " ".join(call.excinfo.exconly().split())[:MOST]
        if not report.skipped:
            report.user_properties.append(("fidelity", row))
        return report

    def _kind(self, item: pytest.Item, error: BaseException) -> str:
        if isinstance(error, OtherBytes):
            return BYTES
        lacks = self._config.getoption("--lacks", [])
        needed = {mark.args[0] for mark in item.iter_markers("feature")}
        return LACKS if isinstance(error, Lacking) or needed & set(lacks) else WRONG

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what a report says."""
        self._rows += [value for name, value in report.user_properties if name == "fidelity"]  # type: ignore[misc]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """How each case came out, where somebody wants to know."""
        if (path := self._config.getoption("--outcomes", None)) is not None:
            path.write_text("".join(json.dumps(row) + "\n" for row in self._rows))
        if not self._config.getoption("--cases", False):
            return
        outcomes: dict[int, list[str]] = {}
        for row in self._rows:
            for number in row["cases"]:
                outcomes.setdefault(number, []).append(row["outcome"])
        kept = sum(set(words) == {HOLDS} for words in outcomes.values())
        terminalreporter.section(f"{kept} of {len(outcomes)} fidelity cases hold")
        for number, words in sorted(outcomes.items()):
            failed = [f"{words.count(word)} {word}" for word in (WRONG, LACKS, BYTES) if word in words]
            if failed:
                terminalreporter.write_line(f"case {number}: of {len(words)} tests {', '.join(failed)}")
