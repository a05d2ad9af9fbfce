from __future__ import annotations

from typing import Any

import pytest

from policies.rederivation import TOLERANCE, differences

SIGNED: dict[str, Any] = {
    "id": "x",
    "decided": 1.0,
    "verdict": "reject",
    "reasons": ["too_far: the drift is 0.2659, 17 honest answers stay within 0.06766"],
    "audited": True,
    "checks": [
        {"name": "distance", "level": 0.05, "metrics": {"score": 0.2659, "tokens": 37, "tail": 1e-300, "p": None}}
    ],
}


def changed(**more: Any) -> dict[str, Any]:
    return SIGNED | more


def with_metric(name: str, value: Any) -> dict[str, Any]:
    (check,) = SIGNED["checks"]
    return changed(checks=[check | {"metrics": check["metrics"] | {name: value}}])


@pytest.mark.parametrize(
    "same",
    [
        changed(id="y", decided=2.0, extra_replay=True, second_reference={"confirmed": []}),
        changed(reasons=["too_far: the drift is 0.26591, 17 honest answers stay within 0.06766"]),
        with_metric("score", 0.2659 * (1 + TOLERANCE / 2)),
        with_metric("tail", 0.0),
        with_metric("tokens", 37.0),
    ],
)
def test_what_machines_may_differ_in(same: dict[str, Any]) -> None:
    assert differences(SIGNED, same) == []
    assert differences(same, SIGNED) == []


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (changed(verdict="pass"), "`verdict`"),
        (changed(audited=1), "`audited`"),
        (changed(more=1), "`more`"),
        (changed(reasons=[]), "`reasons`"),
        (changed(reasons=["too_near: the drift is 0.2659, 17 honest answers stay within 0.06766"]), "`reasons[0]`"),
        (changed(reasons=["too_far: the drift is 0.27, 17 honest answers stay within 0.06766"]), "`reasons[0]`"),
        (changed(reasons=["too_far: the drift is 0.2659, 18 honest answers stay within 0.06766"]), "`reasons[0]`"),
        (
            changed(reasons=["too_far: the drift is 0.2659, १७ honest answers stay within 0.06766"]),
            "`reasons[0]`",
        ),
        (changed(object="other"), "`object`"),
        (with_metric("score", 0.266), "`checks[distance].metrics.score`"),
        (with_metric("tokens", 38), "`checks[distance].metrics.tokens`"),
        (with_metric("p", 0.0), "`checks[distance].metrics.p`"),
        (with_metric("new", 0.0), "`checks[distance].metrics.new`"),
        (changed(checks="x"), "`checks`"),
        (changed(created=1.0), "`created`"),
        (with_metric("tail", 1e-40), "`checks[distance].metrics.tail`"),
        (with_metric("p", 1e-13), "`checks[distance].metrics.p`"),
    ],
)
def test_everything_else_is_told(other: dict[str, Any], words: str) -> None:
    for found in (differences(SIGNED, other), differences(other, SIGNED)):
        assert len(found) == 1
        assert words in found[0]


def test_whole_numbers_in_texts_are_counts() -> None:
    told = [changed(reasons=[f"far: {count} of 120000 tokens"]) for count in (120000, 120001)]
    assert differences(told[0], told[0]) == []
    assert len(differences(*told)) == 1


@pytest.mark.parametrize("decided", [None, True, "1.0", [1.0]])
def test_a_verdict_was_made_at_some_time(decided: Any) -> None:
    assert differences(changed(decided=decided), SIGNED) == ["`decided` is no time"]


def test_times_are_exact_and_levels_are_never_nothing() -> None:
    (check,) = SIGNED["checks"]
    one, other = (changed(created=1.7e9 + more) for more in (0.0, 0.25))
    assert len(differences(one, other)) == 1
    assert differences(one, one) == []
    for level, signed in ((1e-13, 0.0), (1e-40, 9e-13), (1e-30, 2e-30)):
        pair = [changed(checks=[check | {"level": each}]) for each in (signed, level)]
        assert len(differences(*pair)) == 1
    assert differences(*(changed(checks=[check | {"level": each}]) for each in (1e-30, 1e-30 * (1 + 1e-6)))) == []
