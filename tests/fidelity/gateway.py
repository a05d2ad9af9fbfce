"""A gateway to put questions to, and our own as a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import redis

from policies import codec
from policies.evidence import Evidence
from policies.settings import hash_key
from tests.support.raw_http import Answer, Call
from tests.support.valkey import Valkey
from verifier_pool.queue import evidence_key

MODEL = "m"
CLIENT_KEY = "sk-client-4b1d"
BACKEND_KEY = "sk-backend-9f3e"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
EMBEDDINGS = "/v1/embeddings"
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "impatient": {"timeouts": {"connect": 0.5, "first_byte": 0.6, "idle": 0.6, "total": 4.0}},
    "keepalive": {"relay": {"keepalive": 0.2}},
    "pair": {},
    "recorded": {
        "models": {MODEL: {"tokenizer": str(Path(__file__).parents[1] / "data" / "tokenizers" / "smollm2.json")}}
    },
}
_ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "count"}]},
    COMPLETIONS: {"prompt": "count"},
    RESPONSES: {"input": "count"},
    MESSAGES: {"messages": [{"role": "user", "content": "count"}], "max_tokens": 8},
    EMBEDDINGS: {"input": "count"},
}


@dataclass
class Gateway:
    """One gateway. `pid` and `valkey` are known of our own."""

    url: str
    model: str = MODEL
    key: str = CLIENT_KEY
    pid: int | None = None
    valkey: Valkey | None = None
    process: subprocess.Popen[str] | None = field(default=None, repr=False)

    def body(self, path: str = CHAT, **fields: Any) -> bytes:
        """A request's JSON."""
        return json.dumps({"model": self.model, **_ASKED.get(path, {}), **fields}).encode()

    def call(
        self, path: str = CHAT, headers: dict[str, str] | None = None, *, raw: bytes | None = None, **fields: Any
    ) -> Call:
        """Begin a request; `raw` is its whole body."""
        body = self.body(path, **fields) if raw is None else raw
        return Call(self.url, path, body, {"authorization": f"Bearer {self.key}"} | (headers or {}))

    def ask(
        self, path: str = CHAT, headers: dict[str, str] | None = None, *, raw: bytes | None = None, **fields: Any
    ) -> Answer:
        """A request and its whole answer."""
        with self.call(path, headers, raw=raw, **fields) as call:
            return call.answer()

    def evidence(self, answer: Answer) -> list[Evidence]:
        """What was recorded of an answer, which only we do."""
        id = answer.header("x-countersign-id")
        if not id or self.valkey is None:
            pytest.fail("this gateway records nothing that can be looked up")
        with self.valkey.client() as client:
            deadline = time.monotonic() + 10
            while (packed := client.get(evidence_key(id))) is None:
                assert time.monotonic() < deadline, "no evidence was recorded"
                time.sleep(0.01)
        return codec.unpack(cast(bytes, packed))

    def redis(self) -> redis.Redis:
        """The store of our own gateway; close it."""
        if self.valkey is None:
            pytest.fail("this gateway records nothing that can be looked up")
        return self.valkey.client()

    def resident(self) -> int:
        """Bytes of memory its process holds."""
        if self.pid is None:
            pytest.fail("say --gateway-pid")
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


class Gateways:
    """The gateway in every way it is set up; ours are started when somebody asks for them."""

    def __init__(
        self, main: Gateway | None, upstreams: list[str], folder: Path, valkey: Valkey | None, given: dict[str, str]
    ) -> None:
        self._upstreams = upstreams
        self._folder = folder
        self._valkey = valkey
        self._given = given
        self._running: dict[str, Gateway] = {"plain": main} if main is not None else {}

    @property
    def main(self) -> Gateway:
        """As it is."""
        return self.variant("plain")

    def variant(self, name: str, *, otherwise: str | None = None) -> Gateway:
        """Set up otherwise; fails the test when there is none, and no other one will do."""
        if name not in self._running:
            if otherwise is not None and self._valkey is None and name not in self._given:
                return self.variant(otherwise)
            if self._valkey is not None:
                self._running[name] = self.start(name)
            elif name in self._given:
                main = self.main
                self._running[name] = Gateway(self._given[name].rstrip("/"), main.model, main.key)
            else:
                pytest.fail(f"this gateway was not given with --variant {name}=URL")
        return self._running[name]

    def start(self, name: str) -> Gateway:
        """Another process of our own."""
        if self._valkey is None:
            pytest.fail("only our own gateway can be started and stopped")
        urls = self._upstreams if name == "pair" else self._upstreams[:1]
        backend = {"model": MODEL, "api_key": BACKEND_KEY, "runtime": "vllm-0.32-v2"}
        if name == "recorded":
            backend["served_model"] = "smollm2"
        settings: dict[str, Any] = {
            "port": 0,
            "redis_url": self._valkey.url,
            "keys": [{"name": "client", "sha256": hash_key(CLIENT_KEY)}],
            "models": {MODEL: {"vocab_size": 1000}},
            "backends": [{"name": f"b{at}", "url": url, **backend} for at, url in enumerate(urls, 1)],
        }
        config = self._folder / f"{name}-{time.monotonic_ns()}.yaml"
        config.write_text(json.dumps(settings | VARIANTS[name]))
        environ = {key: value for key, value in os.environ.items() if not key.startswith("COUNTERSIGN_")}
        command = [sys.executable, "-c", "import countersign, sys; sys.exit(countersign.main())", "serve"]
        log = config.with_suffix(".log")
        with log.open("w") as out:
            process = subprocess.Popen([*command, "--config", str(config)], stderr=out, text=True, env=environ)
        return Gateway(_listening(process, log), pid=process.pid, valkey=self._valkey, process=process)

    def stop(self) -> None:
        """End those that were started."""
        processes = [gateway.process for gateway in self._running.values() if gateway.process is not None]
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def _listening(process: subprocess.Popen[str], log: Path) -> str:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and process.poll() is None:
        for line in log.read_text().splitlines():
            if line.startswith("{") and json.loads(line)["message"] == "listening":
                url: str = json.loads(line)["url"]
                return url
        time.sleep(0.05)
    process.kill()
    process.wait()
    raise AssertionError(log.read_text())
