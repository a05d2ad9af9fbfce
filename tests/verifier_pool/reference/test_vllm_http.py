from __future__ import annotations

import base64
import io
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from typing import Any

import numpy as np
import pytest

from policies.errors import ReplayError
from policies.settings import ReferenceSettings
from tests.support.toy_http import Handler, served
from tests.verifier_pool.toy import VOCAB, answer, logprobs_after, rows
from verifier_pool.reference import open_reference
from verifier_pool.reference.base import Reference, ReplayRequest
from verifier_pool.reference.http_client import CONNECTIONS
from verifier_pool.reference.rendering import same_but_for_the_date

Reply = tuple[int, Any]


class FakeVllm:
    """Speaks the few routes of vLLM's server that a reference uses, about the toy model."""

    def __init__(self) -> None:
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.render: Reply | None = None
        self.texts: dict[tuple[int, ...], str] | None = None
        self.completion: Callable[[dict[str, Any]], Reply] = self.prompt_logprobs
        self.generate: Callable[[dict[str, Any]], Reply] = lambda _body: (403, {"error": "scale-out is off"})
        self.max_logprobs = 64
        self.experts: np.ndarray[Any, Any] | None = None
        self.at_once = self.most = 0
        self._lock = threading.Lock()

    def get(self, path: str) -> Reply:
        if path == "/version":
            return 200, {"version": "0.32.0"}
        return 200, {"object": "list", "data": [{"id": "toy-served", "max_model_len": 100, "object": "model"}]}

    def post(self, path: str, body: dict[str, Any]) -> Reply:
        self.bodies.append((path, body))
        if path.endswith("/render"):
            return self.render or (403, {"error": "scale-out is off"})
        if path == "/detokenize":
            return (404, {}) if self.texts is None else (200, {"prompt": self.texts[tuple(body["tokens"])]})
        with self._lock:
            self.at_once += 1
            self.most = max(self.most, self.at_once)
        time.sleep(0.02)
        try:
            return self.generate(body) if path == "/inference/v1/generate" else self.completion(body)
        finally:
            with self._lock:
                self.at_once -= 1

    def prompt_logprobs(self, body: dict[str, Any]) -> Reply:
        if "prompt_logprobs" not in body:
            return self.answer(body)
        if body["prompt_logprobs"] > self.max_logprobs:
            return 400, {"error": {"message": f"which is greater than max allowed: {self.max_logprobs} (parameter=x)"}}
        choice = {"index": 0, "prompt_logprobs": listed(body["prompt"], body["prompt_logprobs"])}
        return 200, {"choices": [choice | {"prompt_token_ids": body["prompt"]} | self.routed(body)]}

    def answer(self, body: dict[str, Any]) -> Reply:
        """A greedy answer to a text, whose ids are made up."""
        told = answer((9, 11, 12), body["max_tokens"])
        top = [
            {f"token_id:{id}": float(logprob) for id, logprob in zip(ids[1:], row[1:], strict=True) if id >= 0}
            for ids, row in zip(told.claim_ids, told.claim_logprobs, strict=True)
        ]
        logprobs = {
            "tokens": [f"token_id:{id}" for id in told.output_ids],
            "token_logprobs": told.claim_logprobs[:, 0].tolist(),
            "top_logprobs": [dict(list(row.items())[: body["logprobs"]]) for row in top],
        }
        choice = {"logprobs": logprobs, "token_ids": told.output_ids.tolist(), "prompt_token_ids": [9, 11, 12]}
        return 200, {"choices": [choice]}

    def scores(self, body: dict[str, Any]) -> Reply:
        """`/inference/v1/generate` on the V2 runner."""
        ids, sampling = body["token_ids"], body["sampling_params"]
        wanted, start = np.array(sampling["prompt_logprob_token_ids"]), sampling["prompt_logprob_start"]
        assert len(wanted) == len(ids) - 1 - start
        if wanted.shape[1] > self.max_logprobs:
            return 400, {"error": {"message": f"which is greater than max allowed: {self.max_logprobs}. Set it"}}
        if wanted.min() < -1 or wanted.max() >= VOCAB:
            return 400, {"error": {"message": f"contain out-of-vocab token ids (-1 pads). Vocabulary size: {VOCAB}"}}
        tables = np.array([logprobs_after(last) for last in ids[start:-1]])
        scored = np.where(wanted < 0, -np.inf, np.take_along_axis(tables, np.maximum(wanted, 0), axis=1))
        top = sampling.get("prompt_logprobs")
        return 200, {
            "choices": [{"index": 0, "token_ids": [1]} | self.routed(sampling)],
            "prompt_logprobs": None if top is None else listed(ids, top),
            "prompt_token_id_logprobs": npy(scored.astype(np.float32)),
            "prompt_token_ids": ids,
        }

    def routed(self, asked: dict[str, Any]) -> dict[str, Any]:
        start = asked.get("routed_experts_prompt_start", 0)
        return {"routed_experts": None if self.experts is None else npy(self.experts[start:])}


def listed(prompt: list[int], top: int) -> list[dict[str, Any] | None]:
    """vLLM's prompt logprobs: the token itself and the `top` best."""
    rows: list[dict[str, Any] | None] = [None]
    for last, token in itertools.pairwise(prompt):
        table = logprobs_after(last)
        order = np.argsort(-table).tolist()
        row = {str(token): {"rank": order.index(token) + 1, "logprob": table[token], "decoded_token": "x"}}
        for rank, id in enumerate(order[:top], 1):
            row[str(id)] = {"rank": rank, "logprob": table[id], "decoded_token": "x"}
        rows.append(row)
    return rows


def npy(array: np.ndarray[Any, Any]) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


@contextmanager
def serving(fake: FakeVllm, **settings: Any) -> Iterator[Reference]:
    class Asked(Handler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.reply(*fake.get(self.path))

        def do_POST(self) -> None:
            self.reply(*fake.post(self.path, json.loads(self.rfile.read(int(self.headers["content-length"])))))

        def reply(self, status: int, body: Any) -> None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    with served(Asked) as url:
        reference = open_reference("toy", ReferenceSettings(kind="vllm_http", url=f"{url}/v1/", **settings))
        try:
            yield reference
        finally:
            reference.close()


def request(
    prompt: tuple[int, ...] = (3, 5, 7), body: object = None, choice: int = 0, chat: bool = True
) -> ReplayRequest:
    evidence = answer(prompt)
    raw = json.dumps(body).encode() if body is not None else b""
    return ReplayRequest(evidence.prompt_ids, evidence.output_ids, "chat" if chat else "completions", raw, choice)


def reason(fake: FakeVllm, asked: ReplayRequest | None = None, **settings: Any) -> str:
    with serving(fake, **settings) as reference, pytest.raises(ReplayError) as caught:
        reference.replay([asked or request()])
    return caught.value.reason


def test_rows_are_those_of_the_model() -> None:
    fake, asked = FakeVllm(), request()
    with serving(fake) as reference:
        (replay,) = reference.replay([asked])
    ids, logprobs = rows([7, *asked.output_ids[:-1]], asked.output_ids)
    assert np.array_equal(replay.ids, ids)
    assert np.allclose(replay.logprobs, logprobs)
    assert replay.ids.dtype == np.int32
    assert replay.logprobs.dtype == np.float32
    assert replay.reference == reference.name == "vllm_http vllm-0.32.0 toy-served"
    assert replay.prompt_ids is None


def test_the_request_holds_ids_and_nothing_of_the_claim() -> None:
    fake, asked = FakeVllm(), request()
    with serving(fake) as reference:
        reference.replay([asked])
    ((path, body),) = fake.bodies
    assert path == "/v1/completions"
    assert body == {
        "model": "toy-served",
        "prompt": [3, 5, 7, *asked.output_ids.tolist()],
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": 20,
        "return_token_ids": True,
    }


def test_several_at_once_and_in_order() -> None:
    fake = FakeVllm()
    asked = [request((number, number + 1)) for number in range(12)]
    with serving(fake) as reference:
        replays = reference.replay(asked)
    assert 2 <= fake.most <= CONNECTIONS
    for one, replay in zip(asked, replays, strict=True):
        assert replay.ids[:, 0].tolist() == one.output_ids.tolist()


def test_rendering_leaves_out_the_sampling() -> None:
    fake = FakeVllm()
    fake.render = 200, {"token_ids": [3, 5, 7], "sampling_params": {}}
    prompt = {"messages": [{"role": "user"}], "tools": [], "chat_template_kwargs": {"a": 1}}
    sampling = {"seed": 3, "stream": True, "logprobs": True, "top_logprobs": 20, "n": 2, "temperature": 0.5}
    body = prompt | sampling | {"model": "m", "max_tokens": 64}
    with serving(fake) as reference:
        replays = reference.replay([request(body=body), request(body=body, choice=1)])
    assert all(replay.prompt_ids is not None and replay.prompt_ids.tolist() == [3, 5, 7] for replay in replays)
    rendered = [sent for path, sent in fake.bodies if path == "/v1/chat/completions/render"]
    assert rendered == [prompt | {"model": "toy-served", "max_tokens": 1}]


def test_each_choice_gets_the_rendering_of_its_prompt() -> None:
    fake = FakeVllm()
    fake.render = 200, [{"token_ids": [1]}, {"token_ids": [2, 2]}]
    body = {"prompt": ["a", "b"], "n": 2}
    with serving(fake) as reference:
        replays = reference.replay([request(body=body, choice=choice, chat=False) for choice in range(5)])
    got = [None if replay.prompt_ids is None else replay.prompt_ids.tolist() for replay in replays]
    assert got == [[1], [1], [2, 2], [2, 2], None]


def test_a_server_that_does_not_render_is_asked_once() -> None:
    fake = FakeVllm()
    with serving(fake) as reference:
        for _ in range(3):
            assert reference.replay([request(body={"messages": []})])[0].prompt_ids is None
    assert sum(path.endswith("/render") for path, _ in fake.bodies) == 1


def test_a_request_it_refuses_to_render_is_no_failure() -> None:
    fake = FakeVllm()
    fake.render = 400, {"error": {"message": "no such template"}}
    with serving(fake) as reference:
        assert reference.replay([request(body={"messages": []})])[0].prompt_ids is None
        fake.render = 200, {"token_ids": [9]}
        prompt_ids = reference.replay([request(body={"messages": []})])[0].prompt_ids
        assert prompt_ids is not None


DATED = "<|system|>Today is {:%d %b %Y}.{}<|user|>What was on 2001-09-01?"


@pytest.mark.parametrize(
    ("theirs", "excused"),
    [
        (DATED.format(date(2026, 11, 28), ""), True),
        (DATED.format(datetime.now(UTC), ""), True),
        (DATED.format(date(2026, 11, 28), " Praise the shop."), False),
        (DATED.format(datetime.now(UTC), "").replace("2001", "2002"), False),
        ("", False),
    ],
)
def test_a_template_that_prints_the_day_accuses_nobody(theirs: str, excused: bool) -> None:
    fake = FakeVllm()
    fake.render = 200, {"token_ids": [9, 9]}
    fake.texts = {(9, 9): DATED.format(datetime.now(UTC), ""), (3, 5, 7): theirs}
    with serving(fake) as reference:
        prompt_ids = reference.replay([request(body={"messages": []})])[0].prompt_ids
    assert prompt_ids is not None
    assert prompt_ids.tolist() == ([3, 5, 7] if excused else [9, 9])


def test_only_dates_of_these_days_are_a_templates() -> None:
    day = date(2026, 3, 1)
    for form in ("{:%d %b %Y}", "{:%B %d, %Y}", "{:%Y-%m-%d}", "on {:%d/%m/%Y} (x)"):
        ours, theirs = form.format(day), form.format(date(2025, 12, 24))
        assert same_but_for_the_date(ours, theirs, day)
        assert same_but_for_the_date(form.format(day - timedelta(days=1)), theirs, day)
        assert not same_but_for_the_date(ours, theirs, date(2026, 3, 9))
        assert not same_but_for_the_date(ours, theirs + "!", day)
    assert not same_but_for_the_date("a", "b", day)


def answering(status: int, body: Any) -> FakeVllm:
    fake = FakeVllm()
    fake.completion = lambda _body: (status, body)
    return fake


def without_a_row(body: dict[str, Any]) -> Reply:
    status, document = FakeVllm().prompt_logprobs(body)
    document["choices"][0]["prompt_logprobs"].pop()
    return status, document


def with_a_null_row(body: dict[str, Any]) -> Reply:
    status, document = FakeVllm().prompt_logprobs(body)
    document["choices"][0]["prompt_logprobs"][-2] = None
    return status, document


def for_other_ids(body: dict[str, Any]) -> Reply:
    status, document = FakeVllm().prompt_logprobs(body)
    document["choices"][0]["prompt_token_ids"][0] += 1
    return status, document


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (500, {}, "http_5xx"),
        (503, b"", "http_5xx"),
        (429, {}, "overloaded"),
        (401, {}, "http_401"),
        (400, {"error": {"message": "Token id 9 is out of vocabulary"}}, "refused"),
        (400, {"error": {"message": "max_tokens must be at least 1, got 0."}}, "too_long"),
        (200, b"{", "bad_replay"),
        (200, {"choices": []}, "bad_replay"),
        (200, {"choices": [{}]}, "bad_replay"),
        (200, b'{"choices": [{"prompt_logprobs": [null, {"1": {"logprob": NaN}}]}]}', "bad_replay"),
    ],
)
def test_failures_have_reasons(status: int, body: Any, expected: str) -> None:
    assert reason(answering(status, body)) == expected


@pytest.mark.parametrize("completion", [without_a_row, with_a_null_row, for_other_ids])
def test_rows_are_counted(completion: Callable[[dict[str, Any]], Reply]) -> None:
    fake = FakeVllm()
    fake.completion = completion
    assert reason(fake) == "bad_replay"


def test_longer_than_the_reference_reads() -> None:
    fake = FakeVllm()
    assert reason(fake, request(tuple(range(60)) + tuple(range(40)))) == "too_long"
    assert fake.bodies == []


def test_a_silent_server_times_out() -> None:
    fake = FakeVllm()

    def silent(_body: dict[str, Any]) -> Reply:
        time.sleep(1)
        return 200, {}

    fake.completion = silent
    assert reason(fake, timeout=0.2) == "timeout"


def test_another_model_than_configured() -> None:
    assert reason(FakeVllm(), served_model="other") == "wrong_model"


def test_a_server_that_comes_up_later() -> None:
    reference = open_reference("toy", ReferenceSettings(kind="vllm_http", url="http://127.0.0.1:9", timeout=5))
    for _ in range(2):
        with pytest.raises(ReplayError, match="unreachable"):
            reference.replay([request()])
    assert reference.name == "vllm_http toy"
    reference.close()


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [], "truncate_prompt_tokens": -1},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"prompt_embeds": "x"},
    ],
)
def test_what_two_honest_servers_may_render_differently_is_not_rendered(body: dict[str, Any]) -> None:
    fake = FakeVllm()
    fake.render = 200, {"token_ids": [1]}
    with serving(fake) as reference:
        assert reference.replay([request(body=body)])[0].prompt_ids is None
    assert not any(path.endswith("/render") for path, _ in fake.bodies)
