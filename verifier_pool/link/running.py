"""Which processes run and by which settings, as each says of itself in Redis, and how all are asked to read them anew.

    running     hash: by process what it said last, JSON (`Said`); who was silent for `SILENT` seconds is gone
    running-at  sorted set of processes, scored by the second at which they said it
    reload      JSON: the last time that somebody asked for the settings to be read anew (`ask`), for an hour

Each process says it every few seconds, and whenever something changed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Mapping
from typing import Any, cast

import msgspec
from redis import Redis

from policies.settings import BackendSettings, Settings
from verifier_pool.link.queue import PREFIX

RUNNING = PREFIX + "running"
RELOAD = PREFIX + "reload"
EVERY = 5.0
"""Seconds after which a process says that it runs, at the latest."""
SILENT = 30.0
_FORGOTTEN = 3600
_RUNNING_AT = PREFIX + "running-at"

TELL = """
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[1])
local oldest = tonumber(ARGV[3]) - tonumber(ARGV[4])
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', oldest)) do redis.call('HDEL', KEYS[1], id) end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', oldest)
for n = 1, 2 do redis.call('EXPIRE', KEYS[n], ARGV[4]) end
"""
"""Lua: say what a process is up to, and forget those that were silent for long. KEYS are `KEYS`, ARGV
`tell_arguments`."""
LEAVE = "redis.call('HDEL', KEYS[1], ARGV[1]) redis.call('ZREM', KEYS[2], ARGV[1])"
"""Lua: this process ends. KEYS are `KEYS`. ARGV: its id."""
KEYS = [RUNNING, _RUNNING_AT]


class Said(msgspec.Struct, frozen=True):
    """What a process says of its settings.

    Attributes:
        kind: `proxy` or `worker`. `does`: what a worker does, such as `verify`.
        sha256: of the settings file as it was last read; empty where there is none.
        since: Unix second since when the settings hold that hold now. `at`: when this was said.
        error: why the file as it is now cannot be used: the key, and what was expected.
        restart: settings in the file that hold only after a restart.
        left_out: by backend, why what is laid over it cannot be used.
        backends: version of what is laid over backends, as it holds here.
        asked: the last `ask` that was followed.
        profiles: by model, what profile a worker judges by.
    """

    id: str
    kind: str
    host: str
    pid: int
    started: float
    at: float
    does: str = ""
    sha256: str = ""
    since: float = 0.0
    error: dict[str, str] | None = None
    restart: tuple[str, ...] = ()
    left_out: dict[str, str] = {}
    backends: str = ""
    asked: str = ""
    profiles: dict[str, Any] = {}


class Asked(msgspec.Struct, frozen=True):
    """Somebody asked for the settings to be read anew. `id` tells one time from another; `by` is who."""

    id: str
    by: str
    at: float


_said = msgspec.json.Decoder(Said)
_asked = msgspec.json.Decoder(Asked)


def begun(kind: str, does: str = "") -> Said:
    """What this process says first."""
    now = time.time()
    return Said(secrets.token_hex(8), kind, socket.gethostname(), os.getpid(), now, now, does, since=now)


def tell_arguments(said: Said) -> list[str | bytes | int]:
    """ARGV of `TELL`."""
    now = time.time()
    return [said.id, msgspec.json.encode(msgspec.structs.replace(said, at=now)), f"{now:.3f}", _FORGOTTEN]


def alive(stored: Mapping[bytes, bytes], now: float) -> list[Said]:
    """Who runs, of those that `running` holds."""
    found = list[Said]()
    for data in stored.values():
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            if (said := _said.decode(data)).at >= now - SILENT:
                found.append(said)
    return sorted(found, key=lambda said: (said.kind, said.host, said.pid, said.does))


def processes(redis: Redis) -> list[Said]:
    """Who runs now."""
    return alive(cast("dict[bytes, bytes]", redis.hgetall(RUNNING)), time.time())


def tell(redis: Redis, said: Said) -> None:
    """Say it."""
    redis.eval(TELL, len(KEYS), *KEYS, *tell_arguments(said))


def leave(redis: Redis, said: Said) -> None:
    """This process ends."""
    redis.eval(LEAVE, len(KEYS), *KEYS, said.id)


def ask(redis: Redis, by: str) -> Asked:
    """Ask every process to read its settings anew, which each does within two seconds."""
    asked = Asked(secrets.token_hex(8), by, time.time())
    redis.set(RELOAD, msgspec.json.encode(asked), ex=_FORGOTTEN)
    return asked


def asked_for(data: bytes | None) -> Asked | None:
    """What `reload` holds; None for nothing, and for what cannot be read."""
    try:
        return None if data is None else _asked.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def described(said: Said, asked: str = "") -> dict[str, Any]:
    """What there is to say of a process, as JSON. `state`: of its settings."""
    state = "invalid" if said.error else "restart needed" if said.restart else "current"
    return {**msgspec.structs.asdict(said), "state": state} | ({"followed": said.asked == asked} if asked else {})


def profiles(redis: Redis, settings: Settings) -> list[dict[str, Any]]:
    """By model and reference: the file with its profile, the profile that workers say they judge by, what it lacks, and
    which backends it does not speak for."""
    told: dict[str, list[tuple[Said, dict[str, Any]]]] = {}
    for said in processes(redis):
        for name, facts in said.profiles.items():
            told.setdefault(name, []).append((said, facts))
    found = []
    for model, declared in settings.models.items():
        for second, path in ((False, declared.profile), (True, declared.second_profile)):
            if path is None and second:
                continue
            field = profile_field(model, second=second)
            found.append(_profile(model, path, second, told.get(field, []), settings))
    return found


def profile_field(model: str, *, second: bool = False) -> str:
    """How `Said.profiles` names a model's profile, or that of its second reference."""
    return f"{model}\n2" if second else model


def _profile(
    model: str, path: str | None, second: bool, told: list[tuple[Said, dict[str, Any]]], settings: Settings
) -> dict[str, Any]:
    latest = max(told, key=lambda each: each[0].since)[1] if told else None
    found = {each.name: _unfit(each, latest["key"]) for each in settings.backends if latest and each.model == model}
    unfit = {name: why for name, why in found.items() if why}
    lacks = ["a profile"] if path is None else ["a worker that has read it"] if latest is None else latest["lacks"]
    return {
        "object": "profile",
        "model": model,
        "reference": "second" if second else "first",
        "path": path,
        "lacks": lacks,
        "unfit": unfit,
        "profile": latest,
        "differ": len({facts["name"] for _, facts in told}) > 1,
        "workers": len(told),
    }


def _unfit(backend: BackendSettings, key: Mapping[str, Any]) -> str:
    for name in ("runtime", "precision", "engine"):
        has, wanted = getattr(backend, name), key[name]
        if has != wanted:
            return f"{name} is {has!r}, the profile was measured with {wanted!r}"
    return ""
