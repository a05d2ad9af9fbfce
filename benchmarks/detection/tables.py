"""Tables made of judged rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.adversary.score import until_evidence, wilson
from benchmarks.detection.judging import LENGTHS, Row, as_choice, caught
from policies import lmcv

CHECKS = ("structure", "selection", "distance", "margin", "routing")
STATISTICS = (
    "distance",
    "lmcv mean",
    "lmcv p99",
    "lmcv rank rate",
    "lmcv 1 - jaccard",
    "lmcv js p99",
    "gonka",
    "logic ks",
)
COMPARED = ("fp8", "kv-fp8", "fp8-rounded", "int8", "perturbed", "int4")
FALSE_ALARMS = 0.01
LEVEL = 1e-6


def by_arm(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows of each arm, arms in the order they came."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["arm"], []).append(row)
    return groups


def verdicts(rows: Sequence[Row], kind: str) -> list[list[str]]:
    """One line per arm of a kind: what happened to its answers, and how soon evidence suffices."""
    lines = [["arm", "answers", "pass", "inconclusive", "reject", "rejected (95 %)", "by", "answers / tokens to 1e-6"]]
    for name, group in by_arm(row for row in rows if row["kind"] == kind).items():
        words = Counter(row["verdict"] for row in group)
        low, high = wilson(len(caught(group)), len(group))
        by = Counter(check for row in group for check in CHECKS if row.get(f"{check} result") == "reject")
        answers, tokens = until_evidence([{"choices": [as_choice(row)]} for row in group], LEVEL)
        lines.append(
            [
                name,
                str(len(group)),
                *(str(words.get(word, 0)) for word in ("pass", "inconclusive", "reject")),
                f"{low:.1%} to {high:.1%}",
                ", ".join(f"{check} {count}" for check, count in by.most_common()) or "–",
                f"{answers} / {tokens}" if answers else "never",
            ]
        )
    return lines


def strangers(rows: Sequence[Row]) -> list[list[str]]:
    """LMCV's named rules on the same answers, as they stand."""
    lines = [["arm", *(f"{name}: PASS / INC / REJ, %" for name in lmcv.POLICIES)]]
    for name, group in by_arm(row for row in rows if row["arm"].isascii() and "," not in row["arm"]).items():
        cells = []
        for policy in lmcv.POLICIES:
            words = Counter(str(row[f"lmcv {policy}"]).split("_")[0] for row in group)
            cells.append(" / ".join(f"{100 * words.get(word, 0) / len(group):.0f}" for word in WORDS))
        lines.append([name, *cells])
    return lines


WORDS = ("PASS", "INCONCLUSIVE", "REJECT")


def effects(rows: Sequence[Row], length: int) -> list[list[str]]:
    """Each statistic's separation of one answer from honest ones, at so many tokens, all temperatures together.

    d′ = (mean of the cheat − mean of the honest) / √((variance + variance)/2) of the logarithm, and the share detected
    at the threshold that 1 % of the honest answers exceed.
    """
    honest = [row for row in rows if row["kind"] == "honest" and not row["arm"].startswith("moe")]
    lines = [["statistic", *(f"{name}: d′, detected" for name in COMPARED)]]
    for statistic in STATISTICS:
        null = _logs(honest, f"{statistic} @{length}")
        cells = []
        for name in COMPARED:
            cheat = _logs([row for row in rows if row["arm"] == name], f"{statistic} @{length}")
            cells.append(_separation(null, cheat))
        lines.append([statistic, *cells])
    return lines


def _logs(rows: Sequence[Row], column: str) -> NDArray[np.float64]:
    values = np.array([float(row[column]) for row in rows if row.get(column) not in (None, "")])
    values = values[np.isfinite(values)]
    positive = values[values > 0]
    floor = float(np.quantile(positive, 0.01)) if len(positive) else 1e-9
    logs: NDArray[np.float64] = np.log(np.maximum(values, floor))
    return logs


def _separation(null: NDArray[np.float64], cheat: NDArray[np.float64]) -> str:
    if len(null) < 2 or len(cheat) < 2:
        return "–"
    spread = np.sqrt((null.var(ddof=1) + cheat.var(ddof=1)) / 2)
    detected = float((cheat > np.quantile(null, 1 - FALSE_ALARMS)).mean())
    return f"{(cheat.mean() - null.mean()) / spread:.1f}, {detected:.0%}" if spread > 0 else "–"


def scores(rows: Sequence[Row]) -> list[list[str]]:
    """Our deciding statistics on whole answers by temperature: median, and the smallest and largest."""
    temperatures = sorted({float(row["temperature"]) for row in rows if row["arm"] != "hot"})
    lines = [["arm", *(f"{check}, T = {t:g}" for check in ("distance", "margin") for t in temperatures)]]
    for name, group in by_arm(row for row in rows if row["arm"] not in ("hot", "cached")).items():
        cells = []
        for check in ("distance", "margin"):
            for temperature in temperatures:
                found = [
                    float(row[f"{check} score"])
                    for row in group
                    if float(row["temperature"]) == temperature and row.get(f"{check} score") not in (None, "")
                ]
                cells.append(f"{np.median(found):.3g} ({min(found):.2g}–{max(found):.2g})" if found else "–")
        lines.append([name, *cells])
    return lines


__all__ = ["LENGTHS", "by_arm", "effects", "scores", "strangers", "verdicts"]
