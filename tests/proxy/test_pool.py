"""The order in which backends are asked, without a proxy around it."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.errors import BackendUnavailable
from proxy.backends.pool import Backends, Standing
from tests.support.running import settings_for

SUSPECT = Standing("suspect", 1.0)
_BACKENDS = st.lists(
    st.tuples(
        st.sampled_from(["trial", "trusted", "suspect", "quarantined"]),
        st.integers(0, 3),
        st.integers(0, 3),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


@settings(deadline=None)
@given(_BACKENDS, st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 7))
def test_who_is_asked_and_when(drawn: list[tuple[Any, int, int, bool]], share: float, skipped: int) -> None:
    entries = [
        {"name": f"b{n}", "url": "http://127.0.0.1:9", "model": "m", "max_concurrency": limit}
        for n, (_, limit, _, _) in enumerate(drawn)
    ]
    backends = Backends(settings_for(backends=entries, standing={"suspect_share": share}))
    for backend, (state, _, outstanding, resting) in zip(backends.all, drawn, strict=True):
        backend.standing = Standing(state, 1.0)
        backend.outstanding = outstanding
        backend.resting_until = time.monotonic() + 60 if resting else 0.0
    without = backends.all[skipped] if skipped < len(drawn) else None
    usable = [item for item in backends.all if not item.quarantined and not item.full and item is not without]
    assert bool(backends.served_models()) == any(not item.quarantined for item in backends.all)
    if not usable:
        with pytest.raises(BackendUnavailable):
            backends.candidates("m", without=without)
        return
    order = backends.candidates("m", without=without)
    assert sorted(item.name for item in order) == sorted(item.name for item in usable)
    asleep = [item.resting_until > 0 for item in order]
    assert asleep == sorted(asleep)
    suspect = [item.standing.state == "suspect" for item in order]
    for half in (False, True):
        group = [bad for bad, late in zip(suspect, asleep, strict=True) if late == half]
        # Only the one whose turn it is may stand before the others, and only if it has turns at all.
        mine = group[1:] if share and group and group[0] else group
        assert mine == sorted(mine)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_suspects_share(share: float) -> None:
    """Of n backends a suspect gets `suspect_share` of every n-th request, under load as well; the order is random."""
    backends = Backends(settings_for(*["http://127.0.0.1:9"] * 4, standing={"suspect_share": share}))
    suspect, *others = backends.all
    suspect.standing = SUSPECT
    suspect.outstanding = 5
    rounds = 8000
    firsts = [backends.candidates("m") for _ in range(rounds)]
    first = Counter(order[0].name for order in firsts)
    expected = rounds * share / 4
    assert abs(first["b1"] - expected) <= 4 * (expected + 1) ** 0.5
    assert all(order[-1] is suspect for order in firsts if order[0] is not suspect)
    rest = [first[backend.name] for backend in others]
    assert max(rest) - min(rest) < rounds * 0.05


def test_suspects_alone_are_like_any_other() -> None:
    backends = Backends(settings_for(*["http://127.0.0.1:9"] * 2))
    for backend in backends.all:
        backend.standing = SUSPECT
    backends.all[0].outstanding = 1
    assert {tuple(item.name for item in backends.candidates("m")) for _ in range(50)} == {("b2", "b1")}


def test_turns_go_round_for_each_model_by_itself() -> None:
    settings = settings_for(
        models={"a": {}, "b": {}},
        backends=[
            {"name": f"{model}{n}", "url": "http://127.0.0.1:9", "model": model} for model in "ab" for n in (1, 2)
        ],
    )
    backends = Backends(settings)
    firsts = Counter(backends.candidates("ab"[n % 2])[0].name for n in range(40))
    assert firsts == {"a1": 10, "a2": 10, "b1": 10, "b2": 10}
