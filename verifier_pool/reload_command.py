"""`countersign reload`: has every proxy and worker read countersign.yaml and the profiles anew, and says how it went.

They notice changes of the file by themselves (`admin.watch_seconds`), and read it at SIGHUP; this is for whoever does
not want to wait, or wants to know. `--status` asks for nothing, and shows who runs by which settings.

exit code 0: every process that runs follows its file     1: one cannot use it, or did not follow in time, or Redis did
          not answer     2: wrong usage     3: wrong settings
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

from redis import Redis

from verifier_pool.link import running, trail
from verifier_pool.runtime import answering, read_settings
from verifier_pool.terminal import plain, print_lines, table

TIMEOUT = 5.0
"""Seconds that Redis has for an answer, twice."""
PATIENCE = 15.0
"""Seconds that processes have to follow."""
_POLL = 0.2


def main(argv: Sequence[str]) -> int:
    """Ask, and show how it went; returns the exit code. Raises SettingsError and StoreUnavailable."""
    arguments = _parser().parse_args(list(argv))
    settings = read_settings(arguments.config)
    with answering(settings, TIMEOUT) as redis:
        if arguments.status:
            found = [running.described(each) for each in running.processes(redis)]
        else:
            found = _asked(redis, arguments.wait)
    if arguments.json:
        print_lines([json.dumps(each) for each in found])
    else:
        print_lines(_lines(found))
    return int(any(each["error"] or not each.get("followed", True) for each in found))


def _asked(redis: Redis, patience: float) -> list[dict[str, Any]]:
    asked = running.ask(redis, trail.terminal_actor())
    deadline = time.monotonic() + patience
    while True:
        found = [running.described(each, asked.id) for each in running.processes(redis)]
        if all(each["followed"] for each in found) or time.monotonic() >= deadline:
            return found
        time.sleep(_POLL)


def _lines(found: Sequence[dict[str, Any]]) -> list[str]:
    if not found:
        return ["no proxy and no worker runs"]
    rows = [("process", "host", "pid", "settings")]
    rows += [
        (f"{each['kind']} {each['does']}".strip(), plain(each["host"]), str(each["pid"]), plain(_state(each)))
        for each in found
    ]
    return table(rows, 10_000, right=(2,), indent="")


def _state(found: dict[str, Any]) -> str:
    if not found.get("followed", True):
        return "did not follow in time"
    if found["error"]:
        return f"invalid, the old ones hold: setting {found['error']['key']!r}: {found['error']['expected']}"
    if found["restart"]:
        return f"current; hold only after a restart: {', '.join(found['restart'])}"
    return "current"


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="countersign reload", description=__doc__, formatter_class=formatter)
    parser.add_argument("--status", action="store_true", help="ask for nothing, and show who runs by which settings")
    say = f"how long processes may take ({PATIENCE:g})"
    parser.add_argument("--wait", type=float, default=PATIENCE, metavar="SECONDS", help=say)
    parser.add_argument("--json", action="store_true", help="one line of JSON per process instead of text")
    parser.add_argument("--config", help="settings file (default: $COUNTERSIGN_CONFIG, then ./countersign.yaml)")
    return parser
