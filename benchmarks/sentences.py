"""What the README says of results in words, read from them.

What a word says instead of a figure (a quarter, under a millisecond) turns into the figure when it no longer holds, and
so into a sentence that the README does not have.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import served
from benchmarks.adversary.registry import ATTACKS
from benchmarks.adversary.score import summarise
from benchmarks.cost.at_load import speeds
from benchmarks.cost.in_pool import share_of_floor
from benchmarks.cost.plan import IDS, WORKER
from benchmarks.cost.pool import QUEUEING
from benchmarks.cost.rows import LOAD, POOL, read
from benchmarks.fidelity import report as fidelity
from benchmarks.fidelity.cases import CASES
from benchmarks.harness import metadata
from benchmarks.harness.rows import read as read_rows
from benchmarks.overhead.relay import report as relay
from benchmarks.overhead.relay.loads import LOADS, WARM
from policies.errors import CountersignError
from policies.settings import AuditSettings, StandingSettings

RESULTS = Path("benchmarks/results")
GENERATED = ("64x128/1024", "128x512/256")
"""Loads whose generation is compared with their replay."""
_SHARES = {0.25: "quarter", 0.05: "twentieth"}
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


def sentences(root: Path, answers: Sequence[str]) -> list[str]:
    """Every sentence; `answers` are the loads of the README's table of replays.

    Raises CountersignError where results are damaged.
    """
    results = root / RESULTS
    return [
        *demo(results),
        *detection(results),
        *gateways(results),
        *overhead(results),
        *streams(results),
        *served.sentences(root),
        *pool(results / "cost", answers),
        *chaos(results),
    ]


def demo(results: Path) -> list[str]:
    """What `make demo` printed, line by line; and how many answers its spoofer may give."""
    page = (results / "demo.md").read_text(encoding="utf-8")
    rows = [row for row in read_rows(results / "detection" / "cpu" / "rows.jsonl") if row["attack"] == "spoofer"]
    needed = summarise(ATTACKS["spoofer"], rows).responses
    alpha = round(1 / StandingSettings().alpha)
    cores, pairs = _one(r"Measured on (\d+) cores", page), _one(r"median of (\d+) pairs", page)
    return [
        f"On {cores} cores it printed",
        *(" ".join(line.split()) for line in page.splitlines() if line.startswith("| ")),
        f"median of {pairs} pairs",
        f"Against the demo's spoofer {_word(needed or 0)} answers were enough.",
        f"(one in {'a million' if alpha == 1_000_000 else f'{alpha:,}'})",
    ]


def detection(results: Path) -> list[str]:
    """Of how many answers each the shares of detected ones are."""
    page = (results / "detection" / "h200" / "summary.md").read_text(encoding="utf-8")
    counts = {int(_one(rf"\| {arm} \| (\d+) \|", page)) for arm in ("eager-64", "fp8", "kv-fp8", "fp8 spoofed")}
    each = f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    return [f"({each} each, every one audited;"]


def gateways(results: Path) -> list[str]:
    """How many of the fidelity cases each gateway holds."""
    rows = fidelity.read(results / "fidelity.jsonl")
    names = [row["gateway"] for row in rows if row["kind"] == "run"]
    held = {
        name: fidelity.held([row for row in rows if row["kind"] == "test" and row["gateway"] == name]) for name in names
    }
    (ours, _), (router, by_meaning), (other, meant) = (held[name] for name in ("Countersign", "vllm-router", "LiteLLM"))
    every, alike = "all " if ours == len(CASES) else "", "" if router == by_meaning else f" ({by_meaning} by meaning)"
    return [
        f"The same suite of {len(CASES)} reported gateway faults, run against {_word(len(names))} gateways: this proxy "
        f"holds {every}{ours} byte for byte, vLLM's Rust router {router}{alike}, LiteLLM {other} ({meant} by meaning)"
    ]


def overhead(results: Path) -> list[str]:
    """What ran on how many cores."""
    cores = _machine(results / "overhead" / "scripted")["cores"]
    return [f"On {cores} cores that also ran client, backend, worker and Redis"]


def streams(results: Path) -> list[str]:
    """How many answers came whole through either gateway, and how long a first token takes when nobody sleeps."""
    bursts = relay.read(results / "relay")
    counts = []
    for arm in ("proxy", "litellm"):
        mine = [burst for burst in bursts if burst.arm == arm]
        asked = sum(burst.requests for burst in mine)
        counts.append((asked - sum(sum(burst.errors.values()) for burst in mine), asked))
    (ours, asked), (theirs, others) = counts
    warm = relay.added_first(bursts, "proxy", WARM)
    assert warm is not None
    first = "Under a millisecond" if warm.value < 1 else f"{warm.value:.2f} ms"
    cores = _machine(results / "relay")["cores"]
    return [
        f"The relay alone, up to {max(LOADS):,} streams at once",
        f"{ours:,} of {asked:,} answers came whole through Countersign, {theirs:,} of {others:,} through LiteLLM.",
        f"The gateway has one core of the {_word(cores)}",
        f"{first} is what a first token takes longer where requests follow each other",
    ]


def pool(folder: Path, answers: Sequence[str]) -> list[str]:
    """What the pool does of replays, and how long verdicts take."""
    load, rows = (read(folder / name) for name in (LOAD, POOL))
    audit = AuditSettings()
    full = [share for name in answers if (share := share_of_floor(load, rows, name, audit.full)) is not None]
    (at_80,) = (
        row["latency_s"]
        for row in rows
        if (row["phase"], row.get("load"), row.get("level")) == (QUEUEING, "128x512/256", 0.8) and not row["error"]
    )
    every = speeds(load)
    shares = [float(np.median(every[name, IDS]) / np.median(every[name, WORKER])) for name in GENERATED]
    last = metadata.read(folder / metadata.FILE)["runs"][-1]
    version = ".".join(last["engine_packages"]["vllm"].split(".")[:2])
    gpu = str(last["machine"]["gpu"]).partition(",")[0].removeprefix("NVIDIA ")
    part, floor = _SHARES.get(audit.full, f"{audit.full:.0%}"), _SHARES.get(audit.floor, f"{audit.floor:.0%}")
    return [
        f"On an {gpu} (8B shape, vLLM {version};",
        f"with the default {part} of form `full` the pool does {_percent(full)} %",
        "At 80 % of capacity half of the verdicts come within "
        f"{1000 * at_80['p50']:.0f} ms of the answer's end, 99 % within {1000 * at_80['p99']:.0f} ms.",
        f"Replaying every answer takes {_percent(shares)} % of the GPU time of generating them for the first two rows; "
        f"at the default floor a {floor} of that.",
    ]


def chaos(results: Path) -> list[str]:
    """How many answers lived through how many kills."""
    page = (results / "chaos.md").read_text(encoding="utf-8")
    accepted, kills = int(_one(r"\| accepted: .* \| (\d+) \|", page)), _one(r"\| \*\*all\*\* \| \*\*(\d+)\*\* \|", page)
    lost, doubled = (int(_one(rf"\| \*\*{what}\*\* \| \*\*(\d+)\*\* \|", page)) for what in ("lost", "duplicates"))
    amid = f"during {kills} kills and network cuts (workers, references, proxies, Redis)"
    told = "each got exactly one verdict" if not lost + doubled else f"{lost} were lost and {doubled} doubled"
    return [f"of {accepted:,} accepted answers {amid} {told}"]


def _machine(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = metadata.read(folder / metadata.FILE)["runs"][-1]["machine"]
    return found


def _percent(shares: Sequence[float]) -> str:
    return f"{100 * min(shares):.0f} to {100 * max(shares):.0f}"


def _word(count: int) -> str:
    return _NUMBERS[count] if count < len(_NUMBERS) else f"{count:,}"


def _one(pattern: str, page: str) -> str:
    found = re.search(pattern, page)
    if found is None:
        raise CountersignError(f"no {pattern!r} in the results")
    return found[1]
