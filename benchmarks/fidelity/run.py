"""Runs the suite against one gateway: its processes are started here and end here."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.fidelity.gateways import CLIENT_KEY, Plan, our_version
from benchmarks.harness import machine
from policies.errors import CountersignError

Row = dict[str, Any]

SUITE = "tests/fidelity"
PATIENCE = 8
"""Seconds that a client waits for another gateway to say anything; the longest pause of an upstream is 4.5."""
ROOT = Path(__file__).parents[2]


def run(plan: Plan, port: int, select: str | None = None) -> list[Row]:
    """The rows of one run: what was run, then how each test came out.

    Args:
        plan: the gateway.
        port: the first of the ports it takes: three for upstreams, then one a variant.
        select: only tests whose names match (pytest's `-k`).

    Raises:
        CountersignError: the suite is not there or did not run.
    """
    if not (ROOT / SUITE).is_dir():
        raise CountersignError(f"bench fidelity: needs a checkout, with {SUITE}")
    started, clock = datetime.now(UTC), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cs-fidelity-") as name, ExitStack() as stack:
        folder = Path(name)
        commands, options = _started(plan, folder, port, stack)
        outcomes = folder / "outcomes.jsonl"
        command = [sys.executable, "-m", "pytest", SUITE, "--timed", *options, *plan.options, *_lacks(plan)]
        command += ["--outcomes", str(outcomes), *(["-k", select] if select else [])]
        ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if not outcomes.exists():
            raise CountersignError(
                f"bench fidelity: the suite did not run against {plan.name}:\n{ended.stdout[-3000:]}"
            )
        tests = [json.loads(line) for line in outcomes.read_text().splitlines()]
        settings = {path.stem: path.read_text() for path in sorted(folder.glob("*.yaml"))}
    head = {
        "kind": "run",
        "gateway": plan.name,
        "version": plan.version() or our_version(),
        "started": started.strftime("%Y-%m-%d %H:%M UTC"),
        "seconds": round(time.monotonic() - clock, 1),
        "machine": machine.describe(),
        "commands": {variant: _shown(words, folder) for variant, words in commands.items()},
        "suite": _shown(["python", *command[1:]], folder),
        "settings": settings,
        "lacks": plan.lacks,
        "remarks": list(plan.remarks),
    }
    return [head, *({"kind": "test", "gateway": plan.name, **test} for test in tests)]


def _started(plan: Plan, folder: Path, port: int, stack: ExitStack) -> tuple[dict[str, list[str]], list[str]]:
    """Start every variant; returns their commands, and the suite's options that name them."""
    if plan.start is None:
        return {}, []
    commands: dict[str, list[str]] = {}
    options = ["--upstream-port", str(port), "--client-key", CLIENT_KEY, "--readiness", plan.readiness]
    options += ["--patience", str(PATIENCE)]
    for at, variant in enumerate(("plain", *plan.variants)):
        own = port + 10 + at
        commands[variant] = list(plan.start(folder, variant, own, port))
        log = stack.enter_context((folder / f"{variant}.log").open("w"))
        process = subprocess.Popen(
            commands[variant], stdout=log, stderr=log, env=os.environ | plan.environment, cwd=folder
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        url = f"http://127.0.0.1:{own}"
        if variant == "plain":
            options += ["--base-url", url, "--gateway-pid", str(process.pid)]
        else:
            options += ["--variant", f"{variant}={url}", "--pid", f"{variant}={process.pid}"]
    return commands, options


def _lacks(plan: Plan) -> list[str]:
    return [word for feature in plan.lacks for word in ("--lacks", feature)]


def _shown(words: list[str], folder: Path) -> str:
    """A command without the folders of this machine."""
    return shlex.join(Path(word).name if at == 0 or str(folder) in word else word for at, word in enumerate(words))
