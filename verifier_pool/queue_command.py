"""`countersign queue`: what waits for the workers, and the jobs that failed for good.

    list                what waits in every queue, by lane, in flight and for a later try, how long, and who takes it;
                        what waits for its verdict, by backend; how references did at replays with a known answer, and
                        how often they were started again; the dead letters, and nothing of a prompt or an answer
    requeue ID… | --all  queue dead letters anew. A verdict is written once: what is decided stays so and is not queued
                        again. That leaves webhooks, and what lost its worker before it could say so
    drop ID… | --all     delete dead letters; what is undecided then ends unverified, or is judged without its replay

An ID is a job's, or a generation's for all its jobs. docs/pool.md says more.

exit code 0: done     1: Redis did not answer, or an ID that was given is no dead letter or cannot be queued anew
          2: wrong usage     3: wrong settings
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any, cast

from redis import Redis

from policies.settings import Settings
from verifier_pool import dead_letters
from verifier_pool.link import letters, overlays, queues
from verifier_pool.link.fair import LANES
from verifier_pool.link.queue import waiting_bytes_key, waiting_key
from verifier_pool.link.trail import terminal_actor
from verifier_pool.replays import CANARIES
from verifier_pool.runtime import answering, read_settings
from verifier_pool.standing import Standings
from verifier_pool.terminal import plain, print_lines, table

TIMEOUT = 5.0
"""Seconds that Redis has for an answer, twice."""


def main(argv: Sequence[str]) -> int:
    """Show or change; returns the exit code. Raises SettingsError and StoreUnavailable."""
    parser = _parser()
    arguments = parser.parse_args(list(argv))
    if arguments.action != "list" and bool(arguments.ids) == arguments.all:
        parser.error(f"{arguments.action} needs IDs, or --all")
    settings = read_settings(arguments.config)
    with answering(settings, TIMEOUT) as redis:
        settings = overlays.effective(redis, settings).settings
        if arguments.action == "list":
            return _list(redis, settings, arguments.json)
        return _change(redis, settings, arguments)


def _list(redis: Redis, settings: Settings, as_json: bool) -> int:
    now = time.time()
    found = queues.described(redis, now)
    backends = _backends(redis, settings, now)
    references = _references(redis, settings)
    dead = [letters.shown(letter, now) for letter in letters.find(redis)]
    if as_json:
        print_lines([json.dumps({"queues": found, "backends": backends, "references": references, "dead": dead})])
        return 0
    lines = ["queues", *_table(_QUEUE, found), "", "waiting for a verdict", *_table(_BACKEND, backends), ""]
    lines += ["known answers replayed", *_table(_REFERENCE, references), "", "dead letters", *_table(_LETTER, dead)]
    print_lines(lines)
    return 0


def _change(redis: Redis, settings: Settings, arguments: argparse.Namespace) -> int:
    ids = None if arguments.all else arguments.ids
    done = dead_letters.act(redis, settings, arguments.action, ids, actor=terminal_actor())
    if arguments.json:
        print_lines([json.dumps(done)])
    else:
        word = {"requeue": "queued anew", "drop": "dropped"}[arguments.action]
        print_lines(
            [f"{plain(each['job'])}: {word if each['done'] else 'not ' + word + ': ' + each['why']}" for each in done]
        )
    return int(not arguments.all and not all(each["done"] for each in done))


def _backends(redis: Redis, settings: Settings, now: float) -> list[dict[str, Any]]:
    """What waits for its verdict, by backend."""
    names = [backend.name for backend in settings.backends]
    names += [name for name in Standings(redis, settings).backends() if name not in names]
    pipeline = redis.pipeline(transaction=False)
    for name in names:
        pipeline.zcount(waiting_key(name), now - settings.verification.evidence_ttl, "+inf")
        pipeline.zrange(waiting_key(name), 0, 0, withscores=True)
        pipeline.get(waiting_bytes_key(name))
    found = pipeline.execute()
    return [
        {
            "backend": name,
            "waiting": found[3 * at],
            "oldest_seconds": max(0.0, round(now - found[3 * at + 1][0][1], 3)) if found[3 * at] else None,
            "bytes": int(found[3 * at + 2] or 0),
        }
        for at, name in enumerate(names)
    ]


def _references(redis: Redis, settings: Settings) -> list[dict[str, Any]]:
    """By model, how often its references gave a known answer back or did not, were started again, and were wrong about
    an answer each time, which is left undecided."""
    counts: dict[str, dict[str, int]] = {name: {} for name, model in settings.models.items() if model.reference}
    for field, count in cast(dict[bytes, bytes], redis.hgetall(CANARIES)).items():
        model, _, what = field.decode(errors="replace").rpartition(":")
        counts.setdefault(model, {})[what] = int(count)
    return [
        {"model": model, **{what: found.get(what, 0) for what in ("passed", "failed", "restarts", "unsound")}}
        for model, found in sorted(counts.items())
    ]


_QUEUE = {
    "queue": "queue",
    "waiting": "waiting",
    **dict.fromkeys(("first", *LANES), ""),
    "in_flight": "in flight",
    "later": "later",
    "oldest_seconds": "oldest",
    "dead": "dead",
    "workers": "workers",
}
_BACKEND = {"backend": "backend", "waiting": "waiting", "oldest_seconds": "oldest", "bytes": "bytes"}
_REFERENCE = {name: name for name in ("model", "passed", "failed", "restarts", "unsound")}
_LETTER = {
    "job": "job",
    "stage": "stage",
    "reason": "reason",
    "age_seconds": "age",
    "tries": "tries",
    "backend": "backend",
    "model": "model",
    "verdict": "verdict",
}
_NUMBERS = {
    "waiting",
    "first",
    *LANES,
    "in_flight",
    "later",
    "oldest_seconds",
    "age_seconds",
    "bytes",
    "dead",
    "workers",
    "tries",
}
_NUMBERS |= {"passed", "failed", "restarts", "unsound"}


def _table(headings: dict[str, str], rows: Sequence[dict[str, Any]]) -> list[str]:
    if not rows:
        return ["  none"]
    cells = [[text or name for name, text in headings.items()]]
    cells += [[_cell(name, {**row, **row.get("lanes", {})}.get(name)) for name in headings] for row in rows]
    return table(cells, 10_000, right=[at for at, name in enumerate(headings) if name in _NUMBERS])


def _cell(name: str, value: Any) -> str:
    if value is None or value == "":
        return "-"
    if name.endswith("_seconds"):
        seconds = int(value)
        return f"{seconds} s" if seconds < 120 else f"{seconds // 60} min" if seconds < 7200 else f"{seconds // 3600} h"
    return plain(value)


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="countersign queue", description=__doc__, formatter_class=formatter)
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|requeue|drop")
    for name, text in {
        "list": "show queues and dead letters",
        "requeue": "queue dead letters anew",
        "drop": "delete dead letters",
    }.items():
        one = actions.add_parser(name, help=text, description=text)
        if name != "list":
            one.add_argument("ids", nargs="*", metavar="ID", help="of a job or a generation")
            one.add_argument("--all", action="store_true", help="all of them")
        one.add_argument("--json", action="store_true", help="one line of JSON instead of text")
        one.add_argument("--config", help="settings file (default: $COUNTERSIGN_CONFIG, then ./countersign.yaml)")
    return parser
