"""What the demo does, step by step, once the machine is found fit for it."""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai

from benchmarks.demo import exhibits, layout, models, report, servers, traffic
from benchmarks.demo.machine import describe, fingerprint
from benchmarks.demo.processes import Children, answers, free_ports
from benchmarks.demo.progress import Progress
from policies.errors import CountersignError

ABOUT = {
    layout.HONEST: "the declared bf16 model",
    layout.IMPOSTOR: "FP8 weights, reports its own logprobs",
    layout.SPOOFER: "FP8 weights, reports the bf16 model's logprobs",
}
PATIENCE = 600.0
"""Seconds in which a server that starts, or a calibration, must have come further."""
COUNTERSIGN = [sys.executable, "-m", "countersign"]


class DemoError(CountersignError):
    """A request of the demo failed; the message says which."""


def run(arguments: argparse.Namespace, folder: Path, children: Children, progress: Progress) -> bool:
    """Everything from the models to the table; whether it shows what it should.

    Raises:
        CountersignError: a step failed; the message says how.
    """
    with progress.step("the demo models"):
        built = models.ensure(say=progress.tick)
    ports = free_ports(3)
    urls = dict(zip(layout.BACKENDS, (f"http://127.0.0.1:{port}" for port in ports), strict=True))
    profile = arguments.profile or models.cache_dir() / f"profile-{fingerprint()}.json"
    config = folder / "countersign.yaml"
    layout.write(
        config,
        layout.configuration(built, urls, port=arguments.port, store=folder / "store", profile=profile.absolute()),
    )
    with progress.step("two vLLM servers (bf16 and FP8) and a spoofer"):
        _start_backends(children, built, ports, urls, progress.tick)
    if not profile.exists():
        with progress.step(
            f"measuring honest drift on this machine, once ({layout.CALIBRATION['--requests']} answers)"
        ):
            _calibrate(children, config, profile, progress.tick)
    proxy = f"http://127.0.0.1:{arguments.port}"
    with progress.step("the proxy, its store, and a worker with the reference engine"):
        _start_product(children, config, proxy, progress.tick)
    rows, standings = asyncio.run(_ask_all(proxy + "/v1", urls, children, progress))
    text = "\n\n".join([report.table(rows), *report.exceptions(rows), report.FOOTNOTE])
    print(f"\n{text}\n\n{report.standings(standings)}\n\nAll of it took {progress.elapsed()}.")
    if arguments.output:
        _save(arguments.output, text, progress.elapsed())
    if arguments.evidence:
        commands = exhibits.save(proxy, arguments.evidence, rows)
        print("\n".join(["", f"Evidence is in {arguments.evidence}; anybody can check it:", *commands, ""]))
    complaints = report.complaints(rows)
    print("\n".join(complaints or ["The honest backend passed and both cheats were caught."]), flush=True)
    if arguments.keep:
        _keep(proxy, children)
    return not complaints


def _start_backends(
    children: Children,
    built: models.DemoModels,
    ports: Sequence[int],
    urls: dict[str, str],
    tick: Callable[[str], None],
) -> None:
    environ = servers.environment()
    for name, model, port in zip(layout.BACKENDS, (built.bf16, built.fp8), ports, strict=False):
        children.start(name, servers.command(model, port), environ)
    cheap, truth = urls[layout.IMPOSTOR], urls[layout.HONEST]
    where = ["--port", str(ports[2]), "--upstream", cheap, "--truth", truth]
    children.start(layout.SPOOFER, [*COUNTERSIGN, "attack", "spoofer", *where])
    waiting = {name: answers(url + "/v1/models") for name, url in urls.items()}
    children.wait(waiting, PATIENCE, lambda missing: tick(f"waiting for {missing}"))


def _calibrate(children: Children, config: Path, profile: Path, tick: Callable[[str], None]) -> None:
    profile.parent.mkdir(parents=True, exist_ok=True)
    command = [*COUNTERSIGN, "calibrate", "--config", str(config), "--backend", layout.HONEST]
    how = [part for pair in layout.CALIBRATION.items() for part in pair]
    child = children.start("calibrate", [*command, *how, "--output", str(profile)], servers.environment())
    children.finish(child, PATIENCE, tick, how_far)


def how_far(log: str) -> str:
    """What a calibration waits for, by its log: its own last word on how far it is, never one of the engine's."""
    counts = re.findall(r"\d+ of \d+ answers, \d+ replayed.*", log)
    return counts[-1] if counts else "waiting for the reference engine"


def _start_product(children: Children, config: Path, proxy: str, tick: Callable[[str], None]) -> None:
    def waiting(missing: str) -> None:
        tick(f"waiting for {missing}")

    children.start("proxy", [*COUNTERSIGN, "serve", "--config", str(config)])
    children.wait({"the proxy": answers(proxy + "/readyz")}, 60, waiting)
    worker = children.start("worker", [*COUNTERSIGN, "worker", "--config", str(config)], servers.environment())

    def ready() -> bool:
        return "ready: taking verifications" in worker.log.read_text(errors="replace")

    children.wait({"the worker": ready}, PATIENCE, waiting)


async def _ask_all(
    base_url: str, urls: dict[str, str], children: Children, progress: Progress
) -> tuple[list[report.Row], list[dict[str, Any]]]:
    client = traffic.Client(base_url)
    plan = traffic.shots()
    rows = []

    def tick(detail: str) -> None:
        children.check()
        progress.tick(detail)

    name = layout.HONEST
    try:
        for name in layout.BACKENDS:
            with progress.step(f"{len(plan)} chat requests to {name}"):
                outcomes = await client.run(name, plan, tick)
            rows.append((name, outcomes))
        with progress.step("added latency"):
            standings = [await client.standing(name, len(plan)) for name, _ in rows]
            added = {name: await traffic.added_latency(client, name, urls[name]) for name, _ in rows}
    except (openai.APIError, httpx.HTTPError) as error:
        children.check()
        raise DemoError(f"a request to {name} failed: {type(error).__name__}: {error}") from error
    finally:
        await client.close()
    return [report.Row(name, ABOUT[name], outcomes, added[name]) for name, outcomes in rows], standings


def _save(path: Path, table: str, elapsed: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{table}\n\n{describe()}. The whole demo took {elapsed}.\n", encoding="utf-8")


def _keep(proxy: str, children: Children) -> None:
    body = (
        f'{{"model":"{servers.MODEL}","max_tokens":64,"messages":[{{"role":"user","content":"Why is the sky blue?"}}]}}'
    )
    store = f"COUNTERSIGN_CONFIG={children.folder / 'countersign.yaml'}"
    print(
        "\nStill running; Ctrl-C ends it. Ask any backend by name (honest, impostor, spoofer):\n\n"
        f"curl -s {proxy}/v1/chat/completions -H 'content-type: application/json' \\\n"
        f"  -H 'x-countersign-mode: inline' -H 'x-countersign-backend: spoofer' \\\n  -d '{body}'\n\n"
        f"{store} {' '.join(COUNTERSIGN)} standing spoofer\n",
        flush=True,
    )
    try:
        while True:
            children.check()
            time.sleep(1.0)
    except KeyboardInterrupt:
        print("\nstopped")
