"""Both forms of a replay over HTTP, from servers of every kind: V2 and V1 runner, with and without scale-out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from policies.errors import ReplayError
from policies.evidence import Replay, ReplayForm
from policies.settings import ReferenceSettings
from tests.verifier_pool.reference.test_vllm_http import FakeVllm, Reply, npy, serving
from tests.verifier_pool.toy import VOCAB, answer, logprobs_after
from verifier_pool.reference import open_reference
from verifier_pool.reference.base import ReplayRequest

FORMS: tuple[ReplayForm, ...] = ("full", "ids")


def claimed(form: ReplayForm = "full", **changes: Any) -> ReplayRequest:
    """A claim of every id from 0 to 20, whatever the model thinks of them."""
    evidence = answer((3, 5, 7))
    ids = np.tile(np.arange(21, dtype=np.int32), (len(evidence.output_ids), 1))
    asked = ReplayRequest(evidence.prompt_ids, evidence.output_ids, "chat", b"", 0, ids, form)
    return replace(asked, **changes)


def fake_v2(**attributes: Any) -> FakeVllm:
    fake = FakeVllm()
    fake.generate = fake.scores
    for name, value in attributes.items():
        setattr(fake, name, value)
    return fake


def replayed(fake: FakeVllm, *requests: ReplayRequest) -> list[Replay]:
    with serving(fake) as reference:
        return [reference.replay([request])[0] for request in requests]


def truth(request: ReplayRequest, replay: Replay) -> None:
    """Every listed number is the toy's own."""
    previous = [int(request.prompt_ids[-1]), *request.output_ids[:-1].tolist()]
    tables = np.array([logprobs_after(last) for last in previous])
    wanted = np.where(replay.ids < 0, -np.inf, np.take_along_axis(tables, np.maximum(replay.ids, 0), axis=1))
    assert np.allclose(replay.logprobs, wanted, atol=1e-5)
    assert np.array_equal(replay.ids[:, 0], request.output_ids)
    for row in replay.ids:
        assert len(set(row[row >= 0])) == (row >= 0).sum()


@pytest.mark.parametrize("max_logprobs", [64, 21, 20])
def test_given_ids_are_scored_by_themselves(max_logprobs: int) -> None:
    fake, asked = fake_v2(max_logprobs=max_logprobs), claimed("ids")
    (replay,) = replayed(fake, asked)
    assert (replay.form, replay.own) == ("ids", None)
    truth(asked, replay)
    for row, emitted in zip(replay.ids, asked.output_ids, strict=True):
        wanted, got = {int(emitted), *range(21)}, set(row[row >= 0].tolist())
        # Where 20 ids fill a row, the emitted one comes with the prompt's logprobs and the claim's last is left out.
        assert got <= wanted
        assert len(wanted - got) <= {64: 0, 21: 0, 20: 1}[max_logprobs]
    assert {path for path, _ in fake.bodies} == {"/inference/v1/generate"}
    # A full list of the engine's own best is not computed, let alone sent.
    assert all(body["sampling_params"].get("prompt_logprobs") in (None, 0) for _, body in fake.bodies)


@pytest.mark.parametrize("max_logprobs", [64, 20])
def test_the_full_form_has_the_servers_own_best_first(max_logprobs: int) -> None:
    fake, asked = fake_v2(max_logprobs=max_logprobs), claimed("full")
    (replay,) = replayed(fake, asked)
    assert (replay.form, replay.own) == ("full", 21)
    truth(asked, replay)
    plain = replayed(FakeVllm(), claimed(candidate_ids=None))[0]
    assert np.array_equal(replay.ids[:, :21], plain.ids)
    missed = [set(range(20)) - set(row.tolist()) for row in replay.ids]
    assert not any(missed)


def test_both_forms_agree_where_both_speak() -> None:
    full, ids = replayed(fake_v2(), *(claimed(form) for form in FORMS))
    same = ids.ids[:, :, None] == full.ids[:, None, :]
    assert same.any(axis=2)[ids.ids >= 0].all()
    apart = np.abs(np.nan_to_num(ids.logprobs[:, :, None]) - np.nan_to_num(full.logprobs[:, None, :]))
    assert apart[same & (ids.ids >= 0)[:, :, None]].max() < 1e-5


def test_the_claim_never_travels() -> None:
    fake, asked = fake_v2(), claimed("ids")
    replayed(fake, asked)
    ((_, body),) = fake.bodies
    sampling = body["sampling_params"]
    assert set(body) == {"model", "token_ids", "return_token_ids", "sampling_params"}
    assert set(sampling) == {
        "max_tokens",
        "temperature",
        "detokenize",
        "prompt_logprob_token_ids",
        "prompt_logprob_start",
    }
    assert sampling["prompt_logprob_start"] == len(asked.prompt_ids) - 1
    assert all(isinstance(id, int) for row in sampling["prompt_logprob_token_ids"] for id in row)


@pytest.mark.parametrize("max_logprobs", [64, 20, 5])
@pytest.mark.parametrize("form", FORMS)
def test_a_server_that_cannot_score_answers_in_full(max_logprobs: int, form: ReplayForm) -> None:
    fake, asked = FakeVllm(), claimed(form)
    fake.max_logprobs = max_logprobs
    first, second = replayed(fake, asked, asked)
    for replay in (first, second):
        assert (replay.form, replay.own) == ("full", 21)
        truth(asked, replay)
    # The toy has 64 tokens: a list of 64 holds every claimed id, one of 20 only those among the best.
    assert (first.ids.shape[1] > 21) == (max_logprobs == 64)
    paths = [path for path, _ in fake.bodies]
    assert paths.count("/inference/v1/generate") == 1
    assert paths.count("/v1/completions") == (2 if max_logprobs == 64 else 3)


@pytest.mark.parametrize(
    ("status", "words", "tried"),
    [
        (403, "scale-out is off", 1),
        (404, "Not Found", 1),
        (400, "prompt_logprob_token_ids requires the V2 model runner", 1),
        (400, "prompt_logprob_token_ids is incorrect with --kv-sharing-fast-prefill", 1),
        # What is about one request teaches nothing about the server.
        (400, "some other trouble", 3),
        (422, "unheard of", 3),
    ],
)
def test_what_a_refusal_teaches(status: int, words: str, tried: int) -> None:
    fake = FakeVllm()
    fake.generate = lambda _body: (status, {"error": {"message": words}})
    for replay in replayed(fake, *[claimed("ids")] * 3):
        assert replay.form == "full"
    assert [path for path, _ in fake.bodies].count("/inference/v1/generate") == tried


def test_a_server_that_ignores_the_ids() -> None:
    fake = fake_v2()

    def deaf(body: dict[str, Any]) -> Reply:
        status, answer = fake.scores(body)
        return status, answer | {"prompt_token_id_logprobs": None}

    fake.generate = deaf
    assert [replay.form for replay in replayed(fake, claimed("ids"), claimed("ids"))] == ["full", "full"]
    assert [path for path, _ in fake.bodies].count("/inference/v1/generate") == 1


def test_hostile_ids_cost_nobody_a_replay() -> None:
    fake = fake_v2()
    odd = np.tile(np.array([-7, VOCAB, 2**31 - 1, 5, 5, -1, 6]), (12, 1))
    good, hostile = claimed("ids"), claimed("ids", candidate_ids=odd)
    for request, replay in zip((hostile, good, hostile), replayed(fake, hostile, good, hostile), strict=True):
        assert replay.form == "ids"
        truth(request, replay)
        assert replay.ids.max() < VOCAB
    # The vocabulary is learned once.
    assert len(fake.bodies) == 4


def test_an_emitted_id_outside_the_vocabulary_is_refused_and_teaches_nothing() -> None:
    fake = fake_v2()
    fake.completion = lambda _body: (400, {"error": {"message": "Token id 99 is out of vocabulary"}})
    wrong = claimed("ids", output_ids=np.array([99], np.int32), candidate_ids=None)
    with serving(fake) as reference:
        with pytest.raises(ReplayError, match="refused"):
            reference.replay([wrong])
        assert reference.replay([claimed("ids")])[0].form == "ids"


def test_a_prompt_that_is_too_long_is_final_in_both_ways() -> None:
    fake = FakeVllm()
    long = (400, {"error": {"message": "max_tokens must be at least 1, got 0."}})
    fake.generate = fake.completion = lambda _body: long
    with serving(fake) as reference, pytest.raises(ReplayError, match="too_long"):
        reference.replay([claimed("ids")])


@pytest.mark.parametrize(
    "scores", ["", "@@", npy(np.zeros((12, 3), np.float32)), npy(np.zeros((12, 22), np.int32)), npy(np.ones((12, 22)))]
)
def test_scores_that_are_none(scores: str) -> None:
    fake = fake_v2()
    fake.generate = lambda body: (200, {"choices": [{}], "prompt_token_id_logprobs": scores})
    with serving(fake) as reference, pytest.raises(ReplayError, match="bad_replay"):
        reference.replay([claimed("ids")])


@pytest.mark.parametrize(("form", "scores"), [(form, scores) for form in FORMS for scores in (True, False)])
def test_expert_ids_of_the_output_part(form: ReplayForm, scores: bool) -> None:
    fake = fake_v2() if scores else FakeVllm()
    asked = claimed(form, experts=True)
    total = len(asked.prompt_ids) + len(asked.output_ids)
    fake.experts = np.arange(total * 4 * 2).reshape(total, 4, 2).astype(np.uint16)
    (replay,) = replayed(fake, asked)
    assert replay.routed_experts is not None
    assert np.array_equal(replay.routed_experts, fake.experts[len(asked.prompt_ids) : -1])
    assert replayed(fake, claimed(form))[0].routed_experts is None
    fake.experts = None
    assert replayed(fake, asked)[0].routed_experts is None
    fake.experts = np.zeros((total + 5, 4, 2), np.uint8)
    with pytest.raises(ReplayError, match="bad_replay"):
        replayed(fake, asked)


@pytest.mark.e2e
@pytest.mark.parametrize("form", FORMS)
def test_a_real_server(vllm_server: str, form: ReplayForm) -> None:
    reference = open_reference("m", ReferenceSettings(kind="vllm_http", url=vllm_server, timeout=60))
    text = np.random.default_rng(3).integers(100, 40_000, 60).astype(np.int32)
    asked = ReplayRequest(text[:40], text[40:], "chat", b"")
    try:
        (plain,) = reference.replay([asked])
        hostile = np.tile(np.array([-7, 49_152, 2**31 - 1, 5, 5]), (20, 1))
        ids = np.concatenate([hostile, plain.ids[:, ::-1]], axis=1)
        (replay,) = reference.replay([replace(asked, candidate_ids=ids, form=form, experts=True)])
    finally:
        reference.close()
    # A server on a CPU runs vLLM's V1 runner, which cannot score given ids.
    assert (replay.form, replay.own) == ("full", 21)
    # Another batch may swap what is nearly tied.
    same = (replay.ids[:, :21, None] == plain.ids[:, None, :]).any(axis=2)
    assert same.mean() > 0.9
    assert np.abs(replay.logprobs[:, 0] - plain.logprobs[:, 0]).mean() < 0.3
    assert not np.isin(replay.ids, [-7, 49_152, 2**31 - 1]).any()
    assert replay.routed_experts is None
