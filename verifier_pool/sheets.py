"""Metrics of several processes on one page: each child writes what it counted to a file that its parent reads.

A child writes once a second, and when it ends. What it counted in its last second is lost with a child that is killed;
what it wrote stays in the parent's sums, so counters go on when a child is started again.
"""

from __future__ import annotations

import contextlib
import os
import struct
import tempfile
import threading
import zlib
from collections.abc import Callable, Sequence

import msgspec

from verifier_pool.link.meters import Family, merged

EVERY = 1.0
"""Seconds between two writes."""
_SLOT = 4 * 1024 * 1024
"""Bytes of each of the two places that are written in turn: one of them is whole whenever a child is killed."""
_HEAD = struct.Struct("<QII")

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(list[Family])


class Sheet:
    """One child's file, without a name. Either side has a Sheet of the same open file; `fd` is its number here."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = _file() if fd is None else fd
        self._written = 0

    def write(self, families: Sequence[Family]) -> None:
        """Put what is counted now in the place of what was counted before the last time. Too much is left out."""
        data = _encode(families)
        if len(data) + _HEAD.size > _SLOT:
            return
        self._written += 1
        head = _HEAD.pack(self._written, len(data), zlib.crc32(data))
        os.pwrite(self.fd, head + data, self._written % 2 * _SLOT)

    def read(self) -> list[Family]:
        """What was counted when it was last written whole."""
        found = [self._slot(at) for at in (0, _SLOT)]
        return max(found, key=lambda slot: slot[0])[1]

    def close(self) -> None:
        """Let go of it."""
        os.close(self.fd)

    def _slot(self, at: int) -> tuple[int, list[Family]]:
        head = os.pread(self.fd, _HEAD.size, at)
        if len(head) < _HEAD.size:
            return 0, []
        number, size, sum = _HEAD.unpack(head)
        data = os.pread(self.fd, size, at + _HEAD.size)
        if len(data) < size or zlib.crc32(data) != sum:
            return 0, []
        try:
            return number, _decoder.decode(data)
        except msgspec.MsgspecError:
            return 0, []


class Writer:
    """Writes to a sheet, from a thread of its own, until `close`, and then once more."""

    def __init__(self, sheet: Sheet, read: Callable[[], Sequence[Family]]) -> None:
        self._sheet, self._read = sheet, read
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write a last time and end."""
        self._ended.set()
        self._thread.join(2 * EVERY)

    def _run(self) -> None:
        over = False
        while not over:
            over = self._ended.wait(EVERY)
            with contextlib.suppress(OSError):  # no room; the next time there may be some
                self._sheet.write(self._read())


class Sheets:
    """Those of all children of this process, and what those that are gone had counted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[Sheet] = []
        self._gone: list[Family] = []

    def open(self) -> Sheet:
        """One for a child that is about to start."""
        sheet = Sheet()
        with self._lock:
            self._open.append(sheet)
        return sheet

    def retire(self, sheet: Sheet) -> None:
        """Its child is gone: what it counted stays, what it held does not."""
        with self._lock:
            kept = [family for family in sheet.read() if family.kind != "gauge"]
            self._gone = merged(self._gone, kept)
            self._open.remove(sheet)
            sheet.close()

    def read(self) -> list[Family]:
        """What all of them say together."""
        with self._lock:
            return merged(self._gone, *(sheet.read() for sheet in self._open))


def _file() -> int:
    """A file without a name: in memory, so that it takes no folder that can be written, where the system has such."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("metrics")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


SHEETS = Sheets()
"""Those of this process."""
