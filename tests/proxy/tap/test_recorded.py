"""Bodies of real vLLM servers, recorded with and without what we add to requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies.evidence import MASKED
from policies.settings import BackendSettings, ModelSettings
from proxy.relay.body import Body
from proxy.tap import TokenStrings, open_tap, prepare
from proxy.tap.types import Prepared, Tap
from tests.proxy.tap.compare import assert_same, text

FOLDERS = sorted((Path(__file__).parents[2] / "data").glob("vllm-*"))


class Recording:
    """One request of an index, with its bodies."""

    def __init__(self, folder: Path, row: dict[str, Any]) -> None:
        self.folder, self.row = folder, row
        self.name: str = row["name"]
        self.stream: bool = row["stream"]
        self.body = self._bytes(".body")
        self.plain = self._bytes(".plain.body")
        self.request: dict[str, Any] = json.loads(self._bytes(".request.json"))
        self.plain_request: dict[str, Any] = json.loads(self._bytes(".plain.request.json"))

    def _bytes(self, suffix: str) -> bytes:
        return (self.folder / (self.name + suffix)).read_bytes()

    @property
    def tokenizer(self) -> Path | None:
        """The model's tokenizer, cut down to the tokens that occur, where there is one."""
        path = self.folder.parent / "tokenizers" / f"{self.row['model'].split('/')[-1]}.json"
        return path if path.exists() else None

    def prepared(self) -> Prepared:
        """The plain request, prepared as the proxy does."""
        model = self.row["model"]
        settings = ModelSettings.model_validate({"tokenizer": str(self.tokenizer) if self.tokenizer else None})
        backend = BackendSettings.model_validate({"name": "b", "url": "http://b", "model": model})
        body = json.dumps(self.plain_request).encode()
        return prepare(Body.read(self.row["endpoint"], body), settings, backend, seed=self.request.get("seed", 1))

    def tap(self, cut: int | None = None) -> tuple[bytes, Tap]:
        """What the client gets of the recorded body, and the tap it went through."""
        path = self.tokenizer
        tokenizer = TokenStrings.load(path) if path else None
        row = self.row
        tap = open_tap(
            self.prepared(),
            row["model"],
            tokenizer=tokenizer,
            status=row["status"],
            content_type=row["content_type"],
        )
        step = cut or len(self.body)
        parts = [self.body[at : at + step] for at in range(0, len(self.body), step)]
        out = b"".join([tap.feed(part) for part in parts])
        return out + tap.close() + tap.done, tap


RECORDINGS = [Recording(folder, row) for folder in FOLDERS for row in json.loads((folder / "index.json").read_text())]
ANSWERS = [recording for recording in RECORDINGS if recording.row["status"] == 200]
STREAMS = [recording for recording in ANSWERS if recording.stream]


def label(recording: Recording) -> str:
    return f"{recording.folder.name}-{recording.name}"


@pytest.mark.parametrize("recording", RECORDINGS, ids=label)
def test_client_sees_plain_answer(recording: Recording) -> None:
    shown, _ = recording.tap()
    if recording.row["status"] != 200:
        assert shown == recording.body == recording.plain
        return
    if text(recording.body, stream=recording.stream) != text(recording.plain, stream=recording.stream):
        return  # two runs on a GPU may differ; then there is nothing to compare
    assert_same(recording.plain, shown, stream=recording.stream)


@pytest.mark.parametrize("recording", RECORDINGS, ids=label)
def test_nothing_of_ours_is_shown(recording: Recording) -> None:
    shown, _ = recording.tap()
    prepared = recording.prepared()
    if prepared.ids_as_tokens:
        assert b"token_id:" not in shown
    if not prepared.asked.token_ids:
        assert b'token_ids":[' not in shown
    if prepared.asked.logprobs is None:
        assert b'"logprobs":{' not in shown


@pytest.mark.parametrize("recording", ANSWERS, ids=label)
def test_evidence_is_complete(recording: Recording) -> None:
    _, tap = recording.tap()
    prepared = recording.prepared()
    evidence = tap.evidence(id="1", model=recording.row["model"])
    assert len(evidence) == prepared.n * prepared.prompts
    for index, one in enumerate(evidence):
        assert one.index == index
        assert one.faults == ()
        assert one.complete
        assert len(one.output_ids) > 0
        assert len(one.prompt_ids) > 0
        assert one.claim_ids.shape == one.claim_logprobs.shape == (len(one.output_ids), 21)
        assert (one.claim_ids[:, 0] == one.output_ids).all()
        assert (one.claim_ids[:, :20] >= 0).all()
        assert np.isfinite(one.claim_logprobs[:, :20]).all()
        assert (one.claim_logprobs <= 0).all()
        mass = np.exp(np.where(one.claim_logprobs == MASKED, -np.inf, one.claim_logprobs)).sum(axis=1)
        assert (mass <= 1.01).all()
        assert one.sampling.seed == prepared.sampling.seed + index % prepared.n  # type: ignore[operator]
        assert one.usage is not None
        assert one.usage.prompt_tokens == one.usage.counted_prompt_tokens
        assert one.usage.completion_tokens == one.usage.counted_completion_tokens
    if recording.name.startswith("moe") and not recording.stream:
        for one in evidence:
            assert one.routed_experts is not None
            assert one.routed_experts.shape[0] == len(one.prompt_ids) + len(one.output_ids) - 1


@pytest.mark.parametrize("cut", [1, 7, 4096])
@pytest.mark.parametrize("recording", STREAMS, ids=label)
def test_reads_may_cut_anywhere(recording: Recording, cut: int) -> None:
    whole, tap = recording.tap()
    pieces, other = recording.tap(cut)
    assert pieces == whole
    for left, right in zip(tap.evidence(), other.evidence(), strict=True):
        assert left.text == right.text
        assert (left.output_ids == right.output_ids).all()
        assert (left.claim_ids == right.claim_ids).all()
        assert (left.claim_logprobs == right.claim_logprobs).all()
        assert left.faults == right.faults
