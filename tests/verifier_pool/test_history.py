"""Repeated answers under fresh seeds, on a real Valkey."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis

from policies import structure
from policies.checks import Result
from policies.evidence import Evidence
from policies.structure import Earlier
from tests.policies import recorded
from verifier_pool import history
from verifier_pool.link.queue import answered_key, answers_key

ANSWER = recorded.cpu("bf16")[0]
SECRET = b"secret"


@pytest.fixture
def redis(valkey: str) -> Iterator[Redis]:
    connection = Redis.from_url(valkey)
    connection.flushdb()
    yield connection
    connection.close()


def given(id: str, seed: int, base: Evidence = ANSWER, **changes: Any) -> Evidence:
    return dataclasses.replace(base, id=id, sampling=dataclasses.replace(base.sampling, seed=seed), **changes)


def note(redis: Redis, *choices: Evidence) -> list[Earlier | None]:
    return history.note(redis, SECRET, choices, recorded.VOCABULARY)


def test_a_cached_answer_is_rejected_at_its_own_probability(redis: Redis) -> None:
    assert note(redis, given("a", 1)) == [Earlier()]
    (earlier,) = note(redis, given("b", 2))
    assert earlier == Earlier(answers=1, same=1)
    check = structure.check(given("b", 2), vocab_size=recorded.VOCABULARY, eos_token_ids=(2,), earlier=earlier)
    assert check.result is Result.REJECT
    assert "repeated_answer" in check.reason
    assert check.level is not None
    assert 0 < check.level < 1e-20
    assert check.metrics["repeats"] == 1


def test_seeds_of_the_clients_own_accuse_nobody() -> None:
    # 1 and 2³² + 1 draw the same noise on a CPU, so an honest backend repeats itself.
    for mine in (False, True):
        sampling = dataclasses.replace(ANSWER.sampling, seed=2**32 + 1, client_seed=mine)
        repeated = dataclasses.replace(ANSWER, sampling=sampling)
        check = structure.check(repeated, vocab_size=recorded.VOCABULARY, earlier=Earlier(answers=1, same=1))
        assert ("repeated_answer" in check.reason) is not mine


def test_the_same_verification_again_accuses_nobody(redis: Redis) -> None:
    for _ in range(3):
        assert note(redis, given("a", 1)) == [Earlier()]
    note(redis, given("b", 2))
    assert note(redis, given("a", 1)) == [Earlier()]


def test_the_same_seed_gives_the_same_answer_honestly(redis: Redis) -> None:
    note(redis, given("a", 1))
    assert note(redis, given("b", 1)) == [Earlier(answers=1)]


def test_choices_of_one_response_are_answers_of_their_own(redis: Redis) -> None:
    choices = [given("a", 1), given("a", 2, index=1)]
    assert note(redis, *choices) == [Earlier(), Earlier(answers=1, same=1)]
    assert note(redis, *choices) == [Earlier(), Earlier(answers=1, same=1)]


def test_other_prompts_parameters_backends_and_answers_are_others(redis: Redis) -> None:
    note(redis, given("a", 1))
    for other in (
        given("b", 2, prompt_ids=ANSWER.prompt_ids[1:]),
        given("b", 2, backend="another"),
        given("b", 2, model="another"),
        given("b", 2, dataclasses.replace(ANSWER, sampling=dataclasses.replace(ANSWER.sampling, top_k=40))),
    ):
        assert note(redis, other) == [Earlier()]
    shorter = given("c", 3)
    cut = {name: getattr(shorter, name)[:-1] for name in ("output_ids", "claim_ids", "claim_logprobs")}
    assert note(redis, dataclasses.replace(shorter, **cut)) == [Earlier(answers=1)]


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": dataclasses.replace(ANSWER.sampling, temperature=0.0, seed=1)},
        {"complete": False},
        {"faults": ("bad_ids",)},
        {name: getattr(ANSWER, name)[:1] for name in ("output_ids", "claim_ids", "claim_logprobs")},
    ],
    ids=["greedy", "broken", "withheld", "one token"],
)
def test_answers_that_tell_nothing_are_not_kept(redis: Redis, changes: dict[str, Any]) -> None:
    assert note(redis, dataclasses.replace(ANSWER, **changes)) == [Earlier()]
    assert redis.dbsize() == 0


def test_a_likely_answer_may_come_again() -> None:
    likely = given("b", 2)
    cut = {name: getattr(likely, name)[:3] for name in ("output_ids", "claim_ids", "claim_logprobs")}
    check = structure.check(dataclasses.replace(likely, **cut), earlier=Earlier(1, 1), eos_token_ids=(2,))
    assert "repeated_answer" not in check.reason
    assert check.metrics["repeats"] == 1


def test_memory_is_bounded_and_expires(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MOST_PROMPTS", 3)
    monkeypatch.setattr(history, "MOST_ANSWERS", 2)
    for cut in range(6):
        note(redis, given("a", cut, prompt_ids=ANSWER.prompt_ids[cut:]))
    assert redis.zcard(answered_key("honest")) == 3
    assert len(redis.keys(answers_key("honest", "*"))) == 3
    for cut in range(5):
        values = {name: getattr(ANSWER, name)[: 60 - cut] for name in ("output_ids", "claim_ids", "claim_logprobs")}
        note(redis, given(f"b{cut}", cut, **values))
    key = answers_key("honest", history.hashes(SECRET, ANSWER)[0])
    assert redis.hlen(key) == 2
    assert 0 < redis.ttl(key) <= history.TTL
    assert 0 < redis.ttl(answered_key("honest")) <= history.TTL


def test_nothing_of_the_content_is_kept(redis: Redis) -> None:
    note(redis, given("a", 1))
    (key,) = redis.keys(answers_key("honest", "*"))
    stored = repr([key, redis.hgetall(key)]).encode()
    assert len(stored) < 200  # two hashes, a seed and an id


def test_of_answers_noted_at_once_one_is_first(redis: Redis) -> None:
    found: list[Earlier | None] = []
    threads = [threading.Thread(target=lambda at=at: found.extend(note(redis, given(f"r{at}", at)))) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(earlier.same for earlier in found if earlier) == [0] + [1] * 7


def test_without_redis_nothing_was_asked() -> None:
    gone = Redis(host="127.0.0.1", port=1, socket_connect_timeout=0.2)
    (earlier,) = history.note(gone, SECRET, [ANSWER])
    assert earlier is None
    check = structure.check(ANSWER, vocab_size=recorded.VOCABULARY, eos_token_ids=(2,), earlier=earlier)
    assert check.result is Result.PASS
    assert check.metrics["repeats"] is None
