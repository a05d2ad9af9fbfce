"""Standing: evidence into states, and what may not count."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import _folding, standing
from policies.record import LAST_ACCUSING, LONGEST_TRAIL, MOST_POINTS, WINDOW, Record
from policies.settings import AuditSettings
from policies.unit import EARLIER_LIFE
from tests.policies.standings import DECLARATION, RULES, START, after, honest, record, unit, until_quarantine

AUDIT = AuditSettings()


def test_a_new_backend_is_on_trial_and_audited_in_full() -> None:
    known = record()
    assert (known.state, standing.audit_rate(known, AUDIT)) == ("trial", 1.0)
    assert standing.audit_rate(known, AuditSettings(rate=0.0)) == 0.0
    found = standing.summary(known, RULES, AUDIT)
    assert found["evidence"]["log10"] is None
    assert found["coverage"]["ratio"] is None
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_honest_answers_earn_trust_and_fewer_audits() -> None:
    known = record(honest(RULES.trusted_after - 1))
    assert known.state == "trial"
    assert known.reasons == (f"{RULES.trusted_after - 1} of {RULES.trusted_after} answers decided",)
    known = after(known, honest(1, RULES.trusted_after))
    assert known.state == "trusted"
    assert standing.audit_rate(known, AUDIT) == pytest.approx(0.5)
    known = after(known, honest(3000, 1000))
    assert standing.audit_rate(known, AUDIT) == AUDIT.floor


@pytest.mark.parametrize("process", ["selection", "structure", "withheld"])
@pytest.mark.parametrize("past", [0, 200, 2000])
def test_exact_failures_accuse_within_a_few_answers_whatever_the_past(process: str, past: int) -> None:
    known = record(honest(past))
    cheats = [unit(past + at, process, replay=False, key="one") for at in range(20)]
    assert (until_quarantine(known, cheats) or 99) <= 6


@pytest.mark.parametrize("past", [0, 200, 2000])
def test_calibrated_failures_accuse_when_three_keys_saw_them(past: int) -> None:
    known = record(honest(past))
    cheats = [unit(past + at, "distance", key=f"key{at % 3}") for at in range(60)]
    assert (until_quarantine(known, cheats) or 99) <= 36


def test_the_level_is_alpha_plus_what_calibration_may_miss() -> None:
    cheats = [unit(at, "distance", profile=f"profile{at % 2}") for at in range(60)]
    accused = record(cheats).accused
    assert accused is not None
    assert accused.basis == "replayed"
    assert accused.level == pytest.approx(RULES.alpha + 2e-6)
    exact = record([unit(at, "selection") for at in range(20)]).accused
    assert exact is not None
    assert (exact.basis, exact.level) == ("exact", RULES.alpha)


@given(st.integers(1, 10_000), st.floats(1e-12, 0.1))
def test_all_lives_together_spend_at_most_alpha(lives: int, alpha: float) -> None:
    assert math.fsum(_folding.budget(k, alpha) for k in range(1, lives + 1)) <= alpha


def test_withheld_evidence_keeps_a_backend_from_trust() -> None:
    """One in a hundred: too rare to accuse it soon, and more than is allowed."""
    units = [unit(at, *(("withheld",) if at % 100 == 7 else ()), replay=at % 100 != 7) for at in range(400)]
    known = record()
    for one in units:
        known = after(known, [one])
        assert known.state != "trusted" or known.earned.withheld == 0
    assert known.state == "suspect" or "evidence is missing from 4 of 400 answers" in " ".join(known.reasons)


def test_a_fault_within_chance_costs_no_trust() -> None:
    known = after(record(honest(300)), [unit(300, "withheld", replay=False)])
    assert known.state == "trusted"


def test_what_a_backend_keeps_undecided_keeps_it_from_trust_and_what_clients_do_does_not() -> None:
    closed: dict[str, Any] = {"undecided": "upstream_closed", "blame": "backend", "outcomes": {}, "replayed": False}
    left: dict[str, Any] = {"undecided": "client_left", "blame": "request", "outcomes": {}, "replayed": False}
    evasive = record([unit(at, **(closed if at % 5 == 0 else {})) for at in range(600)])
    assert evasive.state == "trial"
    assert "only 80% of what could be decided was, 90% is needed" in evasive.reasons
    busy = record([unit(at, **(left if at % 5 == 0 else {})) for at in range(600)])
    assert busy.state == "trusted"
    shown = standing.summary(busy, RULES, AUDIT)["coverage"]
    assert shown["by_reason"] == {"client_left": {"generations": 120, "tokens": 12_000, "blame": "request"}}
    assert shown["ratio"] == pytest.approx(0.8)
    turned = after(record(honest(600)), [unit(1000 + at, **closed) for at in range(200)])
    assert turned.state == "suspect"


def test_without_replays_or_with_speculation_nobody_is_trusted() -> None:
    assert record(honest(500, replay=False)).state == "trial"
    drafted = {**DECLARATION, "speculative": "yes"}
    known = standing.new("b", drafted, 1, START)
    known = after(known, honest(500, declaration=drafted))
    assert known.state == "trial"
    assert "speculative" in known.reasons[0]


def test_suspicion_passes_and_is_announced_both_ways() -> None:
    trusted = record(honest(400))
    suspect = after(trusted, [unit(1000 + at, "distance", key="one") for at in range(4)])
    assert [event.type for event in standing.events(trusted, suspect)] == []
    suspect = after(trusted, [unit(1000 + at, "distance", key="one") for at in range(8)])
    assert suspect.state == "suspect"
    assert [event.type for event in standing.events(trusted, suspect)] == ["backend.suspect"]
    calm = after(suspect, honest(3000, 5000))
    assert calm.state == "trusted"
    (event,) = standing.events(suspect, calm)
    assert event.type == "backend.recovered"
    json.dumps(event.data, allow_nan=False)


def test_the_operators_overrides_are_on_record() -> None:
    trusted = record(honest(300))
    by_hand: dict[str, Any] = {"by": "ops", "now": START + 1000, "rules": RULES}
    held = standing.override(trusted, "quarantine", why="maintenance", **by_hand)
    assert held.state == "quarantined"
    assert after(held, honest(100, 1000)).state == "quarantined"
    released = standing.override(held, "release", why="done", **by_hand)
    assert released.state == "trusted"
    assert [(entry.by, entry.action, entry.before, entry.after) for entry in released.trail[-2:]] == [
        ("ops", "quarantine", "trusted", "quarantined"),
        ("ops", "release", "quarantined", "trusted"),
    ]
    assert [event.type for event in standing.events(held, released)] == ["backend.recovered"]


def test_a_pardon_begins_another_life_with_less_to_spend() -> None:
    accused = record([unit(at, "selection") for at in range(10)])
    pardoned = standing.override(accused, "pardon", by="ops", why="bug", now=START + 50, rules=RULES, number=2)
    assert (pardoned.state, pardoned.number, pardoned.n) == ("trial", 2, 0)
    assert pardoned.trail[-1].action == "pardon"
    assert standing.audit_rate(pardoned, AUDIT) == 1.0
    first, second = (standing.summary(one, RULES, AUDIT)["evidence"] for one in (accused, pardoned))
    assert (first["budget"], second["budget"]) == (pytest.approx(RULES.alpha / 2), pytest.approx(RULES.alpha / 6))
    assert standing.next_number([accused, pardoned]) == 3


def test_what_was_served_before_a_pardon_is_of_the_life_that_it_ended() -> None:
    accused = record([unit(at, "selection") for at in range(10)])
    pardoned = standing.override(accused, "pardon", by="ops", why="bug", now=START + 100, rules=RULES, number=2)
    late = after(pardoned, [unit(at, "selection", served=START + at) for at in range(90, 110)])
    assert late.n == 10
    assert late.outside == {EARLIER_LIFE: 10}
    assert late.coverage.generations == 10


@pytest.mark.parametrize(
    ("action", "fields"),
    [
        ("release", {}),
        ("pardon", {}),
        ("pardon", {"number": 1}),
        ("promote", {}),
        ("quarantine", {"why": " "}),
        ("quarantine", {"by": ""}),
        ("quarantine", {"why": "\u202eesrever"}),
        ("quarantine", {"by": "ops\x1b[2J"}),
        ("quarantine", {"why": "x" * 501}),
    ],
)
def test_what_makes_no_sense_is_refused(action: str, fields: dict[str, object]) -> None:
    given_fields: dict[str, Any] = {"by": "ops", "why": "because", "now": START, "rules": RULES, **fields}
    with pytest.raises(ValueError, match=r"\w"):
        standing.override(record(), action, **given_fields)


def test_a_changed_runtime_makes_a_suspect_audited_in_full_until_it_is_accepted() -> None:
    trusted = record(honest(3000))
    changed = standing.note_change(trusted, "answers fit vllm-0.32-v1-cpu", START + 5000, RULES)
    assert changed.state == "suspect"
    assert standing.audit_rate(changed, AUDIT) == 1.0
    assert [event.type for event in standing.events(trusted, changed)] == ["backend.runtime_changed", "backend.suspect"]
    assert standing.note_change(changed, None, START + 6000, RULES).state == "trusted"
    assert standing.note_change(changed, "answers fit vllm-0.32-v1-cpu", START + 6000, RULES) is changed


def test_a_declaration_that_returns_is_audited_in_full_again_and_forgets_nothing() -> None:
    known = record(honest(3000))
    other = after(standing.new("b", {**DECLARATION, "engine": "y"}, 2, START), honest(10, 5000))
    assert standing.resumed(known, [known]) is known
    again = standing.resumed(known, [known, other])
    assert standing.audit_rate(again, AUDIT) == 1.0
    assert (again.log_m, again.state) == (known.log_m, "trusted")
    assert standing.audit_rate(after(again, honest(400, 6000)), AUDIT) == pytest.approx(0.25)


def test_a_declaration_of_its_own_is_announced() -> None:
    assert standing.events(None, record()) == []
    assert [event.type for event in standing.events(None, record(number=2))] == ["backend.redeclared"]


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.sampled_from([(), ("selection",), ("distance",), ("withheld", "structure")]), st.integers(0, 4)),
        max_size=60,
    ),
    st.integers(1, 59),
)
def test_grouping_units_changes_nothing_but_moments(drawn: list[tuple[tuple[str, ...], int]], cut: int) -> None:
    units = [unit(at, *failing, key=f"k{key}") for at, (failing, key) in enumerate(drawn)]
    whole = standing.fold(record(), units, set(), RULES)
    first = standing.fold(record(), units[:cut], set(), RULES)
    second = standing.fold(first.record, units[cut:], set(first.remember), RULES)
    assert first.remember + second.remember == whole.remember
    same = {"state", "reasons", "since", "trail", "trusted_once"}
    for name in Record.__struct_fields__:
        if name not in same:
            assert getattr(second.record, name) == getattr(whole.record, name), name
    assert standing.unpack(standing.pack(whole.record)) == whole.record


def test_a_record_stays_small_whatever_comes() -> None:
    units = [unit(at, "distance", key=f"key{at}", at=START + at) for at in range(1500)]
    units += [unit(2000 + at, undecided=f"code{at}", blame="backend", outcomes={}) for at in range(200)]
    known = record(units)
    assert len(known.heard) == WINDOW
    assert len(known.accusing) == LAST_ACCUSING
    assert len(known.chart) <= MOST_POINTS
    assert len(known.coverage.left) <= 65
    for at in range(300):
        known = standing.override(
            known, "release" if known.held else "quarantine", by="o", why="w", now=at, rules=RULES
        )
    assert len(known.trail) == LONGEST_TRAIL
    assert len(standing.pack(known)) < 200_000


def test_broken_bytes_are_an_error() -> None:
    with pytest.raises(msgspec.DecodeError):
        standing.unpack(b"\x81\xa1a\x01")
    assert dataclasses.is_dataclass(standing.Event)


def test_swings_do_not_wash_the_operators_entries_out_of_the_trail() -> None:
    known = standing.override(record(), "quarantine", by="ops", why="kept", now=START, rules=RULES)
    known = standing.override(known, "release", by="ops", why="too", now=START, rules=RULES)
    for at in range(2 * LONGEST_TRAIL):
        known = standing.note_change(known, None if at % 2 else "another runtime", START + at, RULES)
    assert len(known.trail) == LONGEST_TRAIL
    assert [entry.why for entry in known.trail if entry.by == "ops"] == ["kept", "too"]


def test_trust_that_came_under_quarantine_counts_when_it_ends() -> None:
    held = standing.override(record(), "quarantine", by="ops", why="x", now=START, rules=RULES)
    freed = standing.override(after(held, honest(300)), "release", by="ops", why="y", now=START + 400, rules=RULES)
    assert (freed.state, freed.trusted_once) == ("trusted", True)


def test_a_pardon_of_a_backend_nobody_heard_of_declares_nothing() -> None:
    pardoned = standing.override(record(), "pardon", by="ops", why="x", now=START, rules=RULES, number=2)
    assert standing.events(None, pardoned) == []
