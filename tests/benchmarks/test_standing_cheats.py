"""Backends that turn bad: how soon they are accused by standing, by other rules, and as predicted."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks import command as benches
from benchmarks.detection.rows import ROWS
from benchmarks.standing import cheating, command, evidence, honest, report, rivals
from benchmarks.standing.evidence import Answer, of_outcomes
from benchmarks.standing.predict import generations
from benchmarks.standing.turning import quantile
from policies.settings import AuditSettings, StandingSettings
from policies.unit import EXACT

HONEST = {
    "selection": (0.0, 0.0),
    "structure": (0.0, 0.0),
    "withheld": (0.0, 0.0),
    "distance": (0.0, 0.04),
    "margin": (0.0, 0.04),
    "forged": (0.0, 0.0),
}
SPOOFED = {**HONEST, "selection": (1.0, 0.0)}
FAR = {**HONEST, "distance": (1.0, 0.04)}
Arms = dict[str, tuple[str, list[Answer]]]


@pytest.fixture(scope="module")
def arms() -> Arms:
    return evidence.recorded(command.RECORDED / "h200" / ROWS)


def test_every_recorded_arm_becomes_outcomes(arms: Arms) -> None:
    for name, (kind, answers) in arms.items():
        assert all(0 <= x <= 1 for answer in answers for x, _ in answer.outcomes.values()), name
        assert all(
            mu0 > 0 for answer in answers for check, (_, mu0) in answer.outcomes.items() if check in ("distance",)
        )
        assert all(set(answer.unseen) <= set(EXACT) for answer in answers)
        if kind == "honest":
            assert not any(answer.caught for answer in answers), name
            assert not any(x > 0 for answer in answers for x, _ in answer.outcomes.values()), name
    assert any(x > 0 for answer in arms["fp8"][1] for x, _ in answer.outcomes.values())


@pytest.mark.parametrize("name", ["fp8", "hidden", "int4 spoofed", "withheld, 100%", "withheld, 10%", "usage, 100%"])
def test_a_cheat_is_accused_after_a_good_past_almost_as_soon(arms: Arms, name: str) -> None:
    found = {cheat.name: cheat for cheat in cheating.cheats(arms, honest.EXCLUDED)}
    pasts = cheating.Pasts(1, StandingSettings())
    rows = list(cheating.simulate(found[name], pasts, seed=[1], changes=(0, 200), repetitions=6))
    everything = {row["change"]: row for row in rows if row["audited"] == "everything"}
    assert all(row["quarantined share"] == 1 for row in rows)
    for row in rows:
        assert row["suspect median"] <= row["quarantined median"] <= row["quarantined high"]
        assert row["enough median"] <= row["quarantined median"]
    assert everything[200]["quarantined median"] < everything[0]["quarantined median"] + 60
    assert everything[200]["lifetime median"] > everything[0]["lifetime median"]


def test_a_good_past_buys_more_under_the_other_rules() -> None:
    failed = np.zeros((1, 2200), np.bool_)
    failed[:, 2000:] = True
    _, late = rivals.first(rivals.z_rule(failed), 2000)
    _, soon = rivals.first(rivals.z_rule(failed[:, 2000:]), 0)
    assert (soon, late) == ([1], [116])
    _, late = rivals.first(rivals.sprt(failed, 1e-3), 2000)
    # Wald's test climbs from −H to H by ln 2 each time.
    assert late == [math.ceil(2 * math.log(1000) / math.log(2))]


def test_the_other_rules_err_as_is_known_of_them() -> None:
    """Known of them: z > 1 flags two thirds and more of honest workers within 2,000 validations, SPRT 0.18 %, and SPRT
    needs 300 and 21 validations to detect 10 % and 50 %."""
    random = np.random.default_rng(2)
    boundary = random.random((1500, 2000)) < rivals.P0
    assert 0.6 < rivals.z_rule(boundary).any(axis=1).mean() < 0.85
    assert rivals.sprt(boundary, 1e-3).any(axis=1).mean() < 0.006
    for rate, low, high in ((0.1, 200, 400), (0.5, 15, 28)):
        _, found = rivals.first(rivals.sprt(random.random((200, 2000)) < rate, 1e-3), 0)
        assert low < (quantile(found, 0.5) or 0) < high, rate


def test_gonkas_own_statistic_flags_most_honest_backends_under_its_first_rule(arms: Arms) -> None:
    rows = cheating.false_accusations(command.honest_of(arms), seed=[3], sequences=60)
    ours, theirs, _ = rows
    assert (ours["rate"], ours["z > 1"]) == (0, 0)
    assert theirs["rate"] == pytest.approx(cheating.SIMILAR, abs=0.01)
    assert theirs["z > 1"] > 0.4


def test_a_prediction_is_quick_and_sensible() -> None:
    spoofed = generations([SPOOFED], [HONEST], repetitions=12)
    assert (spoofed.median, spoofed.high, spoofed.accused, spoofed.early) == (4, 4, 1.0, 0.0)
    far = generations([FAR], [HONEST], repetitions=12)
    assert far.median is not None
    assert far.high is not None
    assert 10 < far.median <= far.high < 100
    operators = generations([FAR], [HONEST], repetitions=12, operator=True)
    assert operators.median is not None
    assert operators.median < far.median
    everything = generations([FAR], [HONEST], repetitions=12, audits=AuditSettings(rate=1.0))
    assert everything.median is not None
    assert everything.median <= far.median


def test_two_keys_never_suffice_for_replays_and_nobody_is_accused_for_nothing() -> None:
    two = generations([FAR], [HONEST], keys=("one", "two"), before=20, repetitions=3, longest=150)
    assert (two.median, two.high, two.accused) == (None, None, 0.0)
    assert generations([HONEST], [HONEST], before=20, repetitions=3, longest=300).accused == 0
    assert generations([SPOOFED], [], before=0, keys=("one",), repetitions=3).median == 3


def test_runs_that_begin_bad_count_as_caught_at_once() -> None:
    found = generations([SPOOFED], [SPOOFED], before=50, repetitions=3)
    assert (found.median, found.early) == (0, 1.0)


@pytest.mark.parametrize(
    ("cheat", "good", "options"),
    [([], [HONEST], {}), ([FAR], [], {}), ([FAR], [HONEST], {"keys": ()}), ([FAR], [HONEST], {"repetitions": 0})],
)
def test_a_prediction_needs_something_to_draw_from(
    cheat: list[evidence.Outcomes], good: list[evidence.Outcomes], options: dict[str, object]
) -> None:
    with pytest.raises(ValueError, match="prediction needs"):
        generations(cheat, good, **options)  # type: ignore[arg-type]


def test_quantiles_count_those_that_never_end() -> None:
    assert quantile([3, None, 1, 2], 0.5) == 2
    assert quantile([3, None, 1, 2], 0.95) is None
    assert quantile([], 0.5) is None


def test_outcomes_alone_make_an_answer() -> None:
    answer = of_outcomes(FAR)
    assert (answer.caught, answer.caught_unseen, answer.replayed) == (True, False, True)
    assert not of_outcomes({"withheld": (1.0, 0.0)}).replayed


def test_one_command_writes_rows_and_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["standing", "--output", str(tmp_path), "--backends", "30", "--units", "20", "--repetitions", "1"]
    assert "standing" in benches.BENCHES
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cheating, "CHANGES", (0,))
        patch.setattr(cheating, "LONGEST", 60)
        patch.setattr(cheating, "HONEST_SEQUENCES", 5)
        patch.setattr(cheating, "HONEST_UNITS", 50)
        assert benches.main(arguments) == 0
    first = (tmp_path / report.SUMMARY).read_text()
    assert "| framed |" in first
    assert "| int8 |" in first
    assert benches.main([*arguments[:3], "--tables"]) == 0
    assert (tmp_path / report.SUMMARY).read_text() == first
    assert "wrote" in capsys.readouterr().out
