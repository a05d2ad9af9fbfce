"""The main job on real parts: a real vLLM server, a real Valkey, proxy and worker as processes, the openai SDK.

Slow: the server and twice the reference engine take half a minute each to start, calibration asks for 40 answers,
and a CPU gives some 40 tokens a second.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from benchmarks.demo.models import DemoModels
from benchmarks.questions import DEMO
from policies.examination import Outcome, examine
from policies.jws import keys_in
from policies.signature import verify_signature
from tests.e2e.product import CHEATS, HONEST, SECRET, Product, check_of, running
from tests.support.waiting import PATIENCE
from verifier_pool import verify

pytestmark = pytest.mark.e2e

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def product(
    demo_models: DemoModels, vllm_server: str, valkey: str, profile: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Product]:
    folder, cheats = tmp_path_factory.mktemp("product"), {name: [name] for name in CHEATS}
    with running(demo_models, vllm_server, valkey, folder, profile, cheats) as found:
        yield found


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "greedy stream": {"temperature": 0, "stream": True},
    "sampled": {},
    "sampled stream": {"stream": True},
    "two choices": {"n": 2},
    "two choices, stream": {"n": 2, "stream": True},
    "tools": {"tools": [WEATHER], "tool_choice": "auto"},
    "client seed": {"seed": 11},
    "logprobs": {"logprobs": True, "top_logprobs": 5},
    "nucleus": {"top_p": 0.9},
    "hotter": {"temperature": 1.0},
}


def test_honest_answers_pass_in_every_way_of_asking(product: Product) -> None:
    """The distance check calls one honest answer in a hundred borderline by its own definition, so one of these may
    be; nothing else may fall short of a pass, and nothing may ever be rejected."""
    with ThreadPoolExecutor(4) as pool:
        asked = {
            way: pool.submit(product.chat, messages=user(DEMO[index % len(DEMO)]), **fields)
            for index, (way, fields) in enumerate(WAYS.items())
        }
        ids = {way: answer.result()[0] for way, answer in asked.items()}
    found = {way: product.verification(id) for way, id in ids.items()}
    assert {
        way: entry["verdict"] for way, entry in found.items() if entry["verdict"] not in ("pass", "inconclusive")
    } == {}
    for way, entry in found.items():
        exact = {name: check_of(entry, name)["result"] for name in ("structure", "selection")}
        assert exact == {"structure": "pass", "selection": "pass"}, (way, entry)
        assert entry["audited"]
        assert entry["backend"] == HONEST
    borderline = {way: entry["reasons"] for way, entry in found.items() if entry["verdict"] != "pass"}
    assert len(borderline) <= 1, borderline
    assert [choice["index"] for choice in found["two choices"]["choices"]] == [0, 1]


def test_inline_in_the_body_and_readable_from_the_sdk(product: Product) -> None:
    id, answer = product.chat(mode="inline", messages=user(DEMO[0]))
    verdict = answer.countersign
    assert answer.model_extra["countersign"] is verdict
    assert verdict["id"] == id
    assert verdict["verdict"] in ("pass", "inconclusive")
    assert {check["name"] for check in verdict["checks"]} >= {"structure", "selection", "distance"}
    assert "owner" not in verdict
    assert answer.choices[0].message.content
    assert answer.choices[0].logprobs is None
    assert product.verification(id) == verdict


def test_inline_in_a_stream_is_a_comment_before_the_end(product: Product) -> None:
    body = {"model": "smollm2", "messages": user(DEMO[1]), "max_tokens": 32, "stream": True}
    response = product.http.post(
        "/v1/chat/completions",
        json=body,
        headers={"x-countersign-mode": "inline", "x-countersign-backend": HONEST},
    )
    frames = response.text.removesuffix("\n\n").split("\n\n")
    assert frames[-1] == "data: [DONE]"
    assert frames[-2].startswith(": countersign {")
    verdict = json.loads(frames[-2].removeprefix(": countersign "))
    assert verdict["id"] == response.headers["x-countersign-id"]
    assert verdict["verdict"] in ("pass", "inconclusive")
    # Nothing the client did not ask for (vLLM itself writes a null where ids could be).
    for chunk in (json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]):
        assert not chunk.get("usage")
        assert not chunk.get("prompt_token_ids")
        assert chunk["choices"]
        assert not any(choice.get("token_ids") or choice.get("logprobs") for choice in chunk["choices"])
    _, chunks = product.chat(mode="inline", messages=user(DEMO[1]), max_tokens=16, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_asked_logprobs_are_exactly_those_asked_for(product: Product) -> None:
    _, answer = product.chat(messages=user(DEMO[2]), max_tokens=16, logprobs=True, top_logprobs=5)
    content = answer.choices[0].logprobs.content
    assert all(len(entry.top_logprobs) == 5 for entry in content)
    assert "".join(entry.token for entry in content).startswith(answer.choices[0].message.content[:10])
    assert not any(entry.token.startswith("token_id:") for entry in content)


def test_a_stop_string_is_no_truncation(product: Product) -> None:
    id, answer = product.chat(messages=user(DEMO[3]), stop=[" the"], temperature=0)
    assert answer.choices[0].finish_reason == "stop"
    entry = product.verification(id)
    assert entry["verdict"] in ("pass", "inconclusive")
    assert check_of(entry, "structure")["result"] == "pass"


def test_a_client_seed_repeats_its_answer(product: Product) -> None:
    texts = set()
    for _ in range(2):
        _, answer = product.chat(messages=user(DEMO[4]), seed=5, max_tokens=12)
        texts.add(answer.choices[0].message.content)
    assert len(texts) == 1


def test_completions_are_verified_too(product: Product) -> None:
    response = product.openai.completions.with_raw_response.create(
        model="smollm2",
        prompt="The lighthouse keeper opened the letter and",
        max_tokens=48,
        temperature=0.8,
        extra_headers={"x-countersign-backend": HONEST},
    )
    entry = product.verification(response.headers["x-countersign-id"])
    assert entry["verdict"] in ("pass", "inconclusive"), entry
    assert check_of(entry, "structure")["result"] == "pass"
    assert check_of(entry, "selection")["result"] == "pass"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("cheat", "verdict", "check"),
    [
        ("hot", "reject", "selection"),
        ("hidden-prompt", "reject", "distance"),
        ("no-logprobs", "withheld", "structure"),
        ("usage", "reject", "structure"),
    ],
)
def test_cheats_are_caught(product: Product, cheat: str, verdict: str, check: str, stream: bool) -> None:
    """At once, except where a calibrated check has to: its bar lies beyond all honest answers of a calibration of 40,
    and one answer in six of a hidden prompt stays under it. That one is borderline; none may pass."""
    assert cheat in CHEATS
    words = []
    for question in range(5 if check == "distance" else 1):
        id, answer = product.chat(backend=cheat, messages=user(DEMO[5 + question]), stream=stream)
        assert answer
        entry = product.verification(id)
        assert entry["backend"] == cheat
        words.append(entry["verdict"])
        if entry["verdict"] == verdict:
            break
    assert words[-1] == verdict, words
    assert set(words[:-1]) <= {"inconclusive"}, words
    assert check_of(entry, check)["result"] == verdict
    assert entry["reasons"]


def test_only_the_key_that_asked_reads_a_verification(product: Product) -> None:
    id, _ = product.chat(messages=user(DEMO[6]), max_tokens=2)
    other = product.http.get(f"/v1/verifications/{id}", headers={"authorization": "Bearer sk-other"})
    assert other.status_code == 404
    assert other.json()["error"]["type"]
    assert product.verification(id)["id"] == id


def test_the_webhook_arrives_signed(product: Product) -> None:
    id, _ = product.chat(messages=user(DEMO[7]), max_tokens=20)
    expected = product.verification(id)
    deadline = time.monotonic() + PATIENCE
    while not product.webhooks.of(id):
        assert time.monotonic() < deadline, "no webhook came"
        time.sleep(0.1)
    headers, body = product.webhooks.of(id)[0]
    assert verify_signature(SECRET, headers, body, time.time())
    assert not verify_signature(SECRET, headers, body + b" ", time.time())
    message = json.loads(body)
    assert message["type"] in ("verification.completed", "verification.rejected")
    assert message["data"] == expected


def test_an_unknown_model_is_an_openai_error(product: Product) -> None:
    with pytest.raises(openai.NotFoundError):
        product.openai.chat.completions.create(model="no-such-model", messages=user("hi"))


def test_models_are_listed(product: Product) -> None:
    assert [model.id for model in product.openai.models.list()] == ["smollm2"]


def test_a_third_party_derives_every_verdict_again(product: Product, demo_models: DemoModels, tmp_path: Path) -> None:
    """Of all answers above, from nothing but a file each, the operator's keys and, for one, the model's tokenizer."""
    if not product.asked:
        product.chat(messages=user(DEMO[8]), max_tokens=20)
    published = product.http.get("/.well-known/countersign-keys.json").raise_for_status()
    trusted, words = keys_in(published.json()), set()
    for id in product.asked:
        product.verification(id)
        response = product.http.get(f"/v1/verifications/{id}/evidence").raise_for_status()
        found = examine(response.content, trusted)
        assert found.outcome is Outcome.VERIFIED, (id, found.faults)
        assert found.receipt is not None
        words.add(found.receipt.verdict)
        assert len(response.content) < 100_000
    assert len(product.asked) < 20 or {"pass", "reject", "withheld"} <= words
    (tmp_path / "keys.json").write_bytes(published.content)
    (tmp_path / "last.countersign").write_bytes(response.content)
    options = ["--keys", str(tmp_path / "keys.json"), "--tokenizer", str(demo_models.bf16), "--json"]
    assert verify.main([str(tmp_path / "last.countersign"), *options]) == 0
    report = product.http.get(f"/v1/verifications/{id}/report").raise_for_status()
    assert "<script" not in report.text
