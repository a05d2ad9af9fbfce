"""The processes under test, started and stopped here: scripted backend, `countersign serve`, `countersign worker`."""

from __future__ import annotations

import shutil
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import orjson
import yaml
from redis import Redis

from benchmarks.children import Children
from benchmarks.demo.processes import free_ports
from benchmarks.overhead.answer import MODEL, VOCABULARY
from policies.errors import CountersignError
from policies.settings import parse_settings, store_url
from verifier_pool import RQ_PREFIX
from verifier_pool.link.queue import OPEN, verdict_key

START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Backend:
    """What the proxy and the direct arm talk to. `url` ends before `/v1`."""

    url: str
    model: str
    scripted: bool


class Stack:
    """Starts what the arms need; a context manager.

    Args:
        upstream: base URL of a real vLLM, or None for the scripted backend.
        model: served name at a real vLLM; asked from it when None.
        reference: base URL of a vLLM server that replays every answer, or None for CPU checks only.
        script: arguments of the scripted backend.

    Raises:
        CountersignError: a process did not start; the text ends with the tail of its log.
    """

    def __init__(self, *, upstream: str | None, model: str | None, reference: str | None, script: list[str]) -> None:
        self._upstream = upstream.rstrip("/").removesuffix("/v1") if upstream else None
        self._model = model
        self._reference = reference
        self._script = script
        # A short name: a Unix socket's path goes below it and may have 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="cs-bench-"))
        self._children = Children(self.folder)
        self._store: Redis | None = None
        self.backend = Backend("", "", False)
        self.proxy_url = ""

    def __enter__(self) -> Stack:
        try:
            self.backend = self._real() if self._upstream else self._scripted()
            self._start_countersign()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def pid(self, name: str) -> int:
        """Process id of `proxy` or `worker`."""
        return self._children.pid(name)

    def undecided(self) -> int:
        """Generations that have no verdict yet."""
        assert self._store is not None
        return int(self._store.zcard(OPEN))

    def verdicts(self, ids: Sequence[str]) -> dict[str, str]:
        """Verdicts by id, with the reasons where nothing was checked: `unverified: backlog`."""
        assert self._store is not None
        found = cast(list[bytes | None], self._store.mget([verdict_key(id) for id in ids])) if ids else []
        return {id: _word(orjson.loads(text)) for id, text in zip(ids, found, strict=True) if text is not None}

    def check(self) -> None:
        """Raises CountersignError when a process has ended."""
        self._children.check()

    def stop(self) -> None:
        """End every process, last started first, and remove their folder."""
        if self._store is not None:
            self._store.close()
        self._children.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _scripted(self) -> Backend:
        words = [sys.executable, "-m", "benchmarks.overhead.upstream", *self._script]
        return Backend(f"http://127.0.0.1:{self._children.port('backend', words)}", MODEL, True)

    def _real(self) -> Backend:
        assert self._upstream is not None
        if self._model is None:
            try:
                with urllib.request.urlopen(f"{self._upstream}/v1/models", timeout=10) as answer:
                    self._model = str(orjson.loads(answer.read())["data"][0]["id"])
            except (OSError, ValueError, LookupError) as error:
                raise CountersignError(f"no model list at {self._upstream}/v1/models ({error})") from error
        return Backend(self._upstream, self._model, False)

    def _start_countersign(self) -> None:
        settings = self._settings(free_port())
        config = self.folder / "countersign.yaml"
        config.write_text(yaml.safe_dump(settings))
        parsed = parse_settings(config.read_text(), {})
        self.proxy_url = f"http://{parsed.host}:{parsed.port}"
        self._children.start("proxy", [sys.executable, "-m", "countersign", "serve", "--config", str(config)])
        self._children.wait("proxy", lambda: answers(f"{self.proxy_url}/readyz"), START_SECONDS)
        self._store = Redis.from_url(store_url(parsed, {}))
        self._children.start("worker", [sys.executable, "-m", "countersign", "worker", "--config", str(config)])
        listed = RQ_PREFIX + ":workers"
        self._children.wait("worker", lambda: bool(self._store and self._store.scard(listed)), START_SECONDS)

    def _settings(self, port: int) -> dict[str, Any]:
        model: dict[str, Any] = {"vocab_size": VOCABULARY} if self.backend.scripted else {}
        if self._reference:
            model["reference"] = {"kind": "vllm_http", "url": self._reference}
        backend = {"name": "bench", "url": self.backend.url, "model": self.backend.model, "runtime": "vllm-0.32-v2"}
        return {
            "host": "127.0.0.1",
            "port": port,
            "embedded_dir": str(self.folder / "v"),
            "models": {self.backend.model: model},
            "backends": [backend],
            "audit": {"rate": 1.0 if self._reference else 0.0},
        }


def _word(verification: dict[str, Any]) -> str:
    verdict = str(verification["verdict"])
    return f"unverified: {', '.join(verification['reasons'])}" if verdict == "unverified" else verdict


def answers(url: str) -> bool:
    """Whether a GET of it succeeds."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def free_port() -> int:
    """A port that nobody listens on."""
    (port,) = free_ports(1)
    return port
