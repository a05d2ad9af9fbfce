"""JSON log lines without content: ids, names and numbers, never prompts, answers, keys or exception texts."""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from typing import TextIO

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class JsonFormatter(logging.Formatter):
    """One JSON object per line.

    What goes in with `extra=` becomes a field. An exception is told by its type and where it was raised; its
    text stays out, because decoders and parsers quote what they were fed.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update((key, value) for key, value in vars(record).items() if key not in _STANDARD)
        if record.exc_info and record.exc_info[0] is not None:
            line["error"] = record.exc_info[0].__name__
            line["at"] = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(record.exc_info[2])]
        return json.dumps(line, default=str)


def configure(level: str = "INFO", stream: TextIO | None = None) -> None:
    """Send every logger of this process to `stream` (stderr) as JSON lines; libraries only from warnings up."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel("WARNING")
    logging.getLogger("proxy").setLevel(level)
