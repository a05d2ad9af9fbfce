"""The processes under test, started and stopped here: backend, Valkey, `countersign serve`, `countersign worker`."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import orjson
import yaml
from redis import Redis

from benchmarks.children import Children, counted
from benchmarks.demo.processes import free_ports
from benchmarks.harness.progress import LOG_EVERY
from benchmarks.harness.usage import descendants, family, memory_bytes, tree_seconds
from benchmarks.overhead.asking import COUNTED, PATHS
from benchmarks.overhead.backend import SCRIPTED, Backend, environment
from benchmarks.overhead.layout import calibration, settings, unplace
from benchmarks.overhead.steps import DIRECT, PLAIN
from policies.errors import CountersignError
from proxy.embedded import EmbeddedValkey
from verifier_pool.link import running
from verifier_pool.link.queue import OPEN, verdict_key

START_SECONDS = 60.0
ENGINE_SECONDS = 540.0
"""What a server or a reference gets to load."""
RELOAD_SECONDS = 20.0
PROFILE, KEPT = "profile.json", "calibration"
"""What --calibrate makes, in the output folder; and what it has measured so far, until that is made."""
ROLES = ("proxy", "plain", "verify", "replay", "engine", "store")
"""Of processes whose CPU is told apart: the proxy; the one that verifies nothing; CPU workers; the replay process; its
engine's own processes; Valkey."""
Say = Callable[[str], None]
COUNTERSIGN = (sys.executable, "-m", "countersign")
_MEASURED = re.compile(r"^.*\d+ of \d+ answers, .*$", re.MULTILINE)
"""What a calibration says of how far it is."""
_READY = "ready: "
"""What a worker logs before it takes work."""


class Stack:
    """Starts what the arms need; a context manager. It `say`s what it waits for.

    Attributes:
        urls: `direct`, `plain`, `proxy` and `counted`, without `/v1`.

    Raises:
        CountersignError: a process did not start; the text ends with the tail of its log.
    """

    def __init__(self, options: Namespace, backend: Backend, say: Say = lambda _: None) -> None:
        self._options = options
        self._say = say
        # A short name: a Unix socket's path goes below it and may have 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="cs-bench-"))
        self._children = Children(self.folder, environment(options) if backend.kind != SCRIPTED else None)
        self._stack = contextlib.ExitStack()
        self.backend = backend
        self.urls: dict[str, str] = {}
        self.replays = options.reference != "none"

    def __enter__(self) -> Stack:
        try:
            self.urls[DIRECT] = self._backend()
            self.backend = replace(self.backend, url=self.urls[DIRECT])
            self._start_countersign()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    @property
    def redis_url(self) -> str:
        """Of the store that the proxy and the workers share."""
        return self._redis_url

    def audit(self, rate: float) -> None:
        """Have this share of answers replayed from now on. Raises CountersignError when a process does not follow."""
        self._write(rate)
        asked = running.ask(self.store, "bench overhead")
        deadline = time.monotonic() + RELOAD_SECONDS
        while not all(running.described(each, asked.id)["followed"] for each in running.processes(self.store)):
            self.check()
            if time.monotonic() > deadline:
                raise CountersignError(f"a process did not follow new settings within {RELOAD_SECONDS:.0f} s")
            time.sleep(0.1)

    def undecided(self) -> int:
        """Generations that have no verdict yet."""
        return int(self.store.zcard(OPEN))

    def verdicts(self, ids: Sequence[str]) -> dict[str, str]:
        """Verdicts by id, with the reasons where nothing was checked: `unverified: backlog`."""
        found = cast(list[bytes | None], self.store.mget([verdict_key(id) for id in ids])) if ids else []
        return {id: _word(orjson.loads(text)) for id, text in zip(ids, found, strict=True) if text is not None}

    def cpu(self) -> dict[str, float]:
        """CPU seconds of every role so far."""
        pids = self._pids()
        return {role: tree_seconds(pids.get(role, [])) for role in ROLES}

    def stored(self) -> dict[str, int]:
        """What Valkey has taken, given and kept so far, in bytes, and commands."""
        stats, memory = self.store.info("stats"), self.store.info("memory")
        return {
            "in": int(stats["total_net_input_bytes"]),
            "out": int(stats["total_net_output_bytes"]),
            "kept": int(memory["used_memory"]),
            "commands": int(stats["total_commands_processed"]),
        }

    def replayed(self) -> dict[str, float]:
        """Seconds in which the reference had anything to replay, and tokens it replayed; zeros without one."""
        names = {"busy_s": "countersign_replay_busy_seconds_total", "tokens": "countersign_replay_tokens_total"}
        if not self.replays:
            return dict.fromkeys(names, 0.0)
        url = f"http://127.0.0.1:{self._metrics_port}"
        return {name: counted(url, metric) for name, metric in names.items()}

    def peak_mib(self) -> float:
        """Most memory that the proxy ever held."""
        return memory_bytes(self._children.pid("proxy")) / 2**20

    def check(self) -> None:
        """Raises CountersignError when a process has ended."""
        self._children.check()

    def stop(self) -> None:
        """End every process, last started first, and remove their folder."""
        self._children.stop()
        self._stack.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _pids(self) -> dict[str, list[int]]:
        found = {name: family(self._children.pid(name)) for name in ("proxy", "verify")} | {"store": [self._store_pid]}
        if PLAIN in self.urls:
            found[PLAIN] = family(self._children.pid(PLAIN))
        if self.replays:
            replay = self._children.pid("replay")
            found |= {"replay": [replay], "engine": descendants(replay)}
        return found

    def _backend(self) -> str:
        backend = self.backend
        if not backend.command:
            return backend.url
        if backend.kind == SCRIPTED:
            return f"http://127.0.0.1:{self._children.port('backend', backend.command)}"
        self._say("starting the backend")
        port = free_port()
        self._children.start("backend", [*backend.command, "--port", str(port)])
        url = f"http://127.0.0.1:{port}"
        self._children.wait("backend", lambda: answers(f"{url}/v1/models"), ENGINE_SECONDS)
        return url

    def _start_countersign(self) -> None:
        valkey = self._stack.enter_context(EmbeddedValkey(str(self.folder / "v")))
        self._redis_url = f"unix://{valkey.socket}"
        self.store = Redis.from_url(self._redis_url)
        self._stack.callback(self.store.close)
        self._store_pid = int(self.store.info("server")["process_id"])
        ports = free_ports(4)
        self._proxy_port, plain_port, counted_port, self._metrics_port = ports
        self.urls |= {"proxy": f"http://127.0.0.1:{self._proxy_port}", COUNTED: f"http://127.0.0.1:{counted_port}"}
        if self._options.calibrate and self._options.profile is None:
            self._options.profile = self._calibrated()
        self._write(max(self._options.audit))
        self._say("starting proxy and workers" + (", and what replays" if self.replays else ""))
        if self.replays:
            self._start_worker("replay", "--only", "replay", config="replay")
        self._start_worker("verify", "--only", "verify", "--processes", str(self._options.workers))
        self._start_proxy("proxy", self.urls["proxy"])
        if PLAIN in self._options.arms:
            self.urls[PLAIN] = f"http://127.0.0.1:{plain_port}"
            self._save("plain", self._plain(plain_port))
            self._start_proxy(PLAIN, self.urls[PLAIN])
        self._wait_for_workers()

    def _calibrated(self) -> Path:
        """A profile of this very backend and reference, made unless an earlier run of the folder left it.

        Raises CountersignError when it cannot be made.
        """
        profile: Path = self._options.output / PROFILE
        if profile.exists():
            return profile
        tree = settings(self._options, self.backend, self.urls, self._redis_url, self._proxy_port, 0.0)
        tree["backends"] = [tree["backends"][0] | {"trusted": True}]
        self._save("calibrate", tree)
        kept = self._options.output / KEPT
        words = calibration(self._options, self._path("calibrate"), profile, kept)
        self._say("calibrating: starting what replays")
        code = self._followed(self._children.start("calibrate", [*COUNTERSIGN, *words]))
        self._children.kill("calibrate")
        if code:
            raise CountersignError(f"calibrate did not end well\n{self._children.tail('calibrate')}")
        shutil.rmtree(kept, ignore_errors=True)
        unplace(profile)
        return profile

    def _followed(self, child: subprocess.Popen[bytes]) -> int:
        """Say how far a calibration is until it ends; its exit code, or −1 when it stands still."""
        told, since = "", time.monotonic()
        spoken = since
        while (code := child.poll()) is None:
            now = time.monotonic()
            lines = _MEASURED.findall(self._children.tail("calibrate"))
            if lines and lines[-1] != told:
                told, since = lines[-1], now
                if now - spoken >= LOG_EVERY:
                    spoken = now
                    self._say(f"calibrating: {told}")
            if now - since > ENGINE_SECONDS:
                return -1
            time.sleep(0.5)
        return code

    def _start_proxy(self, name: str, url: str) -> None:
        config = "countersign" if name == "proxy" else name
        self._children.start(name, [*COUNTERSIGN, "serve", "--config", str(self._path(config))])
        self._children.wait(name, lambda: answers(f"{url}/readyz"), START_SECONDS)

    def _start_worker(self, name: str, *words: str, config: str = "countersign") -> None:
        self._children.start(name, [*COUNTERSIGN, "worker", "--config", str(self._path(config)), *words])

    def _wait_for_workers(self) -> None:
        expected = {"verify": self._options.workers} | ({"replay": 1} if self.replays else {})
        for name, count in expected.items():
            log = self.folder / f"{name}.log"
            self._children.wait(
                name,
                lambda log=log, count=count: log.read_text(errors="replace").count(_READY) >= count,  # type: ignore[misc]
                ENGINE_SECONDS,
            )

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.yaml"

    def _save(self, name: str, tree: Mapping[str, Any]) -> None:
        part = self._path(f"{name}.part")
        part.write_text(yaml.safe_dump(dict(tree)))
        part.replace(self._path(name))

    def _write(self, rate: float) -> None:
        tree = settings(self._options, self.backend, self.urls, self._redis_url, self._proxy_port, rate)
        self._save("countersign", tree)
        if self.replays:
            self._save("replay", tree | {"metrics": {"port": self._metrics_port}})

    def _plain(self, port: int) -> dict[str, Any]:
        """Of a proxy that relays as it comes: what it passes on is not verified, and nothing is asked for that."""
        tree = settings(self._options, self.backend, self.urls, f"{self._redis_url}?db=1", port, 0.0)
        return tree | {"relay": {"passthrough": [PATHS[self._options.endpoint]]}}


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
