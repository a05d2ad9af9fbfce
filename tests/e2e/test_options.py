"""No option makes an honest answer of a real vLLM look like a lie: all of them in turn, and any of them at once.

Whole answers are judged with a replay by the same server, too. COUNTERSIGN_RANDOM_OPTIONS sets how many random
requests there are, and so how long to look for a combination that nobody thought of.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.recordings.asking import PATHS
from benchmarks.recordings.cases import Case, cases
from policies.evidence import Evidence
from policies.settings import BackendSettings, ModelSettings, ReferenceSettings
from proxy.relay.body import Body
from proxy.tap import TokenStrings, open_tap, prepare
from tests.e2e.ahead import Ahead, ahead
from tests.e2e.random_options import drawn
from verifier_pool.judge import judge, replay_choices
from verifier_pool.reference.vllm_http import VllmHttp

pytestmark = pytest.mark.e2e

FORMS: dict[str, dict[str, Any]] = {
    "whole": {"stream": False, "temperature": 0.0, "logprobs": 2, "limit": 12},
    "stream": {"stream": True, "temperature": 1.0, "limit": 12},
}
RANDOM = int(os.environ.get("COUNTERSIGN_RANDOM_OPTIONS", "24"))
LEFT_OPEN: dict[tuple[str, str], set[str]] = {
    ("chat", "repetition"): {"not_replayed"},
    ("chat", "choice-min"): {"finish_undecided", "undecided"},
    ("chat", "regex-min"): {"finish_undecided", "undecided"},
    ("chat", "top-p"): {"undecided"},
}
"""What may be open of structure and selection, by case."""


class Asking:
    """A real server as a backend and as the reference."""

    def __init__(self, url: str, model_dir: Path) -> None:
        # A connection that waited its turn may be the one that the server is closing.
        limits = httpx.Limits(max_keepalive_connections=0)
        self.client = httpx.Client(base_url=url, timeout=300, trust_env=False, limits=limits)
        self.model = ModelSettings(tokenizer=str(model_dir), vocab_size=49_152, max_model_len=2048, eos_token_ids=(2,))
        self.backend = BackendSettings(name="b", url=url, model="smollm2", runtime="vllm-0.32-v1-cpu")
        self.reference = VllmHttp("smollm2", ReferenceSettings(kind="vllm_http", url=url, served_model="smollm2"))
        self.strings = TokenStrings.load(model_dir)

    def ask(self, case: Case, seed: int) -> list[Evidence] | None:
        """The evidence of the answer; None where the server refuses the request."""
        body = json.dumps({"model": "smollm2", **case.fields}).encode()
        prepared = prepare(Body.read(case.endpoint, body), self.model, self.backend, seed=seed)
        answer = self.client.post(
            PATHS[case.endpoint], content=prepared.body, headers={"content-type": "application/json"}
        )
        if answer.status_code != 200:
            return None
        tap = open_tap(
            prepared, "smollm2", tokenizer=self.strings, status=200, content_type=answer.headers["content-type"]
        )
        tap.feed(answer.content)
        tap.close()
        meta = {"id": "0" * 32, "backend": "b", "model": "smollm2", "runtime": self.backend.runtime}
        return tap.evidence(**meta, request=prepared.body, stream=prepared.upstream_stream)

    def judged(self, case: Case, seed: int) -> dict[str, tuple[str, str]] | None:
        """Result and code of each check; None where the server refuses the request."""
        evidence = self.ask(case, seed)
        if evidence is None:
            return None
        replays = None if case.fields["stream"] else replay_choices(evidence, self.reference)
        found = judge(evidence, model=self.model, replays=replays)
        return {check["name"]: (check["result"], check["reason"].partition(":")[0]) for check in found["checks"]}


@pytest.fixture(scope="module")
def asking(vllm_server: str, model_dir: Path) -> Iterator[Asking]:
    found = Asking(vllm_server, model_dir)
    yield found
    found.reference.close()
    found.client.close()


@pytest.fixture(scope="module")
def each(asking: Asking, request: pytest.FixtureRequest) -> Iterator[Ahead[Any]]:
    def work(case: Case, form: str) -> Any:
        return asking.judged(case.request(**FORMS[form]), seed=len(case.name) * 7919 + 1)

    with ahead(request, "test_each_option", work) as found:
        yield found


@pytest.fixture(scope="module")
def mixed(asking: Asking, request: pytest.FixtureRequest) -> Iterator[Ahead[Any]]:
    def work(seed: int) -> Any:
        return asking.judged(drawn(seed), seed)

    with ahead(request, "test_any_options_at_once", work) as found:
        yield found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", cases(reasoning=False), ids=lambda case: f"{case.endpoint}-{case.name}")
def test_each_option(each: Ahead[Any], request: pytest.FixtureRequest, case: Case, form: str) -> None:
    found = each.of(request.node)
    assert found is not None
    left = LEFT_OPEN.get((case.endpoint, case.name), set())
    for name in ("structure", "selection"):
        result, code = found[name]
        by_grammar = {"grammar"} if name == "selection" else set()
        assert result == "pass" or (result == "inconclusive" and code in left | by_grammar), found
    # Without a profile these pass and reject nothing.
    assert {found[name][0] for name in found.keys() & {"distance", "margin"}} <= {"inconclusive"}
    assert ("distance" in found) is (form == "whole")


@pytest.mark.parametrize("seed", range(RANDOM))
def test_any_options_at_once(mixed: Ahead[Any], request: pytest.FixtureRequest, seed: int) -> None:
    found = mixed.of(request.node)
    if found is not None:
        assert {result for result, _ in found.values()} <= {"pass", "inconclusive"}, (found, drawn(seed))
