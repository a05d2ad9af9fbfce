"""What a request says of the backend that had it."""

from __future__ import annotations

import logging
import time
from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.settings import HealthSettings
from proxy.backends.turn import Turn, retry_after
from tests.proxy.backends.fleet import Fleet

PROBES = HealthSettings(down_after=3, up_after=2)


def _answered(fleet: Fleet, status: int, *headers: tuple[bytes, bytes]) -> None:
    with Turn(fleet.all[0]) as turn:
        turn.answered(status, headers)


@pytest.mark.parametrize("status", [400, 401, 404, 408, 409, 413, 422, 429, 499])
def test_4xx_never_open_it(status: int) -> None:
    fleet = Fleet(1)
    for _ in range(50):
        _answered(fleet, status)
    breaker = fleet.all[0].breaker
    assert (breaker.state, breaker.failures, fleet.all[0].failure) == ("closed", 0, None)


@pytest.mark.parametrize("status", [400, 429])
def test_nor_do_4xx_between_them_forgive_failures(status: int) -> None:
    """Or whoever sends nonsense would keep a broken backend in service."""
    fleet = Fleet(1)
    for _ in range(5):
        _answered(fleet, status)
        _answered(fleet, 500)
    assert fleet.all[0].breaker.state == "open"


@pytest.mark.parametrize("status", [500, 502, 503, 504, 599])
def test_5xx_open_it(status: int) -> None:
    fleet, before = Fleet(1), time.time()
    for _ in range(5):
        _answered(fleet, status)
    backend = fleet.all[0]
    assert (backend.breaker.state, backend.breaker.kind) == ("open", "status")
    assert backend.failure is not None
    assert backend.failure.kind == "status"
    assert before <= backend.failure.at <= time.time()


def test_a_request_counts_once() -> None:
    fleet = Fleet(1)
    with Turn(fleet.all[0]) as turn:
        for _ in range(9):
            turn.answered(500)
            turn.failed("broken")
        turn.finished()
    assert fleet.all[0].breaker.failures == 1


def test_clients_that_leave_say_nothing() -> None:
    fleet = Fleet(1)
    for n in range(20):
        with Turn(fleet.all[0]) as turn:
            if n % 2:
                turn.began()
    assert (fleet.all[0].breaker.failures, fleet.all[0].outstanding) == (0, 0)


def test_one_that_breaks_answers_off_is_opened() -> None:
    fleet = Fleet(1)
    for _ in range(5):
        with Turn(fleet.all[0]) as turn:
            turn.answered(200)
            turn.began()
            turn.failed("broken")
    assert fleet.all[0].breaker.state == "open"


@pytest.mark.parametrize(
    ("status", "headers", "seconds"),
    [
        (429, [], 1),
        (429, [(b"Retry-After", b"7")], 7),
        (429, [(b"retry-after", b"7"), (b"Retry-After-Ms", b"250")], 0.25),
        (429, [(b"retry-after", b"99999999999")], 60),
        (429, [(b"retry-after", b"0")], 0),
        (429, [(b"retry-after", b"-5")], 1),
        (429, [(b"retry-after", b"nan")], 1),
        (429, [(b"retry-after", b"\xff")], 1),
        (503, [], 0),
        (503, [(b"retry-after", b"7")], 7),
        (400, [(b"retry-after", b"7")], 0),
        (500, [(b"retry-after", b"7")], 0),
    ],
)
def test_it_rests_as_long_as_it_wants(status: int, headers: list[tuple[bytes, bytes]], seconds: float) -> None:
    fleet = Fleet(1)
    _answered(fleet, status, *headers)
    until = fleet.all[0].resting_until
    assert max(0.0, until - fleet.clock.now) == pytest.approx(seconds)


def test_retry_after_as_a_date() -> None:
    before = time.time()
    seconds = retry_after([(b"retry-after", formatdate(before + 30, usegmt=True).encode())])
    assert seconds is not None
    assert 28 - (time.time() - before) < seconds <= 30
    assert retry_after([(b"retry-after", formatdate(0).encode())]) == 0
    assert retry_after([]) is None


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_retry_after_is_whatever_a_backend_says(one: bytes, other: bytes) -> None:
    found = retry_after([(b"retry-after", one), (b"retry-after-ms", other)])
    assert found is None or found >= 0


async def test_a_rest_is_over_with_an_answer_or_by_itself() -> None:
    fleet = Fleet(2)
    resting, other = fleet.all
    resting.rest(10)
    assert [await fleet.first() for _ in range(6)] == ["b2"] * 6
    other.rest(10)
    assert {await fleet.first() for _ in range(6)} == {"b1", "b2"}
    fleet.clock.now += 10.001
    assert {await fleet.first() for _ in range(6)} == {"b1", "b2"}
    fleet.fail(resting, "unreachable", times=1)
    assert [await fleet.first() for _ in range(6)] == ["b2"] * 6
    with Turn(resting) as turn:
        turn.began()
    assert {await fleet.first() for _ in range(6)} == {"b1", "b2"}
    # A rest that it asked for is not over because an answer begins that was asked for before.
    resting.rest(10)
    with Turn(resting) as turn:
        turn.began()
    assert [await fleet.first() for _ in range(6)] == ["b2"] * 6


def test_probes_turn_it_off_and_on(caplog: pytest.LogCaptureFixture) -> None:
    backend = Fleet(1).all[0]
    seen = []
    for problem in [
        "timeout",
        "timeout",
        None,
        "timeout",
        "timeout",
        "status_503",
        "status_503",
        None,
        "x",
        None,
        None,
    ]:
        backend.probed(problem, PROBES)
        seen.append(backend.up)
    assert seen == [True] * 5 + [False] * 5 + [True]
    assert [record.message for record in caplog.records] == [
        "a backend is not well; it is asked last",
        "a backend is well again",
    ]
    assert backend.health()["last_probe_failure"]["kind"] == "x"


def test_a_probe_closes_no_breaker() -> None:
    fleet = Fleet(1)
    fleet.fail(fleet.all[0])
    for _ in range(9):
        fleet.all[0].probed(None, PROBES)
    assert fleet.all[0].breaker.state == "open"


def test_only_changes_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    fleet = Fleet(1)
    backend = fleet.all[0]
    fleet.fail(backend, times=20)
    fleet.clock.now += 3
    with Turn(backend) as turn:
        turn.began()
        turn.finished()
    for _ in range(20):
        with Turn(backend) as turn:
            turn.began()
            turn.finished()
    assert [record.__dict__["breaker"] for record in caplog.records] == ["open", "half_open", "closed"]
