"""Units of evidence, from the checks' own results."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest

from policies import unit
from policies.checks import Check, Result
from policies.evidence import Evidence, Sampling
from policies.settings import BackendSettings
from policies.unit import Unit
from policies.verdict import combine, over_choices
from policies.verification import Verification, describe, unverified

SECRET = b"secret"


def answer(id: str = "0" * 32, request: bytes = b'{"messages":[1],"seed":5}', **fields: Any) -> Evidence:
    known: dict[str, Any] = {
        "owner": "owner",
        "runtime": "r",
        "precision": "p",
        "engine": "e",
        "request": request,
        "sampling": Sampling(seed=5),
        "prompt_ids": np.arange(4, dtype=np.int32),
        "output_ids": np.arange(10, dtype=np.int32),
    }
    return Evidence(id=id, endpoint="chat", backend="b", model="m", **known | fields)


def judged(choices: list[Evidence], *checks: list[Check]) -> Verification:
    verdicts = [combine(found, audited=True) for found in checks]
    overall = verdicts[0] if len(verdicts) == 1 else over_choices(verdicts)
    return describe(choices, verdicts, overall, 7.0)


def passing(**metrics: dict[str, Any]) -> list[Check]:
    return [
        Check(name, Result.PASS, metrics=metrics.get(name, {}))
        for name in ("structure", "selection", "distance", "margin")
    ]


def of(choices: list[Evidence], *checks: list[Check], **fields: Any) -> Unit:
    return unit.of_response(choices, judged(choices, *checks), SECRET, **{"operator": False} | fields)


def test_outcomes_of_an_honest_audited_answer() -> None:
    metrics = {"distance": {"exceeds": 0, "mu0": 0.03}, "margin": {"exceeds": 1, "mu0": 0.02, "forged": 0}}
    found = of([answer()], passing(**metrics), profile="x", delta=1e-6)
    assert found.outcomes == {
        "structure": (0.0, 0.0),
        "selection": (0.0, 0.0),
        "withheld": (0.0, 0.0),
        "distance": (0.0, 0.03),
        "margin": (1.0, 0.02),
        "forged": (0.0, 0.0),
    }
    assert (found.tokens, found.at, found.replayed, found.audited, found.outside) == (10, 7.0, True, True, "")
    assert found.undecided == ""
    assert msgspec.json.decode(msgspec.json.encode(found), type=Unit) == found


def test_undecided_checks_say_nothing_and_withheld_evidence_does() -> None:
    checks = [
        Check("structure", Result.WITHHELD, "no_logprobs: none"),
        Check("selection", Result.INCONCLUSIVE, "no_claim: none"),
        Check("distance", Result.INCONCLUSIVE, "no_claim: none", metrics={"exceeds": None}),
    ]
    found = of([answer()], checks)
    assert found.outcomes == {"structure": (0.0, 0.0), "withheld": (1.0, 0.0)}
    assert (found.undecided, found.blame, found.replayed) == ("no_logprobs", "backend", False)


def test_a_unit_is_key_prompt_and_seed_and_nothing_the_backend_says() -> None:
    base = of([answer()], passing())
    same = of(
        [answer("1" * 32, b'{"seed":9,"temperature":0.3,"messages":[1]}', prompt_ids=np.zeros(9, np.int32))], passing()
    )
    assert (same.unit, same.prompt) == (base.unit, base.prompt)
    other_seed = of([answer(sampling=Sampling(seed=6))], passing())
    assert other_seed.prompt == base.prompt
    assert other_seed.unit != base.unit
    other_key = of([answer(owner="somebody")], passing())
    assert other_key.prompt == base.prompt
    assert len({other_key.unit, other_key.key, base.unit, base.key}) == 4
    for request in (b'{"messages":[2]}', b'{"messages":[1],"tools":[]}', b"no json", b"[1]", b'{"messages":[NaN]}'):
        assert of([answer(request=request)], passing()).prompt != base.prompt


@pytest.mark.parametrize("odd", [rb'"\ud800"', b"1e999", b"1" * 400])
def test_the_same_prompt_is_the_same_whatever_stands_beside_it(odd: bytes) -> None:
    units = [of([answer(request=b'{"seed":%d,"junk":%s,"messages":[1]}' % (seed, odd))], passing()) for seed in (1, 2)]
    other = of([answer(request=b'{"seed":1,"junk":%s,"messages":[2]}' % odd)], passing())
    assert units[0].prompt == units[1].prompt != other.prompt


def test_client_seeds_stay_outside() -> None:
    assert of([answer(sampling=Sampling(seed=5, client_seed=True))], passing()).outside == unit.CLIENT_SEED
    assert of([answer()], passing()).outside == ""


def test_one_choice_speaks_for_a_response_and_which_is_secret() -> None:
    """The worst of four would fail four times as often as the null allows."""
    bad = [Check("structure", Result.PASS), Check("selection", Result.REJECT, "not_sampled_from_claim", level=0.0)]
    good = [Check("structure", Result.PASS), Check("selection", Result.PASS)]
    spoken: Counter[float] = Counter()
    for at in range(400):
        choices = [answer(f"{at:032x}", index=index) for index in range(4)]
        found = of(choices, good, bad, good, good)
        spoken[found.outcomes["selection"][0]] += 1
        assert found.tokens == 40
    assert 60 < spoken[1.0] < 140


def test_a_declaration_is_what_the_operator_says_wherever_it_is_read() -> None:
    declared = BackendSettings(
        name="b", url="http://x", model="m", runtime="r", precision="p", engine="e", speculative=True
    )
    of_evidence = unit.declaration_of(answer(speculative=True))
    assert unit.declaration_of(declared) == of_evidence
    assert unit.declaration_name(of_evidence) == unit.declaration_name(dict(reversed(of_evidence.items())))
    assert unit.declaration_name(of_evidence) != unit.declaration_name(unit.declaration_of(answer()))
    lone = dataclasses.replace(answer(), engine="\ud800")
    assert len(unit.declaration_name(unit.declaration_of(lone))) == 16


def test_what_nobody_checked_only_lowers_coverage() -> None:
    intent = {"id": "2" * 32, "backend": "b", "model": "m"}
    found = unit.of_unverified(unverified("2" * 32, "backlog", intent, 3.0), {"model": "m"}, tokens=12)
    assert (found.outcomes, found.undecided, found.blame, found.tokens) == ({}, "backlog", "ours", 12)
