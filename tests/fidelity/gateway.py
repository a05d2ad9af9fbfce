"""A gateway to put questions to, and our own as a process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import redis

from policies import codec
from policies.evidence import Evidence
from policies.settings import hash_key
from tests.fidelity.meaning import lacking
from tests.support.raw_http import Answer, Call
from tests.support.valkey import Valkey
from tests.support.waiting import PATIENCE
from verifier_pool.link.queue import evidence_key

MODEL = "m"
CLIENT_KEY = "sk-client-4b1d"
BACKEND_KEY = "sk-backend-9f3e"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
EMBEDDINGS = "/v1/embeddings"
KEEPALIVE = 0.2
_IMPATIENT = {"timeouts": {"connect": 0.5, "first_byte": 0.6, "idle": 0.6, "total": 4.0}}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "impatient": _IMPATIENT,
    "unreachable": {"timeouts": {"connect": 0.5, "first_byte": PATIENCE, "idle": PATIENCE, "total": PATIENCE}},
    "keepalive": {"relay": {"keepalive": KEEPALIVE}},
    "pair": {},
    "ending": {},
    "breaker": {"breaker": {}},
    "recorded": {
        "models": {MODEL: {"tokenizer": str(Path(__file__).parents[1] / "data" / "tokenizers" / "smollm2.json")}}
    },
}
_START = 300.0
_CALM = 1.0
_ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "count"}]},
    COMPLETIONS: {"prompt": "count"},
    RESPONSES: {"input": "count"},
    MESSAGES: {"messages": [{"role": "user", "content": "count"}], "max_tokens": 8},
    EMBEDDINGS: {"input": "count"},
}


@dataclass
class Gateway:
    """One gateway. `valkey` is known of our own; so is `pid`, and of others when it was said."""

    url: str
    model: str = MODEL
    key: str = CLIENT_KEY
    pid: int | None = None
    valkey: Valkey | None = None
    process: subprocess.Popen[str] | None = field(default=None, repr=False)
    ready: str = "/readyz"
    models: dict[str, str] = field(default_factory=dict)

    @property
    def ours(self) -> bool:
        """Whether it is held to what only our own proxy promises."""
        return self.valkey is not None

    def body(self, path: str = CHAT, **fields: Any) -> bytes:
        """A request's JSON."""
        return json.dumps({"model": self.models.get(path, self.model), **_ASKED.get(path, {}), **fields}).encode()

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
            lacking("nothing is recorded that can be looked up")
        with self.valkey.client() as client:
            deadline = time.monotonic() + PATIENCE
            while (packed := client.get(evidence_key(id))) is None:
                assert time.monotonic() < deadline, "no evidence was recorded"
                time.sleep(0.01)
        return codec.unpack(cast(bytes, packed))

    def redis(self) -> redis.Redis:
        """The store of our own gateway; close it."""
        if self.valkey is None:
            lacking("nothing is recorded that can be looked up")
        return self.valkey.client()

    def resident(self) -> int:
        """Bytes of memory its process holds."""
        if self.pid is None:
            lacking("no --gateway-pid was given")
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def calm(self) -> None:
        """Wait until it is up, and through with what an earlier test left it with."""
        deadline = time.monotonic() + _START
        while True:
            asked = time.monotonic()
            if self.is_ready() and time.monotonic() - asked < _CALM:
                return
            assert time.monotonic() < deadline, f"{self.url} does not get ready"
            time.sleep(0.2)

    def is_ready(self) -> bool:
        """Whether it says that it takes requests."""
        with contextlib.suppress(OSError), self._look(self.ready) as call:
            return call.answer().status == 200
        return False

    def has_ended(self, within: float) -> bool:
        """Whether its process ends in time; our own must end well."""
        deadline = time.monotonic() + within
        while not (gone := self._is_gone()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return gone

    def _is_gone(self) -> bool:
        if self.process is None:
            return self.pid is None or _has_exited(self.pid)
        code = self.process.poll()
        assert code in (None, 0)
        return code == 0

    def _look(self, path: str) -> Call:
        return Call(self.url, path, b"", {"authorization": f"Bearer {self.key}"}, method="GET")


@dataclass(frozen=True)
class Given:
    """Another gateway, as the command line names it: URLs and processes by variant."""

    urls: dict[str, str]
    pids: dict[str, int]
    model: str
    models: dict[str, str]
    key: str
    pid: int | None = None

    def gateway(self, name: str, ready: str) -> Gateway:
        """The variant; ends the test when there is none."""
        if name not in self.urls:
            lacking(f"this gateway was not given with --variant {name}=URL")
        url = self.urls[name].rstrip("/").removesuffix("/v1")
        pid = self.pids.get(name, self.pid if name == "plain" else None)
        gateway = Gateway(url, self.model, self.key, pid, ready=ready, models=self.models)
        gateway.calm()
        return gateway


class Gateways:
    """The gateway in every way it is set up; ours are started when somebody asks for them.

    Attributes:
        keepalive: seconds of silence after which the variant of that name sends a comment.
    """

    def __init__(
        self,
        upstreams: list[str],
        folder: Path,
        *,
        valkey: Valkey | None = None,
        given: Given | None = None,
        keepalive: float = KEEPALIVE,
        ready: str = "/readyz",
    ) -> None:
        self.keepalive = keepalive
        self._upstreams = upstreams
        self._folder = folder
        self._valkey = valkey
        self._given = given
        self._ready = ready
        self._running: dict[str, Gateway] = {}

    @property
    def main(self) -> Gateway:
        """As it is."""
        return self.variant("plain")

    def variant(self, name: str, *, otherwise: str | None = None) -> Gateway:
        """Set up otherwise; ends the test when there is none, and no other one will do."""
        if self._given is not None and otherwise is not None and name not in self._given.urls:
            name = otherwise
        if name not in self._running:
            self._running[name] = self.start(name) if self._given is None else self._given.gateway(name, self._ready)
        elif self._given is not None:
            self._running[name].calm()
        return self._running[name]

    def ending(self) -> Gateway:
        """One whose process may be ended."""
        gateway = self.variant("ending")
        if gateway.pid is None:
            lacking("no --pid ending=PID was given")
        return gateway

    def start(self, name: str) -> Gateway:
        """Another process of our own."""
        assert self._valkey is not None
        first, second, hole = self._upstreams
        urls = {"pair": [first, second], "unreachable": [hole]}.get(name, [first])
        backend = {"model": MODEL, "api_key": BACKEND_KEY, "runtime": "vllm-0.32-v2"}
        if name == "recorded":
            backend["served_model"] = "smollm2"
        settings: dict[str, Any] = {
            "port": 0,
            "redis_url": self._valkey.url,
            "keys": [{"name": "client", "sha256": hash_key(CLIENT_KEY)}],
            "models": {MODEL: {"vocab_size": 1000}},
            "backends": [{"name": f"b{at}", "url": url, **backend} for at, url in enumerate(urls, 1)],
            # One process has hundreds of failures by design, and its upstream expects nobody but the case at hand.
            "breaker": {"failures": 1_000_000},
            "health": {"interval": 0},
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


def _has_exited(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def _listening(process: subprocess.Popen[str], log: Path) -> str:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        for line in log.read_text().splitlines():
            if line.startswith("{") and json.loads(line)["message"] == "listening":
                url: str = json.loads(line)["url"]
                return url
        time.sleep(0.05)
    process.kill()
    process.wait()
    raise AssertionError(log.read_text())
