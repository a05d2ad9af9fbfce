"""What a running proxy is told to do otherwise: by its settings file, by what admins change in Redis, by both.

One task looks at Redis each second and at the file every `admin.watch_seconds`. New settings are read and checked in a
thread, and then hold for every request from one moment on; requests that had begun go on as they began. Settings that
cannot be used change nothing: the old ones hold, and log, metrics and the admin API say why.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
from starlette.datastructures import State

from policies.errors import SettingsError, StoreUnavailable
from policies.overlay import Merged, Overlay, merged
from policies.reload import FIXED_IN_PROXY, Applied, reread
from policies.settings import Settings
from proxy.services import Services, check_addresses, check_backend, load_tokenizers
from proxy.tasks import end
from verifier_pool.link import overlays, running, trail
from verifier_pool.link.settings_file import SettingsFile, hear_hangups

logger = logging.getLogger(__name__)

EVERY = 1.0
"""Seconds between two looks at Redis."""
_TOLD_SECONDS = 5
"""For so long other proxies that apply the same settings add nothing to the audit log."""

_LOOK = """
local version = redis.call('GET', KEYS[1]) or ''
local entries = {}
if ARGV[2] == '' then
  entries = redis.call('XREVRANGE', KEYS[4], '+', '-', 'COUNT', 1)
else
  entries = redis.call('XRANGE', KEYS[4], '(' .. ARGV[2], '+', 'COUNT', 100)
end
local found = {version, redis.call('GET', KEYS[3]) or '', entries}
if version ~= ARGV[1] then found[4] = redis.call('HGETALL', KEYS[2]) end
return found
"""
"""Lua: what is new. KEYS: `backends-version`, `backends`, `reload`, `audit-log`. ARGV: the version and the entry that
are known."""

_NOTE = """
if redis.call('SET', KEYS[1], '1', 'NX', 'EX', ARGV[1]) then
  redis.call('XADD', KEYS[2], 'MAXLEN', ARGV[2], '*', 'entry', ARGV[3])
end
"""


def _usable(declared: Settings, laid_over: Mapping[str, Overlay], shut: Mapping[str, str]) -> Merged:
    """Settings as they hold. What is laid over a backend that then cannot be addressed is left out, and keeps nothing
    else back; a backend whose secrets cannot be had (`shut`, with why) is asked nothing."""
    laid_over = {**laid_over, **dict.fromkeys(shut, Overlay(removed=True))}
    both, odd = merged(declared, laid_over), dict(shut)
    for backend in both.settings.backends:
        if both.sources[backend.name] != "settings":
            try:
                check_backend(backend, "backend")
            except SettingsError as error:
                odd[backend.name] = str(error)
    if not odd:
        return both
    usable = {name: overlay for name, overlay in laid_over.items() if name in shut or name not in odd}
    both = merged(declared, usable)
    return replace(both, left_out={**both.left_out, **odd})


class Following:
    """Keeps `state.services` as the settings file and Redis say.

    Attributes:
        declared: the file's settings as they hold, without what is laid over them.
        merged: settings as they hold.
        said: what this process says of itself (`verifier_pool.link.running`).
    """

    def __init__(
        self, state: State, settings: Settings, redis_url: str, file: SettingsFile | None, given: Mapping[str, Any]
    ) -> None:
        self.declared = settings
        self.merged = Merged(settings)
        self.said = running.begun("proxy")
        self._state = state
        self._redis_url = redis_url
        self._file = file
        self._given = given
        self._overlays: dict[str, Overlay] = {}
        self._shut: dict[str, str] = {}
        self._version: str | None = None
        self._entry = ""
        self._asked: running.Asked | None = None
        self._heard = self._behind = False
        self._turn = asyncio.Lock()
        self._woken = asyncio.Event()
        self._forced = False
        self._file_at = self._said_at = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def services(self) -> Services:
        """The parts of this proxy as they are now."""
        services: Services = self._state.services
        return services

    async def start(self) -> None:
        """Look once, so that the first request is served by what holds, and then each second."""
        if self._file is not None:
            self.said = msgspec.structs.replace(self.said, sha256=self._file.sha256)
        await self.look()
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):  # in a thread signals are not ours
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.wake)
            hear_hangups()
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Stop looking."""
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
            asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
        if self._task is not None:
            await end(self._task)
        with contextlib.suppress(StoreUnavailable):
            await self._run(running.LEAVE, running.KEYS, [self.said.id])

    def wake(self) -> None:
        """Read the file now, changed or not."""
        self._forced = True
        self._woken.set()

    async def look(self) -> bool:
        """See what is new and let it hold. What cannot be read or used is logged, and changes nothing.

        Returns whether what Redis says of backends was heard and holds.
        """
        async with self._turn:
            forced, self._forced = self._forced, False
            heard = await self._hear()
            if self._asked is not None and self._asked.id != self.said.asked:
                forced = True
            text, problem = await self._read(forced=forced)
            if problem is not None:
                await self._refuse(problem)
            if text is not None:
                await self._renew(text, by_hand=forced)
            if self._behind:
                await self._renew(None)
            if forced and self._asked is not None:
                self._say(asked=self._asked.id)
            if time.monotonic() >= self._said_at:
                self._said_at = time.monotonic() + running.EVERY
                with contextlib.suppress(StoreUnavailable):
                    await self._run(running.TELL, running.KEYS, running.tell_arguments(self.said))
            return heard and not self._behind

    async def _hear(self) -> bool:
        """What Redis says, if it does; `_behind` is whether other backends are laid over the file's than hold here."""
        keys = [overlays.VERSION, overlays.BACKENDS, running.RELOAD, trail.TRAIL]
        try:
            version, asked, entries, *stored = await self._run(
                _LOOK, keys, ["?" if self._version is None else self._version, self._entry]
            )
        except StoreUnavailable:
            return False
        self._asked = running.asked_for(asked)
        if not self._heard and self._asked is not None:
            self._say(asked=self._asked.id)  # the file was read after that
        self._tell_of(entries)
        self._heard = True
        if not stored:
            return True
        pairs = dict(zip(stored[0][::2], stored[0][1::2], strict=True))
        found, unreadable = overlays.read(pairs)
        if unreadable:
            logger.error("what is laid over backends cannot be read", extra={"backends": unreadable})
        found, shut = overlays.opened(found, self.services.sealer)
        for name, why in shut.items():
            logger.error("a backend is left out: its key cannot be had", extra={"backend": name, "why": why})
        before, self._overlays, self._shut = (self._overlays, self._shut), found, shut
        self._version = version.decode()
        self._say(backends=self._version)
        self._behind |= (found, shut) != before
        return True

    def _tell_of(self, entries: list[Any]) -> None:
        """Log what is new in the audit log, whoever did it: a change at a terminal has no log of its own."""
        told = [(id, dict(zip(fields[::2], fields[1::2], strict=True))) for id, fields in entries]
        for entry in trail.parsed(told) if self._entry else ():
            logger.warning("an admin's change", extra={"audit": entry})
        if told:
            self._entry = told[-1][0].decode()
        elif not self._entry:
            self._entry = "0-0"

    async def _read(self, *, forced: bool) -> tuple[str | None, SettingsError | None]:
        """The file's text where it is another one, or always where `forced`; or what is wrong with the file."""
        every = self.declared.admin.watch_seconds
        if self._file is None or not (forced or (every and time.monotonic() >= self._file_at)):
            return None, None
        self._file_at = time.monotonic() + every
        try:
            found = await asyncio.to_thread(self._file.take if forced else self._file.look)
        except SettingsError as error:
            return None, error
        finally:
            self._say(sha256=self._file.sha256)
        return (None if found is None else found.text), None

    async def _renew(self, text: str | None, *, by_hand: bool = False) -> None:
        """Let it hold: another file, or other backends laid over the same."""
        services = self.services
        try:
            made = None if text is None else await asyncio.to_thread(self._made, text, by_hand)
            declared = self.declared if made is None else made.settings
            await asyncio.to_thread(check_addresses, declared, self._redis_url)
            both = _usable(declared, self._overlays, self._shut)
            tokenizers = await asyncio.to_thread(load_tokenizers, both.settings, services.settings, services.tokenizers)
        except SettingsError as error:
            await self._refuse(error)
            return
        except Exception as error:
            # Whatever a file makes go wrong, it is the file that cannot be used.
            if self.said.error is None:
                logger.exception("settings could not be read")
            await self._refuse(SettingsError("countersign.yaml", f"cannot be read ({type(error).__name__})"))
            return
        known = {}
        with contextlib.suppress(StoreUnavailable):
            known = await services.standings.of_others(both.settings)
        # From here nothing is awaited: a request sees all of it or nothing.
        self.declared, self.merged, self._behind = declared, both, False
        if both.settings != services.settings:
            self._state.services = services.renewed(both.settings, tokenizers, known)
        self._say(left_out=dict(both.left_out), since=time.time())
        if made is not None:
            await self._applied(made)

    def _made(self, text: str, by_hand: bool) -> Applied:
        return reread(self.declared, text, os.environ, FIXED_IN_PROXY, by_hand=by_hand, given=self._given)

    async def _applied(self, made: Applied) -> None:
        recovered = self.said.error is not None
        self._say(error=None, restart=made.restart)
        self.services.metrics.settings_valid.set(1)
        if not (made.changed or made.restart or recovered):
            return
        said = {"changed": list(made.changed), "restart": list(made.restart)}
        logger.warning("the settings file was applied", extra=said)
        if made.restart:
            logger.warning("settings hold only after a restart", extra={"settings": list(made.restart)})
        self.services.metrics.reloads.add(1, {"result": "applied"})
        await self._note("done", said)

    async def _refuse(self, error: SettingsError) -> None:
        """The file cannot be used as it is: the old settings hold."""
        problem = {"key": error.key, "expected": error.expected}
        if self.said.error == problem:
            return
        self._say(error=problem)
        logger.error("the settings file cannot be used; what it said before holds", extra=problem)
        self.services.metrics.settings_valid.set(0)
        self.services.metrics.reloads.add(1, {"result": "invalid"})
        await self._note(str(error))

    async def _note(self, result: str, after: dict[str, Any] | None = None) -> None:
        """Into the audit log, once for all proxies that read the same file."""
        by = f"file:{socket.gethostname()}"
        if self._asked is not None and self._asked.id != self.said.asked:
            by = self._asked.by
        path = "" if self._file is None else str(self._file.path)
        said = trail.entry(by, "settings.reload", path, after=after, result=result)
        once = f"{running.RELOAD}-told:{self.said.sha256[:32]}"
        most = self.declared.admin.audit_entries
        with contextlib.suppress(StoreUnavailable):
            await self._run(_NOTE, [once, trail.TRAIL], [_TOLD_SECONDS, most, said])

    def _say(self, **fields: Any) -> None:
        said = msgspec.structs.replace(self.said, **fields)
        if said != self.said:
            self.said, self._said_at = said, 0.0

    async def _run(self, script: str, keys: list[str], arguments: list[Any]) -> Any:
        store = self.services.store
        return await store.call(store.script(script), keys, arguments)

    async def _follow(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EVERY):
                    await self._woken.wait()
            self._woken.clear()
            try:
                await self.look()
            except Exception:
                # Whatever is wrong with settings, it must not end this.
                logger.exception("settings could not be followed")
