"""The CPU checks on every answer recorded from a real vLLM server: none of those backends cheated."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from policies.evidence import Evidence
from policies.settings import ModelSettings
from tests.proxy.tap.test_recorded import ANSWERS, Recording, label
from verifier_pool.judge import judge

MODEL = ModelSettings(vocab_size=49_152, max_model_len=2048, eos_token_ids=(2,))
RUNTIMES = {"vllm-0.32-h200": "vllm-0.32-v2", "vllm-0.32-cpu": "vllm-0.32-v1-cpu"}
SAMPLED = ("chat-sampled", "chat-n2", "chat-big-seed", "chat-grammar-sampled", "moe-chat-sampled", "completions-ids")


def evidence(recording: Recording, seed_offset: int = 0) -> list[Evidence]:
    _, tap = recording.tap()
    runtime = RUNTIMES[recording.folder.name]
    found = tap.evidence(id="0" * 32, backend="b", model="m", runtime=runtime)
    return [
        dataclasses.replace(
            choice, sampling=dataclasses.replace(choice.sampling, seed=(choice.sampling.seed or 0) + seed_offset)
        )
        for choice in found
    ]


def verdict(recording: Recording, seed_offset: int = 0) -> dict[str, Any]:
    return judge(evidence(recording, seed_offset), model=MODEL)


@pytest.mark.parametrize("recording", ANSWERS, ids=label)
def test_no_honest_answer_is_rejected_or_called_withheld(recording: Recording) -> None:
    found = verdict(recording)
    undecided = "chat-all-limits" in recording.name
    assert found["verdict"] == ("inconclusive" if undecided else "unaudited"), found["reasons"]


@pytest.mark.parametrize("recording", [r for r in ANSWERS if r.name.startswith(SAMPLED)], ids=label)
def test_the_same_answers_under_another_seed_are_rejected(recording: Recording) -> None:
    # Far enough that no choice's own seed is another choice's.
    assert verdict(recording, seed_offset=1000)["verdict"] == "reject"
