"""What every worker process needs around its loop: Redis, outages, signals and a child process."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from policies.errors import SettingsError, StoreUnavailable
from policies.settings import Settings, parse_settings, store_url
from verifier_pool.link import connection
from verifier_pool.link.settings_file import SettingsFile, hear_hangups, hold_hangups, settings_path
from verifier_pool.sheets import SHEETS, Sheet

logger = logging.getLogger("countersign.worker")

BACKOFF_SECONDS = (0.2, 0.5, 1.0, 2.0, 5.0)
"""Waits between attempts to reach Redis; the last one repeats."""
ANSWER_SECONDS = 15.0
_AGAIN_SECONDS = 5.0
"""How long Redis may take to answer a worker. A connection that a firewall or a machine that is gone dropped without a
word is given up after this; without a bound, whoever waits on it waits for ever."""


def read_settings(config: str | None) -> Settings:
    """Settings from `--config`, else $COUNTERSIGN_CONFIG, else ./countersign.yaml. Raises SettingsError."""
    return parse_settings(SettingsFile(settings_path(config, os.environ)).take().text, os.environ)


def connect(settings: Settings, *, timeout: float | None = None) -> Redis:
    """A client of the operator's Redis or the embedded Valkey; connects with its first command.

    `timeout` bounds each answer, in seconds (default: ANSWER_SECONDS). Raises SettingsError when `redis_url` is no such
    URL.
    """
    # One retry at once takes the place of a pooled connection that a restart broke; outages are the loop's matter.
    return connection.connect(store_url(settings, os.environ), timeout=ANSWER_SECONDS if timeout is None else timeout)


@contextlib.contextmanager
def answering(settings: Settings, timeout: float) -> Iterator[Redis]:
    """A client for a command at a terminal, which waits for no outage. Raises StoreUnavailable for what Redis says."""
    with contextlib.closing(connect(settings, timeout=timeout)) as redis:
        try:
            yield redis
        except RedisError as error:
            raise StoreUnavailable(f"Redis does not answer ({type(error).__name__})") from error


def through_outages(work: Callable[[], Any], stop: threading.Event, *, burst: bool = False) -> None:
    """Call `work` until it returns; when Redis goes away, wait and call it again.

    Raises:
        StoreUnavailable: Redis did not answer and `burst` says not to wait for it.
    """
    attempt = 0
    while not stop.is_set():
        began = time.monotonic()
        try:
            work()
            return
        except RedisError as error:
            if burst:
                raise StoreUnavailable(f"Redis: {type(error).__name__}") from error
            attempt = 0 if time.monotonic() - began > 30 else attempt
            wait = BACKOFF_SECONDS[min(attempt, len(BACKOFF_SECONDS) - 1)]
            attempt += 1
            logger.warning("Redis does not answer (%s); trying again in %.1f s", type(error).__name__, wait)
            stop.wait(wait)


def stop_on_signals(stop: threading.Event) -> None:
    """SIGTERM and SIGINT let the job at hand finish; a second one does not wait for it."""

    def request(number: int, _frame: Any) -> None:
        if stop.is_set():
            raise SystemExit(128 + number)
        logger.info("%s: finishing the job at hand", signal.Signals(number).name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, request)


class Child:
    """A process that lives as long as this one, started again when it dies; `what` names it in the log."""

    def __init__(self, command: Sequence[str], what: str = "webhook process") -> None:
        self._command = [*command, "--parent", str(os.getpid())]
        self._what = what
        self._process: subprocess.Popen[bytes] | None = None
        self._sheet: Sheet | None = None
        self._not_before = 0.0
        self.starts = 0

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs, and before it ever did."""
        return None if self._process is None else self._process.poll()

    def keep(self) -> None:
        """Start it if it does not run; at most once in five seconds."""
        if self._process is not None and self._process.poll() is None:
            return
        if time.monotonic() < self._not_before:
            return
        if self._process is not None:
            logger.warning("the %s ended with %s; starting it again", self._what, self._process.returncode)
        self._not_before = time.monotonic() + _AGAIN_SECONDS
        self.starts += 1
        if self._sheet is not None:
            SHEETS.retire(self._sheet)
        self._sheet = SHEETS.open()
        command = [*self._command, "--sheet", str(self._sheet.fd)]
        waiting = hold_hangups()
        try:
            self._process = subprocess.Popen(command, pass_fds=[self._sheet.fd])
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, waiting)

    def hang_up(self) -> None:
        """Have it read its settings anew."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGHUP)

    def ask_to_end(self) -> None:
        """Ask it to finish."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def end(self, seconds: float = 20.0) -> None:
        """Ask it to finish and wait; after these seconds it is killed."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def supervise(
    command: Sequence[str], count: int, stop: threading.Event, *, patience: float, burst: bool = False
) -> int:
    """Keep `count` processes of one command running until `stop`; returns the exit code for all of them.

    One that refuses its settings (exit code 3) when it is first started ends all. One that does so when it is started
    again, after it had run, may have found the file half written: it is started once more for as long as another runs,
    by the settings from before. With `burst` they end by themselves. SIGHUP is theirs, too.

    Args:
        patience: seconds that each has for finishing the job at hand.
    """
    children = [Child(command, "worker process") for _ in range(count)]

    def hang_up(*_: object) -> None:
        for child in children:
            child.hang_up()

    signal.signal(signal.SIGHUP, hang_up)
    hear_hangups()
    try:
        for child in children:
            child.keep()
        while not stop.wait(0.2):
            codes = [child.code for child in children]
            refused = [child for child in children if child.code == SettingsError.exit_code]
            if len(refused) == count or any(child.starts == 1 for child in refused):
                return SettingsError.exit_code
            if burst and None not in codes:
                return max(abs(code or 0) for code in codes)
            if not burst:
                for child in children:
                    child.keep()
        return 0
    finally:
        deadline = time.monotonic() + patience
        for child in children:
            child.ask_to_end()
        for child in children:
            child.end(max(deadline - time.monotonic(), 0.1))
