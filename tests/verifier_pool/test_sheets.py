"""What a child counted, read by its parent, whatever becomes of the child."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.waiting import wait_until
from verifier_pool import sheets
from verifier_pool.link.meters import Family, Meters, Spread, merged
from verifier_pool.sheets import Sheet, Sheets, Writer

CHILD = """
import sys, time
from verifier_pool.link.meters import Meters
from verifier_pool.sheets import Sheet, Writer
meters = Meters()
counter = meters.counter("c", "1", "", ["k"])
meters.gauge("g", "1", "").set(7)
writer = Writer(Sheet(int(sys.argv[1])), meters.read)
for _ in range(int(sys.argv[2])):
    counter.add(1, {"k": "v"})
if sys.argv[3] == "ends":
    writer.close()
else:
    while True:
        counter.add(0, {"k": "v"})
"""


def families(n: float = 1.0, more: str = "") -> list[Family]:
    meters = Meters()
    meters.counter("c", "1", "", ["k"]).add(n, {"k": "v" + more})
    meters.histogram("h", "s", "", ["k"], bounds=(1.0,)).record(n, {"k": "v"})
    meters.gauge("g", "1", "").set(n)
    return meters.read()


@contextmanager
def open_sheet() -> Iterator[Sheet]:
    sheet = Sheet()
    try:
        yield sheet
    finally:
        sheet.close()


def test_what_was_written_last_is_read() -> None:
    with open_sheet() as sheet:
        assert sheet.read() == []
        for number in range(1, 6):
            sheet.write(families(number))
            assert sheet.read() == families(number)
        assert isinstance(sheet.read()[1].points["v",], Spread)


@given(st.integers(0, 400), st.binary(min_size=1, max_size=300))
def test_a_write_that_breaks_off_leaves_the_one_before(at: int, noise: bytes) -> None:
    """Either place may be torn, never both."""
    with open_sheet() as sheet:
        sheet.write(families(1))
        sheet.write(families(2))
        last = sheet._written % 2 * sheets._SLOT
        before = os.pread(sheet.fd, at + len(noise), last)[at:]
        os.pwrite(sheet.fd, noise, last + at)
        whole = os.pread(sheet.fd, at + len(noise), last)[at:] == before
        found = sheet.read()
        assert found in (families(1), families(2))
        length = sheets._HEAD.unpack(os.pread(sheet.fd, sheets._HEAD.size, last))[1]
        if whole or at >= sheets._HEAD.size + length:
            assert found == families(2)


def test_what_is_too_much_is_left_out() -> None:
    with open_sheet() as sheet:
        sheet.write(families(1))
        sheet.write(families(2, "x" * sheets._SLOT))
        assert sheet.read() == families(1)


def test_what_the_gone_counted_stays_and_what_they_held_does_not() -> None:
    both = Sheets()
    first, second = both.open(), both.open()
    first.write(families(1))
    second.write(families(2))
    assert both.read() == merged(families(1), families(2))
    both.retire(first)
    counted, spread, gauge = both.read()
    assert counted.points == {("v",): 3.0}
    assert spread.points == {("v",): Spread([1, 1], 3.0)}
    assert gauge.points == {(): 2.0}
    both.retire(second)
    assert [family.kind for family in both.read()] == ["counter", "histogram"]


def _counted(sheet: Sheet) -> bool:
    """All that a child counts is written; what it adds after that is nothing."""
    return any(family.points == {("v",): 1000.0} for family in sheet.read() if family.kind == "counter")


@pytest.mark.parametrize("ending", ["ends", "killed"])
def test_a_child_that_is_gone_has_counted(ending: str) -> None:
    """All it counted where it ended by itself; where it was killed, all until a second before."""
    both = Sheets()
    total = 0
    for life in range(2):
        sheet = both.open()
        command = [sys.executable, "-c", CHILD, str(sheet.fd), "1000", ending]
        child = subprocess.Popen(command, pass_fds=[sheet.fd])
        if ending == "killed":
            wait_until(partial(_counted, sheet))
            child.send_signal(signal.SIGKILL)
        child.wait()
        both.retire(sheet)
        total += 1000
        assert both.read()[0].points == {("v",): float(total)}, life


def test_a_writer_writes_once_more_at_its_end() -> None:
    with open_sheet() as sheet:
        meters = Meters()
        counter = meters.counter("c", "1", "")
        writer = Writer(sheet, meters.read)
        counter.add(3)
        writer.close()
        assert sheet.read()[0].points == {(): 3.0}
