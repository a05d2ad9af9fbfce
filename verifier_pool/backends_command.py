"""`countersign backends`: what backends there are, and what is changed about them while everything runs.

    list                what every backend is told to be, where that is from, and how it stands
    show NAME           one backend
    add NAME            a backend that countersign.yaml does not name: --set url=… --set model=…
    change NAME         other settings of one: --set max_concurrency=8, --unset alpha
    declare NAME        what it runs: --set precision=fp8 (model, runtime, precision, engine, speculative)
    drain NAME          no new requests; what runs there is finished
    undrain NAME        requests again
    remove NAME         no such backend any more, whatever countersign.yaml says
    reset NAME          countersign.yaml alone says what holds
    quarantine | release | pardon NAME   as `countersign standing NAME --quarantine` and so on; --why is needed

Changes are kept in Redis, lie over countersign.yaml, and hold in every proxy and worker within two seconds. Under
another declaration another record of standing holds (docs/standing.md). docs/admin.md says more.

exit code 0: done     1: Redis did not answer, or the backend does not exist, or does already, or it makes no sense now
          2: wrong usage     3: wrong settings
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from typing import Any, cast

import orjson
from redis import Redis

from policies.errors import CountersignError, NotFound
from policies.overlay import Merged
from policies.settings import BackendSettings, Settings
from policies.unit import declaration_name, declaration_of
from verifier_pool import standing_command
from verifier_pool.link import durable, overlays
from verifier_pool.link.queue import STANDINGS, standing_field
from verifier_pool.link.sealing import Sealer
from verifier_pool.link.trail import terminal_actor
from verifier_pool.runtime import answering, read_settings
from verifier_pool.standing_text import moment
from verifier_pool.terminal import plain, print_lines, table

TIMEOUT = 5.0
"""Seconds that Redis has for an answer, twice."""
_TRIAL = {"state": "trial", "audit_rate": None, "since": None}


def main(argv: Sequence[str]) -> int:
    """Show or change backends; returns the exit code. Raises SettingsError and CountersignError."""
    parser = _parser()
    arguments = parser.parse_args(list(argv))
    if arguments.action in standing_command.ACTIONS:
        return standing_command.main(_as_standing(arguments))
    settings = read_settings(arguments.config)
    with answering(settings, TIMEOUT + durable.seconds(settings.durability)) as redis:
        if arguments.action == "list":
            print_lines(_list(redis, settings, arguments.json))
            return 0
        if arguments.action == "show":
            print_lines(_show(redis, settings, arguments))
            return 0
        desk = overlays.Desk(redis, settings, terminal_actor(), Sealer.of(settings.storage))
        made = _change(desk, arguments)
        if arguments.json:
            held = overlays.effective(redis, settings)
            found = {"name": arguments.name, "deleted": True} if made is None else _facts(redis, held, made)
            print_lines([json.dumps(found)])
        else:
            print_lines([f"{arguments.name}: {_DONE[arguments.action]}"])
    return 0


def _change(desk: overlays.Desk, arguments: argparse.Namespace) -> BackendSettings | None:
    name, action = arguments.name, arguments.action
    if action in ("drain", "undrain"):
        return desk.drain(name, drained=action == "drain")
    if action == "remove":
        desk.remove(name)
        return None
    if action == "reset":
        return desk.reset(name)
    fields = dict(arguments.set) | dict.fromkeys(arguments.unset)
    if arguments.api_key_file is not None:
        fields["api_key"] = arguments.api_key_file
    if not fields:
        raise CountersignError(f"{action} needs --set or --unset")
    if action == "add":
        return desk.add(name, fields)
    return desk.declare(name, fields) if action == "declare" else desk.change(name, fields)


def _list(redis: Redis, settings: Settings, as_json: bool) -> list[str]:
    held = overlays.effective(redis, settings)
    found = [_facts(redis, held, backend) for backend in held.settings.backends]
    if as_json:
        return [json.dumps(each) for each in found]
    lines = []
    if found:
        rows = [("name", "model", "from", "state", "since (UTC)", "takes", "url")]
        rows += [
            (
                plain(each["name"]),
                plain(each["settings"]["model"]),
                each["from"],
                plain(each["state"]),
                moment(each["since"]),
                "nothing new" if each["settings"]["drained"] else "requests",
                plain(each["settings"]["url"]),
            )
            for each in found
        ]
        lines = table(rows, 10_000, indent="")
    else:
        lines = ["no backends: the settings name none, and none was added"]
    return lines + [f"{plain(name)}: left out: {plain(why)}" for name, why in held.left_out.items()]


def _show(redis: Redis, settings: Settings, arguments: argparse.Namespace) -> list[str]:
    held = overlays.effective(redis, settings)
    found = next((each for each in held.settings.backends if each.name == arguments.name), None)
    if found is None:
        why = held.left_out.get(arguments.name)
        raise NotFound(f"{plain(arguments.name)}: " + (f"left out: {why}" if why else "there is no such backend"))
    facts = _facts(redis, held, found)
    if arguments.json:
        return [json.dumps(facts)]
    rows = {"state": f"{facts['state']}, since {moment(facts['since'])} UTC" if facts["since"] else facts["state"]}
    rows["from"] = {"settings": "the settings", "redis": "Redis", "both": "the settings, changed in Redis"}[
        facts["from"]
    ]
    rows |= {name: value for name, value in facts["settings"].items() if name != "name" and value not in (None, "")}
    if why := held.left_out.get(arguments.name):
        rows["left out"] = why
    width = max(map(len, rows))
    return [f"{name:<{width}}  {plain(_text(value))}" for name, value in rows.items()]


def _text(value: Any) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _facts(redis: Redis, held: Merged, backend: BackendSettings) -> dict[str, Any]:
    field = standing_field(backend.name, declaration_name(declaration_of(backend)))
    stored = cast("bytes | None", redis.hget(STANDINGS, field))
    try:
        known = orjson.loads(stored) if stored else _TRIAL
        standing = {name: known[name] for name in _TRIAL}
    except (orjson.JSONDecodeError, KeyError, TypeError):
        standing = {"state": "unreadable", "audit_rate": None, "since": None}
    source = held.sources.get(backend.name, "settings")
    return {"name": backend.name, "from": source, **standing, "settings": overlays.described(backend)}


def _as_standing(arguments: argparse.Namespace) -> list[str]:
    """The same decision for `countersign standing`."""
    given = [arguments.name, f"--{arguments.action}", "--why", arguments.why]
    given += ["--by", arguments.by] if arguments.by else []
    given += ["--config", arguments.config] if arguments.config else []
    return given + (["--json"] if arguments.json else [])


def _setting(text: str) -> tuple[str, str]:
    """`NAME=VALUE`; what the text means is for the setting to say."""
    name, equals, value = text.partition("=")
    if not equals or name not in BackendSettings.model_fields or name == "name":
        known = ", ".join(each for each in BackendSettings.model_fields if each != "name")
        raise argparse.ArgumentTypeError(f"NAME=VALUE is needed, NAME being one of {known}")
    return name, value


def _key(path: str) -> str:
    """A key, which no list of processes shows that way."""
    try:
        with contextlib.nullcontext(sys.stdin) if path == "-" else open(path, encoding="ascii") as file:
            return file.read().strip()
    except (OSError, UnicodeDecodeError):
        raise argparse.ArgumentTypeError("a readable file with a key is needed") from None


def _known(name: str) -> str:
    if name not in BackendSettings.model_fields or name in ("name", "url", "model"):
        raise argparse.ArgumentTypeError("a setting that a backend may lack is needed")
    return name


_DONE = {
    "add": "added",
    "change": "changed",
    "declare": "declared anew",
    "drain": "drained; what runs there is finished",
    "undrain": "takes requests again",
    "remove": "removed",
    "reset": "as countersign.yaml has it",
}
_HELP = {
    "list": "every backend, where its settings are from, and how it stands",
    "show": "one backend",
    "add": "a backend that the settings do not name",
    "change": "other settings of a backend",
    "declare": "what a backend runs",
    "drain": "send it no new requests",
    "undrain": "send it requests again",
    "remove": "take it away, whatever the settings say",
    "reset": "let the settings alone say what holds",
    **standing_command.ACTIONS,
}


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="countersign backends", description=__doc__, formatter_class=formatter)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in _HELP.items():
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("--config", help="settings file (default: $COUNTERSIGN_CONFIG, then ./countersign.yaml)")
        action.add_argument("--json", action="store_true", help="one line of JSON per backend instead of text")
        if name != "list":
            action.add_argument("name", metavar="NAME")
        if name in ("add", "change", "declare"):
            say = "such as url=https://gpu.example.com"
            action.add_argument("--set", type=_setting, action="append", default=[], metavar="SETTING=VALUE", help=say)
            say_unset = "let it have none"
            action.add_argument("--unset", type=_known, action="append", default=[], metavar="SETTING", help=say_unset)
            action.add_argument("--api-key-file", type=_key, metavar="FILE", help="its key, from a file (- is stdin)")
        if name in standing_command.ACTIONS:
            action.add_argument("--why", required=True, metavar="TEXT", help="the reason, for the audit trail")
            action.add_argument("--by", metavar="NAME", help="who decides (default: the user of this process)")
    return parser
