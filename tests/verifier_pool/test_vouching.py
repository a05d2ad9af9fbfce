"""A replay that accuses is believed once its reference gave known answers back after it, and not before."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from redis import Redis

from policies.errors import ReplayError
from policies.evidence import Evidence
from policies.settings import Settings
from tests.support.waiting import PATIENCE
from tests.verifier_pool import rig
from tests.verifier_pool.audits import declared, judged, ready
from tests.verifier_pool.sick import Sick, SickSecond
from tests.verifier_pool.toy import ToyReference, answer, failing
from verifier_pool import caretaker, context, jobs
from verifier_pool.link.queue import verdict_key
from verifier_pool.packing import pack_outcomes, stamp_of
from verifier_pool.reference import canary
from verifier_pool.reference.canary import Canary
from verifier_pool.replays import CANARIES, Stamp, outcome_key, request_key, vouching_key
from verifier_pool.sweeper import sweep
from verifier_pool.vouching import WANTED, Counsel


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    rig.no_waits(monkeypatch)
    monkeypatch.setattr(canary, "WANTED_SECONDS", 0.05)


def honest(number: int = 0) -> Evidence:
    return answer((40, number % 60), 48, kernels=99)


def cheating(number: int = 0) -> Evidence:
    return answer((40, number % 60), 48, salt=1)


@contextmanager
def serving(redis: Redis, rules: Settings, reference: ToyReference) -> Iterator[None]:
    """A pool at work in the background."""
    stop = threading.Event()
    thread = ready(redis, rules, reference, stop=stop).start()
    try:
        yield
    finally:
        stop.set()
        thread.join(PATIENCE)
    assert not thread.is_alive()


@pytest.fixture
def rules(valkey_url: str) -> Settings:
    return declared(valkey_url)


def test_who_cheats_is_rejected_after_one_canary(redis: Redis, rules: Settings) -> None:
    reference = Sick()
    pool = ready(redis, rules, reference)
    verification, found = judged(pool, redis, rules, cheating())
    assert (verification["verdict"], found.outcomes["distance"][0]) == ("reject", 1.0)
    assert (reference.canaries, len(reference.seen)) == (1, 5)
    # Nobody is made to wait who is not accused.
    assert judged(pool, redis, rules, honest())[0]["verdict"] == "pass"
    assert reference.canaries == 1
    assert redis.hgetall(CANARIES) == {b"toy:passed": b"1"}


def test_a_reference_that_went_wrong_accuses_nobody_falsely(redis: Redis, rules: Settings) -> None:
    reference = Sick()
    pool = ready(redis, rules, reference)
    assert judged(pool, redis, rules, honest())[0]["verdict"] == "pass"
    reference.wrong = True
    verification, found = judged(pool, redis, rules, honest(1))
    assert (verification["verdict"], found.outcomes["distance"][0]) == ("pass", 0.0)
    assert reference.restarts == 1
    assert redis.hgetall(CANARIES) == {b"toy:failed": b"1", b"toy:restarts": b"1"}
    reference.wrong = True
    verification, found = judged(pool, redis, rules, cheating())
    assert (verification["verdict"], found.outcomes["distance"][0]) == ("reject", 1.0)
    assert reference.restarts == 2


def test_both_at_once_while_it_is_wrong(redis: Redis, rules: Settings) -> None:
    reference = Sick()
    pool = ready(redis, rules, reference)
    reference.wrong = True
    good = [rig.submit(redis, rules, [honest(number)]) for number in range(20)]
    bad = [rig.submit(redis, rules, [cheating(number)]) for number in range(20)]
    pool.serve(burst=True)
    assert {rig.verdict_of(redis, id)["verdict"] for id in good} == {"pass"}
    assert {rig.verdict_of(redis, id)["verdict"] for id in bad} == {"reject"}
    # One canary showed it wrong, and one was enough for all who cheated.
    assert (reference.restarts, reference.canaries) == (1, 2)
    assert not redis.keys(WANTED + ":*")


def test_the_operators_extra_replay_is_held_to_the_same(redis: Redis, valkey_url: str) -> None:
    rules = declared(valkey_url, audit={"rate": 0.0})
    reference = Sick()
    pool = ready(redis, rules, reference)
    reference.wrong = True
    evidence = honest()
    claim = evidence.claim_logprobs.copy()
    claim[3, [0, 1]] = claim[3, [1, 0]]  # unsorted: the checks without a replay doubt it
    rig.submit(redis, rules, [replace(evidence, claim_logprobs=claim)])
    pool.serve(burst=True)
    verification = rig.verdict_of(redis, evidence.id)
    assert verification["extra_replay"] is True
    results = {check["name"]: check["result"] for check in verification["checks"]}
    assert results["distance"] != "reject"
    assert reference.restarts == 1


def test_a_reference_that_is_wrong_each_time_leaves_it_undecided(redis: Redis, rules: Settings) -> None:
    reference = Sick(cures=0)
    pool = ready(redis, rules, reference)
    reference.wrong = True
    verification, found = judged(pool, redis, rules, honest())
    assert (verification["verdict"], verification["audited"]) == ("inconclusive", True)
    assert "reference_unsound" in verification["reasons"]
    assert (found.undecided, found.blame) == ("reference_unsound", "ours")
    assert "distance" not in found.outcomes
    assert reference.restarts == 2
    assert redis.hget(CANARIES, "toy:unsound") == b"1"
    assert not redis.exists(vouching_key(found.id), outcome_key(found.id), request_key(found.id))


@pytest.mark.parametrize("without", ["none", "never", "no answer"])
def test_without_canaries_a_replay_is_believed(redis: Redis, rules: Settings, without: str) -> None:
    reference = Sick(seconds=0 if without == "never" else 60)
    if without == "none":
        reference.canary = None
    if without == "no answer":
        reference.canary = Canary(60, lambda: hopeless.give_up())
        hopeless = reference.canary
    pool = ready(redis, rules, reference)
    verification, _ = judged(pool, redis, rules, cheating())
    assert verification["verdict"] == "reject"
    assert reference.canaries == 0


def test_many_share_a_canary_however_fast_they_come(
    redis: Redis, rules: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canary, "WANTED_SECONDS", 0.5)
    reference = Sick()
    with serving(redis, rules, reference):
        began = time.monotonic()
        ids: list[str] = []
        while time.monotonic() < began + 3 or len(ids) <= 20:
            ids.append(rig.submit(redis, rules, [cheating(len(ids))]))
            time.sleep(0.01)
        for id in ids:
            assert rig.verdict_of(redis, id)["verdict"] == "reject"
        lasted = time.monotonic() - began
    assert len(ids) > 20
    assert 1 <= reference.canaries <= lasted / 0.5 + 1


def test_a_canary_of_another_reference_says_nothing(redis: Redis, rules: Settings) -> None:
    ill, well = Sick(), Sick()
    ill.wrong = True
    pool = ready(redis, rules, ill)
    other = ready(redis, rules, well)
    evidence = honest()
    rig.submit(redis, rules, [evidence])
    for loop in (pool.loop, pool.replaying[0], pool.loop):
        loop.serve(burst=True)
    assert not context.current().store.decided(evidence.id)
    # The other one, of the same model, takes canaries all the time.
    other.replaying[0]._care.look()
    other.replaying[0]._care._vouching.answer(other.replaying[0]._care.instance, good=10**6)
    assert jobs.verify(evidence.id) == jobs.WAITING
    pool.serve(burst=True)
    assert rig.verdict_of(redis, evidence.id)["verdict"] == "pass"
    assert (ill.restarts, ill.canaries, well.canaries) == (1, 1, 0)


def test_a_canary_that_was_under_way_is_not_enough(redis: Redis, rules: Settings) -> None:
    ready(redis, rules, Sick())
    vouching = context.current().vouching
    outcome = pack_outcomes([ReplayError("x")], Stamp("a.0", 3))
    vouching.present("a.0")
    for number, counsel in ((2, Counsel.WAITS), (3, Counsel.WAITS), (4, Counsel.STANDS)):
        vouching.answer("a.0", good=number)
        assert vouching.counsel("i", "toy", outcome, second=False) is counsel
    # Another life of its engine, and another process.
    for instance in ("a.1", "b.0"):
        vouching.present(instance)
        other = pack_outcomes([ReplayError("x")], Stamp(instance, 0))
        assert vouching.counsel("j", "toy", other, second=False) is Counsel.WAITS


def waiting(redis: Redis, rules: Settings, reference: Sick, evidence: Evidence) -> rig.Pool:
    """A pool whose response waits for a canary that nobody has taken yet."""
    pool = ready(redis, rules, reference)
    rig.submit(redis, rules, [evidence])
    loop = pool.replaying[0]
    pool.loop.serve(burst=True)
    loop._care.look()
    loop.serve(burst=True)
    pool.loop.serve(burst=True)
    assert not redis.exists(verdict_key(evidence.id))
    assert loop._care._vouching.wanted(loop._care.instance)
    return pool


def test_nobody_waits_for_ever(redis: Redis, rules: Settings) -> None:
    evidence = cheating()
    pool = waiting(redis, rules, Sick(), evidence)
    store = context.current().store
    later = time.time() + rules.verification.replay_wait + 1
    sweep(store, rules.verification, now=time.time())
    assert pool.loop.serve(burst=True) == 0
    redis.hset(vouching_key(evidence.id), "until", time.time() - 1)
    sweep(store, rules.verification, now=later)
    pool.loop.serve(burst=True)
    verification = rig.verdict_of(redis, evidence.id)
    assert (verification["verdict"], verification["audited"]) == ("inconclusive", True)
    assert "canary_overdue" in verification["reasons"]


@pytest.mark.parametrize("how", ["ends", "dies"])
def test_a_reference_that_is_gone_leaves_its_replays_to_another(redis: Redis, rules: Settings, how: str) -> None:
    evidence = cheating()
    reference = Sick()
    pool = waiting(redis, rules, reference, evidence)
    care = pool.replaying[0]._care
    if how == "ends":
        care.leave()
    else:
        redis.delete(*redis.keys("*canary-alive:*"))
        sweep(context.current().store, rules.verification)
    other = Sick()
    ready(redis, rules, other).serve(burst=True)
    assert rig.verdict_of(redis, evidence.id)["verdict"] == "reject"
    assert (reference.canaries, other.canaries) == (0, 1)


def test_a_reference_whose_engine_was_another_one_meanwhile(redis: Redis, rules: Settings) -> None:
    evidence = cheating()
    reference = Sick()
    pool = waiting(redis, rules, reference, evidence)
    reference.life += 1
    pool.serve(burst=True)
    assert rig.verdict_of(redis, evidence.id)["verdict"] == "reject"
    # Replayed again, and then believed.
    assert [len(request.output_ids) for request in reference.seen].count(48) == 2
    assert reference.canaries == 1


def test_a_second_reference_confirms_only_if_it_is_sound_too(redis: Redis, rules: Settings) -> None:
    first, second = Sick(), SickSecond()
    pool = ready(redis, rules, first, second)
    verification, _ = judged(pool, redis, rules, cheating())
    assert "distance" in verification["second_reference"]["confirmed"]
    assert (first.canaries, second.canaries) == (1, 1)
    second.wrong, second.cures = True, 0
    verification, found = judged(pool, redis, rules, cheating(1))
    assert "distance" in verification["second_reference"]["unchecked"]
    assert "distance" not in found.outcomes
    assert redis.hget(CANARIES, "toy:second:unsound") == b"1"


@pytest.mark.parametrize("burst", [True, False])
def test_a_worker_that_ends_waits_no_longer_than_it_must(
    redis: Redis, rules: Settings, burst: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caretaker, "PATIENCE_SECONDS", 0.3)
    evidence = cheating()
    reference = Sick()
    pool = waiting(redis, rules, reference, evidence)
    reference.trouble = failing("timeout")
    loop = pool.replaying[0]
    if not burst:
        loop._stop.set()
    loop.serve(burst=burst)
    assert reference.canaries > 0
    assert not context.current().store.decided(evidence.id)
    reference.trouble = None
    ready(redis, rules, reference).serve(burst=True)
    assert rig.verdict_of(redis, evidence.id)["verdict"] == "reject"


def test_an_outcome_that_was_judged_is_forgotten_and_no_later_one(redis: Redis, rules: Settings) -> None:
    ready(redis, rules, Sick())
    vouching = context.current().vouching
    first, later = (pack_outcomes([ReplayError("x")], Stamp("a.0", at)) for at in (1, 2))
    redis.set(outcome_key("i"), later)
    assert vouching.counsel("i", "toy", first, second=False) is Counsel.FORGOTTEN
    assert redis.get(outcome_key("i")) == later
    assert vouching.counsel("i", "toy", later, second=False) is Counsel.FORGOTTEN
    assert not redis.exists(outcome_key("i"))


def test_outcomes_of_an_earlier_release_say_nobody() -> None:
    assert stamp_of(pack_outcomes([ReplayError("x")])) is None
    assert stamp_of(b"junk") is None
    assert stamp_of(pack_outcomes([ReplayError("x")], Stamp("a.7", 5))) == Stamp("a.7", 5)
