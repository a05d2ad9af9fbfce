"""The stage: everything started, struck for a while, left alone until it has settled, and read."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from benchmarks.chaos import aof, collect, declared, monkey
from benchmarks.chaos.fleet import ENGINE, PROXY, REDIS, REFERENCE, UPSTREAM, WORKER, Fleet, Member
from benchmarks.chaos.ledger import Ledger, settle
from benchmarks.chaos.monkey import Blow, Monkey
from benchmarks.chaos.nursery import Born, Nursery
from benchmarks.chaos.relay import Relay
from benchmarks.chaos.traffic import Clients
from benchmarks.chaos.valkey import Valkey
from benchmarks.demo import servers
from benchmarks.demo.processes import ChildError, answers, free_ports
from verifier_pool.link.queue import OPEN, UNFOLDED

INTERVAL_MS = 12
START_SECONDS = 300.0


@dataclass(frozen=True)
class Scene:
    """What runs, for how long, and what is done to it.

    Attributes:
        references: processes per model.
        kills: blows in all; 0 leaves everything alone. `seconds`: how long clients ask, and blows fall.
        settle: seconds after which every accepted generation must have its verdict.
        fsync: of the append-only file; `everysec` may lose what was acknowledged in the last second.
        power: Redis's machine loses power whenever Redis is killed.
        engine: folder of a real model that the references replay on, in vLLM engines of their own; it says nothing of
            the toy's answers, so what verdicts say is not looked at.
        tenants: client keys; 0 gives every client its own, without which ids cannot be matched by elimination alone.
        pause: mean seconds between a client's requests.
    """

    proxies: int = 2
    workers: int = 3
    references: int = 2
    models: tuple[str, ...] = ("toy",)
    clients: int = 10
    tenants: int = 0
    kills: int = 200
    seconds: float = 60.0
    settle: float = 90.0
    fsync: str = "always"
    power: bool = False
    engine: str = ""
    pause: float = 0.3
    seed: int = 1


@dataclass
class Outcome:
    """What happened."""

    scene: Scene
    ledger: Ledger
    blows: list[Blow]
    kinds: Counter[str]
    exits: dict[str, list[int]]
    lives: dict[str, int]
    refused: int
    settled_after: float | None
    redis: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, list[int]] = field(default_factory=dict)


class Stage:
    """Every process, and the network between them.

    Attributes:
        keys: the clients' keys, by client.
        memory: bytes in RAM once a second, by life (`worker-1.2` is the second one of `worker-1`).
    """

    def __init__(self, scene: Scene, folder: Path, say: Callable[[str], None]) -> None:
        self.scene = scene
        self.folder = folder
        self.rng = random.Random(scene.seed)
        keys = [f"sk-chaos-{secrets.token_hex(8)}" for _ in range(scene.tenants or scene.clients)]
        turns = [index // len(scene.models) if scene.tenants else index for index in range(scene.clients)]
        self.keys = [keys[turn % len(keys)] for turn in turns]
        self.memory: dict[str, list[int]] = {}
        self.relays: dict[str, Relay] = {}
        self.nursery = Nursery(servers.environment(max(scene.references, 2)) if scene.engine else {})
        self.fleet = Fleet(folder, self.rng)
        self._say = say
        ports = free_ports(2 + len(scene.models) + scene.proxies)
        self._upstream_port, redis_port, *rest = ports
        self.engine_ports = dict(zip(scene.models, rest, strict=False))
        self.proxy_ports = {f"proxy-{n}": port for n, port in enumerate(rest[len(scene.models) :], 1)}
        self.valkey = Valkey(self.nursery, redis_port, folder / "valkey", scene.fsync, power=scene.power)
        self.log = folder / "upstream.jsonl"
        self.profiles = {model: folder / f"profile-{model}.json" for model in scene.models}

    async def run(self, look: Callable[[Stage], None] | None = None) -> Outcome:
        """Everything, once; `look` is called when all has settled and nothing was stopped yet."""
        with self.nursery, self._ending():
            await self._start()
            return await self._play(look)

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        try:
            yield
        finally:
            for relay in self.relays.values():
                relay.stop()
            for member in self.fleet.members:
                member.killed = _nothing
                self.fleet.kill(member)

    async def _start(self) -> None:
        for model, path in self.profiles.items():
            path.write_text(declared.measured(model).to_json())
        script = ["--port", str(self._upstream_port), "--log", str(self.log), "--interval-ms", str(INTERVAL_MS)]
        self._add(UPSTREAM, "upstream", "benchmarks.chaos.upstream", script)
        self.fleet.add(REDIS, "redis", self.valkey.start).killed = self.valkey.died
        for model, port in ({} if self.scene.engine else self.engine_ports).items():
            script = ["--port", str(port), "--model", model]
            self._add(ENGINE, f"engine-{model}", "benchmarks.chaos.engine", script)
        self._say("starting the processes")
        await self._until(self.valkey.answers, "Valkey")
        for name, port in self.proxy_ports.items():
            await self._countersign(PROXY, name, ["serve"], port=port)
        for number in range(1, self.scene.workers + 1):
            await self._countersign(WORKER, f"worker-{number}", ["worker", "--only", "verify"])
        for model in self.scene.models:
            for number in range(1, self.scene.references + 1):
                command = ["worker", "--only", "replay", "--model", model]
                await self._countersign(REFERENCE, f"reference-{model}-{number}", command)
        for name, port in self.proxy_ports.items():
            await self._until(answers(f"http://127.0.0.1:{port}/readyz"), name)
        for member in self.fleet.of(WORKER) + self.fleet.of(REFERENCE):
            await self._until(partial(getattr, member, "ready"), member.name)

    async def _countersign(self, kind: str, name: str, command: Sequence[str], port: int = 0) -> None:
        """A process of ours, with relays of its own between it and whatever it talks to."""
        store = await self._relay(f"{name} – redis", self.valkey.port)
        references = {}
        for model, engine in self.engine_ports.items():
            if self.scene.engine:
                references[model] = declared.engine(self.scene.engine)
                continue
            between = await self._relay(f"{name} – {model}", engine) if kind == REFERENCE else None
            references[model] = declared.server(between.port if between else engine)
        tree = declared.settings(
            redis_port=store.port,
            upstream_port=self._upstream_port,
            references=references,
            profiles=self.profiles,
            keys=list(dict.fromkeys(self.keys)),
            port=port,
            aof=self.scene.fsync == "always",
        )
        config = declared.write(self.folder, name, tree)
        self._add(kind, name, "countersign", [*command, "--config", str(config)])

    async def _relay(self, name: str, target: int) -> Relay:
        self.relays[name] = relay = Relay(target)
        await relay.start()
        return relay

    def _add(self, kind: str, name: str, module: str, argv: list[str]) -> Member:
        def start(log: Path) -> Born:
            return self.nursery.start(module, argv, log)

        return self.fleet.add(kind, name, start)

    async def _play(self, look: Callable[[Stage], None] | None) -> Outcome:
        scene = self.scene
        over = asyncio.Event()
        tending = asyncio.create_task(self._tend())
        interval = INTERVAL_MS / 1000
        rng = random.Random(scene.seed + 1)
        clients = Clients(self.proxy_ports, scene.models, self.keys, rng, pause=scene.pause, interval=interval)
        traffic = asyncio.create_task(clients.run(over.is_set))
        striker = Monkey(self.fleet, self.relays, self.rng)
        kinds = [kind for kind in monkey.SHARES if self.fleet.of(kind) or kind in (ENGINE, *monkey.NETWORK)]
        plan = monkey.plan(self.rng, scene.kills, scene.seconds, kinds) if scene.kills else []
        self._say(f"{len(plan)} blows within {scene.seconds:.0f} s")
        started = time.monotonic()
        await striker.run(plan)
        await asyncio.sleep(max(0.0, started + scene.seconds - time.monotonic()))
        over.set()
        self.fleet.hurry()
        await traffic
        self._say(f"{len(clients.asked)} requests; waiting for what is open")
        settled = await self._settled()
        if look is not None:
            await asyncio.to_thread(look, self)
        tending.cancel()
        with self.valkey.client() as redis:
            found, info = collect.kept(redis), redis.info()
        ledger = settle(
            clients.asked,
            collect.served(self.log),
            found,
            aof.writes(self.valkey.folder),
            collect.away(self.fleet.of(PROXY)),
            self.keys,
            truthful=not scene.engine,
        )
        return Outcome(
            scene=scene,
            ledger=ledger,
            blows=striker.blows,
            kinds=striker.counts,
            exits={member.name: member.exits for member in self.fleet.members if member.exits},
            lives={member.name: len(member.logs) for member in self.fleet.members},
            refused=clients.refused,
            settled_after=settled,
            memory=self.memory,
            redis={"version": info.get("valkey_version"), "used_memory": info["used_memory"]},
        )

    async def _tend(self) -> None:
        for turn in itertools.count():
            self.fleet.tend()
            self.valkey.note()
            if turn % 20 == 0:
                self._weigh()
            await asyncio.sleep(0.05)

    def _weigh(self) -> None:
        for member in self.fleet.members:
            if member.life is not None:
                with contextlib.suppress(OSError, ValueError):
                    pages = int(Path(f"/proc/{member.life.pid}/statm").read_text().split()[1])
                    self.memory.setdefault(member.logs[-1].stem, []).append(pages * os.sysconf("SC_PAGE_SIZE"))

    async def _settled(self) -> float | None:
        """Seconds until nothing waited for a verdict or to be counted; None when that was too long."""
        began = time.monotonic()
        while time.monotonic() - began < self.scene.settle:
            await asyncio.sleep(0.2)
            try:
                with self.valkey.client() as redis:
                    if not _left(redis):
                        return time.monotonic() - began
            except RedisError:
                continue
        return None

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not await asyncio.to_thread(condition):
            for member in self.fleet.members:
                if not member.alive:
                    raise ChildError(f"{member.name} ended at once\n{member.last_lines()}")
            if time.monotonic() > deadline:
                raise ChildError(f"{what} was not ready within {START_SECONDS:.0f} s; see {self.folder}")
            await asyncio.sleep(0.1)


def _nothing() -> None:
    pass


def _left(redis: Redis) -> int:
    return int(redis.zcard(OPEN)) + int(redis.scard(UNFOLDED))
