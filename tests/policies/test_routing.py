"""Routing: windows, sentinels, dense layers, what is withheld, the decision against a profile, aggregates."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from policies import routing
from policies._routes import align, by_layer, expert_layers, output_rows
from policies.checks import Result
from policies.evidence import Evidence, Replay, Sampling
from policies.profile import Profile, ProfileKey, fit

RECORDED = Path(__file__).parents[1] / "data" / "vllm-0.32-h200"
E, K, L, P, G = 8, 2, 4, 5, 200

Experts = NDArray[Any]


def routes(rows: int, seed: int = 0, layers: int = L) -> Experts:
    """Expert ids as a router picks them: distinct within a token and layer."""
    generator = np.random.default_rng(seed)
    return np.argsort(generator.random((rows, layers, E)), axis=2)[..., :K].astype(np.uint8)


def flipped(experts: Experts, share: float, seed: int = 1) -> Experts:
    """The same where a share of the tokens of every layer swaps its last expert for one it does not have."""
    generator = np.random.default_rng(seed)
    flip = generator.random(experts.shape[:2]) < share
    other = np.array([[next(e for e in range(E) if e not in slots) for slots in row] for row in experts], np.uint8)
    changed = experts.copy()
    changed[..., -1] = np.where(flip, other, experts[..., -1])
    return changed


def evidence(experts: Experts | None, prompt: int = P, output: int = G, **changes: Any) -> Evidence:
    made = Evidence(
        id="0" * 32,
        endpoint="chat",
        backend="b",
        model="moe",
        runtime="vllm-0.32-v2",
        precision="bf16",
        sampling=Sampling(temperature=0.0),
        prompt_ids=np.arange(prompt, dtype=np.int32),
        output_ids=np.arange(output, dtype=np.int32) + changes.pop("first", 0),
        routed_experts=experts,
    )
    return replace(made, **changes)


def replayed(experts: Experts | None, form: Any = "full") -> Replay:
    return Replay(np.zeros((G, 1), np.int32), np.zeros((G, 1), np.float32), form, reference="r", routed_experts=experts)


def pair(share: float, seed: int = 0) -> tuple[Evidence, Replay]:
    whole = routes(P + G, seed)
    return evidence(flipped(whole, share, seed + 7)[:-1], first=seed), replayed(whole[P:-1])


@pytest.fixture(scope="module")
def profile() -> Profile:
    """Forty honest answers that flip a slot of one token in fifty."""
    rows = [row for seed in range(40) for row in routing.calibration_rows(*pair(0.02, seed), arm="one")]
    assert {row.length for row in rows} == {64, 128}
    return fit(rows, ProfileKey("moe", "vllm-0.32-v2", "bf16", "r"))


@given(prompt=st.integers(2, 40), output=st.integers(1, 40))
def test_every_window_gives_the_same_rows(prompt: int, output: int) -> None:
    whole = np.arange((prompt + output) * 2).reshape(-1, 1, 2)
    wanted = whole[prompt : prompt + output - 1]
    for window in (whole, whole[:-1], whole[prompt:], whole[prompt:-1]):
        assert np.array_equal(output_rows(window, prompt, output), wanted)


def test_one_prompt_token_is_read_as_a_generation() -> None:
    whole = np.arange(8 * 2).reshape(-1, 1, 2)
    assert np.array_equal(output_rows(whole, 1, 8), whole[1:])


@pytest.mark.parametrize(
    "experts",
    [np.zeros((3, 1, 2), np.uint8), np.zeros((12, 2), np.uint8), np.zeros((12, 1, 2)), np.zeros((12, 0, 2), np.uint8)],
)
def test_rows_of_other_tokens(experts: Experts) -> None:
    with pytest.raises(routing.Misfit):
        output_rows(experts, 5, 8)


@given(st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_entry_mismatch_counts_slots_in_place(seed: int, share: float) -> None:
    whole = routes(P + G, seed)
    other = flipped(whole, share, seed)
    metrics = routing.measure(evidence(other[:-1]), replayed(whole))
    wrong = (other[P:-1, 0] != whole[P:-1, 0]).sum()
    assert metrics["mismatches"] == wrong
    assert metrics["entry_mismatch"] == pytest.approx(wrong / ((G - 1) * K))
    assert metrics["tokens"] == G - 1
    # One slot of two flips: the sets of such a token share one expert of three.
    assert metrics["set_match"] == pytest.approx(1 - wrong / (G - 1))
    assert metrics["set_overlap"] == pytest.approx(1 - wrong / (G - 1) / 2)
    assert metrics["set_jaccard"] == pytest.approx(1 - wrong / (G - 1) * 2 / 3)


def test_order_counts_in_slots_but_not_in_sets() -> None:
    whole = routes(P + G)
    metrics = routing.measure(evidence(whole[:-1, :, ::-1]), replayed(whole))
    assert metrics["entry_mismatch"] == 1.0
    assert metrics["set_match"] == metrics["set_jaccard"] == 1.0


def test_sentinels_of_either_side_are_not_compared() -> None:
    whole = routes(P + G).astype(np.int16)
    theirs, ours = whole.copy(), whole[:-1].copy()
    theirs[P : P + 20, 0] = -1
    ours[P + 20, 0] = -1
    ours[P + 30, 0, 0] = (ours[P + 30, 0, 0] + 1) % E
    metrics = routing.measure(evidence(ours), replayed(theirs))
    assert metrics["tokens"] == G - 1 - 21
    assert metrics["mismatches"] == 1
    assert metrics["blank"] == pytest.approx(2 / ((G - 1 - 20) * K))


@pytest.mark.parametrize("blank", [0, -1])
def test_the_first_layer_is_the_first_with_experts(blank: int) -> None:
    whole = routes(P + G).astype(np.int16)
    whole[:, :2] = blank
    assert expert_layers(whole) == (2, 3)
    other = flipped(whole, 0.1)
    other[:, :2] = blank
    metrics = routing.measure(evidence(other[:-1]), replayed(whole))
    assert (metrics["layer"], metrics["layers"]) == (2, 2)
    assert metrics["mismatches"] == (other[P:-1, 2] != whole[P:-1, 2]).sum()
    # A backend that leaves dense layers out altogether.
    assert routing.measure(evidence(other[:-1, 2:]), replayed(whole)) == metrics
    assert list(by_layer(align(evidence(other[:-1]), replayed(whole)))) == [2, 3]


def test_a_backend_cannot_declare_its_layers_dense() -> None:
    whole = routes(P + G)
    zeros = np.zeros_like(whole[:-1])
    found = routing.check(evidence(zeros), replayed(whole), None, experts=E)
    assert (found.result, found.reason.partition(":")[0]) == (Result.WITHHELD, "bad_routed_experts")


@pytest.mark.parametrize(
    ("experts", "changes", "result", "reason"),
    [
        (None, {}, Result.WITHHELD, "no_routed_experts"),
        (None, {"stream": True}, Result.INCONCLUSIVE, "stream"),
        (None, {"complete": False}, Result.INCONCLUSIVE, "incomplete"),
        (None, {"faults": ("client_left",)}, Result.INCONCLUSIVE, "incomplete"),
        (None, {"faults": ("bad_routed_experts",), "stream": True}, Result.WITHHELD, "bad_routed_experts"),
        (routes(P + G - 2), {}, Result.WITHHELD, "bad_routed_experts"),
        (routes(P + G - 1) + np.uint8(1), {}, Result.WITHHELD, "bad_routed_experts"),
        (routes(P + G - 1).astype(np.int16) - 2, {}, Result.WITHHELD, "bad_routed_experts"),
        (routes(P + G - 1)[..., :1], {}, Result.WITHHELD, "bad_routed_experts"),
        (routes(P + G - 1, layers=3), {}, Result.WITHHELD, "bad_routed_experts"),
        (routes(P + G - 1), {"prompt_ids": np.zeros(0, np.int32)}, Result.INCONCLUSIVE, "no_tokens"),
        (routes(P + G - 1), {}, Result.INCONCLUSIVE, "no_profile"),
    ],
)
def test_what_is_withheld(experts: Experts | None, changes: dict[str, Any], result: Result, reason: str) -> None:
    found = routing.check(evidence(experts, **changes), replayed(routes(P + G)), None, experts=E)
    assert (found.result, found.reason.partition(":")[0]) == (result, reason)


def test_leaving_out_the_telling_slots_is_withholding() -> None:
    whole = routes(P + G).astype(np.int16)
    ours = flipped(whole.astype(np.uint8), 0.1).astype(np.int16)
    ours[ours != whole] = -1
    found = routing.check(evidence(ours[:-1]), replayed(whole), None, experts=E)
    assert found.result is Result.WITHHELD
    assert "left out" in found.reason


@pytest.mark.parametrize(
    ("experts", "reason"),
    [(None, "no_reference_experts"), (routes(3), "bad_replay"), (routes(P + G) + np.uint8(3), "bad_replay")],
)
def test_trouble_of_the_reference_is_not_the_backends(experts: Experts | None, reason: str) -> None:
    found = routing.check(evidence(routes(P + G - 1)), replayed(experts), None, experts=E)
    assert (found.result, found.reason.partition(":")[0]) == (Result.INCONCLUSIVE, reason)


@pytest.mark.parametrize("output", [1, 2, 60])
def test_short_answers_say_nothing(output: int, profile: Profile) -> None:
    whole = routes(P + output)
    found = routing.check(evidence(whole[:-1], output=output), replayed(whole[P:-1]), profile, experts=E)
    assert (found.result, found.reason.partition(":")[0]) == (Result.INCONCLUSIVE, "too_short")


def test_decisions_against_a_profile(profile: Profile) -> None:
    honest = routing.check(*pair(0.02, 900), profile, experts=E)
    assert honest.result is Result.PASS
    assert honest.metrics["exceeds"] == 0
    doubtful = routing.check(*pair(0.2, 901), profile, experts=E)
    assert doubtful.result is not Result.REJECT
    assert doubtful.metrics["exceeds"] == 1
    made, replay = pair(0.0, 901)
    made = replace(made, routed_experts=routes(P + G - 1, 902))
    cheat = routing.check(made, replay, profile, experts=E)
    assert cheat.result is Result.REJECT
    assert cheat.level == cheat.metrics["p"] == pytest.approx(1 / 41)
    assert cheat.metrics["bet"] == 1.0
    assert {"score", "p", "n", "bet", "mu0", "tail"} <= set(cheat.metrics)
    # The form of the logprobs has nothing to do with routing.
    assert routing.check(made, replace(replay, form="ids"), profile, experts=E).result is Result.REJECT
    assert routing.check(replace(made, precision="fp8"), replay, profile, experts=E).result is Result.INCONCLUSIVE


def test_pruned_experts_are_named(profile: Profile) -> None:
    whole = routes(P + G)
    ours = whole[:-1].copy()
    for row in ours.reshape(-1, K):
        spare = [e for e in range(E // 2) if e not in row]
        row[:] = [e if e < E // 2 else spare.pop() for e in row]
    found = routing.check(evidence(ours), replayed(whole), profile, experts=E)
    assert found.result is Result.REJECT
    assert found.metrics["missing_experts"] == E // 2
    assert "never occur" in found.reason
    part = routing.counts(align(evidence(ours), replayed(whole)))
    assert routing.aggregate([part] * 5).pruned == (4, 5, 6, 7)


@given(st.lists(st.tuples(st.integers(1, 400), st.floats(0, 0.2)), max_size=12), st.sampled_from([0.060, 0.080]))
def test_aggregates_follow_the_rule(parts: list[tuple[int, float]], threshold: float) -> None:
    empty = np.zeros(E, np.int64)
    samples = [routing.Counts(tokens, tokens * K, int(tokens * K * share), empty, empty) for tokens, share in parts]
    found = routing.aggregate(samples, threshold)
    entries, wrong = sum(s.entries for s in samples), sum(s.mismatches for s in samples)
    if len(samples) < 5:
        assert found.decision == "insufficient_samples"
    elif sum(s.tokens for s in samples) < 512:
        assert found.decision == "insufficient_tokens"
    else:
        assert found.decision == ("accept" if wrong / entries <= threshold else "reject")
    assert found.samples == len(samples)


def test_samples_with_nothing_to_compare_do_not_count() -> None:
    good = routing.counts(align(*pair(0.0)))
    nothing = replace(good, tokens=0, entries=0, mismatches=0)
    assert routing.aggregate([good] * 4 + [nothing]).decision == "insufficient_samples"
    assert routing.aggregate([good] * 5).decision == "accept"
    assert routing.aggregate([routing.counts(align(*pair(0.5)))] * 5).decision == "reject"


@pytest.mark.parametrize("name", ["moe-chat", "moe-chat-n2", "moe-completions", "moe-chat-sampled"])
def test_recorded_expert_ids(name: str) -> None:
    body = json.loads((RECORDED / f"{name}.body").read_text())
    for choice in body["choices"]:
        experts = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
        prompt = np.asarray(body.get("prompt_token_ids") or choice["prompt_token_ids"], np.int32)
        output = np.asarray(choice["token_ids"], np.int32)
        made = replace(evidence(experts), prompt_ids=prompt, output_ids=output)
        assert routing.obstacle(made, E) is None
        found = routing.obstacle(made, 7)
        assert found is not None
        assert found.result is Result.WITHHELD
        metrics = routing.measure(made, replayed(experts[len(prompt) :]))
        assert (metrics["layer"], metrics["layers"], metrics["entry_mismatch"]) == (0, 30, 0.0)
        assert metrics["tokens"] == len(output) - 1
