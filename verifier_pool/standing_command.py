"""`countersign standing`: what is known about the backends, and what you decide about one.

Without a name it prints one line per backend; with one, everything: the state and why, the evidence against 1/alpha as
a chart, the level (alpha + delta), coverage by reason, the last answers that speak against it, client keys, the audit
trail. docs/standing.md says what it all means.

exit code 0: none of the backends shown is quarantined, or what you decided was done
          1: one is (backends that the settings no longer name do not matter), or a record cannot be read, or Redis
             did not answer, or what you decided makes no sense now
          2: wrong usage     3: wrong settings, or no such backend
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import orjson
from redis import Redis

from policies import standing
from policies.errors import CountersignError, SettingsError
from policies.settings import Settings
from policies.standing import Record
from policies.unit import declaration_name, declaration_of
from verifier_pool.link import durable, overlays, trail
from verifier_pool.link.queue import SECOND_UNCHECKED, UNITS_DROPPED, units_key
from verifier_pool.runtime import answering, read_settings
from verifier_pool.standing import Contended, Standings
from verifier_pool.standing_text import Shown, line_per_backend, page
from verifier_pool.terminal import plain, print_lines

TIMEOUT = 5.0
"""Seconds that Redis has for an answer, twice."""
WIDTH = 100
"""Columns of a page at most, and where nobody says how wide the terminal is."""
LONGEST = 1000
"""Characters of a reason or a name in the audit trail."""
ACTIONS = {
    "quarantine": "send it no more clients, until --release",
    "pardon": "begin a new life: evidence starts again, with the next share of alpha",
    "release": "undo --quarantine",
}
_DONE = {"quarantine": "quarantined by hand", "pardon": "pardoned", "release": "released"}


class _Unreadable(CountersignError):
    """A backend has a record that cannot be read."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{plain(name)}: its record cannot be read; was it written by another version?")


def main(argv: Sequence[str]) -> int:
    """Show standings or change one; returns the exit code. Raises SettingsError and CountersignError."""
    parser = _parser()
    arguments = parser.parse_args(list(argv))
    action = next((name for name in ACTIONS if getattr(arguments, name)), None)
    _check(parser, arguments, action)
    settings = read_settings(arguments.config)
    with answering(settings, TIMEOUT + durable.seconds(settings.durability)) as redis:
        settings = overlays.effective(redis, settings).settings
        if action is not None:
            return _act(redis, settings, arguments, action)
        if arguments.backend is None:
            return _all(redis, settings, arguments.json)
        _known(redis, settings, arguments.backend)
        shown = _shown(redis, settings, arguments.backend)
    print_lines([_json(shown)] if arguments.json else page(shown, settings, min(_width(), WIDTH)))
    return int(_quarantined(shown))


def _all(redis: Redis, settings: Settings, as_json: bool) -> int:
    """Print every backend that can be shown, and say which cannot."""
    names = [backend.name for backend in settings.backends]
    names += [name for name in Standings(redis, settings).backends() if name not in names]
    found, failed = list[Shown](), False
    for name in names:
        try:
            found.append(_shown(redis, settings, name))
        except _Unreadable as error:
            print(f"countersign standing: {error}", file=sys.stderr)
            failed = True
    if as_json:
        print_lines([_json(shown) for shown in found])
    elif found:
        # A line that goes to a file or another program is not cut.
        print_lines(line_per_backend(found, _width() if sys.stdout.isatty() else 10_000, time.time()))
    elif not failed:
        print_lines(["no backends: the settings name none, and none has a record"])
    return int(failed or any(map(_quarantined, found)))


def _act(redis: Redis, settings: Settings, arguments: argparse.Namespace, action: str) -> int:
    name = arguments.backend
    try:
        settings.backend(name)
    except KeyError:
        raise SettingsError("BACKEND", f"one that the settings name: {_names(settings)}") from None
    try:
        record = _decided(redis, settings, arguments, action)
    except durable.NotDurable:
        raise  # it was done, and is in the audit log
    except CountersignError as error:
        said = trail.entry(trail.terminal_actor(), f"standing.{action}", name, result=str(error), why=arguments.why)
        trail.append(redis, settings.admin.audit_entries, said)
        raise
    if arguments.json:
        print_lines([_json(_shown(redis, settings, name))])
    else:
        why = "; ".join(map(plain, record.reasons))
        print_lines([f"{plain(name)}: {_DONE[action]}. It is {record.state} now" + (f" ({why})" if why else "")])
    return 0


def _decided(redis: Redis, settings: Settings, arguments: argparse.Namespace, action: str) -> Record:
    name = arguments.backend
    try:
        by = arguments.by or _user()
        return Standings(redis, settings).override(name, action, by=by, why=arguments.why, actor=trail.terminal_actor())
    except Contended:
        raise CountersignError(f"{name}: its record keeps changing; nothing was done, try again") from None
    except msgspec.DecodeError as error:
        raise _Unreadable(name) from error
    except ValueError as error:
        raise CountersignError(f"{name}: {error}") from error


def _shown(redis: Redis, settings: Settings, name: str) -> Shown:
    """What is known of a backend: the record of its present declaration, else of its last one."""
    try:
        records = Standings(redis, settings).records(name)
    except msgspec.DecodeError as error:
        raise _Unreadable(name) from error
    declared = name in [backend.name for backend in settings.backends]
    if declared:
        declaration = declaration_of(settings.backend(name))
        current = records.pop(declaration_name(declaration), None)
    else:
        current = records.pop(max(records, key=lambda known: records[known].number), None) if records else None
        declaration = {}
    number = standing.next_number(records.values())
    summary = _summary(current or standing.new(name, declaration, number, time.time()), settings)
    return Shown(
        summary if current else {**summary, "since": None, "began": None, "trail": []},
        declared,
        current is not None,
        [_summary(record, settings) for record in sorted(records.values(), key=lambda known: -known.number)],
        int(redis.llen(units_key(name))),
        int(redis.hget(UNITS_DROPPED, name) or 0),
        int(redis.hget(SECOND_UNCHECKED, name) or 0),
    )


def _summary(record: Record, settings: Settings) -> dict[str, Any]:
    return standing.summary(record, settings.standing_of(record.backend), settings.audit)


def _known(redis: Redis, settings: Settings, name: str) -> None:
    """Raises SettingsError for a name that neither the settings nor any record has."""
    named = [backend.name for backend in settings.backends]
    if name not in named and name not in Standings(redis, settings).backends():
        raise SettingsError("BACKEND", f"one that the settings name, or that has a record: {_names(settings)}")


def _names(settings: Settings) -> str:
    return ", ".join(backend.name for backend in settings.backends) or "they name none"


def _json(shown: Shown) -> str:
    """The summary with what is not in the record, on one line."""
    counts = {"waiting": shown.waiting, "dropped": shown.dropped, "second_unchecked": shown.unchecked}
    found = {**shown.summary, "declared": shown.declared, **counts, "earlier": shown.earlier}
    # orjson has null for what JSON cannot say; ASCII alone is safe on any terminal.
    return json.dumps(orjson.loads(orjson.dumps(found)))


def _width() -> int:
    return shutil.get_terminal_size((WIDTH, 24)).columns


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container's user without a name
        return f"uid {os.getuid()}"


def _quarantined(shown: Shown) -> bool:
    return shown.declared and shown.summary["state"] == standing.QUARANTINED


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace, action: str | None) -> None:
    if action is None:
        if arguments.why is not None or arguments.by is not None:
            parser.error("--why and --by go with " + ", ".join(f"--{name}" for name in ACTIONS))
        return
    if arguments.backend is None:
        parser.error(f"--{action} needs a BACKEND")
    if arguments.why is None:
        parser.error(f"--{action} needs --why, for the audit trail")


def _words(text: str) -> str:
    """One line of text for the audit trail."""
    words = " ".join(text.split())
    if not words or len(words) > LONGEST:
        raise argparse.ArgumentTypeError(f"between 1 and {LONGEST} characters are needed")
    if words != plain(words):
        raise argparse.ArgumentTypeError("only printable text is taken")
    return words


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="countersign standing", description=__doc__, formatter_class=formatter)
    parser.add_argument("backend", nargs="?", metavar="BACKEND", help="show everything about this one")
    parser.add_argument("--json", action="store_true", help="one line of JSON per backend instead of text")
    parser.add_argument("--config", help="settings file (default: $COUNTERSIGN_CONFIG, then ./countersign.yaml)")
    deciding = parser.add_argument_group("decide about BACKEND")
    one = deciding.add_mutually_exclusive_group()
    for name, text in ACTIONS.items():
        one.add_argument(f"--{name}", action="store_true", help=text)
    deciding.add_argument("--why", type=_words, metavar="TEXT", help="the reason, for the audit trail; required")
    deciding.add_argument("--by", type=_words, metavar="NAME", help="who decides (default: the user of this process)")
    return parser
