"""`countersign attack run`: cheats and honest variants against a running stack, and what it makes of them."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import secrets
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from aiohttp import web

from benchmarks.adversary import local, report, stack
from benchmarks.adversary.base import Cheat, Setup
from benchmarks.adversary.plan import plan
from benchmarks.adversary.registry import ATTACKS
from benchmarks.adversary.score import Summary, summarise
from benchmarks.adversary.servers import Site
from benchmarks.adversary.traffic import PATIENCE, Client
from benchmarks.demo.processes import Children, free_ports
from benchmarks.demo.progress import Progress
from benchmarks.harness import machine
from policies.settings import BackendSettings, Settings

DESCRIPTION = """\
Attack a running stack (countersign serve and countersign worker with the same settings). Cheats are started in front of
its real servers, a second proxy with the same store relays to them, and the stack's own workers judge."""


@dataclass(frozen=True, slots=True)
class Target:
    """The stack and the servers to cheat with. `servers` maps an attack's name, or "" for any, to its server."""

    settings: Settings
    backend: BackendSettings
    truth: Site
    servers: dict[str, Site]
    demo_servers: bool = False
    good: int = 10

    def source(self, attack: type[Cheat]) -> Site | None:
        """Where an attack's tokens come from; None where nobody said."""
        if attack.generates == "true":
            return self.truth
        return self.servers.get(attack.name) or (self.servers.get("") if attack.generates == "cheap" else None)

    def missing(self, attack: type[Cheat]) -> str:
        """Why an attack cannot run here, or nothing."""
        model = self.settings.models[self.backend.model]
        if attack.moe and not model.experts:
            return "skipped: not a mixture-of-experts model"
        if self.source(attack) is not None or (self.demo_servers and attack.name in local.RECIPES):
            return ""
        return (
            "skipped: needs --cheap URL" if attack.generates == "cheap" else f"skipped: needs --cheap {attack.name}=URL"
        )


def main(argv: Sequence[str]) -> int:
    """Run the attacks; 0 when every cheat was caught that should be and no honest variant was held to be one."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.names if name not in ATTACKS]
    if unknown:
        parser.error(f"no attack {unknown[0]!r}; `countersign attack list` names them")
    settings = stack.read(arguments.config)
    stack.check_store(settings)
    target = _target(arguments, settings)
    names = arguments.names or list(ATTACKS)
    chosen = [ATTACKS[name] for name in ATTACKS if name in names]
    with tempfile.TemporaryDirectory(prefix="countersign-attack-") as folder, Children(Path(folder)) as children:
        try:
            summaries = asyncio.run(_attack(arguments, target, chosen, children))
        except KeyboardInterrupt:
            print("\nstopped")
            return 130
    complaints = report.complaints(summaries)
    print("\n".join(complaints or ["Every cheat that should be caught was, and no honest variant was held to be one."]))
    return 1 if complaints and not arguments.no_gate else 0


async def _attack(
    arguments: argparse.Namespace, target: Target, chosen: Sequence[type[Cheat]], children: Children
) -> list[Summary]:
    load = machine.load()
    ports = dict(zip((attack.name for attack in chosen), free_ports(len(chosen)), strict=True))
    # A name of its own per run: what workers remember of a backend must not come from an earlier one.
    mark = secrets.token_hex(3)
    backends = {f"attack-{name}-{mark}": (ATTACKS[name], f"http://127.0.0.1:{port}") for name, port in ports.items()}
    url, key, _ = await asyncio.to_thread(stack.start_proxy, children, target.settings, target.backend, backends)
    client, output, progress = Client(url, key, arguments.patience), report.Output(arguments.output), Progress()
    summaries: list[Summary] = []
    started, begun = time.monotonic(), datetime.now(UTC)
    try:
        for attack in chosen:
            note = target.missing(attack)
            with progress.step(f"{attack.name}{_time_left(started, len(summaries), len(chosen))}"):
                if note:
                    summaries.append(summarise(attack, [], note))
                    continue
                name = f"attack-{attack.name}-{mark}"
                summaries.append(
                    await _one(arguments, target, attack, ports[attack.name], name, client, children, output, progress)
                )
            print("  " + " | ".join(report.cells(summaries[-1])[1:]), flush=True)
    finally:
        await client.close()
        await asyncio.to_thread(stack.forget_standings, target.settings, backends)
        output.finish(summaries, _metadata(arguments, begun, load))
    print(f"\n{report.markdown(summaries)}\n")
    return summaries


async def _one(
    arguments: argparse.Namespace,
    target: Target,
    attack: type[Cheat],
    port: int,
    name: str,
    client: Client,
    children: Children,
    output: report.Output,
    progress: Progress,
) -> Summary:
    source, own = target.source(attack), None
    if source is None:
        site, own = await asyncio.to_thread(local.start, children, attack, progress.tick)
    else:
        site = source
    model = target.settings.models[target.backend.model]
    setup = Setup(site, target.truth, target.backend.runtime, model.eos_token_ids, target.good)
    shots = plan(
        attack,
        target.backend.model,
        arguments.responses,
        arguments.tokens,
        arguments.temperature,
        model.max_model_len,
    )
    together = len(shots) if attack.shape == "batch" else 1 if attack.shape == "repeated" else arguments.concurrency
    try:
        async with _serving(attack(setup), port):
            rows = await client.run(
                name, shots, together, lambda done: progress.tick(f"{done} of {len(shots)} verdicts")
            )
    finally:
        if own is not None:
            await asyncio.to_thread(children.stop, own)
    children.check()
    output.rows(attack.name, rows)
    return summarise(attack, rows)


@contextlib.asynccontextmanager
async def _serving(cheat: Cheat, port: int):  # type: ignore[no-untyped-def]
    runner = web.AppRunner(cheat.app(), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield
    finally:
        await runner.cleanup()


def _target(arguments: argparse.Namespace, settings: Settings) -> Target:
    backend = stack.backend(settings, arguments.backend)
    servers: dict[str, Site] = {}
    for given in arguments.cheap:
        name, found, where = given.partition("=")
        named = bool(found) and name in ATTACKS
        site = stack.site(settings, where if named else given)
        servers[name if named else ""] = site
        servers.setdefault("", site)
    truth = stack.site(settings, arguments.truth or arguments.backend)
    return Target(settings, backend, truth, servers, arguments.demo_servers, max(1, arguments.responses // 2))


def _time_left(started: float, done: int, of: int) -> str:
    if not done:
        return f" (1 of {of})"
    left = (time.monotonic() - started) / done * (of - done)
    return f" ({done + 1} of {of}, about {math.ceil(left / 60)} min left)"


def _metadata(arguments: argparse.Namespace, begun: datetime, load: float) -> dict[str, object]:
    names = ("backend", "responses", "tokens", "temperature", "concurrency", "demo_servers")
    return {
        "begun": begun.isoformat(timespec="seconds"),
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.describe() | {"gpu": machine.gpu()},
        "engine_packages": machine.versions(machine.ENGINE_PACKAGES),
        "load_before": round(load, 2),
        "busy": machine.is_busy(load),
        "arguments": {name: getattr(arguments, name) for name in names},
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="countersign attack run", description=DESCRIPTION)
    parser.add_argument("names", nargs="*", metavar="NAME", help="attacks (default: all that can run here)")
    parser.add_argument("--config", metavar="PATH", help="the stack's settings (default: as for countersign serve)")
    parser.add_argument("--backend", required=True, metavar="BACKEND", help="declared backend that the cheats pose as")
    parser.add_argument(
        "--cheap",
        action="append",
        default=[],
        metavar="[NAME=]URL|BACKEND",
        help="a cheap server for the spoofs; with NAME=, the server of one attack (fp8=, int4=, honest-chunked=, …)",
    )
    parser.add_argument("--truth", metavar="URL|BACKEND", help="server of the true model (default: --backend's)")
    parser.add_argument(
        "--demo-servers",
        action="store_true",
        help="start servers that are missing on this machine's CPU, from the demo's models, one at a time",
    )
    parser.add_argument("--responses", type=_count, default=20, metavar="N", help="responses per attack (20)")
    parser.add_argument("--tokens", type=_count, default=128, metavar="N", help="max_tokens of each (128)")
    parser.add_argument(
        "--temperature",
        type=lambda text: [float(part) for part in text.split(",")],
        default=[0.0, 0.8],
        metavar="T,T,…",
        help="temperatures, in turn (0,0.8)",
    )
    parser.add_argument("--concurrency", type=_count, default=4, metavar="N", help="requests in flight at once (4)")
    parser.add_argument("--patience", type=float, default=PATIENCE, metavar="S", help="seconds to wait for a verdict")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write rows.jsonl, summary.md and metadata.json")
    parser.add_argument("--no-gate", action="store_true", help="report only: exit 0 whatever was caught")
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return value
