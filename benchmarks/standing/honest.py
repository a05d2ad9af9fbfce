"""How many honest backends are accused: counted against α·M + 3·√(α(1 − α)·M), looking after every unit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.standing import fleet, nulls
from benchmarks.standing.evidence import BLOCK, Answer, tightened
from benchmarks.standing.nulls import Scenario

BACKENDS = 10_000
UNITS = 1_000
ALPHAS = (0.01, 0.001)
TOGETHER = 500
"""Backends that are simulated at once: their arrays then stay in the processor's cache."""
LIFE = 100
TIGHT = 0.05
EXCLUDED = ("speculative",)
"""Honest arms under another declaration."""
SIGMAS = 4.0
SAMPLED = 10
"""Of every `TOGETHER` framed backends so many are folded by `policies.standing` itself, which takes long."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One kind of honest backend.

    Attributes:
        about: what it is, for the table.
        promised: standing promises the bound for it, by total evidence; `corroborated`: at least by corroboration.
        memory: prompts are remembered, as standing does.
        life: units between two pardons.
    """

    name: str
    about: str
    scenario: Scenario
    promised: bool = True
    corroborated: bool = True
    memory: bool = True
    life: int | None = None


def settings(h200: Sequence[Sequence[Answer]], cpu: Sequence[Sequence[Answer]]) -> list[Setting]:
    """Every setting; the arguments are the honest arms of recorded answers."""
    return [
        Setting("boundary", "every process at its bound, independent", nulls.independent),
        Setting("together", "every process at its bound, failing together", nulls.dependent),
        Setting("bursts", "conditions come and go, at the bound in bursts of 25 units", nulls.bursts),
        Setting("schedule", "at the bound just while the evidence is near its highest", nulls.scheming),
        Setting("repeated prompts", "40 prompts, 3 seeds, replays fixed by the prompt", nulls.repeating),
        Setting(
            "repeated, no memory",
            "the same, every repeat counted: not what standing does",
            nulls.repeating,
            promised=False,
            corroborated=False,
            memory=False,
        ),
        Setting("repeated faults", "the same with memory, exact checks too fixed by the prompt", nulls.stubborn),
        Setting("recorded, H200", f"honest answers in blocks of {BLOCK}", nulls.recorded(h200, BLOCK)),
        Setting("recorded, CPU", "honest answers of the demo's small profile", nulls.recorded(cpu, BLOCK)),
        Setting(
            "recorded, tight",
            f"H200 answers, 1 from p ≤ {TIGHT:g}, mu0 the arm's that drifts most",
            nulls.recorded(tightened(h200, TIGHT), 1),
        ),
        Setting("lives", f"as `together`, pardoned every {LIFE} units", nulls.dependent, life=LIFE),
        Setting(
            "framed",
            "two of 24 keys, 54 % of the traffic, send prompts that always fail",
            nulls.framed,
            promised=False,
        ),
    ]


def bound(alpha: float, backends: int) -> float:
    """The most accusations that chance explains."""
    return alpha * backends + 3 * math.sqrt(alpha * (1 - alpha) * backends)


def simulate(
    setting: Setting,
    *,
    seed: Sequence[int],
    backends: int = BACKENDS,
    units: int = UNITS,
    alphas: Sequence[float] = ALPHAS,
    compared: int = 1,
    tell: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """One row per α.

    `accused` counts the backends whose total evidence ever reached 1/α; `corroborated` those that
    `policies.standing.fold` accused, which asks for 2/α in a first life and, where replays took part, for evidence
    without any two keys. Where clients collude it is an upper bound: whose evidence without them reached 2/α.

    Args:
        compared: of every `TOGETHER` backends so many are folded by `policies.standing` too, and must agree.

    Raises:
        AssertionError: they do not.
    """
    accused, corroborated, framed = (dict.fromkeys(alphas, 0) for _ in range(3))
    sampled = 0
    capital: dict[int, list[Any]] = {}
    counted = 0
    for start in range(0, backends, TOGETHER):
        random = np.random.default_rng([*seed, start])
        batch = setting.scenario(random, min(TOGETHER, backends - start), units)
        course = fleet.run(fleet.heard(batch, setting.memory), setting.life)
        source = batch if batch.adaptive is None else course.shown
        counted += int(course.counted.sum())
        for n, values in course.capital.items():
            capital.setdefault(n, []).append(values)
        sample = min(SAMPLED, len(batch.x)) if batch.colluding is not None else 0
        sampled += sample
        for alpha in alphas:
            accused[alpha] += int((course.highest >= -math.log(alpha)).sum())
            corroborated[alpha] += _corroborated(setting, source, course, alpha)
            framed[alpha] += _framed(batch, sample, alpha)
        if setting.memory:
            for backend in random.choice(len(batch.x), compared, replace=False).tolist():
                _agree(setting, source, course, backend)
        tell(f"{setting.name}: {min(start + TOGETHER, backends)} of {backends}")
    means = {n: np.concatenate(values) for n, values in capital.items()}
    shared: dict[str, Any] = {"scenario": setting.name, "about": setting.about, "backends": backends, "units": units}
    shared |= {"counted": round(counted / backends, 1), "compared": compared * math.ceil(backends / TOGETHER)}
    for n, values in means.items():
        shared[f"capital {n}"] = round(float(values.mean()), 4)
        shared[f"error {n}"] = round(float(values.std() / math.sqrt(len(values))), 4)
    return [
        shared
        | {
            "alpha": alpha,
            "bound": round(bound(alpha, backends), 1),
            "accused": accused[alpha],
            "corroborated": corroborated[alpha] if setting.corroborated else None,
            "sampled": sampled,
            "sampled accused": framed[alpha],
            "promised": setting.promised,
            "promised corroborated": setting.corroborated,
        }
        for alpha in alphas
    ]


def kept(row: dict[str, Any]) -> bool:
    """Whether a row keeps what standing promises."""
    fair = all(
        row[f"capital {n}"] <= 1 + SIGMAS * row[f"error {n}"]
        for n in fleet.LOOKS
        if row.get(f"capital {n}") is not None
    )
    total = not row["promised"] or (row["accused"] <= row["bound"] and fair)
    itself = row.get("sampled accused", 0) <= bound(row["alpha"], row.get("sampled", 0))
    return total and itself and (not row["promised corroborated"] or row["corroborated"] <= row["bound"])


def _corroborated(setting: Setting, batch: nulls.Batch, course: fleet.Course, alpha: float) -> int:
    if not setting.corroborated:
        return 0
    if batch.colluding is not None:
        return int((course.without >= math.log(2 / alpha)).sum())
    # Evidence in later lives needs more, which `highest` has subtracted already.
    least = -math.log(alpha) if setting.life else math.log(2 / alpha)
    over = np.flatnonzero(course.highest >= least).tolist()
    return sum(fleet.folded(batch, backend, alpha, life=setting.life, once=True)[1] > 0 for backend in over)


def _framed(batch: nulls.Batch, sample: int, alpha: float) -> int:
    """How many of the first framed backends `policies.standing` accuses itself."""
    return sum(fleet.folded(batch, backend, alpha, once=True)[1] > 0 for backend in range(sample))


def _agree(setting: Setting, batch: nulls.Batch, course: fleet.Course, backend: int) -> None:
    """That arrays and records have the same evidence. Records of framed backends take long, so only their beginning."""
    if batch.colluding is not None:
        return
    record, _ = fleet.folded(batch, backend, min(ALPHAS), life=setting.life)
    expected = float(course.last[backend])
    assert math.isclose(record.log_evidence, expected, rel_tol=1e-9, abs_tol=1e-9), (record.log_evidence, expected)
