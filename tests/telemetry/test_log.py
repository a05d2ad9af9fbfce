"""Log lines: JSON, with what they are about, and without what others put into theirs."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from verifier_pool.link.telemetry import log
from verifier_pool.link.telemetry.log import JsonFormatter, LineHandler, about

SECRET = "canary"


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What the process logs, in a test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    levels = {name: logging.getLogger(name).level for name in log._OURS}
    written = io.StringIO()
    log.configure("debug", written)
    try:
        yield written
    finally:
        root.handlers[:], root.level = handlers, level
        for name, before in levels.items():
            logging.getLogger(name).setLevel(before)


def said(lines: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.getvalue().splitlines()]


def test_a_line_of_ours(lines: io.StringIO) -> None:
    with about(id="1f", backend="", model="m"), about(trace="ab"):
        logging.getLogger("proxy.x").debug("said of %s", "b1", extra={"status": 200, "thing": object()})
    logging.getLogger("verifier_pool.y").info("after")
    first, second = said(lines)
    time = first.pop("time")
    assert (len(time), time[-1]) == (24, "Z")
    assert first == {
        "level": "debug",
        "logger": "proxy.x",
        "message": "said of b1",
        "id": "1f",
        "model": "m",
        "trace": "ab",
        "status": 200,
        "thing": "object",
    }
    assert "id" not in second


@pytest.mark.parametrize(
    ("message", "arguments", "shown"),
    [
        ("HTTP Request: %s %s %d", ("POST", f"https://x/?key={SECRET}", 200), "HTTP Request: … … 200"),
        ("%r took %.2f s", (SECRET, 1.5), "… took 1.50 s"),
        ("%(what)s of %(n)d", ({"what": SECRET, "n": 3},), "… of 3"),
        ("%s", ([1, 2, 3],), "…"),
        ("%s", (b"canary",), "…"),
        ("%-20s|", (SECRET,), "…                   |"),
        (f"Exception in callback f('{SECRET}')", (), "…"),
        (f"Task exception was never retrieved\nfuture: {SECRET}", (), "Task exception was never retrieved"),
        (SECRET, (), "…"),
    ],
)
def test_a_line_of_a_library(lines: io.StringIO, message: str, arguments: tuple[Any, ...], shown: str) -> None:
    logging.getLogger("httpx").warning(message, *arguments, extra={"request": SECRET})
    (line,) = said(lines)
    assert line["message"] == shown
    assert SECRET not in lines.getvalue()


def test_libraries_are_heard_from_warnings_up(lines: io.StringIO) -> None:
    for name in ("httpx", "rq.worker", "redis", "aiohttp.client", "uvicorn.error", "vllm.engine", "asyncio"):
        before = logging.getLogger(name).level
        logging.getLogger(name).setLevel("DEBUG")
        logging.getLogger(name).info("quiet")
        logging.getLogger(name).setLevel(before)
    assert said(lines) == []


@pytest.mark.parametrize("name", ["proxy.x", "asyncio"])
def test_an_exception_is_its_type_and_its_way(lines: io.StringIO, name: str) -> None:
    def breaks(text: str) -> None:
        raise ValueError(text)

    try:
        try:
            breaks(SECRET)
        except ValueError as error:
            raise RuntimeError(SECRET) from error
    except RuntimeError:
        logging.getLogger(name).exception("a request broke the proxy")
    (line,) = said(lines)
    assert line["error"] == "RuntimeError"
    assert len(line["at"]) == 1
    assert __file__ in line["at"][0]
    assert SECRET not in lines.getvalue()


def test_texts_are_kept_where_the_settings_want_it() -> None:
    handler = LineHandler(io.StringIO())
    handler.setFormatter(JsonFormatter(texts=True))
    try:
        raise ValueError(SECRET)
    except ValueError:
        record = logging.LogRecord("vllm", logging.ERROR, "", 1, "failed at %s", (SECRET,), sys.exc_info())
    line = json.loads(handler.format(record))
    assert (line["message"], line["text"]) == (f"failed at {SECRET}", SECRET)


async def test_what_asyncio_says_of_a_lost_task(lines: io.StringIO) -> None:
    async def lost() -> None:
        raise ValueError(SECRET)

    task = asyncio.create_task(lost())
    await asyncio.sleep(0)
    del task
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(int, SECRET)
    await asyncio.sleep(0.01)
    first, second = said(lines)
    assert (first["message"], first["error"]) == ("Task exception was never retrieved", "ValueError")
    assert (second["message"], second["error"]) == ("…", "ValueError")
    assert SECRET not in lines.getvalue()


def test_what_nobody_catches(lines: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((sys, "excepthook"), (sys, "unraisablehook"), (threading, "excepthook")):
        monkeypatch.setattr(module, name, getattr(module, name))
    log._hook()
    logging.captureWarnings(False)

    class Breaks:
        def __del__(self) -> None:
            raise ValueError(SECRET)

    def breaks() -> None:
        raise LookupError(SECRET)

    thread = threading.Thread(target=breaks)
    thread.start()
    thread.join()
    del [Breaks()][0]
    try:
        raise KeyError(SECRET)
    except KeyError as error:
        sys.excepthook(KeyError, error, error.__traceback__)
    assert [line["error"] for line in said(lines)] == ["LookupError", "ValueError", "KeyError"]
    assert SECRET not in lines.getvalue()


def test_a_line_that_cannot_be_made_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    written = io.StringIO()
    handler = LineHandler(written)
    handler.setFormatter(JsonFormatter())
    handler.handle(logging.LogRecord("proxy", logging.WARNING, "", 1, "%d", (SECRET,), None))
    assert written.getvalue() + capsys.readouterr().err == ""


@pytest.mark.parametrize(("message", "arguments"), [("%d of it", (SECRET,)), ("%s and %s", (SECRET,))])
def test_a_library_that_says_what_cannot_be_said(message: str, arguments: tuple[Any, ...]) -> None:
    line = JsonFormatter().format(logging.LogRecord("httpx", logging.WARNING, "", 1, message, arguments, None))
    assert json.loads(line)["message"] == message


async def test_lines_of_requests_are_written_together(lines: io.StringIO) -> None:
    logger = logging.getLogger("proxy")
    logger.info("one")
    logger.info("two")
    assert lines.getvalue() == ""
    logger.warning("three")
    assert [line["message"] for line in said(lines)] == ["one", "two", "three"]
    logger.info("four")
    await asyncio.sleep(0.3)
    assert len(said(lines)) == 4


def test_vllms_processes_log_alike() -> None:
    """vLLM applies the file that `configure` names to each of its processes, as `logging.config` does."""
    program = (
        "import json, logging, logging.config, os, sys\n"
        "from verifier_pool.link.telemetry import log\n"
        "log.configure()\n"
        "logging.config.dictConfig(json.load(open(os.environ['VLLM_LOGGING_CONFIG_PATH'])))\n"
        "logging.getLogger('vllm.v1').info('quiet')\n"
        "logging.getLogger('vllm.v1').warning('Added %s of %d', 'canary', 3)\n"
        "raise ValueError('canary')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    first, second = (json.loads(line) for line in done.stderr.splitlines())
    assert (first["logger"], first["message"]) == ("vllm.v1", "Added … of 3")
    assert (second["message"], second["error"]) == ("nobody caught an exception", "ValueError")
    assert done.stdout == ""
