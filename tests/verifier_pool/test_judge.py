from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from policies import distance, margin
from policies.checks import Check, Result, Verdict, VerdictWord
from policies.errors import ReplayError
from policies.evidence import Evidence, Replay, ReplayForm
from policies.profile import Profile, ProfileKey, fit
from policies.settings import ModelSettings
from policies.verification import Verification, describe, encode
from tests.verifier_pool.toy import VOCAB, ToyReference, answer, failing
from verifier_pool.judge import judge, replay_choices
from verifier_pool.reference.base import ReplayRequest

MODEL = ModelSettings.model_validate({"vocab_size": VOCAB})
MOE = ModelSettings.model_validate({"vocab_size": VOCAB, "experts": 8})


def judged(
    *choices: Evidence,
    model: ModelSettings = MODEL,
    reference: ToyReference | None = None,
    form: ReplayForm = "full",
    profile: Profile | None = None,
) -> Verification:
    experts = model.experts is not None
    replays = None if reference is None else replay_choices(choices, reference, form=form, experts=experts)
    return judge(choices, model=model, replays=replays, profile=profile)


def check(verification: Verification, name: str) -> dict[str, object]:
    (found,) = (check for check in verification["checks"] if check["name"] == name)
    assert isinstance(found, dict)
    return found


def two_choices() -> list[Evidence]:
    first = answer()
    return [first, replace(answer((3, 5, 9)), id=first.id, index=1)]


def test_the_reference_sees_ids_only() -> None:
    reference, evidence = ToyReference(), answer()
    judged(evidence, reference=reference)
    (request,) = reference.seen
    assert request.output_ids.tolist() == evidence.output_ids.tolist()
    assert request.candidate_ids is evidence.claim_ids
    assert (request.form, request.experts) == ("full", False)
    # Whatever a request may hold, it is no logprob: nothing of it is floating point.
    values = [getattr(request, name) for name in ReplayRequest.__slots__]
    assert not any(isinstance(value, np.ndarray) and value.dtype.kind == "f" for value in values)


def test_the_form_of_a_replay_and_expert_ids_are_asked_for() -> None:
    reference = ToyReference()
    experts = np.zeros((14, 2, 2), np.uint8)
    choices = [answer(routed_experts=experts), answer()]
    choices = [choices[0], replace(choices[1], id=choices[0].id, index=1)]
    judged(*choices, model=MOE, reference=reference, form="ids")
    assert [(request.form, request.experts) for request in reference.seen] == [("ids", True), ("ids", False)]
    judged(choices[0], reference=reference)
    assert not reference.seen[-1].experts


def test_an_honest_replay_has_no_distance() -> None:
    verification = judged(answer(), reference=ToyReference())
    metrics = check(verification, "distance")["metrics"]
    assert isinstance(metrics, dict)
    assert max(abs(metrics[name]) for name in metrics if "mean" in name) < 1e-6


def test_several_choices_are_one_batch_and_one_verdict() -> None:
    reference = ToyReference()
    verification = judged(*two_choices(), reference=reference)
    assert reference.batches == [1, 1]
    assert [choice["index"] for choice in verification["choices"]] == [0, 1]
    assert all(choice["checks"] for choice in verification["choices"])
    assert "choices" not in judged(answer(), reference=reference)


def test_one_choice_too_long_does_not_cost_the_others_their_replay() -> None:
    first, second = two_choices()
    second = replace(second, prompt_ids=np.arange(30, dtype=np.int32))

    def trouble(requests: object) -> None:
        assert isinstance(requests, list)
        if any(len(request.prompt_ids) > 20 for request in requests):
            raise ReplayError("too_long")

    reference = ToyReference(trouble)
    verification = judged(first, second, reference=reference)
    reasons = [
        next(check["reason"] for check in choice["checks"] if check["name"] == "distance")
        for choice in verification["choices"]
    ]
    assert reasons[0] != "too_long"
    assert reasons[1] == "too_long"
    assert reference.batches == [1, 1]


def test_a_passing_trouble_is_raised_until_the_last_try() -> None:
    reference = ToyReference(failing("unreachable"))
    with pytest.raises(ReplayError, match="unreachable"):
        replay_choices([answer()], reference, last_try=False)
    verification = judged(*two_choices(), reference=reference)
    assert verification["verdict"] == "inconclusive"
    assert check(verification, "distance")["reason"] == "unreachable"
    assert reference.batches == [1, 1, 1]


def test_an_answer_without_ids_is_not_replayed_and_never_passes() -> None:
    reference = ToyReference()
    empty = np.zeros(0, np.int32)
    evidence = replace(
        answer(),
        output_ids=empty,
        claim_ids=np.zeros((0, 0), np.int32),
        claim_logprobs=np.zeros((0, 0), np.float32),
        faults=("no_token_ids",),
    )
    verification = judged(evidence, reference=reference)
    assert reference.batches == []
    assert verification["verdict"] == "withheld"
    assert check(verification, "distance")["reason"] == "nothing_to_replay"


def test_the_cpu_checks_alone_are_unaudited() -> None:
    verification = judge([answer()], model=MODEL)
    assert (verification["verdict"], verification["audited"]) == ("unaudited", False)
    assert judged(answer())["verdict"] == "unaudited"


EXPERTS = np.tile(np.array([1, 5], np.uint8), (14, 2, 1))


@pytest.mark.parametrize(
    ("changes", "result", "reason"),
    [
        ({"stream": True}, "inconclusive", "stream"),
        ({}, "withheld", "no_routed_experts"),
        ({"faults": ("bad_routed_experts",)}, "withheld", "bad_routed_experts"),
        ({"routed_experts": EXPERTS[:9]}, "withheld", "bad_routed_experts"),
        ({"routed_experts": EXPERTS + np.uint8(3)}, "withheld", "bad_routed_experts"),
    ],
)
def test_what_expert_ids_alone_say(changes: dict[str, Any], result: str, reason: str) -> None:
    verification = judged(answer(**changes), model=MOE)
    found = check(verification, "routing")
    assert (found["result"], str(found["reason"]).partition(":")[0]) == (result, reason)
    assert verification["verdict"] == ("withheld" if result == "withheld" else "unaudited")
    assert [found["name"] for found in judged(answer())["checks"]] == ["structure", "selection"]


def test_expert_ids_wait_for_a_reference_that_captures_its_own() -> None:
    moe = answer(routed_experts=EXPERTS)
    assert [found["name"] for found in judged(moe, model=MOE)["checks"]] == ["structure", "selection"]
    found = check(judged(moe, model=MOE, reference=ToyReference()), "routing")
    assert str(found["reason"]).startswith("no_reference_experts")
    found = check(judged(moe, model=MOE, reference=ToyReference(failing("unreachable"))), "routing")
    assert (found["result"], found["reason"]) == ("inconclusive", "unreachable")


def test_numbers_json_cannot_spell_become_null() -> None:
    odd = Check(
        "distance",
        Result.REJECT,
        "x",
        level=float("nan"),
        metrics={"a": float("inf"), "b": float(np.float32(0.5)), "c": 3, "d": None, "e": float("-inf")},
    )
    verdict = Verdict(VerdictWord.REJECT, (odd,), ("x",), True)
    document = json.loads(encode(describe([answer()], [verdict], verdict, 2.0)))
    assert document["checks"][0] == {
        "name": "distance",
        "result": "reject",
        "reason": "x",
        "level": None,
        "metrics": {"a": None, "b": 0.5, "c": 3, "d": None, "e": None},
    }
    assert (document["object"], document["status"], document["decided"]) == ("verification", "done", 2.0)


def test_no_choice_cannot_be_judged() -> None:
    with pytest.raises(ValueError, match="without choices"):
        judge([], model=MODEL)


def profile_of_the_toy() -> Profile:
    reference = ToyReference()
    key = ProfileKey(model="toy", runtime="vllm-0.32-v1-cpu", precision="", reference=reference.name)
    measured = []
    for seed in range(24):
        evidence = answer((seed, seed + 1), 48, kernels=seed + 1)
        (replay,) = replay_choices([evidence], reference, last_try=True)
        assert isinstance(replay, Replay)
        for each in (distance, margin):
            measured += each.calibration_rows(evidence, replay)
    return fit(measured, key)


def test_an_honest_model_passes_and_another_is_rejected() -> None:
    profile = profile_of_the_toy()
    honest, other = answer((40, 41), 48, kernels=99), answer((40, 41), 48, salt=1)
    verdicts = [judged(evidence, reference=ToyReference(), profile=profile) for evidence in (honest, other)]
    assert [verdict["verdict"] for verdict in verdicts] == ["pass", "reject"]
    rejected = check(verdicts[1], "distance")
    assert rejected["result"] == "reject"
    assert isinstance(rejected["level"], float)
    assert check(verdicts[1], "selection")["result"] == "pass"
