"""Standing and the clients: whose answers may speak, how much, and who can neither frame nor shield a backend."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from policies import standing
from policies.settings import AuditSettings, StandingSettings
from policies.unit import CLIENT_SEED, KEY_SHARE, REPEATED, Unit
from tests.policies.standings import RULES, START, after, honest, record, unit, until_quarantine

AUDIT = AuditSettings()


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
    """A fault may be the prompt's own. Asked over and over it still raises suspicion, and that the audit rate alone."""
    first = record(honest(300))
    known = after(first, [unit(1000 + at, process, prompt="the same") for at in range(50)])
    assert known.state == ("suspect" if process == "withheld" else "trusted")
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
    assert lone.earned.decided == lone.n
    mine = record([unit(at, key="mine", operator=True, draw=0.999) for at in range(500)], rules)
    assert mine.n == 500


def test_clients_of_equal_weight_all_count() -> None:
    known = record([unit(at, key=f"k{at % 4}", draw=0.999) for at in range(2000)])
    assert known.n == 2000
    uneven = record([unit(at, key="big" if at % 2 else f"k{at % 8}", draw=0.999) for at in range(2000)])
    assert uneven.outside == {KEY_SHARE: 2000 - uneven.n}
    assert uneven.day_keys["big"] <= uneven.day_keys["k2"] + RULES.key_allowance + 1


def test_friends_do_not_drown_what_a_backend_does_to_others() -> None:
    """Two friends send 2,500 answers each in a day; five victims twenty each, all of them beyond the calibration."""
    random, known, served = np.random.default_rng(0), record(), 0
    for day in range(3):
        units = []
        for who in random.permutation([*(["friend a", "friend b"] * 2500), *(["victim"] * 100)]):
            victim, served = who == "victim", served + 1
            key = f"victim {served % 5}" if victim else str(who)
            draw, at = float(random.random()), START + day * 86_400 + served
            units.append(unit(served, *(["distance"] if victim else []), key=key, draw=draw, at=at))
        known = after(known, units)
        assert known.state != "trusted"
    assert known.state == "quarantined"


def test_friends_who_speak_against_it_once_do_not_drown_others_either() -> None:
    random, known, served = np.random.default_rng(1), record(), 0
    for day in range(3):
        units: list[Unit] = []
        for who in [
            "friend a",
            "friend b",
            *random.permutation([*(["friend a", "friend b"] * 2500), *["victim"] * 100]),
        ]:
            served += 1
            bad = who == "victim" or not units or len(units) == 1
            key = f"victim {served % 5}" if who == "victim" else str(who)
            draw, at = float(random.random()), START + day * 86_400 + served
            units.append(unit(served, *(["distance"] if bad else []), key=key, draw=draw, at=at))
        known = after(known, units)
        assert known.day_keys["friend a"] < 400
    assert known.state == "quarantined"


def test_a_lone_client_is_heard_in_full_once_it_is_cheated() -> None:
    random = np.random.default_rng(0)
    known = record([unit(at, key="lone", draw=float(random.random())) for at in range(2000)])
    cheats = [unit(3000 + at, "selection", key="lone", draw=0.99) for at in range(20)]
    assert (until_quarantine(known, cheats) or 99) <= 7


def test_keys_beyond_those_that_are_counted_share_one_allowance() -> None:
    rules = StandingSettings(key_allowance=10)
    units = [unit(at, key=f"key{at}", draw=0.5) for at in range(3000)]
    assert 1024 < record(units, rules).n < 1100


def test_the_day_begins_anew_for_every_key() -> None:
    rules = StandingSettings(key_allowance=5)
    units = [unit(at, key="k", draw=0.99, at=START + (86_400 if at >= 10 else 0)) for at in range(20)]
    known = record(units, rules)
    # The sixth of a day still counts for certain: its chance is 5/5.
    assert known.n == 12
    assert (known.day_keys, known.day_heard) == ({"k": 6}, {"k": 10})


def test_a_clock_that_was_wrong_does_not_stop_the_days() -> None:
    rules = StandingSettings(key_allowance=5)
    days = [START, START + 50_000 * 86_400, START + 86_400, START + 2 * 86_400]
    units = [unit(100 * which + at, key="k", draw=0.99, at=day) for which, day in enumerate(days) for at in range(10)]
    assert record(units, rules).n == 24
    late = [unit(at, key="k", draw=0.99, at=START + (0 if at % 2 else 86_400)) for at in range(40)]
    assert record(late, rules).n < 20


def test_answers_to_client_seeds_earn_nothing_and_cost_what_the_backend_leaves_out() -> None:
    mute: dict[str, Any] = {"replay": False, "undecided": "no_logprobs", "blame": "backend", "outside": CLIENT_SEED}
    known = record(honest(500, outside=CLIENT_SEED))
    assert (known.state, known.earned.decided, standing.audit_rate(known, AUDIT)) == ("trial", 0, 1.0)
    assert known.coverage.decided == 500
    bad = record([unit(at, "selection", "distance", outside=CLIENT_SEED) for at in range(500)])
    assert (bad.state, bad.n) == ("trial", 0)
    half = [unit(at, *(["withheld"] if at % 20 == 1 else []), **(mute if at % 20 == 1 else {})) for at in range(800)]
    hidden = record(half)
    assert hidden.earned.withheld == 40
    assert hidden.state == "trial"
    assert hidden.log_evidence < 0


@pytest.mark.parametrize("lenient", [0.2, 0.5])
@pytest.mark.parametrize("keys", [12, 20, 40])
def test_two_keys_frame_nobody_behind_others_who_fail_under_lenient_nulls(lenient: float, keys: int) -> None:
    """Honest clients whose answers fail just as often as their null allows, and two whose prompts always fail."""
    random = np.random.default_rng(keys)

    def one(at: int, key: str, x: float, mu0: float) -> Unit:
        return unit(at, key=key, outcomes={"distance": (x, mu0), "margin": (x, mu0)})

    units = [one(at, f"honest {at % keys}", float(random.random() < lenient), lenient) for at in range(20 * keys)]
    known = record(units)
    for at in range(40):
        known = after(known, [one(5000 + at, f"colluder {at % 2}", 1.0, 0.02)])
        assert known.state != "quarantined", at
    assert known.state == "suspect"
