"""`countersign noise detect` on recorded answers; the real server is asked in tests/e2e."""

from __future__ import annotations

import dataclasses
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.noise import command, detect
from benchmarks.recordings.asking import AskError
from policies.evidence import Evidence
from policies.settings import BackendSettings, ModelSettings
from tests.policies import recorded

MODEL = ModelSettings(vocab_size=recorded.VOCABULARY)


def verdicts(answers: list[Evidence]) -> dict[str, str]:
    return {row.runtime: row.verdict for row in detect.findings(answers, MODEL)}


def test_the_noise_that_drew_the_tokens_is_found() -> None:
    assert verdicts(list(recorded.gpu("T1"))) == {recorded.GPU: "fits", recorded.CPU: "does not fit"}
    assert verdicts(list(recorded.cpu("bf16"))) == {recorded.GPU: "does not fit", recorded.CPU: "fits"}


def test_tokens_of_no_known_noise_fit_none() -> None:
    answers = [
        dataclasses.replace(answer, sampling=dataclasses.replace(answer.sampling, seed=3))
        for answer in recorded.gpu("T1")
    ]
    assert set(verdicts(answers).values()) == {"does not fit"}


def test_too_few_tokens_are_undecided() -> None:
    answer = recorded.gpu("T1")[0]
    short = dataclasses.replace(
        answer,
        output_ids=answer.output_ids[:1],
        claim_ids=answer.claim_ids[:1],
        claim_logprobs=answer.claim_logprobs[:1],
    )
    assert verdicts([short])[recorded.GPU] == "undecided"
    assert verdicts([])[recorded.GPU] == "undecided"
    assert "undecided" in detect.table(detect.findings([short], MODEL))


def test_every_kind_of_seed_is_tried() -> None:
    small, wide, negative = islice(detect.seeds(3), 3)
    assert 0 <= small < 2**32 <= wide < 2**63
    assert -(2**63) <= negative < -1


CONFIG = """
models: {smollm2: {vocab_size: 49152}}
backends:
  - {name: mine, url: "http://127.0.0.1:9", model: smollm2, runtime: vllm-0.32-v2, trusted: true}
"""


@pytest.mark.parametrize(
    ("answers", "code", "words"),
    [
        (recorded.cpu("bf16"), 0, "runtime: vllm-0.32-v1-cpu"),
        (recorded.gpu("T1"), 0, "as declared"),
        ((), 1, "selection will be inconclusive at T > 0"),
    ],
)
def test_the_command_prints_the_line_to_declare(
    answers: tuple[Evidence, ...],
    code: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def recorded_answers(backend: BackendSettings, model: ModelSettings, count: int) -> list[Evidence]:
        assert (backend.name, count) == ("mine", 4)
        return list(answers)

    monkeypatch.setattr(detect, "answers", recorded_answers)
    config = tmp_path / "countersign.yaml"
    config.write_text(CONFIG)
    assert command.main(["detect", "--backend", "mine", "--answers", "4", "--config", str(config)]) == code
    assert words in capsys.readouterr().out


def test_a_backend_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    config = tmp_path / "countersign.yaml"
    config.write_text(CONFIG)
    with pytest.raises(AskError, match="mine cannot be reached"):
        command.main(["detect", "--backend", "mine", "--config", str(config)])


@pytest.mark.parametrize("count", ["2", "x"])
def test_too_few_answers_are_refused(count: str) -> None:
    with pytest.raises(SystemExit):
        command.main(["detect", "--backend", "mine", "--answers", count])
