"""Tests whose machine stood still meanwhile are run again.

What a test waits for comes in time on any machine that goes on (see `tests.support.waiting`). On one that stands still
for seconds, or whose every core is taken, a time-out of the very thing under test may be over although nothing is wrong
with it: a backend's silence that was the machine's. A failure then says nothing, so the test is asked again; what is
wrong every time fails every time, and so fails. A race that is lost one time in many may be won then, so little is an
excuse (a long moment, or a large part of the test), and tests that were run again are listed at the end of the run,
with what they said. Those that are about what is lost when everything dies (`alone`) have bounds that forgive, and are
asked once.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest
from _pytest.outcomes import OutcomeException
from _pytest.runner import runtestprotocol

from tests.support.lateness import Lateness

TRIES = 3
STILL = 0.5
"""Seconds that a thread of this process wanted to run and could not: at once, or one and the same over the test."""
SHARE = 0.3
"""The least share of the test's length that it waited, where it waited now and then. In a long test on a busy machine
that comes to half a second however well everything goes on."""
_EVERY = 0.02
PROPERTY = "stood still"


@dataclass(eq=False)
class Lost:
    """Seconds that this process was kept from running while a test ran.

    Attributes:
        length: of the test.
        at_once: the longest moment, less what it computed itself in it: code that lets no thread run is no excuse.
        waited: of the thread that waited longest, all of its moments together.
    """

    length: float = 0.0
    at_once: float = 0.0
    waited: float = 0.0

    def excuses(self) -> bool:
        """Whether a failure says nothing."""
        return self.at_once >= STILL or self.waited >= max(STILL, SHARE * self.length)

    def __str__(self) -> str:
        return f"{max(self.at_once, self.waited):.1f} of {self.length:.1f} s"


AHEAD = pytest.StashKey[Lost]()
"""What was lost while something was done for a test before its turn; excuses the test as well."""


class Watch:
    """Notes how late this process was; one for the session."""

    def __init__(self) -> None:
        self._looking: list[Lost] = []
        self._before = self._now()
        threading.Thread(target=self._watch, daemon=True, name="standstill").start()

    @contextmanager
    def looking(self) -> Iterator[Lost]:
        """Yields what is known once it is over; for any number at once."""
        lost, began, late = Lost(), time.monotonic(), Lateness()
        self._looking.append(lost)
        try:
            with late:
                yield lost
        finally:
            self._look()
            self._looking.remove(lost)
            lost.length, lost.waited = time.monotonic() - began, late.longest

    def _watch(self) -> None:
        while True:
            self._before = self._now()
            time.sleep(_EVERY)
            self._look()

    def _look(self) -> None:
        late = self._now() - self._before - _EVERY
        for lost in tuple(self._looking):
            lost.at_once = max(lost.at_once, late)

    @staticmethod
    def _now() -> float:
        """Seconds that go on while this process does not compute."""
        return time.monotonic() - time.process_time()


class _Elsewhere:
    """As pytest asks the next test where it is: beyond the module of this one."""

    def __init__(self, item: pytest.Item) -> None:
        self._chain = list(itertools.takewhile(lambda node: not isinstance(node, pytest.Module), item.listchain()))

    def listchain(self) -> list[Any]:
        """What both are in."""
        return self._chain


def _forget(item: pytest.Item, *, module: bool) -> None:
    """Make a test as if it had not run: requests anew, and no fixture that failed.

    Args:
        module: nothing that its module's tests share either.
    """
    if AHEAD in item.stash:
        del item.stash[AHEAD]
    if module:
        # What is said of the end of things that went wrong says no more than they did.
        with suppress(Exception, OutcomeException, BaseExceptionGroup):
            item.session._setupstate.teardown_exact(_Elsewhere(item))  # type: ignore[arg-type]
    if isinstance(item, pytest.Function):
        item._initrequest()
        for fixtures in item._fixtureinfo.name2fixturedefs.values():
            for fixture in fixtures:
                if fixture.cached_result is not None and fixture.cached_result[2] is not None:
                    fixture.cached_result = None


class Again:
    """The pytest plugin."""

    def __init__(self) -> None:
        self.watch = Watch()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Run a test, and once more where it failed while the machine stood still."""
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        tries = 1 if item.get_closest_marker("alone") else TRIES
        for attempt in range(1, tries + 1):
            with self.watch.looking() as lost:
                reports = runtestprotocol(item, nextitem=nextitem, log=False)
            failed = next((report for report in reports if report.failed), None)
            excuse = next((each for each in (lost, item.stash.get(AHEAD, lost)) if each.excuses()), None)
            if failed is None or attempt == tries or excuse is None:
                break
            why = str(failed.longrepr).strip().rpartition("\n")[2][:200]
            item.user_properties.append((PROPERTY, f"{excuse}, in its {failed.when}: {why}"))
            _forget(item, module=attempt == tries - 1)
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
            tests = len({node for node, _ in again})
            terminalreporter.section(f"run again, because the machine stood still meanwhile: {tests}")
            for node, text in sorted(again):
                terminalreporter.write_line(f"{node}: {text}")
