"""What processes and the GPU use: CPU and memory from the kernel, utilisation from `nvidia-smi`."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

_SCHEDULED = 2


def cpu_seconds(pid: int) -> float:
    """Seconds on a CPU of all threads of a process, ended ones included; 0 when it is gone."""
    # clock_getcpuclockid(3) has no name in Python; this is what Linux makes of a process id.
    try:
        return time.clock_gettime((~pid << 3) | _SCHEDULED)
    except OSError:
        return 0.0


def descendants(pid: int) -> list[int]:
    """Processes that this one started, and those that they started, as they are now."""
    return family(pid)[1:]


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


def tree_seconds(pids: Iterable[int]) -> float:
    """CPU seconds of these processes together."""
    return sum(map(cpu_seconds, pids))


def resident_bytes(pid: int) -> int:
    """Memory a process holds in RAM now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory_bytes(pid: int) -> int:
    """Most memory a process ever held in RAM."""
    for text in Path(f"/proc/{pid}/status").read_text().splitlines():
        if text.startswith("VmHWM:"):
            return int(text.split()[1]) * 1024
    return 0


def first_gpu() -> str:
    """The first GPU that this process may use, as `nvidia-smi -i` takes it."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"


class Gpu:
    """Samples our first GPU's utilisation while the block lasts; measures nothing where there is no `nvidia-smi`.

    The driver's figure is the share of time in which any kernel ran, not how full the chip was.
    """

    def __init__(self, every_ms: int = 200) -> None:
        self._every_ms = every_ms
        self._samples: list[tuple[float, float]] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Gpu:
        binary = shutil.which("nvidia-smi")
        if binary is not None:
            command = [binary, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-i", first_gpu()]
            self._process = subprocess.Popen(
                [*command, f"-lms={self._every_ms}"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            threading.Thread(target=self._read, name="gpu", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def mean(self, since: float, until: float) -> float | None:
        """Percent, over samples taken between two moments of `time.monotonic()`; None without any."""
        found = [value for at, value in self._samples if since <= at <= until]
        return float(np.mean(found)) if found else None

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip().isdigit():
                self._samples.append((time.monotonic(), float(line)))
