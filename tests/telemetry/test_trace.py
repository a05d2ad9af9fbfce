"""One trace of a request's whole life, over every process that has to do with it."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.waiting import PATIENCE, wait_until
from tests.telemetry.stack import KEY, Span, Stack, running
from verifier_pool.link.telemetry import names

CHAT = "/v1/chat/completions"
LINKED = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
LIFE = {
    names.GENERATION,
    names.RECORD,
    names.QUEUE,
    names.VERIFY,
    names.REPLAY,
    names.CHECKS,
    names.JUDGE,
    names.VERDICT,
    names.WEBHOOK,
    "chat toy",
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(tmp_path_factory.mktemp("trace"), verification={"mode": "async"}) as made:
        yield made


def ask(stack: Stack, head: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    body = {"model": "toy", "messages": [{"role": "user", "content": "marker-2-x"}], "max_tokens": 20, "temperature": 0}
    headers = {"authorization": f"Bearer {KEY}"} | (head or {})
    return httpx.post(stack.url + CHAT, json=body | fields, headers=headers, timeout=120, trust_env=False)


def check(trace: list[Span]) -> dict[str, list[Span]]:
    """By name; each hangs on another of them but one, and says only what it may."""
    (root,) = [span for span in trace if span["parent"] is None]
    by_id = {span["span"]: span for span in trace}
    assert len(by_id) == len(trace)
    assert len({span["trace"] for span in trace}) == 1
    by_name: dict[str, list[Span]] = {}
    for span in trace:
        assert span is root or span["parent"] in by_id, span
        assert 0 < span["start"] <= span["end"], span
        kind = span["name"]
        if kind not in names.ATTRIBUTES:
            kind = names.REQUEST if span is root else names.UPSTREAM
        assert set(span["attributes"]) <= set(names.ATTRIBUTES[kind]), span
        by_name.setdefault(span["name"], []).append(span)
    return by_name


@pytest.mark.parametrize("stream", [False, True])
def test_one_trace_from_the_client_to_the_webhook(stack: Stack, stream: bool) -> None:
    answer = ask(stack, {"traceparent": LINKED}, stream=stream)
    id = answer.headers["x-countersign-id"]
    trace = stack.trace_of(id, *LIFE)
    spans = check(trace)
    root, upstream = sorted(spans["chat toy"], key=lambda span: str(span["kind"]), reverse=True)
    assert (root["kind"], upstream["kind"]) == ("server", "client")
    (generation,) = spans[names.GENERATION]
    assert (generation["parent"], upstream["parent"]) == (root["span"], generation["span"])
    assert root["trace"] != LINKED.split("-")[1]
    assert root["links"] == [LINKED[3:-3]]
    assert root["attributes"][names.STATUS] == 200
    assert root["attributes"][names.STREAM] is stream
    assert upstream["attributes"][names.OUTPUT_TOKENS] == 20
    assert upstream["attributes"][names.INPUT_TOKENS] == 8
    assert upstream["attributes"][names.FIRST_CHUNK] > 0
    (first,) = upstream["events"]
    assert (first["name"], upstream["start"] < first["time"] <= upstream["end"]) == (names.FIRST_TOKEN, True)
    stages = {span["attributes"][names.STAGE] for span in spans[names.QUEUE]}
    assert stages == {"verify", "replay", "judge", "webhook"}
    assert next(span["attributes"][names.OUTCOME] for span in spans[names.VERIFY]) == "replaying"
    (replay,) = spans[names.REPLAY]
    assert replay["attributes"][names.TOKENS] == 28
    assert replay["attributes"][names.BATCH] >= 1
    (verdict,) = spans[names.VERDICT]
    assert verdict["attributes"][names.WORD] == stack.verification(id)["verdict"]
    assert verdict["attributes"][names.AUDITED] is True
    (webhook,) = spans[names.WEBHOOK]
    assert (webhook["attributes"][names.OUTCOME], webhook["attributes"][names.STATUS]) == ("delivered", 200)
    processes = {span["resource"]["countersign.process"] for span in trace}
    assert processes == {"proxy", "worker", "webhooks"}
    assert {span["resource"]["service.name"] for span in trace} == {"countersign"}
    # No span per chunk.
    assert Counter(span["resource"]["countersign.process"] for span in trace)["proxy"] == 4
    assert not any(span["failed"] for span in trace)
    at = {span["name"]: span["start"] for span in sorted(trace, key=lambda span: -span["start"])}
    order = ["chat toy", names.GENERATION, names.RECORD, names.VERIFY, names.REPLAY, names.VERDICT, names.WEBHOOK]
    assert sorted(order, key=lambda name: at[name]) == order
    # What clients and receivers get says nothing of it.
    assert "trace" not in stack.verification(id)
    bodies = [body for _, body in stack.receiver.requests if id.encode() in body]
    assert bodies
    assert all(root["trace"].encode() not in body for body in bodies)
    assert root["trace"] not in answer.text + str(answer.headers)


def test_log_lines_name_the_trace(stack: Stack) -> None:
    id = ask(stack).headers["x-countersign-id"]
    trace = stack.trace_of(id, names.WEBHOOK)[0]["trace"]
    wait_until(lambda: id in (stack.folder / "proxy.log").read_text())
    (line,) = [line for line in stack.lines("proxy") if line.get("id") == id and line["message"] == "served"]
    assert (line["trace"], line["backend"], line["model"]) == (trace, "b1", "toy")


def test_waiting_for_an_inline_verdict(stack: Stack) -> None:
    answer = ask(stack, {"x-countersign-mode": "inline"})
    spans = check(stack.trace_of(answer.headers["x-countersign-id"], names.WEBHOOK, names.INLINE, "chat toy"))
    (wait,) = spans[names.INLINE]
    assert wait["attributes"][names.WORD] == answer.json()["countersign"]["verdict"]
    assert wait["parent"] == spans[names.GENERATION][0]["span"]
    upstream = next(span for span in spans["chat toy"] if span["kind"] == "client")
    assert upstream["end"] <= wait["end"] - 10**6


def test_a_client_that_leaves_ends_its_spans(stack: Stack) -> None:
    body = {"model": "toy", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2000, "temperature": 0}
    headers = {"authorization": f"Bearer {KEY}"}
    with (
        httpx.Client(trust_env=False, timeout=120) as client,
        client.stream("POST", stack.url + CHAT, json=body | {"stream": True}, headers=headers) as answer,
    ):
        id = answer.headers["x-countersign-id"]
        seen = b""
        for piece in answer.iter_raw():
            seen += piece
            if seen.count(b"data: ") > 5:
                break
    left = time.time_ns()
    spans = check(stack.trace_of(id, "chat toy", names.GENERATION, names.WEBHOOK))
    for span in [*spans["chat toy"], *spans[names.GENERATION]]:
        assert span["failed"]
        assert span["end"] < left + 20 * 10**9
    assert spans[names.GENERATION][0]["attributes"][names.ERROR] == "client_left"
    assert spans[names.VERIFY]


def test_refused_requests_have_a_span_of_their_own(stack: Stack) -> None:
    assert ask(stack, {"authorization": "Bearer sk-wrong"}).status_code == 401
    assert ask(stack, model="nobody's canary").status_code == 404

    def refused() -> list[Span]:
        return [span for span in stack.spans() if span["name"] == "chat"]

    wait_until(lambda: len(refused()) == 2)
    assert {span["attributes"][names.STATUS] for span in refused()} == {401, 404}
    for span in refused():
        assert span["parent"] is None
        assert "canary" not in json.dumps(span)


def test_what_ends_exports_what_is_left(tmp_path: Path) -> None:
    with running(tmp_path) as stack:
        id = ask(stack).headers["x-countersign-id"]
        stack.verification(id)
        wait_until(lambda: stack.receiver.requests)
        for child in (stack.proxy, stack.worker):
            child.process.send_signal(signal.SIGTERM)
            assert child.process.wait(PATIENCE) == 0
        trace = [span for span in stack.spans() if span["attributes"].get(names.ID) == id]
        assert {names.GENERATION, names.VERDICT, names.WEBHOOK} <= {span["name"] for span in trace}
        check([span for span in stack.spans() if span["trace"] == trace[0]["trace"]])


def test_what_a_killed_worker_was_at_is_told_by_the_next(tmp_path: Path) -> None:
    """Its own spans are missing; what follows belongs to the same trace."""
    with running(tmp_path) as stack:
        stack.worker.process.kill()
        stack.worker.process.wait()
        id = ask(stack).headers["x-countersign-id"]
        wait_until(lambda: any(span["name"] == names.RECORD for span in stack.spans()))
        command = stack.worker.process.args
        assert isinstance(command, list)
        stack.children.running.remove(stack.worker)
        began = time.time_ns()
        stack.children.start("worker2", command)
        spans = check(stack.trace_of(id, *LIFE))
        waited = next(span for span in spans[names.QUEUE] if span["attributes"][names.STAGE] == "verify")
        assert waited["start"] < began < waited["end"]
        assert len(spans[names.VERDICT]) == 1


def test_a_pass_that_breaks_has_a_span_and_so_has_the_next(tmp_path: Path) -> None:
    from tests.telemetry import loud

    crash = [{"role": "user", "content": loud.CRASH.decode()}]
    with running(tmp_path, program=("-m", "tests.telemetry.loud")) as stack:
        id = ask(stack, messages=crash).headers["x-countersign-id"]

        def broken() -> list[Span]:
            return [span for span in stack.spans() if span["name"] == names.VERIFY and span["failed"]]

        wait_until(lambda: len(broken()) >= 2)
        assert {span["attributes"][names.ERROR] for span in broken()} == {"ValueError"}
        trace = [span for span in stack.spans() if span["trace"] == broken()[0]["trace"]]
        assert {span["attributes"].get(names.ID) for span in trace} <= {id, None}
        checks = [span for span in trace if span["name"] == names.CHECKS]
        assert all(span["failed"] for span in checks)
