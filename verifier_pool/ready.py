"""`python -m verifier_pool.ready`: whether a worker process of this machine takes work. For probes of a supervisor.

A process enters Redis' list of workers once its reference is loaded and tested, renews its entry while it lives, and
drops out of the list when it ends or, after a minute or two, when it hangs; one that was killed counts no more. Exit
code 0: it is listed; 1: it is not; 2 and 3: no worker would start with these arguments or settings.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Sequence
from typing import Any

from redis.exceptions import RedisError
from rq.worker_registration import REDIS_WORKER_KEYS

from policies.errors import SettingsError
from policies.settings import Settings
from verifier_pool.link.queue import VERIFY_QUEUE, WEBHOOK_QUEUE
from verifier_pool.link.queues import seconds
from verifier_pool.parents import began, runs
from verifier_pool.replays import queue_of
from verifier_pool.roles import Roles, add_arguments, check_model, check_replays, roles_of
from verifier_pool.runtime import connect, read_settings

ANSWER_SECONDS = 5.0
"""How long Redis may take to answer."""
CLOCK_SECONDS = 30.0
"""How far a clock that was set meanwhile may move the start of a process that lives past its entry in the list."""


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = _parser()
    arguments = parser.parse_args(list(argv))
    roles_of(parser, arguments)
    try:
        settings = read_settings(arguments.config)
        needed = expected(settings, arguments.only, arguments.model, arguments.reference)
        return 0 if needed <= queues_of(settings, socket.gethostname()) else 1
    except RedisError:
        return 0 if arguments.alive else 1
    except SettingsError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return SettingsError.exit_code


def queues_of(settings: Settings, host: str) -> set[str]:
    """Names of the queues that processes of this host take work from. Raises RedisError."""
    store: Any = connect(settings, timeout=ANSWER_SECONDS)
    try:
        pipeline = store.pipeline(transaction=False)
        for key in store.smembers(REDIS_WORKER_KEYS):
            pipeline.hmget(key, "hostname", "queues", "pid", "birth")
        found = pipeline.execute()
        here = [queues for name, queues, *who in found if name == host.encode() and queues and _lives(*who)]
        return {queue for queues in here for queue in queues.decode().split(",")}
    finally:
        store.close()


def _lives(pid: bytes | None, birth: bytes | None) -> bool:
    """Whether the process that entered itself still runs: a killed one stays listed for a minute or two, and in a
    container its successor has the same id."""
    try:
        process, entered = int(pid or b""), seconds(birth)
    except ValueError:
        return False
    if entered is None:
        return False
    start = began(process)
    return runs(process) and (start is None or start <= entered + CLOCK_SECONDS)


def expected(settings: Settings, only: str | None, model: str | None, reference: str | None) -> set[str]:
    """Names of the queues that `countersign worker` takes work from, when it is called with these arguments.

    Raises:
        SettingsError: it would not start, because there is nothing of what it is asked to do.
    """
    if only == "webhooks":
        return {WEBHOOK_QUEUE}
    roles = Roles(only != "replay", only != "verify", model, reference)
    return ({VERIFY_QUEUE} if roles.verify else set()) | (_replays(settings, roles) if roles.replay else set())


def _replays(settings: Settings, roles: Roles) -> set[str]:
    check_model(settings, roles)
    chosen = {name: own for name, own in settings.models.items() if roles.model in (None, name)}
    first = {queue_of(name, second=False) for name, own in chosen.items() if own.reference}
    second = {queue_of(name, second=True) for name, own in chosen.items() if own.second_reference}
    names = {None: first | second, "first": first, "second": second}[roles.which]
    check_replays(roles, names)
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m verifier_pool.ready", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--alive", action="store_true", help="a store that does not answer says nothing against it")
    return parser


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
