"""`countersign attack`: run a cheating backend in front of real vLLM servers, to test against."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from aiohttp import web

from benchmarks.adversary.cheats import CHEATS
from policies.errors import CountersignError


class AttackError(CountersignError):
    """The cheat cannot run; the message says why."""


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, CHEATS))
    cheats = "\n".join(f"  {name:<{width}}  {cheat.about}" for name, cheat in CHEATS.items())
    parser = argparse.ArgumentParser(
        prog="countersign attack",
        description="Run a cheating backend in front of a real vLLM server.",
        epilog=f"cheats:\n{cheats}\n\nOne cheat needs no code: a vLLM server that runs a quantised copy under the "
        "true name\nand reports its own logprobs.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=sorted(CHEATS), metavar="NAME", help="one of the cheats below")
    parser.add_argument("--upstream", required=True, metavar="URL", help="vLLM server that generates")
    parser.add_argument("--truth", metavar="URL", help="vLLM server with the true model (spoofer)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until interrupted."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    cheat = CHEATS[arguments.name]
    if cheat.needs_truth and not arguments.truth:
        parser.error(f"{cheat.name} needs --truth")
    print(f"{cheat.name} on http://{arguments.host}:{arguments.port}, in front of {arguments.upstream}", flush=True)
    app = cheat(arguments.upstream, arguments.truth).app()
    try:
        web.run_app(app, host=arguments.host, port=arguments.port, print=None, access_log=None)
    except OSError as error:
        raise AttackError(f"cannot listen on {arguments.host}:{arguments.port}: {error.strerror}") from error
    return 0
