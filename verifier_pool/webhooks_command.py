"""`countersign webhooks`: where events go, what did not arrive, and whether one would.

    list             every webhook, and what is on its way to it
    add URL          register one, send it an event to try it, and print its secret, this once
    show ID          one webhook
    change ID        give it another URL or other filters: those that are named
    rotate ID        another secret, printed this once; the present one signs beside it for a day, or --overlap
    remove ID        drop it, with everything that waits for it
    log ID           its deliveries and their tries
    replay ID        send deliveries again, byte for byte: those named, or all that failed
    failures         deliveries that failed for good; `countersign queue requeue ID` sends one again, too
    test [ID]        send an event that says nothing, as any other is sent, and see what becomes of it
    resume [ID]      send again to a webhook that was switched off

Without an ID it is the webhook of the settings, whose id is `settings`. A webhook without --key is the operator's, and
hears of everything; with one it hears of what that client key asks. docs/webhooks.md says more.

exit code 0: done, or delivered     1: Redis did not answer, it makes no sense now, or the event did not arrive in time
          2: wrong usage            3: wrong settings
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from redis import Redis

from policies.errors import CountersignError
from policies.settings import Settings
from verifier_pool.link import letters, receivers
from verifier_pool.link.endpoints import OVERLAP, SETTINGS
from verifier_pool.link.keys import KeyStore
from verifier_pool.link.queue import WEBHOOK_QUEUE
from verifier_pool.link.receivers import Asker, House
from verifier_pool.link.sealing import Sealer
from verifier_pool.link.trail import terminal_actor
from verifier_pool.runtime import answering, read_settings
from verifier_pool.terminal import plain, print_lines, table

TIMEOUT = 5.0
"""Seconds that Redis has for an answer, twice."""
WAIT = 20.0
_COUNTS = {"waiting": "waiting", "sending": "sending", "dropped": "dropped", "sequence": "told"}
_SAID = {
    "delivered": "delivered",
    "failed": "it failed for good; `countersign webhooks failures` has it",
    "retrying": "the first try failed; it is tried again",
    "sending": "it is being sent; the receiver has not answered yet",
    "waiting": "no worker has taken it yet; does one run for webhooks?",
}
_OFF = {"gone": "switched off (410)", "failing": "switched off (it failed for too long)"}
_FILTERS = {"event": "events", "model": "models", "verdict": "verdicts"}


def main(argv: Sequence[str]) -> int:
    """Show, change or try; returns the exit code. Raises SettingsError and CountersignError."""
    arguments = _parser().parse_args(list(argv))
    settings = read_settings(arguments.config)
    with answering(settings, TIMEOUT) as redis:
        house, asker = House(redis, settings, Sealer.of(settings.storage)), Asker(terminal_actor())
        if arguments.action == "test":
            return _test(house, asker, arguments)
        lines = _ACTIONS[arguments.action](house, asker, arguments)
    print_lines(lines)
    return 0


def _list(house: House, asker: Asker, arguments: argparse.Namespace) -> list[str]:
    found = receivers.listed(house, asker)
    if arguments.json:
        return [json.dumps(each) for each in found]
    if not found:
        return ["no webhook: the settings name none, and none is registered"]
    rows = [("id", "url", "of", "state", *_COUNTS.values())]
    rows += [
        (each["id"], plain(each["url"]), plain(each["key"] or "operator"), _state(each), *_counts(each))
        for each in found
    ]
    return table(rows, 10_000, right=range(4, 4 + len(_COUNTS)), indent="")


def _show(house: House, asker: Asker, arguments: argparse.Namespace) -> list[str]:
    return _shown(receivers.shown(house, asker, arguments.id), arguments)


def _add(house: House, asker: Asker, arguments: argparse.Namespace) -> list[str]:
    if arguments.key is not None:
        asker = _of_key(house.redis, house.settings, arguments.key, asker)
    found = receivers.register(house, asker, arguments.url, _named(arguments))
    return _with_secret(found, arguments)


def _change(house: House, asker: Asker, arguments: argparse.Namespace) -> list[str]:
    fields = _named(arguments) | ({} if arguments.url is None else {"url": arguments.url})
    if not fields:
        raise CountersignError("name what is to be changed")
    return _shown(receivers.changed(house, asker, arguments.id, fields), arguments)


def _rotate(house: House, asker: Asker, arguments: argparse.Namespace) -> list[str]:
    return _with_secret(receivers.rotated(house, asker, arguments.id, arguments.overlap), arguments)


def _remove(house: House, asker: Asker, arguments: argparse.Namespace) -> list[str]:
    receivers.removed(house, asker, arguments.id)
    return [json.dumps({"id": arguments.id, "deleted": True}) if arguments.json else "removed"]


def _log(house: House, asker: Asker, arguments: argparse.Namespace) -> list[str]:
    found = receivers.log(house, asker, arguments.id, limit=arguments.limit, status=arguments.status)
    if arguments.json:
        return [json.dumps(each) for each in found]
    rows = [("id", "event", "about", "status", "tries", "last", "took", "next")]
    rows += [
        (each["id"], each["type"], plain(each["about"]), each["status"], str(each["tries"]), *_last(each))
        for each in found
    ]
    return table(rows, 10_000, right=(4, 6), indent="") if found else ["none"]


def _replay(house: House, asker: Asker, arguments: argparse.Namespace) -> list[str]:
    if bool(arguments.delivery) == arguments.failed:
        raise CountersignError("name deliveries, or say --failed")
    found = receivers.replayed(house, asker, arguments.id, None if arguments.failed else arguments.delivery)
    if arguments.json:
        return [json.dumps(each) for each in found]
    return [f"{plain(each['id'])}: {each['why'] or 'it is sent again'}" for each in found] or ["none"]


def _failures(house: House, asker: Asker, arguments: argparse.Namespace) -> list[str]:
    now = time.time()
    found = [letters.shown(each, now) for each in letters.find(house.redis) if each.queue == WEBHOOK_QUEUE]
    if arguments.json:
        return [json.dumps(each) for each in found]
    rows = [("id", "job", "reason", "age")]
    rows += [
        (plain(each["id"]), plain(each["job"]), plain(each["reason"]), f"{int(each['age_seconds'] or 0)} s")
        for each in found
    ]
    return table(rows, 10_000, right=(3,), indent="") if found else ["none"]


def _resume(house: House, asker: Asker, arguments: argparse.Namespace) -> list[str]:
    found = receivers.resumed(house, asker, arguments.id)
    return [json.dumps(found)] if arguments.json else ["events are sent again"]


def _test(house: House, asker: Asker, arguments: argparse.Namespace) -> int:
    found = receivers.attempt(house, asker, arguments.id, arguments.wait)
    status = found["status"]
    print_lines([json.dumps(found)] if arguments.json else [f"{found['id']}: {_SAID[status]}"])
    return int(status != "delivered")


def _of_key(redis: Redis, settings: Settings, name: str, asker: Asker) -> Asker:
    declared = next((key for key in settings.keys if key.name == name), None)
    key = declared or KeyStore(redis).get(name)[0]
    if key is None:
        raise CountersignError(f"{plain(name)}: there is no key of that name")
    return Asker(asker.actor, key.sha256, key.name, key.admin)


def _named(arguments: argparse.Namespace) -> dict[str, Any]:
    named: dict[str, Any] = {
        plural: list(values) for name, plural in _FILTERS.items() if (values := getattr(arguments, name)) is not None
    }
    for name in ("everyone", "description"):
        if getattr(arguments, name) is not None:
            named[name] = getattr(arguments, name)
    return named


def _with_secret(found: Mapping[str, Any], arguments: argparse.Namespace) -> list[str]:
    if arguments.json:
        return [json.dumps(found)]
    if sys.stdout.isatty():
        print("Keep the secret: nobody can read it again.", file=sys.stderr)
    return [f"{found['id']} {found['secret']}"]


def _shown(found: Mapping[str, Any], arguments: argparse.Namespace) -> list[str]:
    if arguments.json:
        return [json.dumps(found)]
    rows = {"url": plain(found["url"]), "of": plain(found["key"] or "operator"), "state": _state(found)}
    rows |= {name: ", ".join(map(plain, found[name])) or "all" for name in _FILTERS.values()}
    rows |= {said: str(found[name]) for name, said in _COUNTS.items()} | {"failures": str(found["failures"])}
    return table([(name, value) for name, value in rows.items()], 10_000, indent="")


def _state(found: Mapping[str, Any]) -> str:
    if found["disabled"]:
        return _OFF.get(found["disabled_reason"], "switched off")
    return f"fails since {_time(found['failing_since'])}" if found["failing_since"] else "on"


def _counts(found: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(found[name]) for name in _COUNTS)


def _last(found: Mapping[str, Any]) -> tuple[str, str, str]:
    last = found["attempts"][-1] if found["attempts"] else {}
    took = f"{last['milliseconds']} ms" if "milliseconds" in last else ""
    return str(last.get("status") or last.get("error") or ""), took, _time(found["next"])


def _time(at: float | None) -> str:
    return "" if at is None else datetime.fromtimestamp(at, UTC).isoformat(sep=" ", timespec="seconds")[:19]


_ACTIONS = {
    "list": _list,
    "add": _add,
    "show": _show,
    "change": _change,
    "rotate": _rotate,
    "remove": _remove,
    "log": _log,
    "replay": _replay,
    "failures": _failures,
    "resume": _resume,
}


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="countersign webhooks", description=__doc__, formatter_class=formatter)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    found: dict[str, argparse.ArgumentParser] = {}
    for name, text in {
        "list": "every webhook, and what is on its way",
        "add": "register one",
        "show": "one webhook",
        "change": "another URL, or other filters",
        "rotate": "another secret",
        "remove": "drop one",
        "log": "its deliveries",
        "replay": "send deliveries again",
        "failures": "deliveries that failed for good",
        "test": "send an event that says nothing",
        "resume": "send again to one that was switched off",
    }.items():
        found[name] = action = actions.add_parser(name, help=text, description=text)
        if name in ("show", "change", "rotate", "remove", "log", "replay"):
            action.add_argument("id", metavar="ID")
        elif name in ("test", "resume"):
            action.add_argument("id", metavar="ID", nargs="?", default=SETTINGS)
        action.add_argument("--json", action="store_true", help="one line of JSON instead of text")
        action.add_argument("--config", help="settings file (default: $COUNTERSIGN_CONFIG, then ./countersign.yaml)")
    _more(found)
    return parser


def _more(found: Mapping[str, argparse.ArgumentParser]) -> None:
    """Arguments that not all have."""
    found["add"].add_argument("url", metavar="URL")
    found["add"].add_argument(
        "--key", metavar="NAME", help="client key whose webhook it is; without one the operator's"
    )
    found["change"].add_argument("--url", metavar="URL")
    for action in (found["add"], found["change"]):
        for name in _FILTERS:
            said = f"only this {name}; may be given more than once, without a value for all"
            action.add_argument(f"--{name}", action="extend", nargs="*", metavar="NAME", help=said)
        everyone = argparse.BooleanOptionalAction
        action.add_argument("--everyone", action=everyone, default=None, help="hear of all client keys' answers")
        action.add_argument("--description", metavar="TEXT", help="whatever its owner wants to remember")
    said = f"seconds for which the present one signs beside it ({OVERLAP})"
    found["rotate"].add_argument("--overlap", type=float, default=float(OVERLAP), metavar="SECONDS", help=said)
    found["log"].add_argument("--limit", type=int, default=50, metavar="N", help="how many (50)")
    statuses = ("waiting", "sending", "retrying", "delivered", "failed")
    found["log"].add_argument("--status", choices=statuses, help="only those")
    found["replay"].add_argument("delivery", nargs="*", metavar="DELIVERY")
    found["replay"].add_argument("--failed", action="store_true", help="all that failed, a thousand at most")
    say = f"how long it may take ({WAIT:g})"
    found["test"].add_argument("--wait", type=float, default=WAIT, metavar="SECONDS", help=say)
