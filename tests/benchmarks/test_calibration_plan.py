"""What calibration asks, in which order, and how it counts time."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.calibration.plan import Plan
from benchmarks.calibration.progress import Progress
from benchmarks.calibration.prompts import KINDS, fingerprint, messages
from benchmarks.questions import DEMO

PLANS = st.builds(
    Plan,
    backends=st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True).map(tuple),
    requests=st.integers(8, 200),
    concurrency=st.lists(st.integers(1, 64), min_size=1, max_size=3, unique=True).map(tuple),
    temperatures=st.lists(st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.3]), min_size=1, max_size=4, unique=True).map(tuple),
    lengths=st.lists(st.integers(1, 999), min_size=1, max_size=4, unique=True).map(tuple),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, unique=True).map(tuple),
    top_p=st.sampled_from([(), (0.9,)]),
    top_k=st.sampled_from([(), (5, 20)]),
    apart=st.booleans(),
)


@given(PLANS)
def test_a_plan_is_even_repeats_nothing_and_survives_its_manifest(plan: Plan) -> None:
    shots = plan.shots()
    assert [shot.index for shot in shots] == list(range(plan.requests * len(plan.backends)))
    for backend in plan.backends:
        counts = Counter(shot.arm for shot in shots if shot.arm.backend == backend)
        assert max(counts.values()) - min(counts.get(arm, 0) for arm in plan.arms(backend)) <= 1
        asked = [(shot.kind, shot.number) for shot in shots if shot.arm.backend == backend]
        assert len(set(asked)) == len(asked)
        kinds = Counter(kind for kind, _ in asked)
        assert max(kinds.values()) - min(kinds.get(kind, 0) for kind in plan.kinds) <= 1
    assert Plan.from_json(plan.as_json()) == plan
    assert plan.shots() == shots


def test_greedy_answers_are_not_truncated_twice() -> None:
    arms = Plan(("a",), 99, top_p=(0.9,), top_k=(20,)).arms("a")
    assert len(arms) == 2 * (1 + 2 * 3)
    assert {arm.label for arm in arms} >= {"a, batch 8, top_p 0.9", "a, batch 1, top_k 20"}
    assert all(arm.top_p == 1 and arm.top_k == 0 for arm in arms if arm.temperature == 0)


def test_every_length_is_streamed_and_not() -> None:
    shots = Plan(("a",), 240).shots()
    for kind in KINDS:
        ways = Counter((shot.max_tokens, shot.stream) for shot in shots if shot.kind == kind)
        assert len(ways) == 6
        assert max(ways.values()) - min(ways.values()) <= 2


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_differ_and_stay_the_same(kind: str) -> None:
    found = [messages(kind, number) for number in range(200)]
    assert len({str(prompt) for prompt in found}) == 200
    assert found == [messages(kind, number) for number in range(200)]
    assert all(prompt[-1]["role"] == "user" and prompt[-1]["content"] for prompt in found)
    assert not {prompt[-1]["content"] for prompt in found} & set(DEMO)


def test_long_prompts_are_as_long_as_asked() -> None:
    for kind in ("summary", "long"):
        for words in (50, 2000):
            assert words <= len(messages(kind, 3, words=words)[0]["content"].split()) <= words + 80
    assert fingerprint() == fingerprint()


def test_time_left_is_told_from_what_was_seen() -> None:
    now = 0.0
    said: list[str] = []
    shots = Plan(("a",), 8, concurrency=(1,), temperatures=(0.0,), lengths=(32,)).shots()
    progress = Progress(shots, said.append, lambda: now)
    progress.known(shots[0], replayed=True)
    progress.step("asking")
    assert progress.seconds_left() is None
    for shot in shots[1:5]:
        now += 3.0
        progress.asked(shot)
    progress.step("replaying")
    now += 2.0
    progress.replayed(4)
    assert progress.seconds_left() == pytest.approx(3 * 3.0 + 3 * 0.5)
    assert said[-1] == "replaying; 5 of 8 answers, 5 replayed, about 10 s left"
