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
from policies.settings import AuditSettings, StandingSettings
from policies.unit import CLIENT_SEED, EARLIER_LIFE, KEY_SHARE, REPEATED, Unit
from tests.policies.standings import DECLARATION, RULES, START, honest, record, unit

AUDIT = AuditSettings()


def after(known: Record, units: list[Unit], seen: set[str] | None = None) -> Record:
    return standing.fold(known, units, seen or set(), RULES).record


def until_quarantine(known: Record, units: list[Unit]) -> int | None:
    """How many of the units it takes."""
    for count, one in enumerate(units, 1):
        known = after(known, [one])
        if known.state == "quarantined":
            return count
    return None


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


def test_two_keys_cannot_accuse_by_calibrated_checks_however_much_they_send() -> None:
    """They chose prompts on which an honest backend is far from its calibration. Others vouch, or nobody does."""
    for others in (0, 1):
        units = [unit(at, "distance", "margin", key=f"colluder{at % 2}") for at in range(400)]
        units += honest(400 * others, 1000)
        known = record(units)
        assert known.state == "suspect"
        if not others:
            assert "evidence suffices, but rests on what two client keys asked" in known.reasons[0]


def test_the_operators_own_traffic_may_accuse_alone() -> None:
    cheats = [unit(at, "distance", key="mine", operator=True) for at in range(20)]
    count = until_quarantine(record(), cheats)
    assert count is not None
    assert count <= 8


def test_the_level_is_the_lifes_budget_plus_what_calibration_may_miss() -> None:
    cheats = [unit(at, "distance", profile=f"profile{at % 2}") for at in range(60)]
    accused = record(cheats).accused
    assert accused is not None
    assert accused.basis == "replayed"
    assert accused.level == pytest.approx(RULES.alpha / 2 + 2e-6)
    exact = record([unit(at, "selection") for at in range(20)]).accused
    assert exact is not None
    assert (exact.basis, exact.level) == ("exact", RULES.alpha / 2)


@given(st.integers(1, 10_000), st.floats(1e-12, 0.1))
def test_all_lives_together_spend_at_most_alpha(lives: int, alpha: float) -> None:
    assert math.fsum(_folding.budget(k, alpha) for k in range(1, lives + 1)) <= alpha


def test_what_was_not_chosen_beforehand_stays_outside() -> None:
    units = [
        unit(0, "selection", outside=CLIENT_SEED),
        unit(1, "distance", outside=CLIENT_SEED),
        unit(2, "selection", unit="known"),
        unit(3, "selection", unit="twice"),
        unit(4, "selection", unit="twice"),
    ]
    folded = standing.fold(record(), units, {"u:known"}, RULES)
    assert folded.record.n == 1
    assert folded.record.outside == {CLIENT_SEED: 2, REPEATED: 2}
    assert folded.record.coverage.generations == 5
    assert folded.remember == ["u:twice", "px:prompt3"]
    assert set(folded.remember) <= set(standing.names(units))


@pytest.mark.parametrize("process", ["distance", "margin", "selection", "withheld"])
def test_a_prompt_speaks_against_a_backend_once(process: str) -> None:
    """A fault may be the prompt's own. Asked over and over it still raises suspicion, and with it the audit rate."""
    first = record(honest(300))
    known = after(first, [unit(1000 + at, process, prompt="the same") for at in range(50)])
    assert known.state == "suspect"
    assert known.log_evidence < math.log(1000)
    assert standing.audit_rate(known, AUDIT) == 1.0
    assert known.n == 350


def test_prompts_that_passed_before_may_accuse_a_backend_that_changes() -> None:
    """Traffic of few prompts: each passes over and over, then each fails."""
    known = record([unit(at, prompt=f"p{at % 40}") for at in range(400)])
    assert known.state == "trusted"
    exact = [unit(1000 + at, "selection", prompt=f"p{at % 40}") for at in range(40)]
    replayed = [unit(1000 + at, "distance", prompt=f"p{at % 40}") for at in range(40)]
    assert (until_quarantine(known, exact) or 99) <= 6
    assert (until_quarantine(known, replayed) or 99) <= 25


def test_exact_and_replayed_faults_of_a_prompt_are_remembered_apart() -> None:
    folded = standing.fold(record(), [unit(0, "distance"), unit(1, "selection"), unit(2)], set(), RULES)
    assert folded.remember == ["u:unit0", "pr:prompt0", "u:unit1", "px:prompt1", "u:unit2"]
    again = [unit(10, "selection", prompt="prompt0"), unit(11, "distance", prompt="prompt1")]
    known = standing.fold(record(), again, set(folded.remember), RULES)
    assert known.remember == ["u:unit10", "px:prompt0", "u:unit11", "pr:prompt1"]


def test_a_busy_key_is_thinned_out_but_never_frozen_out() -> None:
    rules = StandingSettings(key_allowance=10)
    draws = [((at * 7919) % 1000) / 1000 for at in range(2000)]
    lone = record([unit(at, key="lone", draw=draws[at]) for at in range(2000)], rules)
    # 10 for certain, then 10/own each: 10 + 10·ln(2000/10).
    assert lone.n == pytest.approx(10 + 10 * math.log(200), abs=20)
    assert lone.outside == {KEY_SHARE: 2000 - lone.n}
    mine = record([unit(at, key="mine", operator=True, draw=0.999) for at in range(500)], rules)
    assert mine.n == 500
    flood = [unit(at, key=f"k{at % 8}" if at % 2 else "flood", draw=draws[at]) for at in range(2000)]
    mixed = record(flood, rules)
    counted = mixed.n - 1000
    assert counted / mixed.n == pytest.approx(rules.key_share, abs=0.03)


def test_the_day_begins_anew_for_every_key() -> None:
    rules = StandingSettings(key_allowance=5)
    units = [unit(at, key="k", draw=0.99, at=START + (86_400 if at >= 10 else 0)) for at in range(20)]
    known = record(units, rules)
    # The sixth of a day still counts for certain: its chance is 5/5.
    assert known.n == 12
    assert known.day_keys == {"k": 10}


def test_withheld_evidence_keeps_a_backend_from_trust() -> None:
    """One in a hundred: too rare to accuse it soon, and more than is allowed."""
    units = [unit(at, *(("withheld",) if at % 100 == 7 else ()), replay=at % 100 != 7) for at in range(400)]
    known = record()
    for one in units:
        known = after(known, [one])
        assert known.state != "trusted" or known.withheld == 0
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
