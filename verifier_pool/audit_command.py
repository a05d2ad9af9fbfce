"""`countersign audit`: what admins changed, the latest first: at the API, at a terminal, by other settings.

An entry says when (UTC), who, what, of what, and what came of it; --json has how it was before and after, too. Secrets
are in none. `admin.audit_entries` says how many are kept.

exit code 0: done     1: Redis did not answer     2: wrong usage     3: wrong settings
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from verifier_pool.link import trail
from verifier_pool.runtime import answering, read_settings
from verifier_pool.terminal import plain, print_lines, table

TIMEOUT = 5.0
"""Seconds that Redis has for an answer, twice."""
LIMIT = 50


def main(argv: Sequence[str]) -> int:
    """Show the audit log; returns 0. Raises SettingsError and StoreUnavailable."""
    arguments = _parser().parse_args(list(argv))
    settings = read_settings(arguments.config)
    wanted = {name: text for name in ("actor", "action", "target") if (text := getattr(arguments, name))}
    with answering(settings, TIMEOUT) as redis:
        found = trail.read(redis, limit=arguments.limit, before=arguments.before, wanted=wanted)
    print_lines([json.dumps(each) for each in found] if arguments.json else _lines(found))
    return 0


def _lines(found: Sequence[Mapping[str, Any]]) -> list[str]:
    if not found:
        return ["nothing"]
    rows = [("when (UTC)", "who", "what", "of what", "result", "change")]
    rows += [
        (
            time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(each.get("at", 0))),
            plain(each.get("actor", "")),
            plain(each.get("action", "")),
            plain(each.get("target", "")),
            plain(each.get("result", "")),
            plain(_change(each)),
        )
        for each in found
    ]
    return table(rows, 10_000, indent="")


def _change(entry: Mapping[str, Any]) -> str:
    before, after = entry.get("before") or {}, entry.get("after") or {}
    parts = [f"{name}: {_text(before.get(name))} to {_text(after.get(name))}" for name in before if name in after]
    parts += [f"{name}: {_text(after[name])}" for name in after if name not in before]
    return "; ".join(parts) + (f" ({entry['why']})" if entry.get("why") else "")


def _text(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 100_000:
        raise argparse.ArgumentTypeError("a whole number from 1 to 100000 is needed")
    return int(text)


def _id(text: str) -> str:
    first, dash, second = text.partition("-")
    if not first.isdecimal() or (dash and not second.isdecimal()):
        raise argparse.ArgumentTypeError("the id of an entry is needed, such as 1798761600000-0")
    return text


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="countersign audit", description=__doc__, formatter_class=formatter)
    parser.add_argument("--limit", type=_count, default=LIMIT, metavar="N", help=f"entries at most ({LIMIT})")
    parser.add_argument("--before", type=_id, metavar="ID", help="only entries older than this one")
    for name, text in {
        "actor": "who: key:NAME, cli:USER@HOST, file:HOST",
        "action": "what was done, such as backend. or key.revoke",
        "target": "of what",
    }.items():
        parser.add_argument(f"--{name}", metavar="TEXT", help=f"{text}; its beginning suffices")
    parser.add_argument("--json", action="store_true", help="one line of JSON per entry instead of text")
    parser.add_argument("--config", help="settings file (default: $COUNTERSIGN_CONFIG, then ./countersign.yaml)")
    return parser
