"""Who dies when: a seeded plan of kills and cuts, carried out on whoever is alive then."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.fleet import ENGINE, PROXY, REDIS, REFERENCE, WORKER, Fleet
from benchmarks.chaos.relay import Relay
from benchmarks.demo import watchdog

CUT = "network cut"
BLACKHOLE = "network black hole"
NETWORK = (CUT, BLACKHOLE)
SHARES: Mapping[str, float] = {WORKER: 6, REFERENCE: 5, ENGINE: 5, PROXY: 3, REDIS: 2, CUT: 2, BLACKHOLE: 2}
"""How often each kind comes, relative to the others. Without Redis nothing is recorded, so it goes more rarely."""
PATIENCE = 2.0
LOADING = 60.0
"""Seconds that a blow waits for a victim, and for a real engine that still loads."""
CUT_SECONDS = (0.1, 2.0)


@dataclass(frozen=True, slots=True)
class Blow:
    """One thing that was done: Unix seconds, what, to whom, and for how long where it passes by itself."""

    at: float
    kind: str
    victim: str
    seconds: float | None = None


def plan(rng: random.Random, count: int, seconds: float, kinds: Sequence[str]) -> list[tuple[float, str]]:
    """`count` blows at random times in (0, `seconds`), every kind about as often as its share, in random order."""
    total = sum(SHARES[kind] for kind in kinds)
    wanted = [kind for kind in kinds for _ in range(max(1, round(count * SHARES[kind] / total)))]
    wanted += [rng.choice(list(kinds)) for _ in range(count - len(wanted))]
    rng.shuffle(wanted)
    return list(zip(sorted(rng.uniform(0, seconds) for _ in wanted), wanted, strict=True))


def cores(root: int) -> list[int]:
    """Processes below this one that are vLLM's EngineCore."""
    found = []
    for pid in watchdog.tree(root) - {root}:
        with contextlib.suppress(OSError):
            if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


class Monkey:
    """Carries a plan out. `relays` are by name of what stands behind them."""

    def __init__(self, fleet: Fleet, relays: Mapping[str, Relay], rng: random.Random) -> None:
        self.blows: list[Blow] = []
        self._fleet = fleet
        self._relays = relays
        self._rng = rng
        self._healing: set[asyncio.Task[None]] = set()

    @property
    def counts(self) -> Counter[str]:
        """Blows by kind."""
        return Counter(blow.kind for blow in self.blows)

    async def run(self, blows: Sequence[tuple[float, str]]) -> None:
        """Every blow at its time, or as soon as there is a victim for it, and where there is none for long, another
        one; returns when the network is whole again.
        """
        start = time.monotonic()
        for at, kind in blows:
            await asyncio.sleep(max(0.0, start + at - time.monotonic()))
            while not self._strike(kind):
                await asyncio.sleep(0.05)
                loading = kind == ENGINE and not self._fleet.of(ENGINE)
                if time.monotonic() > start + at + (LOADING if loading else PATIENCE):
                    kind = self._rng.choice([other for _, other in blows])
        await asyncio.gather(*self._healing)

    def _strike(self, kind: str) -> bool:
        if kind in NETWORK:
            return self._sever(kind)
        alive = [member for member in self._fleet.of(kind) if member.alive]
        if not alive:
            return kind == ENGINE and self._strike_inside()
        victim = self._rng.choice(alive)
        done = self._fleet.kill(victim)
        if done:
            self.blows.append(Blow(time.time(), kind, victim.name))
        return done

    def _strike_inside(self) -> bool:
        """Kill an engine that a reference process runs below itself."""
        ready = [member for member in self._fleet.of(REFERENCE) if member.life is not None and member.ready]
        engines = [(member, pid) for member in ready if member.life is not None for pid in cores(member.life.pid)]
        if not engines:
            return False
        victim, pid = self._rng.choice(engines)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self.blows.append(Blow(time.time(), ENGINE, victim.name))
        return True

    def _sever(self, kind: str) -> bool:
        whole = [name for name, relay in self._relays.items() if relay.whole]
        if not whole:
            return False
        name = self._rng.choice(whole)
        relay, seconds = self._relays[name], self._rng.uniform(*CUT_SECONDS)
        relay.cut() if kind == CUT else relay.swallow()
        self.blows.append(Blow(time.time(), kind, name, seconds))
        task = asyncio.create_task(self._heal(relay, seconds, reset=self._rng.random() < 0.5))
        self._healing.add(task)
        task.add_done_callback(self._healing.discard)
        return True

    async def _heal(self, relay: Relay, seconds: float, *, reset: bool) -> None:
        await asyncio.sleep(seconds)
        relay.heal(reset=reset)
