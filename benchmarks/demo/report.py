"""The demo's table, and whether it shows what it should."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.demo.layout import HONEST
from benchmarks.demo.traffic import Outcome

CAUGHT_SHARE = 0.8
"""Share of a cheat's answers that must be rejected. Not all: an answer in which the cheap model happens to choose
what the true one would have chosen is no lie, and a short one proves little."""

FOOTNOTE = (
    "Every answer was audited: replayed by a reference engine that saw token ids only. Telling metric: the range over "
    "answers. Added latency: one-token answers through the proxy minus the same asked directly, median of 12 pairs."
)

HEADER = ("backend", "what it really is", "requests", "verdicts", "telling metric", "added latency")


@dataclass(frozen=True, slots=True)
class Row:
    """One backend's results. `added` is in milliseconds, None when it was not measured."""

    backend: str
    about: str
    outcomes: Sequence[Outcome]
    added: float | None = None

    @property
    def counts(self) -> Counter[str]:
        """Answers by verdict."""
        return Counter(outcome.verdict for outcome in self.outcomes)

    @property
    def good(self) -> bool:
        """Honest: every answer passes, one may be inconclusive. A cheat: at least 80 % rejected."""
        counts, total = self.counts, len(self.outcomes)
        if self.backend == HONEST:
            return counts["pass"] >= total - 1 and counts["pass"] + counts["inconclusive"] == total and total > 0
        return counts["reject"] >= CAUGHT_SHARE * total and total > 0

    def cells(self) -> tuple[str, ...]:
        """The row's texts."""
        verdicts = ", ".join(f"{count} {word}" for word, count in self.counts.most_common())
        added = "–" if self.added is None else f"{self.added:+.0f} ms"
        return self.backend, self.about, str(len(self.outcomes)), verdicts, telling(self.outcomes), added


def telling(outcomes: Sequence[Outcome]) -> str:
    """The metric that gave a backend away, or, when nothing did, how near it came to the limit."""
    rejecting: Counter[str] = Counter()
    for outcome in outcomes:
        rejecting.update(check["name"] for check in _checks(outcome) if check["result"] == "reject")
    if not rejecting:
        return _metric("distance", outcomes)
    name, _ = rejecting.most_common(1)[0]
    return _metric(name, outcomes)


def _metric(name: str, outcomes: Sequence[Outcome]) -> str:
    rows = [check["metrics"] for outcome in outcomes for check in _checks(outcome) if check["name"] == name]
    if not rows:
        return "–"
    if name == "selection":
        violations, checked = _total(rows, "violations"), _total(rows, "checked")
        share = violations / checked if checked else 0.0
        return f"selection: {share:.1%} of tokens cannot be drawn from the claim ({violations:.0f} of {checked:.0f})"
    if name == "distance":
        return f"distance: {_range(rows, 'score')} nats between claim and replay"
    if name == "margin":
        losing, checked = _total(rows, "losing_far"), _total(rows, "checked")
        share = losing / checked if checked else 0.0
        return f"margin: {share:.1%} of tokens lose by far to another under the seed ({losing:.0f} of {checked:.0f})"
    return name


def _range(rows: Sequence[Mapping[str, Any]], key: str) -> str:
    values = sorted(float(row[key]) for row in rows if row.get(key) is not None)
    return f"{values[0]:.3f} to {values[-1]:.3f}" if values else "no"


def _total(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(sum(row.get(key) or 0 for row in rows))


def _checks(outcome: Outcome) -> Sequence[Mapping[str, Any]]:
    return outcome.verification.get("checks") or ()


def table(rows: Sequence[Row]) -> str:
    """A table in Markdown, padded so that a terminal shows it as one too."""
    cells = [HEADER, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADER))]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + " |" for line in cells
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def standings(found: Sequence[Mapping[str, Any]]) -> str:
    """One sentence per backend: its state and why, the evidence against it and what accuses."""
    lines = ["Standing after so few answers (`countersign standing`; what replays say counts slowly with so small a"]
    lines[0] += " calibration, what is exact counts at once):"
    for standing in found:
        evidence = standing["evidence"]
        power = "none" if evidence["log10"] is None else f"10^{round(evidence['log10'], 1) + 0.0:.1f}"
        lines.append(
            f"  {standing['backend']}: {standing['state']}; evidence against it {power}, "
            f"10^{evidence['needed_log10']:.1f} accuses; {'; '.join(standing['reasons'])}"
        )
    return "\n".join(lines)


def complaints(rows: Sequence[Row]) -> list[str]:
    """What is not as it should be, one sentence each; empty when the demo showed what it should."""
    return [
        f"{row.backend}: expected "
        + ("every answer to pass" if row.backend == HONEST else f"at least {CAUGHT_SHARE:.0%} of answers rejected")
        + f", got {dict(row.counts)}"
        for row in rows
        if not row.good
    ]


def exceptions(rows: Sequence[Row]) -> list[str]:
    """Every answer whose verdict is not its backend's usual one, with the reason."""
    found = []
    for row in rows:
        for outcome in row.outcomes:
            if outcome.verdict != ("pass" if row.backend == HONEST else "reject"):
                reasons = "; ".join(outcome.verification.get("reasons") or ["no reason given"])
                how = f"T={outcome.shot.temperature:g}, {'streamed' if outcome.shot.stream else 'not streamed'}"
                found.append(f"{row.backend}, {how}: {outcome.verdict}: {reasons}")
    return found
