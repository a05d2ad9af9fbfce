"""JSON log lines without content: ids, names and numbers, never prompts, answers, keys or exception texts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import time
import traceback
from functools import lru_cache
from typing import TextIO

_FLUSH_SECONDS = 0.1
_encode = json.JSONEncoder(default=str).encode
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class JsonFormatter(logging.Formatter):
    """One JSON object per line.

    What goes in with `extra=` becomes a field. An exception is told by its type and where it was raised; its
    text stays out, because decoders and parsers quote what they were fed.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        line: dict[str, object] = {
            "time": f"{_second(int(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update((key, value) for key, value in vars(record).items() if key not in _STANDARD)
        if record.exc_info and record.exc_info[0] is not None:
            line["error"] = record.exc_info[0].__name__
            line["at"] = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(record.exc_info[2])]
        return _encode(line)


class LineHandler(logging.Handler):
    """Writes lines to a stream. Those of requests, which the event loop waits for, go together ten times a second;
    warnings, and what is said where no loop runs, at once."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line, or write it."""
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


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


@lru_cache(maxsize=4)
def _second(at: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))


def configure(level: str = "INFO", stream: TextIO | None = None) -> None:
    """Send every logger of this process to `stream` (stderr) as JSON lines; libraries only from warnings up."""
    handler = LineHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel("WARNING")
    logging.getLogger("proxy").setLevel(level)
