"""Ends process trees when whoever started them is gone, however it went.

The parent writes one process id a line into this process's stdin and keeps the pipe open. The pipe closes when
the parent exits, crashes or is killed, and then every tree that was named is ended. Nothing to install, and it
works where the kernel has no parent-death signal, which would not reach grandchildren anyway.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

GRACE_SECONDS = 5.0


def tree(root: int) -> set[int]:
    """`root` and every process below it or in its session, where `/proc` tells; else `root` alone."""
    parents: dict[int, int] = {}
    members = {root}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            # The name in parentheses may hold anything, so count from behind it.
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            state, parent, session = fields[0], int(fields[1]), int(fields[3])
            if state != "Z":
                parents[int(stat.parent.name)] = parent
                if session == root:
                    members.add(int(stat.parent.name))
    while grown := {pid for pid, parent in parents.items() if parent in members} - members:
        members |= grown
    return members


def end(roots: Iterable[int], grace: float = GRACE_SECONDS) -> None:
    """Ask each root's process group to stop, wait up to `grace` seconds, then kill what is left of the trees.

    Each root must lead its own session. Returns at once for trees that are gone already.
    """
    trees = {root: tree(root) for root in roots}
    for root in trees:
        _send(-root, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while any(map(_alive, set().union(*trees.values()))) and time.monotonic() < deadline:
        time.sleep(0.1)
    for root, members in trees.items():
        _send(-root, signal.SIGKILL)
        for pid in members:
            if _alive(pid):
                _send(pid, signal.SIGKILL)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] != "Z"
    return True


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def main() -> None:
    """Read ids until the parent is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end([int(line) for line in sys.stdin])


if __name__ == "__main__":
    main()
