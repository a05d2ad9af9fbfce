"""The processes under test, each on a core of its own as far as there are any."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

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
    """Starts backend, Valkey, proxy and LiteLLM; a context manager.

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
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = contextlib.ExitStack()
        self._before = os.sched_getaffinity(0)
        self._folder = Path()

    def __enter__(self) -> RelayStack:
        # A short name: a Unix socket's path goes below it and may have 107 bytes.
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="cs-relay-")))
        try:
            os.sched_setaffinity(0, {self.cores.store})
            valkey = self._stack.enter_context(EmbeddedValkey(str(self._folder / "v")))
            os.sched_setaffinity(0, {self.cores.client})
            self.urls["direct"] = self._backend()
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
        """`direct` and the gateways that run."""
        return list(self.urls)

    def pid(self, arm: str) -> int:
        """Of the process between client and backend. Raises KeyError for `direct`."""
        return self._children[arm].pid

    def unrecorded(self) -> float:
        """Answers so far whose evidence the proxy did not keep, or whose job it did not queue."""
        with urllib.request.urlopen(f"{self.urls['proxy']}/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("countersign_unrecorded_total"))

    def check(self) -> None:
        """Raises CountersignError when a process has ended."""
        for name, child in self._children.items():
            if child.poll() is not None:
                raise CountersignError(f"{name} ended with code {child.returncode}\n{self._tail(name)}")

    def stop(self) -> None:
        """End every process, last started first."""
        for child in reversed(self._children.values()):
            child.terminate()
            try:
                child.wait(15)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            if child.stdout is not None:
                child.stdout.close()
        self._children.clear()
        self._stack.close()
        os.sched_setaffinity(0, self._before)

    def _backend(self) -> str:
        child = self._spawn(
            "backend",
            [sys.executable, "-m", "benchmarks.overhead.upstream", f"--tokens={self._tokens}"],
            self.cores.backend,
            piped=True,
        )
        assert child.stdout is not None
        port = child.stdout.readline().decode().strip()
        if not port:
            raise CountersignError(f"the scripted backend did not start\n{self._tail('backend')}")
        return f"http://127.0.0.1:{port}"

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
        self._spawn(
            "proxy", [sys.executable, "-m", "countersign", "serve", "--config", str(config)], self.cores.gateway
        )
        url = f"http://127.0.0.1:{port}"
        self._wait("proxy", f"{url}/readyz")
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
        self._spawn("litellm", words, self.cores.gateway)
        url = f"http://127.0.0.1:{port}"
        self._wait("litellm", f"{url}/health/liveliness")
        return url

    def _spawn(self, name: str, words: list[str], core: int, *, piped: bool = False) -> subprocess.Popen[bytes]:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("COUNTERSIGN_")}
        environ |= _ENVIRONMENT
        # A session of its own: Ctrl-C reaches us alone, and we end the children in order.
        with open(self._folder / f"{name}.log", "wb") as log:
            child = subprocess.Popen(
                ["taskset", "-c", str(core), *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else log,
                stderr=log,
                env=environ,
                start_new_session=True,
            )
        self._children[name] = child
        return child

    def _wait(self, name: str, url: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not answers(url):
            self.check()
            if time.monotonic() > deadline:
                raise CountersignError(f"{name} was not ready within {START_SECONDS:.0f} s\n{self._tail(name)}")
            time.sleep(0.1)

    def _tail(self, name: str) -> str:
        with contextlib.suppress(OSError):
            return "\n".join((self._folder / f"{name}.log").read_text(errors="replace").splitlines()[-20:])
        return ""


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
