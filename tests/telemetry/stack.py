"""A running stack of real processes: the proxy, a worker with its webhook process, a reference server, Valkey."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
import yaml

from benchmarks.chaos import toy
from benchmarks.demo.processes import Child, Children, answers, free_ports
from policies.settings import hash_key
from tests.support.valkey import Valkey
from tests.support.waiting import wait_until
from tests.verifier_pool.receiver import Receiver, listening, status

KEY = "sk-telemetry-client"
SECRET = "whsec_" + "c2VjcmV0" * 5

Span = dict[str, Any]


@dataclass(frozen=True)
class Stack:
    """What runs, and where it writes."""

    folder: Path
    url: str
    receiver: Receiver
    children: Children
    proxy: Child
    worker: Child
    valkey: Valkey

    @property
    def logs(self) -> str:
        """All that every process printed."""
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*.log")))

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Log lines of a process, all of which are JSON."""
        return [orjson.loads(line) for line in (self.folder / f"{name}.log").read_bytes().splitlines()]

    def spans(self) -> list[Span]:
        """All that were exported so far."""
        path = self.folder / "spans.jsonl"
        return [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []

    def trace_of(self, id: str, *kinds: str) -> list[Span]:
        """The trace that a generation belongs to, once it holds spans of these names."""

        def found() -> list[Span]:
            spans = self.spans()
            traces = {span["trace"] for span in spans if span["attributes"].get("countersign.id") == id}
            return [span for span in spans if span["trace"] in traces]

        def whole() -> bool:
            there = {span["name"] for span in found()}
            assert set(kinds) <= there, (kinds, there, self.logs[-3000:])
            return True

        wait_until(whole)
        return found()

    def verification(self, id: str, key: str = KEY) -> dict[str, Any]:
        """The verification, once it is done."""
        headers = {"authorization": f"Bearer {key}"}
        answer = httpx.get(f"{self.url}/v1/verifications/{id}?wait=20", headers=headers, timeout=120, trust_env=False)
        said: dict[str, Any] = answer.json()
        assert said.get("status") == "done", (said, self.logs[-3000:])
        return said


@contextmanager
def running(
    folder: Path,
    backend: str | None = None,
    *,
    program: tuple[str, ...] = ("-m", "countersign"),
    **changes: Any,
) -> Iterator[Stack]:
    """Everything, started and ended.

    Args:
        backend: URL of the one backend; without it one that answers as vLLM would with the toy model.
        program: Python's arguments for `countersign`.
        changes: of the settings, section by section.
    """
    with Valkey() as valkey, listening(Receiver(status(200))) as receiver, Children(folder) as children:
        upstream, engine, port = free_ports(3)
        if backend is None:
            script = ["--port", str(upstream), "--log", str(folder / "upstream.jsonl"), "--interval-ms", "1"]
            children.start("upstream", [sys.executable, "-m", "benchmarks.chaos.upstream", *script])
        script = ["--port", str(engine), "--model", "toy", "--pause-ms", "1"]
        children.start("engine", [sys.executable, "-m", "benchmarks.chaos.engine", *script])
        tree = _settings(folder, backend or f"http://127.0.0.1:{upstream}", engine, port, valkey.url, receiver.url)
        config = folder / "countersign.yaml"
        config.write_text(yaml.safe_dump(_merged(tree, changes)))
        given = ["--config", str(config)]
        proxy = children.start("proxy", [sys.executable, *program, "serve", *given])
        work = children.start("worker", [sys.executable, *program, "worker", *given])
        url = f"http://127.0.0.1:{port}"
        stack = Stack(folder, url, receiver, children, proxy, work, valkey)
        ready = {
            "proxy": answers(f"{url}/readyz"),
            "worker": lambda: "ready: taking replays" in work.log.read_text(),
            "webhooks": lambda: "ready: delivering webhooks" in work.log.read_text(),
        }
        children.wait(ready, 600, lambda missing: None)
        yield stack


def _settings(folder: Path, backend: str, engine: int, port: int, redis_url: str, hook: str) -> dict[str, Any]:
    declared = {"runtime": toy.RUNTIME, "precision": "bf16", "engine": toy.ENGINE}
    return {
        "host": "127.0.0.1",
        "port": port,
        "redis_url": redis_url,
        "keys": [{"name": "client", "sha256": hash_key(KEY)}],
        "models": {
            "toy": {
                "vocab_size": toy.VOCABULARY,
                "reference": {"kind": "vllm_http", "url": f"http://127.0.0.1:{engine}", "canary_seconds": 0},
            }
        },
        "backends": [{"name": "b1", "url": backend, "model": "toy", **declared}],
        "health": {"interval": 0},
        "audit": {"rate": 1.0, "secret": "0" * 32},
        "webhook": {"url": hook, "secret": SECRET, "allow_private": True},
        "telemetry": {"traces": "file", "file": str(folder / "spans.jsonl"), "log_level": "debug"},
    }


def _merged(tree: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(tree)
    for name, value in changes.items():
        both = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = _merged(merged[name], value) if both else value
    return merged
