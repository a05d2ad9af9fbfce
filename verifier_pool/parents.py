"""Processes that end with the one that started them, also when nobody could ask them to."""

from __future__ import annotations

import os
import select
import threading
import time

POLL_SECONDS = 1.0


def stop_with(parent: int, stop: threading.Event) -> None:
    """Set `stop` once the process `parent`, which started this one, is gone. Returns at once."""

    def watch() -> None:
        if os.getppid() == parent:
            wait_for_end(parent)
        stop.set()

    threading.Thread(target=watch, name="parent", daemon=True).start()


def wait_for_end(process: int) -> None:
    """Return once there is no process of this id."""
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):
        # No such descriptors here (an old kernel, or not Linux): the number is looked at instead.
        while runs(process):
            time.sleep(POLL_SECONDS)
        return
    end = select.poll()  # unlike `select`, at home with a process of many descriptors
    end.register(descriptor, select.POLLIN)
    end.poll()
    os.close(descriptor)


def runs(process: int) -> bool:
    """Whether there is a process of this id."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def began(process: int) -> float | None:
    """When a process of this machine was started, as a Unix time good to a second; None where nobody says."""
    try:
        with open(f"/proc/{process}/stat", encoding="ascii", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        with open("/proc/stat", encoding="ascii", errors="replace") as file:
            booted = next(int(line.split()[1]) for line in file if line.startswith("btime "))
        return booted + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, StopIteration):
        return None
