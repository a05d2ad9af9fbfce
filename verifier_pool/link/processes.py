"""What a process says of itself: processor time, memory, and which version runs."""

from __future__ import annotations

import os
import resource
import time
from importlib import metadata
from pathlib import Path

from verifier_pool.link.meters import Meters

_PAGE = os.sysconf("SC_PAGE_SIZE")


def watch_process(meters: Meters, what: str, *, child: bool = False) -> None:
    """Observe this process. `what` it is: `proxy` or `worker`; of a `child`, only what can be added to its parent's."""
    meters.observe(
        "process.cpu.time", "s", "Processor time that it took", (), lambda: [(_processor_seconds(), {})], "counter"
    )
    meters.observe("process.memory.usage", "By", "Memory that it has", (), lambda: [(_memory(), {})])
    if child:
        return
    started, labels = time.time(), {"version": _version(), "process": what}
    meters.observe("countersign.build", "1", "Version and kind of this process", tuple(labels), lambda: [(1, labels)])
    meters.observe("process.start_time", "s", "When it began, Unix time", (), lambda: [(started, {})])


def _version() -> str:
    try:
        return metadata.version("countersign")
    except metadata.PackageNotFoundError:
        return ""


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _memory() -> float:
    try:
        return float(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
