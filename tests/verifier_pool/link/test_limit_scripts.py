"""The scripts that count: against a real Valkey, at times of the test's own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.limits.counted import Counted
from tests.support.valkey import Valkey
from verifier_pool.link.keys import Use, counted_keys
from verifier_pool.link.limit_scripts import ADMIT, RENEW, SETTLE, SHOW, at

MINUTE = 60_000
NAMES = counted_keys("test")
MANY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
NOON = int(datetime.now(UTC).replace(hour=12, minute=0, second=0, microsecond=0).timestamp() * 1000) + 86_400_000


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    with Valkey() as server:
        yield server


@pytest.fixture
def store(valkey: Valkey) -> Iterator[redis.Redis]:
    with valkey.client() as client:
        client.flushall()
        yield client


@dataclass
class Key:
    """One key under test, and what was let in by it."""

    redis: redis.Redis
    rpm: int = 0
    tpm: int = 0
    concurrency: int = 0
    tokens: int = 0
    every: str = "day"
    now: int = NOON
    leases: int = 0
    admitted: list[dict[str, int]] = field(default_factory=list)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.redis.eval(at(script, self.now), 3, *NAMES, *arguments)

    def admit(
        self, cost: int = 0, *, most: int | None = None, least: int = 0, open: bool = False, known: bool = True
    ) -> Counted:
        self.leases += 1
        limits = (self.rpm, self.tpm, self.concurrency, self.tokens, self.every)
        tokens = (cost, cost if most is None else most, least, int(open), int(known))
        refused, *numbers = self.run(ADMIT, *limits, f"l{self.leases}", MINUTE, *tokens)
        said = Counted(refused.decode(), *numbers)
        if not said.refused:
            reserved = said.tokens_cost if self.tpm else -1
            entry = {"lease": self.leases, "at": self.now, "reserved": reserved, "budget": said.budget_cost, "told": 0}
            self.admitted.append({**entry, "used": -1})
        return said

    def admit_again(self, cost: int) -> Counted:
        """As the last `admit`, whose answer was lost."""
        self.leases -= 1
        if self.admitted and self.admitted[-1]["lease"] == self.leases + 1:
            self.admitted.pop()
        return self.admit(cost)

    def settle(self, which: int, used: int) -> None:
        entry = self.admitted[which]
        assert entry["used"] < 0
        entry["used"] = used
        counts = int(self.tokens > 0)
        self.run(SETTLE, f"l{entry['lease']}", entry["at"], entry["reserved"], used, entry["told"], self.every, counts)

    def renew(self, which: int, more: int) -> None:
        entry = self.admitted[which]
        entry["told"] += more
        self.run(RENEW, f"l{entry['lease']}", MINUTE, more, self.every, int(self.tokens > 0))

    def show(self) -> Use:
        return Use(*self.run(SHOW, self.every))

    def most_in_a_minute(self, what: str) -> int:
        """The most that was let in within any 60 seconds: requests, or tokens as they came out or are reserved."""
        amounts = [
            (each["at"], 1 if what == "requests" else each["used"] if each["used"] >= 0 else each["reserved"])
            for each in self.admitted
        ]
        return max(
            (sum(amount for then, amount in amounts if start <= then < start + MINUTE) for start, _ in amounts),
            default=0,
        )


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["admit", "admit", "admit", "settle"]),
        st.sampled_from([0, 1, 7, 500, 999, 1000, 1001, 20_000, 59_999, 60_000, 61_000]),
        st.integers(0, 60),
        st.floats(0, 1),
    ),
    max_size=40,
)


@MANY
@given(rpm=st.integers(1, 8), tpm=st.integers(1, 120), steps=STEPS)
def test_never_more_than_the_limit_in_any_minute(
    store: redis.Redis, rpm: int, tpm: int, steps: list[tuple[str, int, int, float]]
) -> None:
    """Whatever is let in and whatever is given back, at whatever pace; nothing is refused for longer than it must."""
    store.flushall()
    key = Key(store, rpm=rpm, tpm=tpm)
    for what, later, cost, share in steps:
        key.now += later
        if what == "settle":
            waiting = [at for at, each in enumerate(key.admitted) if each["used"] < 0]
            if waiting:
                which = waiting[int(share * (len(waiting) - 1))]
                key.settle(which, int(share * key.admitted[which]["reserved"]))
            continue
        said = key.admit(cost, least=cost)
        assert said.requests_left >= 0
        assert said.tokens_left >= 0
        if said.refused == "size":
            assert cost > tpm
            assert said.wait == -1
        elif said.refused:
            assert said.refused in ("requests", "tokens")
            assert 0 < said.wait <= MINUTE
            before = key.now
            key.now += said.wait
            assert key.admit(cost, least=cost).refused == ""
            assert key.now - before <= MINUTE
    assert key.most_in_a_minute("requests") <= rpm
    assert key.most_in_a_minute("tokens") <= tpm


@MANY
@given(steps=STEPS)
def test_what_is_given_back_makes_no_tokens(store: redis.Redis, steps: list[tuple[str, int, int, float]]) -> None:
    """What is left is never more than the limit less what is in use, and everything is left after a quiet minute."""
    store.flushall()
    key = Key(store, tpm=200)
    for what, later, cost, share in steps:
        key.now += later
        if what == "admit":
            key.admit(cost, least=cost)
        elif waiting := [at for at, each in enumerate(key.admitted) if each["used"] < 0]:
            which = waiting[int(share * (len(waiting) - 1))]
            key.settle(which, int(share * key.admitted[which]["reserved"] * 2))
        lasting = [
            min(each["used"], each["reserved"]) if each["used"] >= 0 else each["reserved"]
            for each in key.admitted
            if each["at"] > key.now - MINUTE
        ]
        assert key.show().tokens >= sum(lasting)
    key.now += MINUTE
    assert key.show().tokens == 0


@MANY
@given(budget=st.integers(1, 300), steps=STEPS, every=st.sampled_from(["day", "never"]))
def test_a_budget_is_never_overspent(
    store: redis.Redis, budget: int, steps: list[tuple[str, int, int, float]], every: str
) -> None:
    store.flushall()
    key = Key(store, tokens=budget, every=every)
    for what, later, cost, share in steps:
        key.now += min(later, 500)
        waiting = [at for at, each in enumerate(key.admitted) if each["used"] < 0]
        if what == "admit":
            held = sum(key.admitted[at]["budget"] - key.admitted[at]["told"] for at in waiting)
            spent = sum(max(each["used"], each["told"]) for each in key.admitted)
            said = key.admit(cost)
            assert (said.refused == "") == (spent + held + cost <= budget and spent + held < budget)
            assert said.budget_left == max(budget - spent - held - (0 if said.refused else cost), 0)
            if said.refused == "quota":
                assert spent + cost > budget
        elif waiting:
            which = waiting[int(share * (len(waiting) - 1))]
            if later % 2:
                key.renew(which, int(share * (key.admitted[which]["budget"] - key.admitted[which]["told"])))
            else:
                told = key.admitted[which]["told"]
                key.settle(which, told + int(share * (key.admitted[which]["budget"] - told)))
    assert sum(max(each["used"], each["told"]) for each in key.admitted) == key.show().charged <= budget
    for which, each in enumerate(key.admitted):
        if each["used"] < 0:
            key.settle(which, each["told"])
    assert key.show().held == 0


def test_a_request_whose_proxy_is_gone_gives_back_what_it_holds(store: redis.Redis) -> None:
    key = Key(store, concurrency=1, tokens=100)
    assert key.admit(60).refused == ""
    assert key.admit(30).refused == "concurrency"
    key.now += 30_000
    key.renew(0, 25)
    assert key.show() == Use(0, 0, 1, 35, 25, 0, key.show().ends)
    key.now += MINUTE - 1
    assert key.admit(30).refused == "concurrency"
    key.now += 1
    assert key.admit(75).refused == ""
    assert key.show()[:6] == (0, 0, 1, 75, 25, 0)
    key.settle(0, 40)  # it was alive after all
    assert key.show()[:6] == (0, 0, 1, 75, 40, 1)


def test_what_is_held_is_no_empty_budget(store: redis.Redis) -> None:
    key = Key(store, tokens=100)
    assert key.admit(60).refused == ""
    said = key.admit(60)
    assert (said.refused, said.wait) == ("held", 1000)
    key.settle(0, 60)
    assert key.admit(60).refused == "quota"
    assert key.admit(40).refused == ""


def test_an_answer_of_any_length_takes_what_is_left(store: redis.Redis) -> None:
    key = Key(store, tpm=100, tokens=1000)
    said = key.admit(5000, least=10, open=True, known=False)
    assert (said.refused, said.tokens_cost, said.budget_cost) == ("", 100, 1000)
    assert key.admit(1).refused == "held"
    key.settle(0, 30)
    said = key.admit(5000, most=500, least=10, open=True)
    assert (said.refused, said.tokens_cost, said.budget_cost) == ("", 70, 500)
    assert key.admit(5000, most=100, least=10, open=True).refused == "tokens"
    key.settle(1, 0)
    assert key.admit(5000, most=900, least=80, open=True).refused == "tokens"
    assert key.admit(5000, most=900, least=101, open=True).refused == "size"
    assert key.admit(5000, most=5000, least=10, open=True).refused == "quota"
    said = key.admit(60, most=400, least=10, open=True, known=False)
    assert (said.refused, said.tokens_cost, said.budget_cost) == ("", 60, 400)


@MANY
@given(st.datetimes(datetime(1972, 1, 1), datetime(2200, 1, 1)))
def test_periods_end_as_the_calendar_says(store: redis.Redis, moment: datetime) -> None:
    key = Key(store, every="day", now=int(moment.replace(tzinfo=UTC).timestamp() * 1000))
    midnight = moment.replace(hour=0, minute=0, second=0, microsecond=0, tzinfo=UTC) + timedelta(days=1)
    assert key.now + key.show().ends == round(midnight.timestamp() * 1000)
    key.every = "month"
    first = (moment.replace(day=1) + timedelta(days=32)).replace(day=1)
    first = first.replace(hour=0, minute=0, second=0, microsecond=0, tzinfo=UTC)
    assert key.now + key.show().ends == round(first.timestamp() * 1000)
    key.every = "never"
    assert key.show().ends == -1


def test_a_budget_starts_again(store: redis.Redis) -> None:
    key = Key(store, tokens=100)
    key.admit(100)
    key.settle(0, 100)
    said = key.admit(1)
    assert (said.refused, said.wait) == ("quota", 43_200_000)
    key.now += said.wait
    assert key.admit(100).refused == ""


def test_nothing_stays_for_ever(store: redis.Redis) -> None:
    key = Key(store, rpm=5, tpm=500, concurrency=5, tokens=1000)
    for each in range(3):
        key.admit(20)
        key.renew(each, 1)
    key.settle(0, 5)
    names = cast("list[bytes]", store.keys())
    assert len(names) == 3
    assert all(0 < store.pttl(name) <= 3 * 86_400_000 for name in names)
    limit, leases, spent = NAMES
    assert store.pttl(limit) > MINUTE
    assert store.pttl(leases) > MINUTE
    key.every = "never"
    key.settle(1, 5)
    assert store.pttl(spent) == -1


def test_time_is_redis_own(store: redis.Redis) -> None:
    limits = (1, 0, 0, 0, "day")
    before = time.time()
    answer = cast("list[Any]", store.eval(ADMIT, 3, *NAMES, *limits, "l", MINUTE, 0, 0, 0, 0, 1))
    assert before - 1 < answer[-1] / 1000 < time.time() + 1


def test_a_clock_that_goes_backwards_gives_nothing_away(store: redis.Redis) -> None:
    key = Key(store, rpm=1)
    key.admit()
    key.now -= 10_000
    assert key.admit().refused == "requests"
    key.now += MINUTE
    assert key.admit().refused == "requests"
    key.now += 10_000
    assert key.admit().refused == ""


def test_asked_again_it_holds_what_it_held(store: redis.Redis) -> None:
    """Where an answer is lost on its way nobody knows whether the script ran, and it runs again."""
    key = Key(store, concurrency=2, tokens=1000)
    assert not key.admit(400).refused
    assert not key.admit(500).refused
    for _ in range(3):
        said = key.admit_again(500)
        assert (said.refused, said.budget_left) == ("", 100)
    assert (key.show().held, key.show().under_way) == (900, 2)
    assert key.admit(50).refused == "concurrency"
    assert key.admit_again(50).refused == "concurrency"
    key.settle(0, 10)
    key.settle(1, 20)
    assert (key.show().held, key.show().under_way, key.show().charged) == (0, 0, 30)
