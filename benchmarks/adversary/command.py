"""`countersign attack`: cheating backends in front of real vLLM servers, one to test against or all of them in turn."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from aiohttp import web

from benchmarks.adversary import registry
from benchmarks.adversary.base import Setup
from benchmarks.adversary.servers import Site
from benchmarks.adversary.turncoat import Wavering
from policies.errors import CountersignError

USAGE = """\
usage: countersign attack serve NAME --port PORT --upstream URL [--truth URL] …   one cheating backend, until stopped
       countersign attack run [NAME …] --backend BACKEND …                       attack a running stack, and report
       countersign attack list [--markdown]                                      what there is

`serve` may be left out. `countersign attack serve --help` and `countersign attack run --help` say more."""


class AttackError(CountersignError):
    """The cheat cannot run; the message says why."""


def main(argv: Sequence[str]) -> int:
    """Pick the sub-command; returns its exit code."""
    if not argv or argv[0] in {"-h", "--help"}:
        print(f"{USAGE}\n\nattacks, honest variants first:\n{registry.text()}")
        return 0 if argv else 2
    name, *rest = argv
    if name == "list":
        print(registry.markdown() if "--markdown" in rest else registry.text())
        return 0
    if name == "run":
        from benchmarks.adversary import run

        return run.main(rest)
    return serve(rest if name == "serve" else argv)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="countersign attack serve",
        description="Run a cheating backend in front of a real vLLM server.",
        epilog=f"attacks:\n{registry.text()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=sorted(registry.ATTACKS), metavar="NAME", help="one of the attacks below")
    parser.add_argument("--upstream", required=True, metavar="URL", help="vLLM server that generates")
    parser.add_argument("--truth", metavar="URL", help="vLLM server with the true model, for prefills")
    parser.add_argument("--runtime", default="", help="name of the sampling noise, as backends.X.runtime declares it")
    parser.add_argument("--eos", type=int, action="append", default=[], metavar="ID", help="a token that ends answers")
    parser.add_argument("--good", type=int, default=10, metavar="N", help="honest answers before good-then-bad turns")
    parser.add_argument("--share", type=float, default=0.1, metavar="S", help="of answers in which sometimes cheats")
    parser.add_argument(
        "--then",
        choices=sorted(name for name, attack in registry.ATTACKS.items() if not issubclass(attack, Wavering)),
        metavar="NAME",
        help="what good-then-bad turns into (default: spoofer), or sometimes does (default: no-logprobs)",
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    return parser


def serve(argv: Sequence[str]) -> int:
    """Serve until interrupted. `$COUNTERSIGN_ATTACK_KEY`, where set, is the key of the servers behind."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    attack = registry.ATTACKS[arguments.name]
    if arguments.then and not issubclass(attack, Wavering):
        parser.error(f"--then is for good-then-bad and sometimes, not for {attack.name}")
    cheat = registry.ATTACKS[arguments.then] if arguments.then else attack
    if cheat.scores and cheat.generates == "cheap" and not arguments.truth:
        parser.error(f"{attack.name} needs --truth")
    key = os.environ.get("COUNTERSIGN_ATTACK_KEY")
    setup = Setup(
        Site(arguments.upstream, key=key),
        Site(arguments.truth, key=key) if arguments.truth else None,
        arguments.runtime,
        tuple(arguments.eos),
        arguments.good,
        arguments.share,
    )
    print(f"{attack.name} on http://{arguments.host}:{arguments.port}, in front of {arguments.upstream}", flush=True)
    try:
        running = attack(setup, cheat) if arguments.then and issubclass(attack, Wavering) else attack(setup)
        web.run_app(running.app(), host=arguments.host, port=arguments.port, print=None, access_log=None)
    except OSError as error:
        raise AttackError(f"cannot listen on {arguments.host}:{arguments.port}: {error.strerror}") from error
    return 0
