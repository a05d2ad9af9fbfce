"""The audit log: every change by an admin, at the API, a terminal or by other settings, in the order they were made.

    audit-log   stream, bounded in length (`admin.audit_entries`); each entry has one field, JSON

An entry says when, who, what, of what, how it was before and after, and what came of it; secrets are named and not
shown. What changes one hash writes its entry in the same step (`CHANGE`), so neither is without the other.
"""

from __future__ import annotations

import getpass
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from redis import Redis

from policies.documents import document
from policies.overlay import HIDDEN
from policies.settings import DurabilitySettings
from policies.standing import LONGEST_WHY, TRIAL, visible
from verifier_pool.link import durable
from verifier_pool.link.queue import PREFIX

TRAIL = PREFIX + "audit-log"
SECRETS = ("api_key", "key", "secret", "sha256", "token")
"""Names of what is never shown."""
MAYBE_LOST = "it was done, but is not as durable yet as the settings ask for; Redis may lose it in a crash"
_CHUNK = 500
_MOST_SCANNED = 100_000

CHANGE = """
local now = redis.call('HGET', KEYS[1], ARGV[1]) or ''
if now ~= ARGV[2] then return 0 end
if ARGV[3] == '' then redis.call('HDEL', KEYS[1], ARGV[1]) else redis.call('HSET', KEYS[1], ARGV[1], ARGV[3]) end
redis.call('SET', KEYS[2], ARGV[4])
if ARGV[6] ~= '' then redis.call('XADD', KEYS[3], 'MAXLEN', ARGV[5], '*', 'entry', ARGV[6]) end
return 1
"""
"""Lua: change one field of a hash unless somebody else did meanwhile, with its entry; says whether it was done.

KEYS: the hash, its version, `audit-log`. ARGV: the field, its value as it was and as it shall be ('' is none), a
version, entries that are kept, the entry ('' is none).
"""


def change_arguments(
    keys: tuple[str, str], field: str, before: str, after: str, entry: str = "", most: int = 1
) -> tuple[list[str], list[str]]:
    """KEYS and ARGV of `CHANGE`. `keys` are the hash and its version."""
    return [*keys, TRAIL], [field, before, after, secrets.token_hex(8), str(most), entry]


def change(redis: Redis, rules: DurabilitySettings, keys: Sequence[str], arguments: Sequence[str]) -> bool:
    """Do `CHANGE`, durably: a revoked key must not be back after a crash. Raises NotDurable where it was done and may
    be lost."""
    try:
        return bool(durable.evaluate(redis, rules, CHANGE, keys, arguments))
    except durable.NotDurable as error:
        raise durable.NotDurable(f"{MAYBE_LOST} ({error})") from error


def entry(
    actor: str,
    action: str,
    target: str,
    *,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
    result: str = "done",
    why: str = "",
) -> str:
    """One entry, as JSON in ASCII.

    Args:
        actor: `key:NAME` of an admin key, `cli:USER@HOST`, `file:HOST` for other settings.
        action: what was done, such as `backend.drain`. `target`: to what.
        before, after: what it changed, as it was and is.
        result: `done`, or why not.
    """
    said = {"at": round(time.time(), 3), "actor": _line(actor), "action": action, "target": _line(target)}
    said |= {"before": _hidden(before), "after": _hidden(after), "result": _line(result)}
    return json.dumps(said | ({"why": _line(why)} if why else {}))


def decision(actor: str, action: str, backend: str, before: str | None, after: str, why: str) -> str:
    """The entry of a decision about a backend's standing, by its states; a new one's record begins with it."""
    states = {"state": before or TRIAL}, {"state": after}
    return entry(actor, f"standing.{action}", backend, before=states[0], after=states[1], why=why)


def append(redis: Redis, most: int, said: str) -> None:
    """Write an entry, of which the last `most` are kept; `redis` may be a pipeline."""
    redis.xadd(TRAIL, {"entry": said}, maxlen=most, approximate=False)


def read(
    redis: Redis, *, limit: int = 50, before: str | None = None, wanted: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Entries, the latest first.

    Args:
        before: the id of an entry; only older ones.
        wanted: what `actor`, `action` or `target` must begin with.
    """
    found: list[dict[str, Any]] = []
    end, scanned = f"({before}" if before else "+", 0
    while len(found) < limit and scanned < _MOST_SCANNED:
        chunk = cast("list[Any]", redis.xrevrange(TRAIL, end, "-", count=_CHUNK))
        found += [each for each in parsed(chunk) if _fits(each, wanted or {})]
        scanned += len(chunk)
        if len(chunk) < _CHUNK:
            break
        end = f"({chunk[-1][0].decode()}"
    return found[:limit]


def parsed(chunk: Sequence[tuple[bytes, Mapping[bytes, bytes]]]) -> list[dict[str, Any]]:
    """Entries as Redis holds them, each with its `id`; what cannot be read says so."""
    return [{"id": id.decode(), **(document(fields.get(b"entry")) or {"action": "unreadable"})} for id, fields in chunk]


def terminal_actor() -> str:
    """Who sits at this terminal."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container's user without a name
        user = f"uid {os.getuid()}"
    return f"cli:{user}@{socket.gethostname()}"


def _hidden(fields: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if fields is None:
        return None
    return {
        name: HIDDEN
        if name in SECRETS and value is not None
        else _hidden(value)
        if isinstance(value, Mapping)
        else value
        for name, value in fields.items()
    }


def _line(text: str) -> str:
    text = " ".join(text.split())[:LONGEST_WHY]
    return text if visible(text) else text.encode("unicode_escape").decode()[:LONGEST_WHY]


def _fits(found: Mapping[str, Any], wanted: Mapping[str, str]) -> bool:
    return all(str(found.get(name, "")).startswith(text) for name, text in wanted.items())
