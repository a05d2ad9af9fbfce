"""Tests whose machine stood still meanwhile are run again.

What a test waits for comes in time on any machine that goes on (see `tests.support.waiting`). On one that stands still
for seconds, or whose every core is taken, a time-out of the very thing under test may be over although nothing is wrong
with it: a backend's silence that was the machine's. A failure then says nothing, so the test is asked again; what is
wrong fails every time. Tests that were run again are listed at the end of the run. Those that are about what is lost
when everything dies (`alone`) have bounds that forgive, and are asked once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from _pytest.runner import runtestprotocol

from tests.support.lateness import Lateness

TRIES = 3
STILL = 0.2
"""Seconds that a thread that wanted to run could not, all of this process's together."""
_EVERY = 0.02
PROPERTY = "stood still"


class Watch:
    """Notes how late this process was; one for the session."""

    def __init__(self) -> None:
        self._worst = 0.0
        threading.Thread(target=self._watch, daemon=True, name="standstill").start()

    @contextmanager
    def looking(self) -> Iterator[list[float]]:
        """Yields a list that holds the seconds lost, once it is over."""
        self._worst = 0.0
        found: list[float] = []
        with Lateness() as late:
            yield found
        found.append(max(self._worst, late.seconds))

    def _watch(self) -> None:
        while True:
            before = time.monotonic()
            time.sleep(_EVERY)
            self._worst = max(self._worst, time.monotonic() - before - _EVERY)


def _forget(item: pytest.Item) -> None:
    """Make a test as if it had not run: requests anew, and no fixture that failed."""
    if isinstance(item, pytest.Function):
        item._initrequest()
        for fixtures in item._fixtureinfo.name2fixturedefs.values():
            for fixture in fixtures:
                if fixture.cached_result is not None and fixture.cached_result[2] is not None:
                    fixture.cached_result = None


class Again:
    """The pytest plugin."""

    def __init__(self) -> None:
        self._watch = Watch()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Run a test, and once more where it failed while the machine stood still."""
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        tries = 1 if item.get_closest_marker("alone") else TRIES
        for attempt in range(1, tries + 1):
            with self._watch.looking() as lost:
                reports = runtestprotocol(item, nextitem=nextitem, log=False)
            failed = next((report for report in reports if report.failed), None)
            if failed is None or attempt == tries or lost[0] < STILL:
                break
            why = str(failed.longrepr).strip().rpartition("\n")[2][:200]
            item.user_properties.append((PROPERTY, f"{lost[0]:.1f} s in its {failed.when}: {why}"))
            _forget(item)
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """What was run again."""
        again = {
            (report.nodeid, text)
            for reports in terminalreporter.stats.values()
            for report in reports
            if isinstance(report, pytest.TestReport)
            for name, text in report.user_properties
            if name == PROPERTY
        }
        if again:
            terminalreporter.section(f"run again, because the machine stood still meanwhile: {len(again)}")
            for node, text in sorted(again):
                terminalreporter.write_line(f"{node}: {text}")
