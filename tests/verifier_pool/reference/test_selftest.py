"""A reference that computes wrong numbers takes no work: one fault at a time, in a toy reference."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from policies.evidence import Replay
from tests.verifier_pool.toy import VOCAB, answer, logprobs_after, rows
from verifier_pool.reference.base import ReplayRequest
from verifier_pool.reference.canary import Known
from verifier_pool.reference.selftest import SelfTestFailed, examine, middle, recheck

Fault = Callable[[ReplayRequest, Replay], Replay]


class Patient:
    """Answers like the toy, but for its fault."""

    def __init__(self, fault: Fault = lambda _request, replay: replay, lie: float = 0.0, flat: bool = False) -> None:
        self.fault, self.lie, self.flat = fault, lie, flat
        self.asked = 0

    async def ask(self, requests: Sequence[ReplayRequest]) -> list[Replay]:
        return [self.fault(request, self.replay(request)) for request in requests]

    def replay(self, request: ReplayRequest) -> Replay:
        self.asked += 1
        assert request.output_ids.max() < VOCAB
        ids, logprobs = rows([int(request.prompt_ids[-1]), *request.output_ids[:-1]], request.output_ids)
        if request.form == "ids":
            assert request.candidate_ids is not None
            ids = np.concatenate([request.output_ids[:, None], request.candidate_ids[:, 1:]], axis=1)
            previous = [int(request.prompt_ids[-1]), *request.output_ids[:-1]]
            tables = np.array([logprobs_after(last) for last in previous])
            found = np.take_along_axis(tables, np.maximum(ids, 0), axis=1)
            logprobs = np.where(ids < 0, -np.inf, found).astype(np.float32)
        if self.flat:
            logprobs = np.where(ids < 0, -np.inf, -np.log(VOCAB)).astype(np.float32)
        return Replay(ids, logprobs, request.form)

    async def answer(self, length: int) -> Known:
        told = answer((9, 11, 12), length)
        logprobs = np.where(np.isfinite(told.claim_logprobs), told.claim_logprobs + self.lie, -np.inf)
        if self.flat:
            logprobs = np.where(told.claim_ids < 0, -np.inf, -np.log(VOCAB))
        return Known(told.prompt_ids, told.output_ids, told.claim_ids, logprobs.astype(np.float32))

    def examine(self, max_tokens: int = 200, own: bool = False) -> list[Known]:
        vocabulary = None if own else middle(VOCAB)
        return asyncio.run(examine(self.ask, self.answer, max_tokens=max_tokens, vocabulary=vocabulary))


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("max_tokens", [16, 17, 40, 200])
def test_a_sound_one_passes_and_tells_two_known_answers(own: bool, max_tokens: int) -> None:
    good, bad = Patient().examine(max_tokens, own)
    assert (good.good, bad.good) == (True, False)
    longest = max(len(each.prompt_ids) + len(each.output_ids) for each in (good, bad))
    assert longest <= max_tokens
    asyncio.run(recheck(Patient().ask, [good, bad]))


def test_a_model_that_tells_no_tokens_apart_has_no_bad_answer() -> None:
    (good,) = Patient(flat=True).examine()
    assert good.good


def shifted(by: float) -> Fault:
    return lambda _request, replay: replace(replay, logprobs=replay.logprobs + np.float32(by))


def test_a_replay_that_is_not_what_it_said() -> None:
    with pytest.raises(SelfTestFailed, match="its own answer"):
        Patient(lie=-1.0).examine()
    with pytest.raises(SelfTestFailed, match="its own answer"):
        Patient(shifted(-0.5)).examine()
    # Noise is none.
    Patient(lie=-0.1).examine()


def test_forms_that_differ() -> None:
    def fault(request: ReplayRequest, replay: Replay) -> Replay:
        return shifted(-1.0)(request, replay) if request.form == "ids" else replay

    with pytest.raises(SelfTestFailed, match="two forms"):
        Patient(fault).examine()


@pytest.mark.parametrize(("form", "words"), [("full", "second replay of form full"), ("ids", "of form ids")])
def test_a_second_replay_that_differs(form: str, words: str) -> None:
    seen: list[str] = []

    def fault(request: ReplayRequest, replay: Replay) -> Replay:
        seen.append(request.form)
        return shifted(-1.0)(request, replay) if request.form == form and seen.count(form) == 2 else replay

    with pytest.raises(SelfTestFailed, match=words):
        Patient(fault).examine()


def test_a_stale_cache() -> None:
    """What follows a known beginning gets the numbers of who came first with it."""
    first: dict[bytes, Replay] = {}

    def fault(request: ReplayRequest, replay: Replay) -> Replay:
        beginning = np.concatenate([request.prompt_ids, request.output_ids])[:40].tobytes()
        stale = first.setdefault(beginning, replay)
        if request.tokens < 60 or stale is replay:
            return replay
        return replace(replay, logprobs=np.where(replay.ids == stale.ids, stale.logprobs, replay.logprobs))

    Patient(fault).examine()

    def worse(request: ReplayRequest, replay: Replay) -> Replay:
        beginning = np.concatenate([request.prompt_ids, request.output_ids])[:40].tobytes()
        again = beginning in first
        first[beginning] = replay
        return shifted(-2.0)(request, replay) if again and request.tokens > 60 else replay

    first.clear()
    with pytest.raises(SelfTestFailed, match="begin alike"):
        Patient(worse).examine()


def test_rows_that_a_cache_swallowed() -> None:
    def fault(request: ReplayRequest, replay: Replay) -> Replay:
        short = request.tokens > 60
        return replace(replay, ids=replay.ids[20:], logprobs=replay.logprobs[20:]) if short else replay

    with pytest.raises(SelfTestFailed, match="other tokens"):
        Patient(fault).examine()


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_numbers_that_are_none(value: float) -> None:
    def fault(_request: ReplayRequest, replay: Replay) -> Replay:
        logprobs = replay.logprobs.copy()
        logprobs[3, 0] = value
        return replace(replay, logprobs=logprobs)

    with pytest.raises(SelfTestFailed, match="not finite"):
        Patient(fault).examine()


def test_one_that_reads_next_to_nothing() -> None:
    with pytest.raises(SelfTestFailed, match="only 15 tokens"):
        Patient().examine(15)


def test_another_model_after_a_restart() -> None:
    known = Patient().examine()
    with pytest.raises(SelfTestFailed, match="when it first started"):
        asyncio.run(recheck(Patient(shifted(-3.0)).ask, known))
