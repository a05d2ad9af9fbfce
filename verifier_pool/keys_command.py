"""`countersign keys`: makes client keys, which are kept in Redis as hashes, and shows what they use.

    create NAME     make a key and print it, this once; nobody can read it again
    list            every key, of the settings and of Redis, and what it may use
    show NAME       one key, and what it used lately and in its budget's period
    limit NAME      give it other limits: those that are named, and no others
    retain NAME     say what is kept of its answers' evidence: --keep none, rejects or all; without it, what the
                    settings say
    revoke NAME     it lets nobody in any more, within two seconds; its name stays taken
    forget NAME     drop what is left of a revoked or expired key: what was counted of it, and its webhooks

Without limits of its own a key has those of the settings (`limits`). A minute is any 60 seconds; a budget of tokens
starts again every day or month (UTC), or never. docs/keys.md says more.

exit code 0: done     1: Redis did not answer, or the key does not exist, or does already, or it makes no sense now
          2: wrong usage     3: wrong settings
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from policies.errors import CountersignError
from policies.settings import ClientKey, LimitSettings, Settings, StoredKey
from verifier_pool.link import durable, receivers
from verifier_pool.link.keys import KeyStore, described, issue, told
from verifier_pool.link.trail import entry, terminal_actor
from verifier_pool.runtime import answering, read_settings
from verifier_pool.terminal import plain, print_lines, table

TIMEOUT = 5.0
"""Seconds that Redis has for an answer, twice."""
_SECONDS = {"m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_KEPT = ("none", "rejects", "all")
_KEPT_TEXT = "what is kept of its answers' evidence after the verdict (default: what storage.retain says)"
_LIMITS = {
    "requests_per_minute": "requests let in within any 60 seconds",
    "tokens_per_minute": "tokens within any 60 seconds, prompts and answers together",
    "concurrency": "requests at once",
    "tokens": "budget of tokens, prompts and answers together",
}


def main(argv: Sequence[str]) -> int:
    """Make, show or change keys; returns the exit code. Raises SettingsError and CountersignError."""
    parser = _parser()
    arguments = parser.parse_args(list(argv))
    if "unlimited" in arguments:
        arguments.limits = _limits(parser, arguments)
    settings = read_settings(arguments.config)
    with answering(settings, TIMEOUT + durable.seconds(settings.durability)) as redis:
        lines = _ACTIONS[arguments.action](KeyStore(redis, settings.durability), settings, arguments)
    print_lines(lines)
    return 0


def _create(store: KeyStore, settings: Settings, arguments: argparse.Namespace) -> list[str]:
    name, now = arguments.name, time.time()
    if arguments.expires is not None and arguments.expires <= now:
        raise CountersignError("--expires is in the past")
    try:
        text, key = issue(
            name,
            now,
            admin=arguments.admin,
            operator=arguments.operator,
            evidence=arguments.evidence,
            retain=arguments.retain,
            limits=arguments.limits,
            expires=arguments.expires,
        )
    except ValidationError:
        expected = "letters, digits and ._@:+- (100 at most), a letter or digit first"
        raise CountersignError(f"{plain(name)}: a name is made of {expected}") from None
    taken = name in [each.name for each in settings.keys]
    if taken or not store.change(name, "", key, *_entry(settings, "key.create", None, key)):
        raise CountersignError(f"{name}: there is a key of that name")
    if arguments.json:
        return [json.dumps({**described(key, now), "key": text})]
    if sys.stdout.isatty():
        print("Keep it: only its hash is stored, and nobody can read it again.", file=sys.stderr)
    return [text]


def _list(store: KeyStore, settings: Settings, arguments: argparse.Namespace) -> list[str]:
    now = time.time()
    stored, unreadable = store.all()
    if unreadable:
        print(f"countersign keys: {unreadable} in Redis cannot be read, and let nobody in", file=sys.stderr)
    found = [described(key, now) for key in (*settings.keys, *stored)]
    if arguments.json:
        return [json.dumps(each) for each in found]
    if not found:
        return ["no keys: only this machine is served"]
    rows = [("name", "begins with", "from", "may", "state", "created", "limits")]
    rows += [
        (
            plain(each["name"]),
            each.get("prefix", ""),
            each["from"],
            " ".join(word for word in ("admin", "operator") if each[word]),
            each["state"],
            _date(each.get("created")),
            _limits_text(each["limits"]),
        )
        for each in found
    ]
    return table(rows, 10_000, indent="")


def _show(store: KeyStore, settings: Settings, arguments: argparse.Namespace) -> list[str]:
    key = _known(store, settings, arguments.name)
    now = time.time()
    limits = key.limits if key.limits is not None else settings.limits
    use = store.use(key, limits.every)
    found = described(key, now)
    used: dict[str, Any] = {"requests_last_minute": use.requests, "tokens_last_minute": use.tokens}
    used |= {"under_way": use.under_way, "tokens_held": use.held}
    used |= {"tokens_charged": use.charged, "requests_charged": use.charged_requests}
    used["period_ends"] = None if use.ends < 0 else round(now + use.ends / 1000)
    if arguments.json:
        return [json.dumps({**found, "applies": limits.model_dump(exclude_none=True), "use": used})]
    rows = {"key": f"{found['prefix']}…" if "prefix" in found else "in the settings", "state": found["state"]}
    rows |= {word: _date(found[word]) for word in ("created", "expires", "revoked") if found.get(word)}
    rows["may"] = " ".join(word for word in ("admin", "operator") if found[word]) or "ask"
    rows["limits"] = _limits_text(limits.model_dump(exclude_none=True)) + (" (default)" if key.limits is None else "")
    rows["last minute"] = _uncounted(
        (limits.requests_per_minute, f"{use.requests} requests"), (limits.tokens_per_minute, f"{use.tokens} tokens")
    )
    rows["under way"] = _uncounted((limits.concurrency or limits.tokens, f"{use.under_way} requests"))
    if limits.tokens:
        ends = "" if use.ends < 0 else f", until {_date(now + use.ends / 1000)}"
        rows["budget"] = (
            f"{use.charged} of {limits.tokens} tokens in {use.charged_requests} requests, {use.held} held{ends}"
        )
    width = max(map(len, rows))
    return [f"{name:<{width}}  {plain(value)}" for name, value in rows.items()]


def _uncounted(*counts: tuple[int | None, str]) -> str:
    """What is counted: only what has a limit is."""
    return ", ".join(text for limit, text in counts if limit) or "not counted: there is no limit"


def _limit(store: KeyStore, settings: Settings, arguments: argparse.Namespace) -> list[str]:
    key = _change(store, settings, arguments.name, "key.limit", limits=arguments.limits)
    limits = None if key.limits is None else key.limits.model_dump(exclude_none=True)
    return [f"{key.name}: {_limits_text(limits)}"]


def _retain(store: KeyStore, settings: Settings, arguments: argparse.Namespace) -> list[str]:
    key = _change(store, settings, arguments.name, "key.retain", retain=arguments.keep)
    return [f"{key.name}: {key.retain or f'{settings.storage.retain} (default)'}"]


def _revoke(store: KeyStore, settings: Settings, arguments: argparse.Namespace) -> list[str]:
    key, _ = _stored(store, settings, arguments.name)
    if key.revoked is not None:
        raise CountersignError(f"{key.name}: it was revoked on {_date(key.revoked)}")
    _change(store, settings, arguments.name, "key.revoke", revoked=time.time())
    return [f"{key.name}: revoked"]


def _forget(store: KeyStore, settings: Settings, arguments: argparse.Namespace) -> list[str]:
    key, before = _stored(store, settings, arguments.name)
    if key.usable(time.time()):
        raise CountersignError(f"{key.name}: revoke it first")
    # Their end would be counted, under a key that nobody looks at any more.
    if left := store.use(key, "never").under_way:
        raise CountersignError(f"{key.name}: {left} requests of it are under way; forget it when they are over")
    if not store.change(key.name, before, None, *_entry(settings, "key.forget", key, None)):
        raise CountersignError(f"{key.name}: it was changed just now; nothing was done, try again")
    store.forget_counts(key)
    receivers.forget_of(store.redis, settings, key.sha256)
    return [f"{key.name}: forgotten"]


def _entry(settings: Settings, action: str, before: StoredKey | None, after: StoredKey | None) -> tuple[str, int]:
    """The change as the audit log has it, and how much that keeps."""
    name = next(key.name for key in (after, before) if key is not None)
    said = entry(terminal_actor(), action, name, before=told(before), after=told(after))
    return said, settings.admin.audit_entries


def _change(store: KeyStore, settings: Settings, name: str, action: str, **fields: Any) -> StoredKey:
    key, before = _stored(store, settings, name)
    changed = key.model_copy(update=fields)
    if not store.change(name, before, changed, *_entry(settings, action, key, changed)):
        raise CountersignError(f"{name}: it was changed just now; nothing was done, try again")
    return changed


def _stored(store: KeyStore, settings: Settings, name: str) -> tuple[StoredKey, str]:
    """A key in Redis, and how it is stored. Raises CountersignError."""
    key, before = store.get(name)
    if key is not None:
        return key, before
    if before:
        raise CountersignError(f"{plain(name)}: its record cannot be read; was it written by another version?")
    if name in [each.name for each in settings.keys]:
        raise CountersignError(f"{plain(name)}: it is in the settings; change it there")
    raise CountersignError(f"{plain(name)}: there is no such key")


def _known(store: KeyStore, settings: Settings, name: str) -> ClientKey:
    """A key of the settings or of Redis. Raises CountersignError."""
    for each in settings.keys:
        if each.name == name:
            return each
    return _stored(store, settings, name)[0]


def _limits(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> LimitSettings | None:
    """Its own limits; None where none are named, which leaves it those of the settings."""
    given = {name: getattr(arguments, name) for name in _LIMITS if getattr(arguments, name) is not None}
    if arguments.every is not None and "tokens" not in given:
        parser.error("--every goes with --tokens")
    if arguments.unlimited and given:
        parser.error("--unlimited goes with no limit")
    if arguments.every is not None:
        given["every"] = arguments.every
    return LimitSettings(**given) if given or arguments.unlimited else None


def _limits_text(limits: dict[str, Any] | None) -> str:
    if limits is None:
        return "default"
    texts = {
        "requests_per_minute": "{} requests a minute",
        "tokens_per_minute": "{} tokens a minute",
        "concurrency": "{} at once",
        "tokens": "{} tokens" if limits.get("every") == "never" else f"{{}} tokens a {limits.get('every')}",
    }
    return ", ".join(text.format(limits[name]) for name, text in texts.items() if name in limits) or "none"


def _date(seconds: float | None) -> str:
    return "" if seconds is None else f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}"


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 0 < number <= 10**15:
        raise argparse.ArgumentTypeError("a whole number above 0 is needed")
    return number


def _moment(text: str) -> float:
    """Unix seconds of `30d` from now, or of a date (and time) in UTC or with its offset."""
    if found := re.fullmatch(r"([0-9]{1,6})([mhdw])", text):
        return time.time() + int(found[1]) * _SECONDS[found[2]]
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError("30m, 12h, 90d, 8w or a date such as 2030-01-31 is needed") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


_ACTIONS = {
    "create": _create,
    "list": _list,
    "show": _show,
    "limit": _limit,
    "retain": _retain,
    "revoke": _revoke,
    "forget": _forget,
}


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="countersign keys", description=__doc__, formatter_class=formatter)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    made = {name: actions.add_parser(name, help=text) for name, text in _HELP.items()}
    for name, action in made.items():
        action.add_argument("--config", help="settings file (default: $COUNTERSIGN_CONFIG, then ./countersign.yaml)")
        if name != "list":
            action.add_argument("name", metavar="NAME")
        if name in ("create", "list", "show"):
            action.add_argument("--json", action="store_true", help="one line of JSON per key instead of text")
        if name in ("create", "limit"):
            _add_limits(action)
    create = made["create"]
    create.add_argument("--admin", action="store_true", help="it may see and decide everything over the API")
    create.add_argument("--operator", action="store_true", help="it is for your own traffic (docs/standing.md)")
    create.add_argument(
        "--evidence",
        choices=["own", "all", "none"],
        help="whose evidence bundles it may read (default: of its own answers; with --admin, all)",
    )
    create.add_argument("--retain", choices=_KEPT, help=_KEPT_TEXT)
    made["retain"].add_argument("--keep", choices=_KEPT, help=_KEPT_TEXT)
    create.add_argument("--expires", type=_moment, metavar="WHEN", help="30m, 12h, 90d, 8w from now, or a date (UTC)")
    return parser


def _add_limits(action: argparse.ArgumentParser) -> None:
    for name, text in _LIMITS.items():
        action.add_argument(f"--{name.replace('_', '-')}", type=_positive, metavar="N", help=text)
    action.add_argument("--every", choices=("day", "month", "never"), help="when --tokens starts again (month)")
    action.add_argument("--unlimited", action="store_true", help="no limits, whatever the settings say")


_HELP = {
    "create": "make a key and print it, this once",
    "list": "every key, and what it may use",
    "show": "one key, and what it used",
    "limit": "give a key other limits, or none that are its own",
    "retain": "say what is kept of its answers' evidence",
    "revoke": "let nobody in by it any more",
    "forget": "drop what is left of a revoked or expired key",
}
