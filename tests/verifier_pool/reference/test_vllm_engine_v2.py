"""The in-process reference on vLLM's V2 runner, which needs a GPU: an engine that answers as that runner does, about
the toy model, while vLLM's own code checks what it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from policies.errors import ReplayError
from policies.evidence import ReplayForm
from policies.settings import ReferenceSettings
from tests.verifier_pool.reference.fake_llm import FakeLlm
from tests.verifier_pool.toy import VOCAB, answer, logprobs_after
from verifier_pool.reference import engine_start
from verifier_pool.reference.base import ReplayRequest
from verifier_pool.reference.engine_start import engine_arguments
from verifier_pool.reference.vllm_engine import VllmEngine

# vLLM and torch warn while they are imported.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.e2e]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    monkeypatch.setattr(engine_start, "build", FakeLlm)
    FakeLlm.made.clear()
    engines: list[VllmEngine] = []

    def open_engine(**arguments: Any) -> VllmEngine:
        engines.append(VllmEngine("m", ReferenceSettings(kind="vllm_engine", path=str(tmp_path), engine=arguments)))
        FakeLlm.made[-1].asked.clear()
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


def asking(form: ReplayForm, **changes: Any) -> ReplayRequest:
    evidence = answer((3, 5, 7))
    ids = np.tile(np.array([-9, VOCAB, 60, 60, *range(18)], np.int32), (len(evidence.output_ids), 1))
    asked = ReplayRequest(evidence.prompt_ids, evidence.output_ids, "chat", b"", 0, ids, form)
    return replace(asked, **changes)


def test_forms(start: Any) -> None:
    engine, requests = start(), [asking("full"), asking("ids"), asking("ids", candidate_ids=None)]
    full, ids, bare = engine.replay(requests)
    assert [replay.form for replay in (full, ids, bare)] == ["full", "ids", "ids"]
    assert (full.own, ids.own) == (21, None)
    previous = [7, *requests[0].output_ids[:-1].tolist()]
    tables = np.array([logprobs_after(last) for last in previous])
    for replay in (full, ids, bare):
        wanted = np.where(replay.ids < 0, -np.inf, np.take_along_axis(tables, np.maximum(replay.ids, 0), axis=1))
        assert np.allclose(replay.logprobs, wanted, atol=1e-5)
        assert np.array_equal(replay.ids[:, 0], requests[0].output_ids)
    for row, emitted in zip(ids.ids, requests[0].output_ids, strict=True):
        assert set(row[row >= 0].tolist()) == {int(emitted), 60, *range(18)}
    assert all({60, *range(18)} <= set(row.tolist()) for row in full.ids)
    assert bare.ids.shape == (12, 1)
    # In whatever order the forms had their turns.
    assert sorted(one.prompt_logprobs or 0 for one in FakeLlm.made[-1].asked) == [0, 0, 20]


def test_an_operators_engine_arguments(start: Any) -> None:
    assert start(max_logprobs=20).scores_ids
    assert FakeLlm.made[-1].arguments["max_logprobs"] == 64
    assert not FakeLlm.made[-1].arguments["enable_prefix_caching"]
    assert engine_arguments({"max_logprobs": -1})["max_logprobs"] == -1
    assert engine_arguments({"enable_return_routed_experts": True})["enable_prefix_caching"] is True
    explicit = {"enable_return_routed_experts": True, "enable_prefix_caching": False}
    assert engine_arguments(explicit)["enable_prefix_caching"] is False


@pytest.mark.parametrize("form", ["full", "ids"])
def test_expert_ids(start: Any, form: ReplayForm) -> None:
    engine = start(enable_return_routed_experts=True)
    (replay,) = engine.replay([asking(form, experts=True)])
    assert FakeLlm.made[-1].asked[0].routed_experts_prompt_start == 3
    assert replay.routed_experts is not None
    assert replay.routed_experts.shape == (11, 2, 2)
    assert replay.routed_experts[0, 0, 0] == 0
    assert engine.replay([asking(form)])[0].routed_experts is None
    assert start().replay([asking(form, experts=True)])[0].routed_experts is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt_token_id_logprobs", None),
        ("prompt_token_id_logprobs", np.zeros((12, 3), np.float32)),
        ("prompt_token_id_logprobs", np.full((12, 20), np.nan, np.float32)),
        ("prompt_logprobs", None),
        ("outputs", [SimpleNamespace(routed_experts=np.zeros((5, 2, 2), np.uint8))]),
    ],
)
def test_what_no_sound_engine_answers(start: Any, name: str, value: Any) -> None:
    engine = start(enable_return_routed_experts=True)

    def spoil(result: Any) -> Any:
        setattr(result, name, value)
        return result

    FakeLlm.made[-1].spoil = spoil
    with pytest.raises(ReplayError, match="bad_replay"):
        engine.replay([asking("full", experts=True)])


def test_preempted_experts_are_only_missing(start: Any) -> None:
    engine = start(enable_return_routed_experts=True)

    def spoil(result: Any) -> Any:
        result.outputs[0].routed_experts = None
        return result

    FakeLlm.made[-1].spoil = spoil
    assert engine.replay([asking("ids", experts=True)])[0].routed_experts is None
