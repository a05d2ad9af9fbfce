"""Many replays in flight over HTTP, canaries, and a server that becomes another one."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest

from policies.errors import ReplayError
from policies.settings import ReferenceSettings
from tests.support.waiting import PATIENCE, TRIES, wait_until
from tests.verifier_pool.reference.test_vllm_http import FakeVllm, Reply, npy, request, serving
from tests.verifier_pool.toy import logprobs_after
from verifier_pool.reference import http_client, open_reference
from verifier_pool.reference.http_client import CONNECTIONS


class Held(FakeVllm):
    """Answers when it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()
        self.completion = self.waiting

    def waiting(self, body: dict[str, Any]) -> Reply:
        assert self.let_go.wait(PATIENCE)
        return self.prompt_logprobs(body)


def test_as_many_as_there_are_connections() -> None:
    fake = Held()
    with serving(fake) as reference:
        futures = [reference.submit(request((number % 60, 2))) for number in range(CONNECTIONS + 10)]
        wait_until(lambda: fake.at_once == CONNECTIONS)
        time.sleep(0.05)
        fake.let_go.set()
        replays = [future.result(PATIENCE) for future in futures]
    assert fake.most == CONNECTIONS
    for number, replay in enumerate(replays):
        assert replay.ids[:, 0].tolist() == request((number % 60, 2)).output_ids.tolist()


def test_a_slow_one_times_out_alone() -> None:
    fake, over = FakeVllm(), threading.Event()

    def slow(body: dict[str, Any]) -> Reply:
        if body["prompt"][0] == 9:
            over.wait(PATIENCE)
        return fake.prompt_logprobs(body)

    fake.completion = slow
    with serving(fake, timeout=2) as reference:

        def alone() -> bool:
            futures = [reference.submit(request((first, 5))) for first in (1, 9, 2)]
            failures = [future.exception(PATIENCE) for future in futures]
            assert isinstance(failures[1], ReplayError)
            assert failures[1].reason == "timeout"
            return failures[0] is None is failures[2]

        # The others are answered at once, unless the machine stands still meanwhile.
        assert any(alone() for _ in range(TRIES))
        over.set()


def test_waiting_for_a_connection_is_no_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "CONNECTIONS", 2)
    fake = FakeVllm()

    def slow(body: dict[str, Any]) -> Reply:
        time.sleep(0.5)
        return fake.prompt_logprobs(body)

    fake.completion = slow
    with serving(fake, timeout=2) as reference:

        def waited() -> bool:
            futures = [reference.submit(request((number, 5))) for number in range(10)]
            return [future.exception(PATIENCE) for future in futures] == [None] * 10

        assert any(waited() for _ in range(TRIES))


def test_cancelled_ones_give_their_connection_back() -> None:
    fake = Held()
    with serving(fake) as reference:
        futures = [reference.submit(request()) for _ in range(CONNECTIONS)]
        wait_until(lambda: fake.at_once == CONNECTIONS)
        for future in futures:
            assert future.cancel()
        fake.let_go.set()
        assert reference.replay([request()])[0].form == "full"
        with pytest.raises(CancelledError):
            futures[0].result()


def test_close_fails_what_is_in_flight() -> None:
    fake = Held()
    with serving(fake) as reference:
        futures = [reference.submit(request()) for _ in range(CONNECTIONS + 5)]
        wait_until(lambda: fake.at_once == CONNECTIONS)
        reference.close()
        for future in futures:
            with pytest.raises(ReplayError):
                future.result(PATIENCE)
        with pytest.raises(ReplayError, match="engine_failed"):
            reference.submit(request()).result(PATIENCE)
        fake.let_go.set()


def test_both_sides_of_the_longest() -> None:
    fake = FakeVllm()
    with serving(fake) as reference:
        assert reference.max_tokens is None
        reference.replay([request()])
        assert reference.max_tokens == 99
        fits = request(tuple(range(40)) + tuple(range(47)))
        assert fits.tokens == 99
        assert reference.replay([fits])[0].ids.shape[0] == 12
        with pytest.raises(ReplayError, match="too_long"):
            reference.replay([request(tuple(range(40)) + tuple(range(48)))])


@pytest.mark.parametrize("scores", [True, False])
def test_its_canaries(scores: bool) -> None:
    fake = FakeVllm()
    if scores:
        fake.generate = fake.scores
    with serving(fake, canary_seconds=1) as reference:
        canary = reference.canary
        assert canary is not None
        # Who never asks for canaries costs the server nothing.
        reference.replay([request()])
        assert len(fake.bodies) == 1
        assert not canary.due(0)
        wait_until(lambda: canary.known)
        for now in range(1, 5):
            assert canary.due(now)
            assert canary.judge(reference.replay(canary.requests()))
        lie(fake)
        assert canary.due(9)
        assert not canary.judge(reference.replay(canary.requests()))


def lie(fake: FakeVllm) -> None:
    """Another model from now on, in both ways of asking."""

    def listed(body: dict[str, Any]) -> Reply:
        status, told = FakeVllm().prompt_logprobs(body)
        for choice in told["choices"]:
            for row in choice.get("prompt_logprobs") or ():
                for entry in (row or {}).values():
                    entry["logprob"] -= 3.0
        return status, told

    def scored(body: dict[str, Any]) -> Reply:
        status, told = FakeVllm().scores(body)
        ids, sampling = body["token_ids"], body["sampling_params"]
        wanted = np.array(sampling["prompt_logprob_token_ids"])
        tables = np.array([logprobs_after(last) for last in ids[sampling["prompt_logprob_start"] : -1]]) - 3.0
        found = np.where(wanted < 0, -np.inf, np.take_along_axis(tables, np.maximum(wanted, 0), axis=1))
        own = listed({"prompt": ids, "prompt_logprobs": sampling.get("prompt_logprobs", 0)})[1]["choices"][0]
        changes = {
            "prompt_token_id_logprobs": npy(found.astype(np.float32)),
            "prompt_logprobs": own["prompt_logprobs"] if told["prompt_logprobs"] is not None else None,
        }
        return status, told | changes

    fake.completion = listed
    if fake.generate == fake.scores:
        fake.generate = scored


@pytest.mark.parametrize("scores", [True, False])
def test_a_server_that_became_another_takes_no_work(scores: bool) -> None:
    fake = FakeVllm()
    if scores:
        fake.generate = fake.scores
    with serving(fake, canary_seconds=1) as reference:
        canary = reference.canary
        assert canary is not None
        assert not canary.due(0)
        wait_until(lambda: canary.known)
        honest = fake.completion, fake.generate
        lie(fake)
        with pytest.raises(ReplayError, match="self_test"):
            reference.restart()
        with pytest.raises(ReplayError, match="self_test"):
            reference.replay([request()])
        fake.completion, fake.generate = honest
        assert reference.replay([request()])[0].ids.shape[0] == 12


def test_a_server_that_never_was_sound() -> None:
    fake = FakeVllm()
    lie(fake)
    with serving(fake, canary_seconds=1) as reference:
        canary = reference.canary
        assert canary is not None
        assert reference.replay([request()])[0].form == "full"
        assert not canary.due(0)

        def refused() -> bool:
            error = reference.submit(request()).exception(PATIENCE)
            return isinstance(error, ReplayError) and error.reason == "self_test"

        wait_until(refused)
        assert not canary.known


def test_a_restart_of_a_sound_server() -> None:
    with serving(FakeVllm()) as reference:
        reference.replay([request()])
        assert reference.life == 0
        reference.restart()
        assert reference.replay([request()])[0].form == "full"
        assert reference.life == 1


def test_who_may_be_another_by_now_has_another_life() -> None:
    fake = FakeVllm()
    with serving(fake, canary_seconds=1) as reference:
        canary = reference.canary
        assert canary is not None
        assert not canary.due(0)
        wait_until(lambda: canary.known)
        lie(fake)
        with pytest.raises(ReplayError, match="self_test"):
            reference.restart()
        assert reference.life == 1
    gone = open_reference("toy", ReferenceSettings(kind="vllm_http", url="http://127.0.0.1:9"))
    with contextlib.closing(gone), pytest.raises(ReplayError, match="unreachable"):
        gone.replay([request()])
    assert gone.life == 1


def test_a_server_that_gives_no_known_answer_has_no_canaries() -> None:
    fake = FakeVllm()
    whole = fake.completion
    fake.completion = lambda body: whole(body) if "prompt_logprobs" in body else (400, {"error": {"message": "no"}})
    with serving(fake, canary_seconds=1) as reference:
        canary = reference.canary
        assert canary is not None
        assert canary.possible
        assert not canary.due(0)
        wait_until(lambda: not canary.possible)
        assert reference.replay([request()])[0].form == "full"
