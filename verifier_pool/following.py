"""What a running worker is told to do otherwise: by its settings file and by what admins change in Redis.

It looks between two jobs, about once a second, so a job begins and ends under the same settings. Settings that cannot
be used change nothing: the old ones hold, and the log and the admin API say why.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
from redis import Redis
from redis.exceptions import RedisError

from policies.errors import SettingsError
from policies.overlay import Overlay, merged
from policies.reload import Path as Name
from policies.reload import reread
from policies.settings import Settings
from verifier_pool.link import overlays, running
from verifier_pool.link.settings_file import SettingsFile, hear_hangups

logger = logging.getLogger(__name__)

EVERY = 1.0

Take = Callable[[Settings], dict[str, Any]]
"""Lets settings hold; returns facts of the profiles that then do. Raises SettingsError, having changed nothing."""


class Following:
    """Keeps a worker by its settings file and by what is laid over backends in Redis. For one thread.

    Args:
        settings: as they were read from the file.
        path: the file; None where nobody shall look at one.
        does: what this worker does.
        fixed: settings that it cannot change while it runs (`policies.reload`).
    """

    def __init__(self, settings: Settings, path: Path | None, does: str, fixed: tuple[Name, ...]) -> None:
        self.declared = settings
        self.settings = settings
        self.take: Take = _nothing
        self.said = running.begun("worker", does)
        self._fixed = fixed
        self._file = None if path is None else SettingsFile(path, self._profiles)
        self._overlays: dict[str, Overlay] = {}
        self._version: bytes | None = None
        self._asked: running.Asked | None = None
        self._first = True
        self._forced = self._behind = False
        self._look_at = self._file_at = self._said_at = 0.0
        self._begin()

    def hear_signals(self, then: Callable[[], None] | None = None) -> None:
        """Read the file at SIGHUP, and do that as well. Only in a process's main thread."""

        def woken(*_: object) -> None:
            self.wake()
            if then is not None:
                then()

        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGHUP, woken)
            hear_hangups()

    def wake(self) -> None:
        """Read the file at the next look, changed or not."""
        self._forced = True
        self._look_at = 0.0

    def look(self, redis: Redis) -> None:
        """See what is new, at most once a second, and let it hold. Redis's own errors pass through."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + EVERY
        self._behind |= self._hear(redis)
        forced, self._forced = self._forced or self._is_asked, False
        with self._refusing():
            text = self._read(now, forced=forced)
            if text is not None:
                self._renew(text, by_hand=forced)
        if self._behind:
            with self._refusing():
                self._renew(None)
        if self._asked is not None and (forced or self._first):
            self._say(asked=self._asked.id)
        self._first = False
        if now >= self._said_at:
            self._said_at = now + running.EVERY
            running.tell(redis, self.said)

    def leave(self, redis: Redis) -> None:
        """This worker ends."""
        running.leave(redis, self.said)

    @property
    def _is_asked(self) -> bool:
        return not self._first and self._asked is not None and self._asked.id != self.said.asked

    def _begin(self) -> None:
        """What it is made with is what it has read: changes from here on are news, however long a model loads."""
        if self._file is None:
            return
        try:
            self._file.take()
        except SettingsError as error:
            self._refuse(error)
        self._say(sha256=self._file.sha256)

    def _hear(self, redis: Redis) -> bool:
        """What Redis says; whether other backends are laid over the file's than before."""
        version, asked = cast("list[bytes | None]", redis.mget(overlays.VERSION, running.RELOAD))
        self._asked = running.asked_for(asked)
        if version == self._version and not self._first:
            return False
        found, unreadable = overlays.read(cast("dict[bytes, bytes]", redis.hgetall(overlays.BACKENDS)))
        if unreadable:
            logger.error("what is laid over backends %s cannot be read", ", ".join(unreadable))
        before, self._overlays, self._version = self._overlays, found, version
        self._say(backends=(version or b"").decode())
        return found != before

    def _read(self, now: float, *, forced: bool) -> str | None:
        every = self.declared.admin.watch_seconds
        if self._file is None:
            return None
        if not forced and not (every and now >= self._file_at):
            return None
        self._file_at = now + every
        try:
            found = self._file.take() if forced else self._file.look()
        finally:
            self._say(sha256=self._file.sha256)
        return None if found is None else found.text

    def _renew(self, text: str | None, *, by_hand: bool = False) -> None:
        declared, restart = self.declared, self.said.restart
        if text is not None:
            made = reread(declared, text, os.environ, self._fixed, by_hand=by_hand)
            declared, restart = made.settings, made.restart
        both = merged(declared, self._overlays)
        facts = self.take(both.settings)
        self.declared, self.settings, self._behind = declared, both.settings, False
        self._say(left_out=dict(both.left_out), since=time.time(), profiles=facts)
        if text is not None:
            self._say(error=None, restart=restart)
            logger.info("the settings file was applied")
            if restart:
                logger.warning("settings hold only after a restart: %s", ", ".join(restart))

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Settings that cannot be used change nothing, whatever is wrong with them."""
        try:
            yield
        except SettingsError as error:
            self._refuse(error)
        except RedisError:
            raise
        except Exception as error:
            if self.said.error is None:
                logger.exception("settings could not be read")
            self._refuse(SettingsError("countersign.yaml", f"cannot be read ({type(error).__name__})"))

    def _refuse(self, error: SettingsError) -> None:
        problem = {"key": error.key, "expected": error.expected}
        if problem != self.said.error:
            self._say(error=problem)
            logger.error("the settings file cannot be used, what it said before holds: %s", error)

    def begin(self, facts: dict[str, Any]) -> None:
        """What this worker judges by at its start."""
        self._say(profiles=facts)

    def _profiles(self) -> Iterable[Path]:
        models = self.declared.models.values()
        return [Path(path) for model in models for path in (model.profile, model.second_profile) if path is not None]

    def _say(self, **fields: Any) -> None:
        said = msgspec.structs.replace(self.said, **fields)
        if said != self.said:
            self.said, self._said_at = said, 0.0


def _nothing(_: Settings) -> dict[str, Any]:
    return {}
