"""docs/standing.md: its numbers are those of the code, its settings valid, its commands understood."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path

import pytest

from policies import _states, audit, coverage, eprocess, record, standing, unit
from policies.profile import BAR, DELTA
from policies.settings import AuditSettings, Settings, StandingSettings, parse_settings
from policies.unit import Unit
from tests.policies import standings
from verifier_pool.link import queue
from verifier_pool.standing_command import _parser

PAGE = (Path(__file__).parents[2] / "docs" / "standing.md").read_text()
TEXT = " ".join(PAGE.split())
RULES = StandingSettings()
MU0 = 0.05
EXAMPLES = (("selection", 1), ("withheld", 10), ("distance", 1), ("distance", 4))
"""Columns of the table: what fails, and in every how many-th answer."""


def blocks(language: str) -> str:
    return "\n".join(re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL))


def rows(heading: str) -> list[list[str]]:
    """Cells of the table whose heading begins like this."""
    table = re.search(rf"^\| {re.escape(heading)}.*?\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    assert table is not None, heading
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[1].splitlines()]


def answer(number: int, failing: str) -> Unit:
    outcomes = {name: (float(name == failing), 0.0) for name in unit.EXACT}
    outcomes |= {name: (float(name == failing), MU0) for name in ("distance", "margin")}
    return standings.unit(number, outcomes=outcomes)


def answers_to_accusation(before: int, failing: str, every: int) -> int:
    found = standings.record([answer(n, "") for n in range(before)])
    number = 0
    while found.accused is None:
        number += 1
        failed = failing if number % every == 0 else ""
        found = standings.after(found, [answer(before + number, failed)])
    assert found.state == standing.QUARANTINED
    return number


@pytest.mark.parametrize("row", rows("clean answers before"), ids=lambda row: str(row[0]))
def test_the_example_is_what_happens(row: list[str]) -> None:
    before, *shown = [int(cell.strip("| ").replace(",", "")) for cell in row]
    assert shown == [answers_to_accusation(before, failing, every) for failing, every in EXAMPLES]


def test_the_example_by_hand() -> None:
    assert "((0.5·999 + 0.247)·999 + 0.0655)·999, about 5e8" in TEXT
    assert [round(eprocess.weight(n), 4) for n in (1, 2, 3)] == [0.5, 0.2466, 0.0655]
    held = ((0.5 * 999 + 0.247) * 999 + 0.0655) * 999
    share = eprocess.STAKE_WEIGHTS[-1] / sum(eprocess.STAKE_WEIGHTS) / len(unit.PROCESSES)
    assert f"{held:.0e}".replace("+0", "") == "5e8"
    assert share == pytest.approx(3 / 10 / 7)
    assert f"{held * share:.1e}".replace("+0", "") == "2.1e7"
    record_ = standing.fold(
        standing.new("b", {}, 1, 0.0), [answer(n, "selection") for n in range(3)], set(), RULES
    ).record
    assert held * share < math.exp(record_.log_evidence) < 1.5 * held * share


def test_the_stakes() -> None:
    patient, bold = eprocess.STAKES["selection"][0], eprocess.STAKES["selection"][-1]
    assert (patient, bold, len(eprocess.STAKES["selection"])) == (0.002, 0.999, 8)
    assert RULES.fault_rate == 0.001
    assert 1 + bold * (1 / RULES.fault_rate - 1) == pytest.approx(999, abs=0.01)
    assert 1 - bold == pytest.approx(0.001)
    assert 1 + patient * (1 / RULES.fault_rate - 1) == pytest.approx(3, abs=0.01)
    assert 1 - patient == 0.998
    assert [eprocess.weight(n) * n * math.log(n) ** 2 for n in (2, 9999)] == pytest.approx([0.237, 0.237], abs=1e-4)


def test_every_process_is_in_the_table_with_its_null() -> None:
    found = {name: row[-1] for row in rows("process |") for name in re.findall(r"`(\w+)`", row[0])}
    assert list(found) == ["selection", "structure", "withheld", "distance", "margin", "routing", "forged"]
    assert sorted(found) == sorted(unit.PROCESSES)
    _, forged = eprocess.null_means({"forged": (0.0, 0.0)}, RULES.fault_rate)
    assert f"{forged[unit.PROCESSES.index('forged')]:.4f}" in found["forged"]
    assert f"delta ({DELTA:.0e})".replace("e-06", "e-6") in found["distance"]
    assert math.expm1(BAR) == pytest.approx(0.22, abs=0.005)


def test_what_stays_outside_is_in_the_table() -> None:
    shown = [re.findall(r"`(\w+)`", row[0])[0] for row in rows("stays outside")]
    assert shown == [unit.CLIENT_SEED, unit.REPEATED, unit.KEY_SHARE, unit.EARLIER_LIFE]


def test_blame_is_as_the_page_says() -> None:
    words = {"the request": coverage.REQUEST, "ours": coverage.OURS, "the backend": coverage.BACKEND}
    for row in rows("whose doing"):
        codes = [code for code in re.findall(r"`(\w+)`", row[1]) if code != "withheld"]
        assert len(codes) >= 3
        assert {coverage.blame_of(code) for code in codes} == {words[row[0]]}


def test_states_actions_and_events_are_on_the_page() -> None:
    assert [row[0] for row in rows("state |")] == [f"`{state}`" for state in record.STATES]
    for action in standing.ACTIONS:
        assert f"`--{action}`" in PAGE
    for word in ("trusted", "suspect", "quarantined", "recovered", "redeclared", "runtime_changed"):
        assert f"`backend.{word}`" in PAGE


@pytest.mark.parametrize(
    ("words", "number"),
    [
        ("From 100 decided answers on the rate is 100/decided", audit.LEARN),
        ("over the number of units (1,000 at most)", eprocess.HORIZON),
        ("raises the rate from 10 on", round(math.exp(audit.CALM))),
        ("everything from 1,000 on", round(math.exp(audit.ALARM))),
        ("the last 1,024 units that had a replay", record.WINDOW),
        ("half the weight every 500 answers", record.HALF_LIFE),
        ("remembered for 30 days", queue.REMEMBERED // 86_400),
        ("the last 100,000 of each", queue.MOST_REMEMBERED),
        ("a day (32)", RULES.key_allowance),
        ("answers decided (200)", RULES.trusted_after),
        ("`least_coverage` (90 %)", round(100 * RULES.least_coverage)),
        ("`suspect_share` (10 %)", round(100 * RULES.suspect_share)),
        ("`audit.floor` (5 %)", round(100 * AuditSettings().floor)),
        ("5 points under `least_coverage`", round(100 * _states.SLACK)),
        ("chance explains (1 in 1,000)", round(1 / _states.FAULTS_LEVEL)),
        ("`standing.fault_rate`, 1 in 1,000", round(1 / RULES.fault_rate)),
    ],
)
def test_its_numbers_are_the_codes(words: str, number: int) -> None:
    assert words in TEXT
    assert f"{number:,}" in words


def test_the_rest_of_its_numbers() -> None:
    assert "a quarter as many judged by a replay" in TEXT
    assert _states.REPLAYED_SHARE == 4
    assert "The first life needs evidence of 2/alpha" in TEXT
    assert "one in a million by default" in TEXT
    assert RULES.alpha == 1e-6
    # mu0 of a cell, by Wilks's limit, with delta spread over 24 cells.
    cells = {n: 1 - (DELTA / 24) ** (1 / n) for n in (12, 330, 1000)}
    assert cells[330] == pytest.approx(MU0, abs=5e-4)
    assert f"it is {cells[12]:.2f}" in TEXT
    assert cells[1000] == pytest.approx(17 / 1000, rel=0.02)


def test_the_settings_are_the_defaults() -> None:
    settings = parse_settings(blocks("yaml"), {})
    assert settings.standing == RULES
    assert settings.audit == AuditSettings()
    assert set(Settings.model_fields["standing"].default.model_dump()) <= set(re.findall(r"\w+", blocks("yaml")))


def test_the_commands_are_understood() -> None:
    commands = [shlex.split(line, comments=True) for line in blocks("sh").splitlines() if line]
    for command in commands:
        assert command[:2] == ["countersign", "standing"]
        _parser().parse_args(command[2:])
    assert len(commands) == 3
