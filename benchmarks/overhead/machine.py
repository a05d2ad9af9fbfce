"""What a benchmark ran on, and what a process used, read from /proc."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

BUSY_LOAD_PER_CORE = 0.3
_SCHEDULED = 2
PACKAGES = ("countersign", "aiohttp", "uvicorn", "uvloop", "httptools", "starlette", "orjson", "redis", "rq", "numpy")


def cpu_seconds(pid: int) -> float:
    """Seconds on a CPU of all threads of a process, ended ones included. Raises OSError when it is gone."""
    # clock_getcpuclockid(3) has no name in Python; this is what Linux makes of a process id.
    return time.clock_gettime((~pid << 3) | _SCHEDULED)


def family(pid: int) -> list[int]:
    """A process and its descendants, as far as they live."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for each in found:
        found += parents.get(each, [])
    return found


def resident_bytes(pid: int) -> int:
    """Memory a process holds in RAM now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory_bytes(pid: int) -> int:
    """Most memory a process ever held in RAM."""
    for text in Path(f"/proc/{pid}/status").read_text().splitlines():
        if text.startswith("VmHWM:"):
            return int(text.split()[1]) * 1024
    return 0


def load() -> float:
    """Load average of the last minute."""
    return os.getloadavg()[0]


def is_busy(before: float) -> bool:
    """Whether the load before the start says that others use this machine."""
    return before > BUSY_LOAD_PER_CORE * (os.cpu_count() or 1)


def describe() -> dict[str, Any]:
    """Hardware, kernel, Python, versions and commit; no names of hosts, users or folders."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "commit": _git("rev-parse", "HEAD"),
        "modified": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


def _cpu_model() -> str:
    for text in Path("/proc/cpuinfo").read_text().splitlines():
        if text.startswith("model name"):
            return text.partition(":")[2].strip()
    return platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
