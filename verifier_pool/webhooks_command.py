"""`countersign webhooks`: where events go, what did not arrive, and whether one would.

    list          the receiver, what is on its way to it and what failed for good
    failures      deliveries that failed for good; `countersign queue requeue ID` sends one again
    test          send an event that says nothing, as any other is sent, and see what becomes of it
    resume        send again to a receiver that answered 410

exit code 0: done, or delivered     1: Redis did not answer, there is no webhook, or the event did not arrive in time
          2: wrong usage     3: wrong settings
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence

from redis import Redis

from policies.errors import CountersignError
from policies.settings import Settings
from verifier_pool.link import letters, receivers
from verifier_pool.link.queue import WEBHOOK_QUEUE
from verifier_pool.link.trail import terminal_actor
from verifier_pool.runtime import answering, read_settings
from verifier_pool.terminal import plain, print_lines, table

TIMEOUT = 5.0
"""Seconds that Redis has for an answer, twice."""
WAIT = 20.0
_COUNTS = {"outbox": "outbox", "waiting": "waiting", "in_flight": "in flight", "later": "later", "failed": "failed"}
_SAID = {
    "delivered": "delivered",
    "failed": "it failed for good; `countersign webhooks failures` has it",
    "retrying": "the first try failed; it is tried again",
    "sending": "it is being sent; the receiver has not answered yet",
    "waiting": "no worker has taken it yet; does one run for webhooks?",
}


def main(argv: Sequence[str]) -> int:
    """Show or try; returns the exit code. Raises SettingsError and CountersignError."""
    arguments = _parser().parse_args(list(argv))
    settings = read_settings(arguments.config)
    with answering(settings, TIMEOUT) as redis:
        if arguments.action == "test":
            return _test(redis, settings, arguments)
        lines = {"list": _list, "failures": _failures, "resume": _resume}[arguments.action](
            redis, settings, arguments.json
        )
    print_lines(lines)
    return 0


def _list(redis: Redis, settings: Settings, as_json: bool) -> list[str]:
    found = receivers.described(redis, settings)
    if as_json:
        return [json.dumps(each) for each in found]
    if not found:
        return ["no webhook: the settings name none"]
    rows = [("url", "state", *_COUNTS.values())]
    rows += [
        (plain(each["url"]), "switched off (410)" if each["disabled"] else "on", *(str(each[name]) for name in _COUNTS))
        for each in found
    ]
    return table(rows, 10_000, right=range(2, 2 + len(_COUNTS)), indent="")


def _failures(redis: Redis, settings: Settings, as_json: bool) -> list[str]:
    now = time.time()
    found = [letters.shown(each, now) for each in letters.find(redis) if each.queue == WEBHOOK_QUEUE]
    if as_json:
        return [json.dumps(each) for each in found]
    rows = [("id", "reason", "tries", "age")]
    rows += [
        (plain(each["id"]), plain(each["reason"]), str(each["tries"]), f"{int(each['age_seconds'] or 0)} s")
        for each in found
    ]
    return table(rows, 10_000, right=(2, 3), indent="") if found else ["none"]


def _resume(redis: Redis, settings: Settings, as_json: bool) -> list[str]:
    if not receivers.resume(redis, settings, terminal_actor()):
        raise CountersignError("the receiver is not switched off")
    return [json.dumps({"disabled": False})] if as_json else ["events are sent again"]


def _test(redis: Redis, settings: Settings, arguments: argparse.Namespace) -> int:
    found = receivers.attempt(redis, settings, terminal_actor(), arguments.wait)
    status = found["status"]
    print_lines([json.dumps(found)] if arguments.json else [f"{found['id']}: {_SAID[status]}"])
    return int(status != "delivered")


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="countersign webhooks", description=__doc__, formatter_class=formatter)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in {
        "list": "the receiver, and what is on its way",
        "failures": "deliveries that failed for good",
        "test": "send an event that says nothing",
        "resume": "send again after a 410",
    }.items():
        action = actions.add_parser(name, help=text, description=text)
        if name == "test":
            say = f"how long it may take ({WAIT:g})"
            action.add_argument("--wait", type=float, default=WAIT, metavar="SECONDS", help=say)
        action.add_argument("--json", action="store_true", help="one line of JSON instead of text")
        action.add_argument("--config", help="settings file (default: $COUNTERSIGN_CONFIG, then ./countersign.yaml)")
    return parser
