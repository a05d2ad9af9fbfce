"""Made-up rows of an overhead run whose figures are known."""

from __future__ import annotations

from typing import Any

from benchmarks.harness.rows import Row
from benchmarks.overhead.measure import TIMES
from benchmarks.overhead.steps import BYTES, DIRECT, INLINE, PLAIN, STEP
from benchmarks.overhead.witness import WITNESS

ADDS = {DIRECT: 0.0, PLAIN: 1.0, "async": 2.0, INLINE: 2.5}
"""Milliseconds to the first token."""
CHUNK_US, REQUEST_MS = 100.0, 3.0
META: dict[str, Any] = {
    "benchmark": "overhead",
    "runs": [
        {
            "began": "2026-01-01 00:00 UTC",
            "machine": {
                "cpu": "Abacus",
                "cores": 2,
                "kernel": "6",
                "python": "3.11",
                "commit": "f" * 40,
                "modified": False,
                "gpu": None,
            },
            "engine_packages": {"vllm": "0"},
            "load_before": 0.1,
            "busy": False,
            "seconds": 60.0,
        }
    ],
    "what": {
        "backend": "scripted",
        "reference": "none",
        "profile": None,
        "model": "scripted",
        "first": 0.02,
        "gap": 0.01,
    },
}


def step(arm: str, number: int, *, tokens: int = 64, audit: float = 0.0, requests: int = 25, **more: Any) -> Row:
    """One step: each round is a millisecond slower than the one before, for every arm alike."""
    first = 20.0 + number + ADDS[arm]
    found: dict[str, Any] = {name: [None] * requests for name in TIMES}
    found["ttft_ms"] = [first + place / 100 for place in range(requests)]
    found["total_ms"] = [first + 10.0 * tokens + (5.0 if arm == INLINE else 0.0)] * requests
    for name in ("gap_p50_ms", "gap_p99_ms", "gap_max_ms", "gap_mean_ms"):
        found[name] = [10.0] * requests
    verified = arm in ("async", INLINE)
    if arm == "async":
        found["verdict_ms"] = [float(place) for place in range(requests)]
    cpu = dict.fromkeys(("proxy", "plain", "verify", "replay", "engine", "store"), 0.0)
    if verified:
        cpu |= {"proxy": requests * (REQUEST_MS + tokens * CHUNK_US / 1000), "verify": requests * 2.0}
    if arm == PLAIN:
        cpu |= {"plain": requests * 5.0, "proxy": 1.0}
    return {
        "what": STEP,
        "round": number,
        "audit": audit,
        "arm": arm,
        "cell": f"closed 4 32/{tokens}",
        "kind": "closed",
        "at": 4,
        "mix": f"32/{tokens}",
        "repeat": 0,
        "requests": requests,
        **found,
        "asked": [tokens] * requests,
        "prompt": [32] * requests,
        "chunks": [tokens] * requests,
        "verdicts": ["unaudited" if verified else ""] * requests,
        "errors": [""] * requests,
        "seconds": 2.0,
        "settle_ms": 1.0,
        "undecided": 0,
        "cpu_ms": cpu,
        "store": {"in": 100 * requests, "out": 10 * requests, "kept": 50 * requests, "commands": requests},
        "replay_busy_ms": 0.0,
        "replayed_tokens": 0.0,
        "proxy_peak_mib": 99.0,
        "gpu_percent": None,
        "error": "",
    } | more


def rows(rounds: int = 7) -> list[Row]:
    """Every arm in every round, with long and short answers; bytes of two arms."""
    found = [step(arm, number, tokens=tokens) for number in range(1, rounds + 1) for arm in ADDS for tokens in (64, 4)]
    for arm, down in ((DIRECT, 1000), ("async", 9000)):
        found.append(
            {
                "what": BYTES,
                "arm": arm,
                "mix": "32/64",
                "requests": 3,
                "tokens": 192,
                "up": 300,
                "down": down,
                "error": "",
            }
        )
    return found


def heard(tool: str, arm: str, number: int, first: float, error: str = "") -> Row:
    """A run of the witness, or of ours beside it."""
    values = [] if error else [first - 1, first, first + 1]
    return {
        "what": WITNESS,
        "round": number,
        "tool": tool,
        "arm": arm,
        "requests": 3,
        "ttft_ms": values,
        "gap_mean_ms": [10.0 for _ in values],
        "total_ms": [value + 100 for value in values],
        "error": error,
    }
