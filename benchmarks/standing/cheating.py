"""How many answers each cheat gets away with after a good past, and what other rules make of the same answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.standing import rivals
from benchmarks.standing.evidence import Answer, resampled
from benchmarks.standing.turning import Backend, Caught, Clients, quantile
from policies.record import Record
from policies.settings import AuditSettings, StandingSettings
from policies.unit import EXACT

CHANGES = (0, 200, 2_000)
REPETITIONS = 20
LONGEST = 1_000
HOPELESS = 3
SHARES = (1.0, 0.1, 0.01)
HIGH = 0.9
CLIENTS = Clients()
HONEST_UNITS = 2_000
HONEST_SEQUENCES = 1_000
SIMILAR = 0.05
"""Share of honest answers under gonka's similarity threshold here, so that z > 1 has the rate it assumes."""
AUDITS = {"by standing": AuditSettings(), "everything": AuditSettings(rate=1.0)}


@dataclass(frozen=True, slots=True)
class Cheat:
    """One way to cheat: `answers` to draw from, in a `share` of all answers; `honest` arms are what else it serves."""

    name: str
    answers: Sequence[Answer]
    honest: Sequence[Sequence[Answer]]
    share: float = 1.0
    longest: int = LONGEST

    def draw(self, random: np.random.Generator, count: int) -> list[Answer]:
        """Answers after the change."""
        chosen = random.integers(len(self.answers), size=count)
        bad = [self.answers[at] for at in chosen]
        if self.share >= 1:
            return bad
        good = resampled(random, self.honest, count)
        return [one if random.random() < self.share else other for one, other in zip(bad, good, strict=True)]


def cheats(arms: dict[str, tuple[str, list[Answer]]], excluded: Sequence[str]) -> list[Cheat]:
    """Every recorded cheat and second pass, and two lies that the exact checks see, in three shares each."""
    honest = {name: answers for name, (kind, answers) in arms.items() if kind == "honest" and name not in excluded}
    dense = [answers for name, answers in honest.items() if not name.startswith("moe")]
    experts = [answers for name, answers in honest.items() if name.startswith("moe")]
    found = [
        Cheat(name, answers, experts if name.startswith("moe") else dense)
        for name, (kind, answers) in arms.items()
        if kind != "honest"
    ]
    flat = [answer for arm in dense for answer in arm]
    lies = {"withheld": [_withheld(answer) for answer in flat], "usage": [_lying(answer) for answer in flat]}
    for name, answers in lies.items():
        found += [
            Cheat(f"{name}, {share:.0%}", answers, dense, share, LONGEST if share > SHARES[-1] else 5 * LONGEST)
            for share in SHARES
        ]
    return found


class Pasts:
    """Honest pasts and the records they leave, shared by every cheat that follows them."""

    def __init__(self, seed: int, rules: StandingSettings) -> None:
        self.rules = rules
        self._seed = seed
        self._made: dict[tuple[int, int, str, int], tuple[list[Answer], Record]] = {}

    def get(
        self, honest: Sequence[Sequence[Answer]], change: int, audited: str, number: int
    ) -> tuple[list[Answer], Record]:
        """Answers and record of one of them."""
        name = (id(honest), change, audited, number)
        if name not in self._made:
            random = np.random.default_rng([self._seed, change, number])
            answers = resampled(random, honest, change)
            backend = Backend(random, CLIENTS, self.rules, AUDITS[audited])
            backend.serve(answers)
            self._made[name] = answers, backend.record
        return self._made[name]


def simulate(
    cheat: Cheat,
    pasts: Pasts,
    *,
    seed: Sequence[int],
    changes: Sequence[int] | None = None,
    repetitions: int = REPETITIONS,
) -> Iterator[dict[str, Any]]:
    """One row per moment of change and rule of auditing, medians and 90 % quantiles of generations and tokens.

    After `CHANGES` honest answers unless told otherwise, and no more than `HOPELESS` runs where none of them ends in
    quarantine.
    """
    for change in CHANGES if changes is None else changes:
        for audited, audits in AUDITS.items():
            found: list[Caught] = []
            runs: list[tuple[list[Answer], list[Answer]]] = []
            for number in range(repetitions):
                past, record = pasts.get(cheat.honest, change, audited, number)
                random = np.random.default_rng([*seed, change, number])
                runs.append((past, cheat.draw(random, cheat.longest)))
                backend = Backend(random, CLIENTS, pasts.rules, audits, record, change)
                found.append(backend.turn(runs[-1][1]))
                if len(found) == HOPELESS and all(each.quarantined is None for each in found):
                    break
            row: dict[str, Any] = {"cheat": cheat.name, "change": change, "audited": audited}
            row |= {"runs": len(found), "longest": cheat.longest}
            for what in ("suspect", "enough", "quarantined", "tokens"):
                values = [getattr(each, what) for each in found]
                row |= {f"{what} median": quantile(values, 0.5), f"{what} high": quantile(values, HIGH)}
            row["quarantined share"] = sum(each.quarantined is not None for each in found) / len(found)
            if audits.rate == 1.0:
                row |= _rivals(runs, change, pasts.rules)
            yield row


def false_accusations(
    honest: Sequence[Sequence[Answer]],
    *,
    seed: Sequence[int],
    sequences: int | None = None,
    units: int | None = None,
) -> list[dict[str, Any]]:
    """Share of honest backends that the rivals accuse within `units` answers, by what counts as a failed answer.

    `HONEST_SEQUENCES` sequences of `HONEST_UNITS` answers unless told otherwise.
    """
    random = np.random.default_rng(list(seed))
    sequences, units = sequences or HONEST_SEQUENCES, units or HONEST_UNITS
    measured = [[answer for answer in arm if answer.similarity is not None] for arm in honest]
    flat = np.array([answer.similarity for arm in measured for answer in arm], np.float64)
    least = float(np.quantile(flat, SIMILAR))
    ours, theirs = np.empty((2, sequences, units), np.bool_)
    for number in range(sequences):
        ours[number] = [answer.caught for answer in resampled(random, honest, units)]
        theirs[number] = [(answer.similarity or 0.0) < least for answer in resampled(random, measured, units)]
    boundary = random.random((sequences, units)) < rivals.P0
    return [
        {
            "failed": name,
            "rate": round(float(failed.mean()), 5),
            "sequences": sequences,
            "units": units,
            "z > 1": float(rivals.z_rule(failed).any(axis=1).mean()),
            **{f"sprt {alpha:g}": float(rivals.sprt(failed, alpha).any(axis=1).mean()) for alpha in (1e-3, 1e-6)},
        }
        for name, failed in (
            ("our verdicts on recorded answers", ours),
            (f"gonka's similarity under {least:.4f}", theirs),
            ("an honest rate of p0, independent", boundary),
        )
    ]


def _rivals(runs: Sequence[tuple[list[Answer], list[Answer]]], change: int, rules: StandingSettings) -> dict[str, Any]:
    failed = np.array([[answer.caught for answer in past + future] for past, future in runs])
    lives = [rivals.lifetime(past + future, rules.fault_rate, rules.alpha) for past, future in runs]
    row: dict[str, Any] = {}
    for name, accusing in (
        ("z > 1", rivals.z_rule(failed)),
        ("sprt", rivals.sprt(failed, rules.alpha)),
        ("lifetime", np.array(lives)),
    ):
        early, found = rivals.first(accusing, change)
        row |= {f"{name} median": quantile(found, 0.5) if found else None, f"{name} early": float(early.mean())}
    return row


def _withheld(answer: Answer) -> Answer:
    outcomes = {"withheld": (1.0, 0.0)}
    return replace(
        answer,
        outcomes=outcomes,
        caught=True,
        caught_unseen=True,
        replayed=False,
        undecided="withheld",
        blame="backend",
    )


def _lying(answer: Answer) -> Answer:
    """The same answer billed for more tokens than it has, which structure counts."""
    outcomes = {name: answer.outcomes[name] for name in answer.outcomes if name in EXACT} | dict(answer.outcomes)
    return replace(answer, outcomes=outcomes | {"structure": (1.0, 0.0)}, caught=True, caught_unseen=True, undecided="")
