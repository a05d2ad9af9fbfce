"""Answers of a real vLLM server to every option (`benchmarks.recordings.options`), as the proxy reads them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import zstandard

from policies.evidence import Evidence
from policies.settings import BackendSettings, ModelSettings
from proxy.relay.body import Body
from proxy.tap import TokenStrings, open_tap, prepare
from proxy.tap.types import Prepared

DATA = Path(__file__).parents[1] / "data"
TOKENIZER = DATA / "tokenizers" / "smollm2-tags.json"
RUNTIME = "vllm-0.32-v1-cpu"
MODEL = ModelSettings(vocab_size=49_152, max_model_len=2048, eos_token_ids=(2,), tokenizer=str(TOKENIZER))
BACKEND = BackendSettings(name="b", url="http://b", model="smollm2", runtime=RUNTIME)


@dataclass(frozen=True, slots=True)
class Answer:
    """One recorded answer."""

    endpoint: Any
    name: str
    stream: bool
    request: str
    seed: int
    kind: str
    body: bytes

    @property
    def label(self) -> str:
        """Its name in test reports."""
        return f"{self.endpoint}-{self.name}"

    def prepared(self) -> Prepared:
        """The request as the proxy sends it."""
        return prepare(Body.read(self.endpoint, self.request.encode()), MODEL, BACKEND, seed=self.seed)

    def read(self, body: bytes | None = None) -> tuple[bytes, list[Evidence]]:
        """What the client is shown of the answer (or of another body), and its evidence."""
        prepared = self.prepared()
        tap = open_tap(prepared, "smollm2", tokenizer=strings(), status=200, content_type=self.kind)
        shown = tap.feed(self.body if body is None else body) + tap.close() + tap.done
        return shown, tap.evidence(id="0" * 32, backend="b", model="smollm2", runtime=RUNTIME, request=prepared.body)


@cache
def strings() -> TokenStrings:
    """The model's tokens, as far as they occur."""
    return TokenStrings.load(TOKENIZER)


@cache
def answers() -> tuple[Answer, ...]:
    """All of them: of a server without a reasoning parser, then of one with deepseek_r1's."""
    files = sorted((DATA / "evidence").glob("options_*.msgpack.zst"))
    rows = [row for file in files for row in msgspec.msgpack.decode(zstandard.decompress(file.read_bytes()))]
    return tuple(Answer(**row) for row in rows)


def named(name: str, endpoint: str = "chat") -> Answer:
    """One of them."""
    return next(answer for answer in answers() if (answer.endpoint, answer.name) == (endpoint, name))
