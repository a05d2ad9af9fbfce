"""The cases about time tell a gateway that is at once from one that is not, although machines stand still."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest

from tests.fidelity import test_cancellation as cancellation
from tests.fidelity import test_framing as framing
from tests.fidelity.gateway import CHAT, Gateway
from tests.fidelity.timing import assert_mostly
from tests.fidelity.toy import Fault, Toy
from tests.support.fake_backend import FakeBackend

pytestmark = [pytest.mark.ours, pytest.mark.timed]
Case = Callable[[Gateway, FakeBackend], None]


def leaves(phase: str) -> Case:
    """Cases 1 to 4 and 8."""

    def case(gateway: Gateway, upstream: FakeBackend) -> None:
        cancellation.test_the_upstream_is_closed_when_the_client_leaves(gateway, upstream, CHAT, phase, False)

    return case


LEAVES: dict[str, Case] = {phase: leaves(phase) for phase in cancellation.PHASES}
STALLED: Case = cancellation.test_a_reader_that_stalled_and_went_away
MANY: Case = cancellation.test_many_who_leave_at_once_hold_up_nobody
FORWARDED: Case = framing.test_a_chunk_is_there_before_the_next_one
SLEEPS = {"first": Fault(sleeps=0.1), "end": Fault(sleeps=0.1, at_the_end=True)}
"""On a machine that stands still now and then; 25 ms are found on one that does not."""


@contextmanager
def gateway_with(fault: Fault, upstream: FakeBackend) -> Iterator[Gateway]:
    """A toy; what it left open at the upstream does not outlive it."""
    with Toy(upstream.url, fault) as toy:
        yield Gateway(toy.url)
    upstream.reset()


@pytest.mark.parametrize("case", [*LEAVES.values(), STALLED, MANY, FORWARDED], ids=[*LEAVES, "stalled", "many", "sent"])
def test_one_without_a_fault_holds(upstream: FakeBackend, case: Case) -> None:
    with gateway_with(Fault(), upstream) as gateway:
        case(gateway, upstream)


@pytest.mark.parametrize("case", [*LEAVES.values(), STALLED], ids=[*LEAVES, "stalled"])
def test_one_that_looks_now_and_then_whether_its_client_is_there_is_found(upstream: FakeBackend, case: Case) -> None:
    with gateway_with(Fault(polls=0.5), upstream) as gateway, pytest.raises(AssertionError):
        case(gateway, upstream)


def test_one_that_closes_at_once_one_time_in_ten_is_found(upstream: FakeBackend) -> None:
    with gateway_with(Fault(seldom=10), upstream) as gateway, pytest.raises(AssertionError):
        LEAVES["mid-stream"](gateway, upstream)


def test_one_that_stands_still_while_it_clears_up_is_found(upstream: FakeBackend) -> None:
    with gateway_with(Fault(blocks=2 * cancellation.HELD_UP), upstream) as gateway, pytest.raises(AssertionError):
        MANY(gateway, upstream)


@pytest.mark.parametrize("fault", SLEEPS.values(), ids=SLEEPS)
def test_one_that_sleeps_once_an_answer_is_found(upstream: FakeBackend, fault: Fault) -> None:
    with gateway_with(fault, upstream) as gateway, pytest.raises(AssertionError):
        FORWARDED(gateway, upstream)


@pytest.mark.parametrize(
    ("took", "holds"),
    [
        ([0.0, 0.0, 0.0], True),
        ([9.0, 0.0, 9.0, 0.0, 0.0], True),
        ([0.0, 9.0, 0.0, 9.0, 9.0], False),
        ([9.0, 9.0, 9.0], False),
    ],
)
def test_the_median_decides(took: list[float], holds: bool) -> None:
    left = iter(took)
    with nullcontext() if holds else pytest.raises(AssertionError):
        assert_mostly(lambda: next(left), 0.1)
    assert next(left, None) is None
