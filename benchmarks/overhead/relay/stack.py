"""The processes under test, each on a core of its own as far as there are any."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.children import Children, counted
from benchmarks.overhead.answer import MODEL, VOCABULARY
from benchmarks.overhead.stack import answers, free_port
from policies.errors import CountersignError
from policies.settings import hash_key
from proxy.embedded import EmbeddedValkey

START_SECONDS = 90.0
KEY = "sk-benchmark"
_ENVIRONMENT = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""Else LiteLLM fetches a list of prices before it starts."""


@dataclass(frozen=True, slots=True)
class Cores:
    """Which core runs whom. With two of them all but the gateway share one."""

    client: int
    backend: int
    store: int
    gateway: int

    @classmethod
    def of(cls, usable: Sequence[int]) -> Cores:
        """Places on these cores, the gateway's kept free of all others where there are two."""
        ordered = sorted(usable)
        gateway, *others = ordered[::-1]
        others = others or [gateway]
        return cls(others[0], others[1 % len(others)], others[2 % len(others)], gateway)


class RelayStack:
    """Starts backend, Valkey, forwarder, proxy and LiteLLM; a context manager.

    Args:
        tokens: of the longest answer.
        litellm: path of the command that runs LiteLLM's proxy, or None.

    Raises:
        CountersignError: a process did not start; the text ends with the tail of its log.
    """

    def __init__(self, tokens: int, litellm: str | None) -> None:
        self.cores = Cores.of(sorted(os.sched_getaffinity(0)))
        self.urls: dict[str, str] = {}
        self._tokens = tokens
        self._litellm = litellm
        self._stack = contextlib.ExitStack()
        self._before = os.sched_getaffinity(0)
        self._folder = Path()

    def __enter__(self) -> RelayStack:
        # A short name: a Unix socket's path goes below it and may have 107 bytes.
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="cs-relay-")))
        self._children = Children(self._folder, _ENVIRONMENT)
        try:
            os.sched_setaffinity(0, {self.cores.store})
            valkey = self._stack.enter_context(EmbeddedValkey(str(self._folder / "v")))
            os.sched_setaffinity(0, {self.cores.client})
            self.urls["direct"] = self._backend()
            self.urls["floor"] = self._floor()
            self.urls["proxy"] = self._proxy(f"unix://{valkey.socket}")
            if self._litellm is not None:
                self.urls["litellm"] = self._other(self._litellm)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def arms(self) -> list[str]:
        """`direct` and what runs in between: `floor`, `proxy`, `litellm`."""
        return list(self.urls)

    def pid(self, arm: str) -> int:
        """Of the process between client and backend. Raises KeyError for `direct`."""
        return self._children.pid(arm)

    def unrecorded(self) -> float:
        """Answers so far whose evidence the proxy did not keep, or whose job it did not queue."""
        return counted(self.urls["proxy"], "countersign_unrecorded_total")

    def check(self) -> None:
        """Raises CountersignError when a process has ended."""
        self._children.check()

    def stop(self) -> None:
        """End every process, last started first."""
        self._children.stop()
        self._stack.close()
        os.sched_setaffinity(0, self._before)

    def _backend(self) -> str:
        words = [sys.executable, "-m", "benchmarks.overhead.upstream", f"--tokens={self._tokens}"]
        return f"http://127.0.0.1:{self._children.port('backend', _pinned(words, self.cores.backend))}"

    def _floor(self) -> str:
        host, _, port = self.urls["direct"].removeprefix("http://").partition(":")
        words = [sys.executable, "-m", "benchmarks.overhead.relay.floor", host, port]
        return f"http://127.0.0.1:{self._children.port('floor', _pinned(words, self.cores.gateway))}"

    def _proxy(self, redis_url: str) -> str:
        port = free_port()
        settings: dict[str, Any] = {
            "host": "127.0.0.1",
            "port": port,
            "redis_url": redis_url,
            "models": {MODEL: {"vocab_size": VOCABULARY}},
            "backends": [{"name": "bench", "url": self.urls["direct"], "model": MODEL, "runtime": "vllm-0.32-v2"}],
            "keys": [{"name": "bench", "sha256": hash_key(KEY)}],
            "audit": {"rate": 0.0},
            # Nobody takes the jobs; shedding them would be cheaper than recording them.
            "verification": {"max_backlog": 10**7, "max_backlog_bytes": 2**40},
        }
        config = self._folder / "countersign.yaml"
        config.write_text(yaml.safe_dump(settings))
        words = [sys.executable, "-m", "countersign", "serve", "--config", str(config)]
        self._children.start("proxy", _pinned(words, self.cores.gateway))
        url = f"http://127.0.0.1:{port}"
        self._children.wait("proxy", lambda: answers(f"{url}/readyz"), START_SECONDS)
        return url

    def _other(self, command: str) -> str:
        port = free_port()
        route = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{self.urls['direct']}/v1", "api_key": KEY}
        settings = {
            "model_list": [{"model_name": MODEL, "litellm_params": route}],
            "litellm_settings": {"num_retries": 0, "request_timeout": 120},
            "general_settings": {"master_key": KEY},
            "router_settings": {"disable_cooldowns": True, "num_retries": 0},
        }
        config = self._folder / "litellm.yaml"
        config.write_text(yaml.safe_dump(settings))
        words = [command, "--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
        self._children.start("litellm", _pinned(words, self.cores.gateway))
        url = f"http://127.0.0.1:{port}"
        self._children.wait("litellm", lambda: answers(f"{url}/health/liveliness"), START_SECONDS)
        return url


def _pinned(words: Sequence[str], core: int) -> list[str]:
    return ["taskset", "-c", str(core), *words]


def litellm_version(command: str) -> str:
    """Version of the LiteLLM that a command belongs to. Raises CountersignError when it cannot be run."""
    try:
        done = subprocess.run(
            [command, "--version"],
            capture_output=True,
            text=True,
            timeout=90,
            check=True,
            env=os.environ | _ENVIRONMENT,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CountersignError(f"bench overhead: {command!r} does not run ({error})") from error
    return (done.stdout.strip().splitlines() or ["unknown"])[-1].rpartition(" ")[2]
