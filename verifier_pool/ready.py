"""`python -m verifier_pool.ready`: whether a worker process of this machine takes work. For probes of a supervisor.

A process enters Redis' list of workers once its reference is loaded and tested, renews its entry while it lives, and
drops out of the list when it ends or, after a minute or two, when it hangs. Exit code 0: it is listed; 1: it is not.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

from redis.exceptions import RedisError
from rq.worker_registration import REDIS_WORKER_KEYS

from policies.settings import Settings
from verifier_pool.queue import VERIFY_QUEUE, WEBHOOK_QUEUE
from verifier_pool.replays import queue_of
from verifier_pool.runtime import connect, read_settings

ANSWER_SECONDS = 5.0
"""How long Redis may take to answer."""


def main(argv: Sequence[str]) -> int:
    """Returns the exit code. Raises SettingsError."""
    arguments = _parser().parse_args(list(argv))
    settings = read_settings(arguments.config)
    try:
        taken = queues_of(settings, socket.gethostname())
    except RedisError:
        return 0 if arguments.alive else 1
    return 0 if expected(settings, arguments.only, arguments.model, arguments.reference) <= taken else 1


def queues_of(settings: Settings, host: str) -> set[str]:
    """Names of the queues that processes of this host take work from. Raises RedisError."""
    store: Any = connect(settings, timeout=ANSWER_SECONDS)
    try:
        pipeline = store.pipeline(transaction=False)
        for key in store.smembers(REDIS_WORKER_KEYS):
            pipeline.hmget(key, "hostname", "queues")
        here = [queues for name, queues in pipeline.execute() if name == host.encode() and queues]
        return {queue for queues in here for queue in queues.decode().split(",")}
    finally:
        store.close()


def expected(settings: Settings, only: str | None, model: str | None, reference: str | None) -> set[str]:
    """Names of the queues that `countersign worker` takes work from, when it is called with these arguments."""
    if only == "webhooks":
        return {WEBHOOK_QUEUE}
    names = {VERIFY_QUEUE} if only in (None, "verify") else set()
    if only in (None, "replay"):
        chosen = {name: own for name, own in settings.models.items() if model in (None, name)}
        if reference in (None, "first"):
            names |= {queue_of(name, second=False) for name, own in chosen.items() if own.reference}
        if reference in (None, "second"):
            names |= {queue_of(name, second=True) for name, own in chosen.items() if own.second_reference}
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m verifier_pool.ready", description=__doc__)
    parser.add_argument("--config", default=os.environ.get("COUNTERSIGN_CONFIG"), help="settings file")
    parser.add_argument("--only", choices=("verify", "replay", "webhooks"), help="as given to countersign worker")
    parser.add_argument("--model", help="as given to countersign worker")
    parser.add_argument("--reference", choices=("first", "second"), help="as given to countersign worker")
    parser.add_argument("--alive", action="store_true", help="a store that does not answer says nothing against it")
    return parser


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
