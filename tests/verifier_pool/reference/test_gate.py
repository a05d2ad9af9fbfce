"""Who is inside the engine, in which order; hypothesis draws the traffic."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from policies.evidence import ReplayForm
from verifier_pool.reference.gate import Gate

FORMS: tuple[ReplayForm, ...] = ("ids", "full")
TRAFFIC = st.lists(st.tuples(st.sampled_from(FORMS), st.integers(1, 40)), max_size=40)


async def pass_through(
    gate: Gate, traffic: Sequence[tuple[ReplayForm, int]], cancelled: frozenset[int] = frozenset()
) -> list[int]:
    """The numbers of those that entered, in the order they did; each stays for a moment."""
    entered: list[int] = []
    dice = random.Random(7)
    inside: dict[int, int] = {}

    async def one(number: int, form: ReplayForm, tokens: int) -> None:
        async with gate.through(form, tokens):
            entered.append(number)
            inside[number] = tokens
            try:
                assert sum(inside.values()) <= gate.inside < 30 + 40
                for _ in range(dice.randrange(4)):
                    await asyncio.sleep(0)
            finally:
                del inside[number]

    tasks = [asyncio.create_task(one(number, *each)) for number, each in enumerate(traffic)]
    await asyncio.sleep(0)
    for number in cancelled:
        tasks[number].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for number, task in enumerate(tasks):
        assert task.cancelled() or number not in cancelled or number in entered
        assert task.cancelled() or task.exception() is None
    return entered


@given(TRAFFIC)
def test_all_come_through_first_come_first_served_within_a_form(traffic: list[tuple[ReplayForm, int]]) -> None:
    gate = Gate(window=30, turn=50)
    entered = asyncio.run(pass_through(gate, traffic))
    assert sorted(entered) == list(range(len(traffic)))
    for form in FORMS:
        of_form = [number for number in entered if traffic[number][0] == form]
        assert of_form == sorted(of_form)
    assert gate.inside == 0


@given(TRAFFIC, st.data())
def test_whoever_leaves_the_line_holds_nobody_up(traffic: list[tuple[ReplayForm, int]], data: st.DataObject) -> None:
    away = data.draw(st.frozensets(st.integers(0, max(len(traffic) - 1, 0)), max_size=len(traffic)))
    gate = Gate(window=30, turn=50)
    entered = asyncio.run(pass_through(gate, traffic, away))
    assert set(range(len(traffic))) - away <= set(entered)
    assert gate.inside == 0


def test_forms_have_turns() -> None:
    gate = Gate(window=10, turn=40)
    traffic: list[tuple[ReplayForm, int]] = [("ids", 10), ("full", 10)] * 12
    entered = asyncio.run(pass_through(gate, traffic))
    forms = [traffic[number][0] for number in entered]
    changes = sum(one != other for one, other in itertools.pairwise(forms))
    assert changes == 5
    assert forms[:4] == ["ids"] * 4


def test_nobody_waits_for_a_form_that_does_not_come() -> None:
    entered = asyncio.run(pass_through(Gate(window=10, turn=20), [("full", 10)] * 9))
    assert entered == list(range(9))
