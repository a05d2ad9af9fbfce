"""Which known sampling noise a backend draws by, from a handful of its seeded answers.

Null of each row: the backend draws by this noise. Then no decided token violates, exactly. Fitting by accident is
ruled out by the probability that fresh noise would have crowned the same tokens (`selection.FIT_LEVEL`).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.questions import CALIBRATION
from benchmarks.recordings.asking import ask
from policies import noise, selection
from policies.evidence import Evidence
from policies.settings import BackendSettings, ModelSettings

TOKENS = 32
"""Asked for per answer."""


@dataclass(frozen=True, slots=True)
class Finding:
    """How the answers fare under one noise.

    Attributes:
        tokens: those whose outcome is decided.
        chance_log10: log₁₀ of the probability that fresh noise would have crowned the same tokens.
    """

    runtime: str
    tokens: int
    violations: int
    chance_log10: float

    @property
    def verdict(self) -> str:
        """`fits`, `does not fit`, or `undecided` where nothing violates and too few tokens could have."""
        if self.violations:
            return "does not fit"
        return "fits" if self.chance_log10 <= math.log10(selection.FIT_LEVEL) else "undecided"


def seeds(count: int) -> Iterator[int]:
    """Seeds of every kind in turn: below 2³², over it, and negative."""
    for number in range(count):
        small = secrets.randbelow(2**31)
        yield (small, 2**32 + secrets.randbelow(2**62), -2 - secrets.randbelow(2**62))[number % 3]


def answers(backend: BackendSettings, model: ModelSettings, count: int) -> list[Evidence]:
    """Short seeded answers at T = 1, without a cut. Raises AskError."""
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": TOKENS}
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    found: list[Evidence] = []
    for number, seed in enumerate(seeds(count)):
        messages = [{"role": "user", "content": CALIBRATION[number % len(CALIBRATION)]}]
        found += ask(backend, model, {"messages": messages, "seed": seed, **plain, **neutral})
    return found


def findings(evidence: Sequence[Evidence], model: ModelSettings) -> list[Finding]:
    """One row per known noise."""
    rows = []
    for runtime in sorted(noise.RUNTIMES):
        outcomes = [selection.fit(answer, runtime, vocab_size=model.vocab_size) for answer in evidence]
        raced = [outcome for outcome in outcomes if outcome is not None]
        rows.append(
            Finding(
                runtime,
                sum(int((~outcome.skipped).sum()) for outcome in raced),
                sum(int(outcome.violation.sum()) for outcome in raced),
                sum(float(outcome.chance.sum()) for outcome in raced) / math.log(10),
            )
        )
    return rows


def table(rows: Sequence[Finding]) -> str:
    """The findings for a terminal."""
    lines = [("noise", "tokens", "violations", "chance", "verdict")]
    for row in rows:
        chance = f"1e{row.chance_log10:.0f}" if row.tokens else "–"
        lines.append((row.runtime, str(row.tokens), str(row.violations), chance, row.verdict))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
