"""Selection against a real vLLM server: every processor, both endpoints, streams, several choices, any seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.noise import command as noise_command
from benchmarks.recordings.asking import ask
from policies import selection
from policies.checks import Check, Result
from policies.evidence import Evidence
from policies.settings import BackendSettings, ModelSettings
from tests.e2e.ahead import Ahead, ahead
from tests.policies import recorded
from verifier_pool.judge import cpu_checks

pytestmark = pytest.mark.e2e

MESSAGES = [{"role": "user", "content": "Describe a walk through an old harbour town at dawn."}]
PROMPT = {"prompt": "The old harbour town woke slowly, and"}
PROCESSORS: dict[str, dict[str, Any]] = {
    "none": {},
    "bias": {"logit_bias": {"253": -6, "28": 2.5, "260": -100, "1734": 4}},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    "negative penalties": {"presence_penalty": -0.5, "frequency_penalty": -0.2},
    "bad words": {"bad_words": ["the", "harbour", "sea", "old town", "and the"]},
    "min_tokens": {"min_tokens": 20, "logit_bias": {"2": 15}},
    "allowed": {"allowed_token_ids": [2, *range(200, 2000)]},
    "everything": {
        "logit_bias": {"253": -3, "28": 1.5},
        "presence_penalty": 0.7,
        "bad_words": ["harbour", "a"],
        "min_tokens": 12,
        "allowed_token_ids": [2, *range(100, 20_000)],
    },
}
SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.7, "seed": 2**33 + 5},
    "cut": {"temperature": 1.0, "top_p": 0.92, "top_k": 30, "min_p": 0.01, "seed": -77},
    "tiny": {"temperature": 0.003, "seed": 12},
}


@pytest.fixture(scope="module")
def model(model_dir: Path) -> ModelSettings:
    return ModelSettings(tokenizer=str(model_dir), vocab_size=recorded.VOCABULARY, eos_token_ids=(recorded.EOS,))


def backend(url: str, runtime: str = recorded.CPU) -> BackendSettings:
    return BackendSettings(name="honest", url=url, model="smollm2", runtime=runtime)


def selected(answer: Evidence, model: ModelSettings) -> Check:
    return next(check for check in cpu_checks(answer, model) if check.name == selection.NAME)


def reseeded(answer: Evidence) -> Evidence:
    sampling = dataclasses.replace(answer.sampling, seed=(answer.sampling.seed or 0) + 1)
    return dataclasses.replace(answer, sampling=sampling)


@pytest.fixture(scope="module")
def answered(vllm_server: str, model: ModelSettings, request: pytest.FixtureRequest) -> Iterator[Ahead[list[Evidence]]]:
    def work(kind: str, sampler: str) -> list[Evidence]:
        fields = {**PROCESSORS[kind], **SAMPLERS[sampler], "max_tokens": 32}
        chat = {"messages": MESSAGES, **fields}
        answers = ask(backend(vllm_server), model, chat | {"stream": True})
        return answers + ask(backend(vllm_server), model, PROMPT | fields, endpoint="completions")

    with ahead(request, "test_honest_answers_never_violate_and_wrong_seeds_do", work) as found:
        yield found


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("kind", PROCESSORS)
def test_honest_answers_never_violate_and_wrong_seeds_do(
    answered: Ahead[list[Evidence]],
    request: pytest.FixtureRequest,
    model: ModelSettings,
    kind: str,
    sampler: str,
) -> None:
    answers = answered.of(request.node)
    checks = [selected(answer, model) for answer in answers]
    assert all(check.metrics["violations"] == 0 for check in checks), checks
    if sampler in ("greedy", "sampled"):
        assert all(check.result is Result.PASS for check in checks)
    if sampler == "sampled":
        wrong = [selected(reseeded(answer), model) for answer in answers]
        assert sum(int(check.metrics["violations"] or 0) for check in wrong) > 6


def test_every_choice_has_its_own_seed(vllm_server: str, model: ModelSettings) -> None:
    fields = {"messages": MESSAGES, "n": 3, "temperature": 1.0, "presence_penalty": 0.4, "max_tokens": 24}
    answers = ask(backend(vllm_server), model, fields, seed=2**40)
    assert [answer.sampling.seed for answer in answers] == [2**40, 2**40 + 1, 2**40 + 2]
    assert all(selected(answer, model).result is Result.PASS for answer in answers)


def test_a_wrong_declaration_is_recognised(vllm_server: str, model: ModelSettings) -> None:
    fields = {"messages": MESSAGES, "temperature": 1.0, "max_tokens": 48}
    (answer,) = ask(backend(vllm_server, recorded.GPU), model, fields)
    check = selected(answer, model)
    assert check.result is Result.INCONCLUSIVE
    assert selection.fitting_runtime(check.reason) == recorded.CPU


def test_detection_names_the_server_s_noise(
    vllm_server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "countersign.yaml"
    config.write_text(
        f"""
models: {{smollm2: {{vocab_size: {recorded.VOCABULARY}}}}}
backends: [{{name: mine, url: "{vllm_server}", model: smollm2, trusted: true}}]
"""
    )
    assert noise_command.main(["detect", "--backend", "mine", "--answers", "3", "--config", str(config)]) == 0
    assert f"runtime: {recorded.CPU}" in capsys.readouterr().out
