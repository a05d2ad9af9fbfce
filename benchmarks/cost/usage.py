"""What processes and the GPU use: CPU seconds of process trees from /proc, utilisation from `nvidia-smi`."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

_TICK = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system seconds of a process, threads that ended among them; 0 when it is gone. Ticks are 10 ms."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICK


def descendants(pid: int) -> list[int]:
    """Processes that this one started, and those that they started, as they are now."""
    found: list[int] = []
    todo = [pid]
    while todo:
        for child in _children(todo.pop()):
            found.append(child)
            todo.append(child)
    return found


def _children(pid: int) -> list[int]:
    found = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found


def tree_seconds(pids: Iterable[int]) -> float:
    """CPU seconds of these processes together."""
    return sum(map(cpu_seconds, pids))


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
