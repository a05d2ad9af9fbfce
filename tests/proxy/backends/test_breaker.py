"""The circuit breaker on a clock of the test's own."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from policies.settings import BreakerSettings
from proxy.backends.breaker import REACHED, Breaker, Entry, Failure

RULES = BreakerSettings(failures=3, open_seconds=2, longest=16)
KINDS = st.sampled_from(["unreachable", "timeout", "disconnected", "status", "broken"])


def _breaker(chance: float = 0.0, rules: BreakerSettings = RULES) -> Breaker:
    return Breaker(rules, lambda: chance)


def _fail(breaker: Breaker, now: float, times: int = 3, kind: Failure = "unreachable") -> None:
    for _ in range(times):
        breaker.failed(breaker.enter(now), kind, now)


def test_failures_in_a_row_open_it() -> None:
    breaker = _breaker()
    _fail(breaker, 0, 2)
    breaker.finished(breaker.enter(0))
    _fail(breaker, 0, 2)
    assert breaker.state == "closed"
    _fail(breaker, 10, 1)
    assert (breaker.state, breaker.until, breaker.admits(11.9), breaker.admits(12)) == ("open", 12, False, True)


def test_one_request_tries() -> None:
    breaker = _breaker()
    _fail(breaker, 0)
    probe = breaker.enter(2)
    assert (probe.probe, breaker.state) == (True, "half_open")
    assert not breaker.admits(17.9)
    breaker.began(probe)
    assert breaker.state == "closed"
    _fail(breaker, 3, 1)
    assert (breaker.state, breaker.until) == ("open", 7)


def test_it_grows_up_to_its_longest_and_shrinks_with_an_answer() -> None:
    breaker = _breaker()
    _fail(breaker, 0)
    now, seconds = 0.0, []
    for _ in range(6):
        seconds.append(breaker.until - now)
        now = breaker.until
        breaker.failed(breaker.enter(now), "timeout", now)
    assert seconds == [2, 4, 8, 16, 16, 16]
    now = breaker.until
    breaker.finished(breaker.enter(now))
    _fail(breaker, now)
    assert breaker.until == now + 2


def test_centuries_of_failures() -> None:
    breaker = _breaker()
    _fail(breaker, 0)
    for _ in range(5000):
        now = breaker.until
        breaker.failed(breaker.enter(now), "disconnected", now)
    assert breaker.opened > 5000
    assert breaker.until < 5001 * 16


def test_a_backend_that_breaks_every_answer_off_stays_out() -> None:
    """Each answer begins; if that alone took the failures back, none would ever count."""
    breaker = _breaker()
    _fail(breaker, 0, kind="broken")
    now = 0.0
    for n in range(1, 4):
        now = breaker.until
        probe = breaker.enter(now)
        breaker.began(probe)
        breaker.failed(probe, "broken", now)
        assert (breaker.state, breaker.until - now) == ("open", 2 * 2**n)


@given(st.integers(1, 6), KINDS, st.integers(0, 20))
def test_who_says_nothing_changes_nothing(failures: int, kind: Failure, left: int) -> None:
    """4xx and clients that leave: neither a failure nor a success."""
    breaker = _breaker(rules=BreakerSettings(failures=failures))
    for n in range(failures):
        for _ in range(left):
            breaker.left(breaker.enter(0), 0)
        assert (breaker.state, breaker.failures) == ("closed", n)
        breaker.failed(breaker.enter(0), kind, 0)
    assert breaker.state == "open"


def test_a_try_that_says_nothing_lets_another_one_try() -> None:
    breaker = _breaker()
    _fail(breaker, 0)
    breaker.left(breaker.enter(5), 5)
    assert breaker.enter(5).probe
    assert not breaker.admits(5)


def test_a_try_that_hangs_keeps_others_from_trying_only_so_long() -> None:
    breaker = _breaker()
    _fail(breaker, 0)
    hangs = breaker.enter(2)
    assert not breaker.admits(17.9)
    other = breaker.enter(18)
    assert other.probe
    breaker.failed(hangs, "timeout", 19)
    breaker.left(hangs, 19)
    assert (breaker.state, breaker.admits(19)) == ("half_open", False)
    breaker.began(other)
    assert breaker.state == "closed"


def test_what_was_in_flight_when_it_opened_is_no_news() -> None:
    breaker = _breaker()
    old = [breaker.enter(0) for _ in range(10)]
    _fail(breaker, 0)
    until = breaker.until
    for entry in old[:5]:
        breaker.failed(entry, "timeout", 1)
    for entry in old[5:]:
        breaker.began(entry)
        breaker.finished(entry)
    assert (breaker.state, breaker.until, breaker.opened) == ("open", until, 1)
    probe = breaker.enter(until)
    breaker.failed(old[0], "timeout", until)
    breaker.left(old[1], until)
    assert not breaker.admits(until + 15)
    breaker.finished(probe)
    assert breaker.state == "closed"


def test_asked_for_want_of_anybody_else() -> None:
    breaker = _breaker()
    _fail(breaker, 0, kind="status")
    assert breaker.reached
    breaker.failed(breaker.enter(1), "status", 1)
    assert (breaker.opened, breaker.until) == (1, 2)
    breaker.finished(breaker.enter(1))
    assert (breaker.state, breaker.failures) == ("closed", 0)


@pytest.mark.parametrize("kind", ["unreachable", "timeout"])
def test_nobody_waits_for_one_that_is_not_there(kind: Failure) -> None:
    breaker = _breaker()
    _fail(breaker, 0, kind=kind)
    assert not breaker.reached


def test_what_takes_too_long_while_others_are_answered_is_the_requests_own() -> None:
    """Or a few prompts that are too long would take the backend away from everybody else."""
    breaker = _breaker()
    for _ in range(10):
        long = [breaker.enter(0) for _ in range(10)]
        breaker.finished(breaker.enter(1))
        for entry in long:
            breaker.failed(entry, "timeout", 2)
    assert (breaker.state, breaker.failures) == ("closed", 0)
    long = [breaker.enter(0) for _ in range(3)]
    for entry in long:
        breaker.failed(entry, "timeout", 2)
    assert breaker.state == "open"


class _Life(RuleBasedStateMachine):
    """Whatever happens in whatever order."""

    @initialize(failures=st.integers(1, 4), chance=st.floats(0, 1, exclude_max=True), first=st.floats(0.1, 5))
    def begin(self, failures: int, chance: float, first: float) -> None:
        self.now = 0.0
        self.given = BreakerSettings(failures=failures, open_seconds=first, longest=first * 4)
        self.breaker = Breaker(self.given, lambda: chance)
        self.flying: list[Entry] = []
        self.row = 0

    @rule(seconds=st.floats(0, 30))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def enter(self) -> None:
        before = self.breaker.state, self.breaker.admits(self.now)
        entry = self.breaker.enter(self.now)
        assert entry.probe == (before[0] != "closed" and before[1])
        self.flying.append(entry)

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), how=st.sampled_from(["began", "finished", "left", "failed"]), kind=KINDS)
    def over(self, data: Any, how: str, kind: Failure) -> None:
        entry = data.draw(st.sampled_from(self.flying))
        opened, state, epoch = self.breaker.opened, self.breaker.state, self.breaker.epoch
        if how == "began":
            self.breaker.began(entry)
        else:
            self.flying.remove(entry)
            if how == "failed":
                self.breaker.failed(entry, kind, self.now)
            else:
                if how == "finished":
                    self.breaker.finished(entry)
                self.breaker.left(entry, self.now)
        if entry.epoch != epoch or how == "left":
            assert (self.breaker.opened, self.breaker.state) == (opened, state)
        if how != "failed":
            assert self.breaker.opened <= opened
        if self.breaker.opened > opened:
            assert self.breaker.state == "open"
            assert self.breaker.kind == kind
            least = min(self.given.open_seconds * 2.0**opened, self.given.longest)
            assert 0.74 * least <= self.breaker.until - self.now <= least * 1.0001

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "breaker"):
            return
        tries = [entry for entry in self.flying if entry.probe and entry.epoch == self.breaker.epoch]
        assert len(tries) <= 1
        if self.breaker.state == "half_open" and not tries:
            assert self.breaker.admits(self.now)
        # Whatever hangs or is lost, it is tried again within the longest time.
        assert self.breaker.admits(self.now + self.given.longest)
        assert self.breaker.reached == (self.breaker.state != "closed" and self.breaker.kind in REACHED)
        if self.breaker.state == "closed":
            assert self.breaker.failures < self.given.failures


TestLife = _Life.TestCase
