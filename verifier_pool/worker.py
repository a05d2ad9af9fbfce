"""`countersign worker`: loads the references, then turns recorded evidence into verdicts until told to stop.

When the settings name a webhook, delivery runs in a second process on a queue of its own, so that a slow
receiver never holds up a verdict.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Mapping, Sequence

from policies.settings import Settings
from verifier_pool import context, jobs, webhooks
from verifier_pool.loop import Loop
from verifier_pool.queue import VERIFY_QUEUE, WEBHOOK_QUEUE
from verifier_pool.reference.base import Reference
from verifier_pool.runtime import Child, connect, read_settings, stop_on_signals, through_outages
from verifier_pool.store import Store
from verifier_pool.sweeper import sweep
from verifier_pool.tokenizer import spelling_of

logger = logging.getLogger("countersign.worker")

WEBHOOK_COMMAND = (sys.executable, "-m", "verifier_pool.worker", "--only", "webhooks")


def main(argv: Sequence[str]) -> int:
    """Run a worker; returns its exit code. Raises SettingsError, and StoreUnavailable with `--burst`."""
    arguments = _parser().parse_args(list(argv))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in ("rq.worker", "rq.job", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)
    settings = read_settings(arguments.config)
    connect(settings).close()  # a wrong URL is said now, not after a reference took minutes to load
    stop = threading.Event()
    if arguments.only == "webhooks":
        run_webhooks(settings, stop, burst=arguments.burst, parent=arguments.parent)
        return 0
    child = None
    if settings.webhook is not None and arguments.only is None and not arguments.burst:
        webhooks.check_settings(settings.webhook)
        child = Child([*WEBHOOK_COMMAND, *(["--config", arguments.config] if arguments.config else [])])
    run_verify(settings, stop, burst=arguments.burst, child=child)
    return 0


def run_verify(settings: Settings, stop: threading.Event, *, burst: bool = False, child: Child | None = None) -> None:
    """Load profiles and references, say so, and work on verifications until `stop`."""
    profiles = context.read_profiles(settings)
    second_profiles = context.read_profiles(settings, second=True)
    references = context.open_references(settings)
    try:
        second_references = context.open_references(settings, second=True)
    except BaseException:
        _close(references)
        raise
    for model in settings.models.values():
        spelling_of(model)  # read now, and complained of now, not in the first job
    stop_on_signals(stop)

    def work() -> None:
        store = _store(settings)
        secret = settings.audit.secret
        here = context.Context(
            settings,
            store,
            references,
            profiles,
            secret.get_secret_value().encode() if secret else store.audit_secret(),
            second_references,
            second_profiles,
        )
        context.use(here)

        def timer() -> None:
            sweep(store, settings.verification)
            here.standings.fold_left()

        loop = Loop(
            VERIFY_QUEUE,
            store.redis,
            stop,
            on_failed=jobs.give_up,
            on_tick=child.keep if child else None,
            on_timer=timer,
        )
        logger.info("ready: taking verifications")
        with contextlib.closing(store.redis):
            loop.serve(burst=burst)

    try:
        for name, reference in references.items():
            logger.info("model %s is replayed by %s", name, reference.name)
        for name, reference in second_references.items():
            logger.info("what accuses a backend of model %s is replayed by %s too", name, reference.name)
        through_outages(work, stop, burst=burst)
    finally:
        if child:
            child.end()
        _close(references)
        _close(second_references)
        context.use(None)
        logger.info("stopped")


def run_webhooks(settings: Settings, stop: threading.Event, *, burst: bool = False, parent: int | None = None) -> None:
    """Deliver verdicts to the webhook until `stop`, or until the process `parent` is gone."""
    webhooks.check_settings(settings.webhook)
    stop_on_signals(stop)

    def work() -> None:
        store = _store(settings)
        context.use(context.Context(settings, store))

        def tick() -> None:
            webhooks.drain_outbox(store, settings)
            if parent is not None and os.getppid() != parent:
                stop.set()

        loop = Loop(WEBHOOK_QUEUE, store.redis, stop, on_failed=webhooks.dead_letter, on_tick=tick)
        logger.info("ready: delivering webhooks")
        with contextlib.closing(store.redis):
            loop.serve(burst=burst)

    through_outages(work, stop, burst=burst)


def _close(references: Mapping[str, Reference]) -> None:
    for reference in references.values():
        reference.close()


def _store(settings: Settings) -> Store:
    return Store(
        connect(settings),
        verdict_ttl=settings.verification.verdict_ttl,
        webhook=settings.webhook is not None,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="countersign worker", description=__doc__)
    parser.add_argument("--config", help="settings file (default: $COUNTERSIGN_CONFIG, then ./countersign.yaml)")
    parser.add_argument("--burst", action="store_true", help="end when no job is left")
    parser.add_argument("--only", choices=("verify", "webhooks"), help="run one of the two queues")
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
