"""JSON log lines without content: ids, names and numbers, never prompts, answers, keys or exception texts.

Our own log calls are written for that. Others' are not: libraries put requests, headers, URLs and values into their
messages. So of what a library says only what cannot hold content is kept: its words without what it put into them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

_FLUSH_SECONDS = 0.1
_OURS = frozenset({"proxy", "verifier_pool", "policies", "benchmarks", "countersign"})
_TEXTS = "VERIFIER_LOG_TEXTS"
"""Environment variable, for the processes that vLLM starts. Not `COUNTERSIGN_…`: those are settings."""
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
_FIXED = frozenset(
    {
        "Task exception was never retrieved",
        "Future exception was never retrieved",
        "Task was destroyed but it is pending!",
        "Unclosed client session",
        "Unclosed connection",
        "Unclosed connector",
        "Unclosed response",
        "Exception in ASGI application",
        "Exception in 'lifespan' protocol",
        "Application startup failed. Exiting.",
        "Invalid HTTP request received.",
        "ASGI callable returned without completing response.",
        "ASGI callable returned without starting response.",
    }
)
"""First lines that libraries say without putting anything into them."""
_about: ContextVar[Mapping[str, str]] = ContextVar("about", default={})  # noqa: B039


def _encodable(value: object) -> str:
    return type(value).__name__


_encode = json.JSONEncoder(default=_encodable).encode


@contextlib.contextmanager
def about(**fields: str) -> Iterator[None]:
    """What is logged in here is about these: each line has them as fields, as far as they are not empty."""
    before = _about.set({**_about.get(), **{name: value for name, value in fields.items() if value}})
    try:
        yield
    finally:
        _about.reset(before)


class JsonFormatter(logging.Formatter):
    """One JSON object per line.

    What goes in with `extra=`, or is said by `about`, becomes a field. An exception is told by its type and where it
    was raised; its text stays out, because decoders and parsers quote what they were fed.

    Args:
        texts: keep what libraries say, and what exceptions say, as it is. Either may hold content.
    """

    def __init__(self, *, texts: bool | None = None) -> None:
        super().__init__()
        self._texts = os.environ.get(_TEXTS) == "1" if texts is None else texts

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        ours = _is_ours(record)
        line: dict[str, object] = {
            "time": f"{_second(int(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage() if ours or self._texts else _without_values(record),
        }
        line.update(_about.get())
        if ours:
            line.update((key, value) for key, value in vars(record).items() if key not in _STANDARD)
        if record.exc_info and record.exc_info[0] is not None:
            kind, error, trace = record.exc_info
            line["error"] = kind.__name__
            line["at"] = places(trace)
            if self._texts:
                line["text"] = str(error)
        return _encode(line)


def places(trace: TracebackType | None) -> list[str]:
    """Where an exception came by, outermost first."""
    return [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(trace)]


def _is_ours(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] in _OURS


class _Hidden:
    def __format__(self, spec: str) -> str:
        return "…"

    def __str__(self) -> str:
        return "…"

    __repr__ = __str__


def _without_values(record: logging.LogRecord) -> str:
    """What a library says, without what it was about: words that are put together at run time may hold anything."""
    template = str(record.msg)
    if not record.args:
        first = template.partition("\n")[0]
        return first if first in _FIXED else "…"
    try:
        if isinstance(record.args, Mapping):
            return template % {name: _shown(value) for name, value in record.args.items()}
        return template % tuple(map(_shown, record.args))
    except (TypeError, ValueError, KeyError):
        return template


def _shown(value: object) -> object:
    return value if isinstance(value, bool | int | float) or value is None else _Hidden()


class LineHandler(logging.Handler):
    """Writes lines to a stream (stderr). Those of requests, which the event loop waits for, go together ten times a
    second; warnings, and what is said where no loop runs, at once.

    Attributes:
        others: the level from which libraries are heard, whatever their own loggers let through.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__()
        self.others = logging.WARNING
        self._stream = stream or sys.stderr
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line, or write it."""
        if record.levelno < self.others and not _is_ours(record):
            return
        try:
            self._lines.append(self.format(record) + "\n")
            loop = None if record.levelno >= logging.WARNING else _running_loop()
            if loop is None:
                self.flush()
            elif len(self._lines) == 1:
                loop.call_later(_FLUSH_SECONDS, self.flush)
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Write what was kept."""
        with self.lock or contextlib.nullcontext():
            if self._lines:
                lines, self._lines = self._lines, []
                self._stream.write("".join(lines))
                self._stream.flush()

    def handleError(self, record: logging.LogRecord) -> None:
        """A line that cannot be written is lost; logging would print what was to be in it."""


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


@lru_cache(maxsize=4)
def _second(at: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))


def configure(level: str = "INFO", stream: TextIO | None = None, *, texts: bool = False) -> None:
    """Send every logger of this process to `stream` (stderr) as JSON lines; libraries only from warnings up.

    Args:
        level: of the product's own loggers.
        texts: see JsonFormatter. Holds for the processes that vLLM starts here, too.
    """
    handler = LineHandler(stream)
    handler.setFormatter(JsonFormatter(texts=texts))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel("WARNING")
    for name in _OURS:
        logging.getLogger(name).setLevel(level.upper())
    if stream is None:
        os.environ[_TEXTS] = "1" if texts else "0"
        # vLLM's own handlers write prompts at some levels, and in another form.
        os.environ["VLLM_LOGGING_CONFIG_PATH"] = str(Path(__file__).with_name("vllm_logging.json"))
        _hook()


def _hook() -> None:
    """What nobody catches, and what Python warns of, is logged too: else it is printed as it is, texts and all."""
    logging.captureWarnings(True)
    logger = logging.getLogger("countersign")

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        logger.critical("nobody caught an exception", exc_info=(kind, error, trace))

    def in_thread(given: threading.ExceptHookArgs) -> None:
        if given.exc_type is not SystemExit and given.exc_value is not None:
            uncaught(given.exc_type, given.exc_value, given.exc_traceback)

    def unraisable(given: Any) -> None:
        if given.exc_value is not None:
            uncaught(given.exc_type, given.exc_value, given.exc_traceback)

    sys.excepthook, threading.excepthook, sys.unraisablehook = uncaught, in_thread, unraisable
