"""Nothing of what clients and backends say, and no key, is in any log line, span or metric, at any level."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.demo.processes import free_ports
from policies.settings import hash_key
from tests.support import wire
from tests.support.fake_backend import Close, FakeBackend, Received, Step
from tests.support.waiting import PATIENCE, wait_until
from tests.telemetry import loud
from tests.telemetry.canaries import Canaries
from tests.telemetry.stack import Stack, running
from tests.verifier_pool.receiver import status

ADMIN = "sk-telemetry-admin"
TOKEN = "metrics-token-0123456789"


class Backend:
    """Answers with canaries, in the way that the prompt names: `case-NAME`."""

    def __init__(self, canaries: Canaries) -> None:
        self._canaries = canaries
        self.asked: list[str] = []

    def __call__(self, received: Received) -> Sequence[Step]:
        text = received.body.decode(errors="replace")
        case = text.partition("case-")[2].partition(" ")[0] or "well"
        self.asked.append(case)
        extra = f"x-theirs: {self._canaries.key('backend_header')}"
        match case:
            case "stream" | "left":
                pause: list[Step] = [0.3] if case == "left" else []
                frames = [part for frame in self._frames() for part in (*pause, wire.chunk(frame))]
                return [wire.SSE_HEAD, *frames, wire.LAST_CHUNK]
            case "broken":
                return [wire.SSE_HEAD, wire.chunk(self._frames()[0]), wire.chunk(self._frames()[1]), Close()]
            case "garbage":
                return [f"HTTP/1.1 2{self._canaries['garbage']} X\r\n\r\n".encode()]
            case "no-json":
                return [wire.whole(f'{{"{self._canaries["garbage"]}'.encode(), 200, "application/json", extra)]
            case "no-event":
                junk = f"data: {{{self._canaries['garbage']}\n\n:{self._canaries['garbage']}\n\n".encode()
                return [wire.SSE_HEAD, wire.chunk(self._frames()[0]), wire.chunk(junk), wire.LAST_CHUNK]
            case "error" | "refused":
                said = {"error": {"message": self._canaries["backend_error"], "code": self._canaries["garbage"]}}
                return [
                    wire.whole(json.dumps(said).encode(), 500 if case == "error" else 400, "application/json", extra)
                ]
            case "silent":
                return [3.0, Close()]
        return [wire.whole(json.dumps(self._message()).encode(), 200, "application/json", extra)]

    def _entry(self, id: int) -> dict[str, Any]:
        top = [{"token": f"token_id:{id + n}", "logprob": -0.1 - n, "bytes": None} for n in range(21)]
        return {"token": f"token_id:{id}", "logprob": -0.1, "bytes": None, "top_logprobs": top}

    def _called(self) -> list[dict[str, Any]]:
        function = {"name": self._canaries["called"], "arguments": json.dumps({"q": self._canaries["called"]})}
        return [{"id": self._canaries["called"], "type": "function", "index": 0, "function": function}]

    def _message(self) -> dict[str, Any]:
        message = {
            "role": "assistant",
            "content": self._canaries["answer"],
            "reasoning_content": self._canaries["reasoning"],
            "tool_calls": self._called(),
        }
        ids = self._canaries.ids
        choice = {
            "index": 0,
            "message": message,
            "logprobs": {"content": [self._entry(id) for id in ids]},
            "finish_reason": self._canaries["finish"],
            "stop_reason": self._canaries["finish"],
            "token_ids": ids,
        }
        head = {"id": self._canaries["garbage"], "object": "chat.completion", "created": 1}
        usage = {"prompt_tokens": 3, "completion_tokens": len(ids), "total_tokens": 3 + len(ids)}
        named = {"model": self._canaries["model"], "system_fingerprint": self._canaries["garbage"]}
        return {**head, **named, "choices": [choice], "usage": usage, "prompt_token_ids": ids[:3]}

    def _frames(self) -> list[bytes]:
        whole = self._message()
        head = {name: whole[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
        frames = []
        for place, id in enumerate(self._canaries.ids):
            last = place == len(self._canaries.ids) - 1
            choice = {
                "index": 0,
                "delta": {"content": self._canaries["answer"] if not place else ""},
                "logprobs": {"content": [self._entry(id)]},
                "token_ids": [id],
                "finish_reason": self._canaries["finish"] if last else None,
            }
            frames.append(
                head | {"choices": [choice]} | ({} if place else {"prompt_token_ids": whole["prompt_token_ids"]})
            )
        frames.append(head | {"choices": [], "usage": whole["usage"]})
        return [*(b"data: " + json.dumps(frame).encode() + b"\n\n" for frame in frames), wire.DONE]


class Client:
    """Asks with canaries."""

    def __init__(self, url: str, canaries: Canaries) -> None:
        self._canaries = canaries
        self.ids: list[str] = []
        headers = {
            "authorization": f"Bearer {canaries.key('client_key')}",
            "x-request-id": canaries.key("header"),
            "user-agent": canaries.key("header"),
            "traceparent": "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01",
            "tracestate": f"x={canaries.key('header')}",
            "baggage": f"x={canaries.key('header')}",
            "cookie": canaries.key("header"),
        }
        self.http = httpx.Client(base_url=url, headers=headers, timeout=120, trust_env=False)

    def body(self, case: str, **more: Any) -> dict[str, Any]:
        """A chat request."""
        say = self._canaries
        tool = {"type": "function", "function": {"name": "f" + say.key("tool"), "description": say["tool"]}}
        messages = [
            {"role": "system", "content": say["system"]},
            {"role": "user", "content": f"case-{case} {say['prompt']}"},
        ]
        return {"model": "toy", "messages": messages, "tools": [tool], "max_tokens": 8, "user": say["prompt"]} | more

    def ask(
        self, case: str, path: str = "/v1/chat/completions", *, head: dict[str, str] | None = None, **more: Any
    ) -> int:
        """Ask; returns the status."""
        with contextlib.suppress(httpx.HTTPError):
            answer = self.http.post(path, json=self.body(case, **more), headers=head)
            if id := answer.headers.get("x-countersign-id"):
                self.ids.append(id)
            return answer.status_code
        return 0

    def leave(self) -> None:
        """Ask, and go away in the middle."""
        with self.http.stream("POST", "/v1/chat/completions", json=self.body("left", stream=True)) as answer:
            assert answer.status_code == 200, answer.read()
            self.ids.append(answer.headers["x-countersign-id"])
            next(answer.iter_raw())

    def err(self) -> None:
        """Every kind of request that is refused."""
        say, post = self._canaries, self.http.post
        chat = "/v1/chat/completions"
        assert self.ask("well", head={"authorization": f"Bearer {say.key('wrong_key')}"}) == 401
        assert self.ask("well", head={"x-countersign-mode": say.key("header")}) == 400
        assert self.ask("well", head={"x-countersign-backend": say.key("header")}) == 400
        assert self.ask("well", head={"content-encoding": say.key("header")}) >= 400
        assert self.ask("well", model=say["model"]) == 404
        for body in (f'{{"{say["broken"]}', f'{{"model": "toy", "{say["broken"]}": NaN}}', f'"{say["broken"]}"'):
            assert post(chat, content=body.encode()).status_code == 400
        for field in (
            "temperature",
            "logprobs",
            "max_tokens",
            "messages",
            "stop",
            "response_format",
            "n",
            "logit_bias",
        ):
            self.ask("well", **{field: {say["broken"]: say["broken"]}})  # type: ignore[arg-type]
        self.ask("well", kv_transfer_params={say["broken"]: 1})
        with contextlib.suppress(httpx.HTTPError):
            post(chat, content=b"\xff" + say["broken"].encode("utf-16"))
        self.http.get(f"/v1/verifications/{say.key('path')}", params={"wait": say["path"]})
        self.http.get(f"/{say.key('path')}", params={"q": say["path"]})
        self.http.request("POST", f"{chat}?api_key={say.key('path')}", json=self.body("well"))
        self.http.request(say.key("path").upper(), chat)
        self.http.get("/v1/models", headers={"authorization": say.key("wrong_key")})


def shout(port: int, canaries: Canaries) -> None:
    """Things that are not HTTP."""
    for data in (
        f"{canaries.key('broken')} / HTTP/9.9\r\n\r\n",
        f"GET /{canaries.key('path')} HTTP/1.1\r\n{canaries['broken']}\r\n\r\n",
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {canaries.key('broken')}\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(data.encode())
            connection.settimeout(2)
            with contextlib.suppress(OSError):
                connection.recv(1000)


@pytest.fixture(scope="module")
def canaries() -> Canaries:
    return Canaries()


@pytest.fixture(scope="module")
def stack(canaries: Canaries, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, Backend, int]]:
    folder: Path = tmp_path_factory.mktemp("canaries")
    backend = Backend(canaries)
    (port,) = free_ports(1)
    keys = [
        {"name": "client", "sha256": hash_key(canaries.key("client_key")), "limits": {"requests_per_minute": 1000}},
        {"name": "admin", "sha256": hash_key(ADMIN), "admin": True},
    ]
    declared = {"name": "b1", "model": "toy", "runtime": "vllm-0.32-v2", "precision": "bf16", "engine": "e"}
    with FakeBackend(backend) as server:
        # With a slash and letters beyond ASCII none could be in a header.
        given = {"url": server.url, "api_key": canaries.key("backend_key"), **declared}
        with running(
            folder,
            server.url,
            program=("-m", "tests.telemetry.loud"),
            keys=keys,
            models={"toy": {"vocab_size": None}},
            backends=[given],
            webhook={"secret": canaries.secret, "retries": [1, 1]},
            timeouts={"first_byte": 1.0},
            relay={"retries": 0},
            breaker={"failures": 10_000},
            standing={"alpha": 1e-300},
            metrics={"port": port, "token": TOKEN},
            bounds={"json_depth": 32},
            verification={"job_timeout": 20, "replay_wait": 2},
        ) as made:
            yield made, backend, port


def test_no_canary_is_found(stack: tuple[Stack, Backend, int], canaries: Canaries) -> None:
    made, backend, port = stack
    made.receiver.answers[:] = [
        status(500, canaries["receiver"].encode(), x_theirs=canaries.key("receiver")),
        status(200),
    ]
    client = Client(made.url, canaries)
    for case in ("well", "stream", "no-json", "no-event", "error", "refused", "garbage", "broken", "silent"):
        for more in ({}, {"stream": True}):
            client.ask(case, **more)  # type: ignore[arg-type]
    client.ask("well", head={"x-countersign-mode": "inline"})
    client.ask("stream", head={"x-countersign-mode": "inline"}, stream=True)
    for path in ("/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/tokenize"):
        client.ask("well", path, prompt=canaries["prompt"], input=canaries["prompt"])
    client.leave()
    client.err()
    shout(int(made.url.rpartition(":")[2]), canaries)
    for id in client.ids[:8]:
        made.verification(id, canaries.key("client_key"))
    for text in (loud.LOST.decode(), loud.CRASH.decode()):
        client.ask("well", messages=[{"role": "user", "content": f"case-well {text} {canaries['prompt']}"}])
    for said in ("Task exception was never retrieved", " raised ValueError", "delivery of "):
        wait_until(partial(_was_said, made, said))
    wait_until(lambda: len(made.receiver.requests) > 5)
    client.http.close()
    pages = _pages(made.url, port)
    _stop(made)
    spans = (made.folder / "spans.jsonl").read_bytes()

    # It was said, done and told.
    assert {"well", "stream", "garbage", "silent", "left"} <= set(backend.asked)
    assert any(canaries["answer"] in request for request in [json.dumps(backend._message(), ensure_ascii=False)])
    assert made.logs.count('"message": "served"') >= 20
    assert {"httpx", "httpcore.http11", "asyncio", "py.warnings"} <= _loggers(made)
    assert spans.count(b"\n") > 100
    assert all(page.count(b"\n") > 20 for page in pages)
    # And nobody heard.
    assert canaries.found(made.logs.encode()) == []
    assert canaries.found(spans) == []
    assert canaries.found(b"\n".join(pages)) == []
    for name in ("proxy", "worker"):
        assert all(isinstance(line["message"], str) for line in made.lines(name))


def _pages(url: str, port: int) -> list[bytes]:
    pages = []
    for head in ({}, {"authorization": f"Bearer {ADMIN}"}, {"authorization": f"Bearer {TOKEN}"}):
        pages.append(httpx.get(f"{url}/metrics", headers=head, trust_env=False).content)
    head = {"authorization": f"Bearer {TOKEN}"}
    pages.append(httpx.get(f"http://127.0.0.1:{port}/metrics", headers=head, trust_env=False).content)
    return pages


def _was_said(made: Stack, text: str) -> bool:
    return text in made.logs


def _loggers(made: Stack) -> set[str]:
    return {line["logger"] for name in ("proxy", "worker") for line in made.lines(name)}


def _stop(made: Stack) -> None:
    for child in (made.proxy, made.worker):
        child.process.send_signal(signal.SIGTERM)
    for child in (made.proxy, made.worker):
        child.process.wait(PATIENCE)
    time.sleep(0.1)


@pytest.mark.parametrize("text", ["canary", 'a"b', "x/y+z"])
def test_the_search_finds_what_is_there(text: str, canaries: Canaries) -> None:
    import base64
    from urllib.parse import quote

    whole = f"{text} {canaries['prompt']} {text}"
    for data in (
        whole.encode(),
        json.dumps(whole).encode(),
        base64.b64encode(whole.encode()),
        base64.urlsafe_b64encode(b"x" + whole.encode()),
        quote(whole).encode(),
        whole.encode("utf-16"),
        whole.upper().encode(),
        str(canaries.ids).encode(),
        json.dumps(canaries.ids, separators=(",", ":")).encode(),
        canaries.secret.encode(),
    ):
        assert canaries.found(data), data
    assert canaries.found(b"nothing of it") == []
