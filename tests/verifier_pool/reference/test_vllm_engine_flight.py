"""Many replays in flight in one engine: what happens to them when it, or somebody, loses patience."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies.errors import ReplayError, SettingsError
from policies.evidence import Replay, ReplayForm
from policies.settings import ReferenceSettings
from tests.support.waiting import PATIENCE, wait_until
from tests.verifier_pool.reference.fake_llm import FakeLlm
from tests.verifier_pool.toy import answer, logprobs_after
from verifier_pool.reference import engine_reading, engine_start, vllm_engine
from verifier_pool.reference.base import ReplayRequest
from verifier_pool.reference.vllm_engine import VllmEngine

# vLLM and torch warn while they are imported.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.e2e]

Open = Callable[..., VllmEngine]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Open]:
    monkeypatch.setattr(engine_start, "build", FakeLlm)
    monkeypatch.setattr(vllm_engine, "START_PAUSE", 0.01)
    FakeLlm.made.clear()
    engines: list[VllmEngine] = []

    def open_engine(timeout: float = 60, **arguments: Any) -> VllmEngine:
        settings = ReferenceSettings(kind="vllm_engine", path=str(tmp_path), engine=arguments, timeout=timeout)
        engines.append(VllmEngine("m", settings))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


def asking(number: int = 3, form: ReplayForm = "ids", length: int = 12) -> ReplayRequest:
    evidence = answer((3, 5, number), length)
    return ReplayRequest(
        evidence.prompt_ids, evidence.output_ids, "chat", b"", candidate_ids=evidence.claim_ids, form=form
    )


def hold(engine: VllmEngine) -> FakeLlm:
    """Nothing that is asked from now on comes back."""
    fake = FakeLlm.made[-1]
    engine.loop.call_soon_threadsafe(fake.hold.clear)
    fake.asked.clear()
    return fake


def reason(future: Future[Replay]) -> str:
    with pytest.raises(ReplayError) as caught:
        future.result(PATIENCE)
    return caught.value.reason


def test_all_are_in_the_engine_at_once(start: Open) -> None:
    engine = start()
    fake = hold(engine)
    futures = [engine.submit(asking(number % 60)) for number in range(200)]
    wait_until(lambda: len(fake.asked) == 200)
    assert not any(future.done() for future in futures)
    engine.loop.call_soon_threadsafe(fake.hold.set)
    for number, future in enumerate(futures):
        replay = future.result(PATIENCE)
        previous = [number % 60, *replay.ids[:-1, 0]]
        tables = np.array([logprobs_after(int(last)) for last in previous])
        assert np.allclose(
            replay.logprobs[:, 0], np.take_along_axis(tables, replay.ids[:, :1], axis=1)[:, 0], atol=1e-5
        )
        assert replay.reference == engine.name


def test_from_many_threads(start: Open) -> None:
    engine, futures = start(), list[Future[Replay]]()
    callers = [
        threading.Thread(target=lambda: futures.extend(engine.submit(asking()) for _ in range(20))) for _ in range(8)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(futures) == 160
    assert all(future.result(PATIENCE).form == "ids" for future in futures)


def test_the_engine_holds_a_few_steps_and_forms_take_turns(start: Open) -> None:
    engine = start(max_num_batched_tokens=60)
    fake = hold(engine)
    forms: list[ReplayForm] = ["ids", "full"] * 40
    futures = [engine.submit(asking(3, form)) for form in forms]
    # Of 15 tokens each, three steps of 60.
    wait_until(lambda: len(fake.asked) == 12)
    time.sleep(0.05)
    assert len(fake.asked) == 12
    engine.loop.call_soon_threadsafe(fake.hold.set)
    wait(futures, PATIENCE)
    seen = [sampling.prompt_logprobs is not None for sampling in fake.asked]
    assert sum(seen) == 40
    # The first ones entered as they came.
    assert sum(one != other for one, other in itertools.pairwise(seen[12:])) <= 6


def test_cancelling_takes_it_out_of_the_engine(start: Open) -> None:
    engine = start()
    fake = hold(engine)
    futures = [engine.submit(asking()) for _ in range(5)]
    wait_until(lambda: len(fake.asked) == 5)
    assert all(future.cancel() for future in futures[1:])
    wait_until(lambda: fake.aborted == 4)
    engine.loop.call_soon_threadsafe(fake.hold.set)
    assert futures[0].result(PATIENCE).form == "ids"
    with pytest.raises(CancelledError):
        futures[1].result()
    assert engine.replay([asking()])[0].form == "ids"


def test_a_dead_engine_fails_what_it_held_and_starts_once_for_all_others(start: Open) -> None:
    engine = start(max_num_batched_tokens=60)
    fake = hold(engine)
    futures = [engine.submit(asking()) for _ in range(30)]
    wait_until(lambda: len(fake.asked) == 12)
    fake.engine_core.resources.engine_dead = True
    late = [engine.submit(asking()) for _ in range(10)]
    outcomes = [future.exception(PATIENCE) for future in futures]
    failed = [outcome for outcome in outcomes if outcome is not None]
    assert all(isinstance(outcome, ReplayError) and outcome.reason == "engine_failed" for outcome in failed)
    # Nobody who still stood outside goes down with it.
    assert len(failed) == 12
    assert sum(future.exception(PATIENCE) is not None for future in late) == 0
    assert fake.stopped
    assert len(FakeLlm.made) == engine.life == 2


def test_an_engine_that_falls_silent_is_left(start: Open) -> None:
    engine = start()
    assert engine._engine is not None
    # The next one has all the time that it needs.
    engine._engine.patience = 0.4
    hold(engine)
    future = engine.submit(asking())
    assert reason(future) == "engine_failed"
    assert engine.replay([asking()])[0].form == "ids"
    assert len(FakeLlm.made) == 2


def test_an_idle_engine_is_not_silent(start: Open) -> None:
    engine = start(timeout=0.3)
    time.sleep(1)
    assert engine._engine is not None
    engine._engine.patience = PATIENCE
    assert engine.replay([asking()])[0].form == "ids"
    assert len(FakeLlm.made) == 1


def test_a_start_that_fails_fails_for_all_and_is_tried_again(start: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    tries: list[int] = []

    def broken(path: str, given: Any) -> Any:
        tries.append(1)
        raise RuntimeError("no memory")

    monkeypatch.setattr(engine_start, "build", broken)
    fake = FakeLlm.made[-1]
    fake.engine_core.resources.engine_dead = True
    wait_until(lambda: bool(engine._engine and engine._engine.dead))
    futures = [engine.submit(asking()) for _ in range(20)]
    assert {reason(future) for future in futures} == {"engine_failed"}
    assert len(tries) == vllm_engine.START_TRIES
    monkeypatch.setattr(engine_start, "build", FakeLlm)
    assert engine.replay([asking()])[0].form == "ids"


def test_restart(start: Open) -> None:
    engine = start()
    fake = hold(engine)
    future = engine.submit(asking())
    wait_until(lambda: len(fake.asked) == 1)
    engine.restart()
    assert reason(future) == "engine_failed"
    assert len(FakeLlm.made) == 2
    assert fake.stopped
    assert engine.replay([asking()])[0].form == "ids"


def test_a_restarted_engine_must_say_what_the_first_one_said(start: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()

    def wrong(path: str, given: Any) -> FakeLlm:
        fake = FakeLlm(path, given)
        fake.drift = lambda ids: -2.0
        return fake

    monkeypatch.setattr(engine_start, "build", wrong)
    with pytest.raises(ReplayError, match="self_test"):
        engine.restart()
    assert reason(engine.submit(asking())) == "self_test"
    assert all(fake.stopped for fake in FakeLlm.made)
    monkeypatch.setattr(engine_start, "build", FakeLlm)
    assert engine.replay([asking()])[0].form == "ids"


def test_an_engine_with_wrong_numbers_never_takes_work(monkeypatch: pytest.MonkeyPatch, start: Open) -> None:
    def wrong(path: str, given: Any) -> FakeLlm:
        fake = FakeLlm(path, given)
        fake.drift = lambda ids: float("nan")
        return fake

    monkeypatch.setattr(engine_start, "build", wrong)
    with pytest.raises(SettingsError, match=r"models\.m\.reference\.engine"):
        start()
    assert FakeLlm.made[-1].stopped


@pytest.mark.parametrize("trouble", [TypeError("unexpected keyword"), ValueError("too big"), RuntimeError("memory")])
def test_what_vllm_says_of_its_arguments(monkeypatch: pytest.MonkeyPatch, start: Open, trouble: Exception) -> None:
    def broken(path: str, given: Any) -> Any:
        raise trouble

    monkeypatch.setattr(engine_start, "build", broken)
    with pytest.raises(SettingsError, match=str(trouble)):
        start()


def test_memory_that_a_predecessor_gives_back_late(monkeypatch: pytest.MonkeyPatch, start: Open) -> None:
    tries: list[int] = []

    def late(path: str, given: Any) -> Any:
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("Engine core initialization failed")
        return FakeLlm(path, given)

    monkeypatch.setattr(engine_start, "build", late)
    assert start().replay([asking()])[0].form == "ids"


def test_close_fails_what_is_in_flight(start: Open) -> None:
    engine = start(max_num_batched_tokens=60)
    fake = hold(engine)
    futures = [engine.submit(asking()) for _ in range(30)]
    wait_until(lambda: len(fake.asked) == 12)
    engine.close()
    engine.close()
    assert {reason(future) for future in futures} == {"engine_failed"}
    assert reason(engine.submit(asking())) == "engine_failed"
    assert fake.stopped


def test_both_sides_of_the_longest(start: Open) -> None:
    engine = start()
    assert engine.max_tokens == 199
    fits, too_long = asking(length=196), asking(length=197)
    assert fits.tokens == 199
    assert engine.replay([fits])[0].ids.shape[0] == 196
    assert reason(engine.submit(too_long)) == "too_long"


def test_the_first_failure_in_order_and_the_rest_is_cancelled(start: Open) -> None:
    engine = start()
    with pytest.raises(ReplayError, match="too_long"):
        engine.replay([asking(), asking(length=300), replace(asking(), prompt_ids=np.zeros(0, np.int32))])


def test_no_object_per_token_comes_back(start: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    read: list[Any] = []
    entries = engine_reading.kept_entries

    def noted(kept: Any, output: int) -> Any:
        read.append(kept)
        return entries(kept, output)

    monkeypatch.setattr(engine_reading, "kept_entries", noted)
    monkeypatch.setattr(engine_reading, "flat_entries", lambda *_: pytest.fail("vLLM's flat form was read"))
    full, ids = engine.replay([asking(form="full"), asking(form="ids")])
    assert len(read) == 1
    assert (full.form, ids.form) == ("full", "ids")


def test_a_vllm_that_keeps_no_arrays_is_read_all_the_same(
    start: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (kept,) = start().replay([asking(form="full")])

    def another() -> Any:
        raise AttributeError("LogprobsProcessor is another")

    monkeypatch.setattr(engine_reading, "_keeper", another)
    with caplog.at_level(logging.WARNING):
        engine = start()
    assert "keeps no arrays" in caplog.text
    (flat,) = engine.replay([asking(form="full")])
    assert np.array_equal(flat.ids, kept.ids)
    assert np.allclose(flat.logprobs, kept.logprobs)


def test_its_canaries(start: Open) -> None:
    engine = start()
    verdicts = []
    for turn in range(4):
        assert engine.canary.due(turn * 60.0)
        verdicts.append(engine.canary.judge(engine.replay(engine.canary.requests())))
    assert verdicts == [True] * 4
    FakeLlm.made[-1].drift = lambda ids: -2.0
    assert engine.canary.due(1000)
    assert not engine.canary.judge(engine.replay(engine.canary.requests()))


def test_a_bare_prefill(start: Open) -> None:
    engine = start()
    FakeLlm.made[-1].asked.clear()
    assert engine.prefill(asking()).result(PATIENCE) is None
    (sampling,) = FakeLlm.made[-1].asked
    assert sampling.prompt_logprobs is sampling.prompt_logprob_token_ids is sampling.logprobs is None
