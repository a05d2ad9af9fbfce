"""`countersign worker`: turns recorded evidence into verdicts until told to stop.

There are three kinds of work. Verifying is CPU work on one queue for all models. Replaying drains the queue of one
reference, with many replays in flight. Delivering webhooks waits for receivers on the internet. By default one process
does all of it: verification in its main thread, a thread for each reference, and delivery in a child process, so that
a slow receiver holds up nothing. With `--only` it does one kind, and any number of such processes share the work.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial

from policies.reload import FIXED_IN_REFERENCE, FIXED_IN_WORKER
from policies.settings import Settings
from verifier_pool import context, webhooks
from verifier_pool.duties import Worked, check_verifying, delivering, references, replaying, verifying
from verifier_pool.following import Following
from verifier_pool.link.settings_file import hold_hangups, settings_path
from verifier_pool.link.telemetry import log
from verifier_pool.link.telemetry.tracing import opened
from verifier_pool.metrics_page import shown
from verifier_pool.parents import stop_with
from verifier_pool.roles import EVERYTHING, Roles, add_arguments, roles_of
from verifier_pool.runtime import Child, connect, read_settings, stop_on_signals, supervise, through_outages

logger = logging.getLogger("countersign.worker")

COMMAND = (sys.executable, "-m", "countersign", "worker")


def main(argv: Sequence[str]) -> int:
    """Run a worker; returns its exit code. Raises SettingsError, and StoreUnavailable with `--burst`."""
    hold_hangups()
    arguments, roles = _read(argv)
    settings = read_settings(arguments.config)
    log.configure(settings.telemetry.log_level, texts=settings.telemetry.log_texts)
    connect(settings).close()  # a wrong URL is said now, not after a reference took minutes to load
    stop = threading.Event()
    if arguments.parent is not None:
        stop_with(arguments.parent, stop)
    with shown(settings, arguments.only if arguments.only == "webhooks" else roles.name, arguments.sheet):
        return _started(settings, arguments, roles, stop)


def _started(settings: Settings, arguments: argparse.Namespace, roles: Roles, stop: threading.Event) -> int:
    command = [*COMMAND, *(["--config", arguments.config] if arguments.config else [])]
    path = settings_path(arguments.config, os.environ)
    if arguments.only == "webhooks":
        run_webhooks(
            settings, stop, burst=arguments.burst, following=Following(settings, path, "webhooks", FIXED_IN_WORKER)
        )
        return 0
    if arguments.processes > 1:
        check_verifying(settings)
        stop_on_signals(stop)
        command += ["--only", "verify", *(["--burst"] if arguments.burst else [])]
        patience = settings.verification.job_timeout + 30
        return supervise(command, arguments.processes, stop, patience=patience, burst=arguments.burst)
    child = None
    if arguments.only is None and not arguments.burst:
        webhooks.check_settings(settings.webhook)
        child = Child([*command, "--only", "webhooks"])
    following = Following(settings, path, roles.name, _fixed(roles))
    run(settings, stop, roles, burst=arguments.burst, child=child, following=following)
    return 0


def run(
    settings: Settings,
    stop: threading.Event,
    roles: Roles = EVERYTHING,
    *,
    burst: bool = False,
    child: Child | None = None,
    following: Following | None = None,
) -> None:
    """Load what the roles need, say so, and work until `stop`, following its settings.

    Raises:
        SettingsError: a profile, a tokenizer or a reference cannot be used.
        StoreUnavailable: with `burst`, Redis does not answer.
    """
    following = following or Following(settings, None, roles.name, _fixed(roles))
    checks = verifying(following, stop) if roles.verify else None
    with opened(settings.telemetry, roles.name), references(settings, roles) as served:
        stop_on_signals(stop)
        following.hear_signals(None if child is None else child.hang_up)
        replays = [
            partial(replaying, settings, stop, each, None if roles.verify or number else following)
            for number, each in enumerate(served)
        ]

        told = None if child is None else webhooks.Anyone(connect(settings), settings)

        def tick() -> None:
            if child is not None and told:
                child.keep()

        try:
            for each in served:
                said = "what accuses a backend of model %s is replayed by %s too" if each.second else None
                logger.info(said or "model %s is replayed by %s", each.model, each.reference.name or "a server")
            if burst:
                _exhaust([*([checks] if checks else []), *replays], stop)
            else:
                _work(checks, replays, stop, tick)
        finally:
            if child is not None:
                child.end()
            context.use(None)
            logger.info("stopped")


def _work(checks: Worked | None, replays: Sequence[Worked], stop: threading.Event, tick: Callable[[], None]) -> None:
    """All queues at once until `stop`: replays in threads, verifications here."""
    broken: list[BaseException] = []

    def thread(work: Worked) -> None:
        try:
            through_outages(partial(work, burst=False, tick=None), stop)
        except BaseException as error:
            broken.append(error)
            stop.set()

    # Daemons, so that a second signal ends the process whatever is in flight.
    threads = [
        threading.Thread(target=thread, args=(work,), name=f"replays-{number}", daemon=True)
        for number, work in enumerate(replays)
    ]
    for each in threads:
        each.start()
    try:
        if checks is not None:
            through_outages(partial(checks, burst=False, tick=tick), stop)
        while not stop.wait(1.0):
            tick()
    finally:
        stop.set()
    for each in threads:
        each.join()
    if broken:
        raise broken[0]


def _exhaust(works: Sequence[Worked], stop: threading.Event) -> None:
    """One queue after the other, until nothing is left in any: one stage's job is another's next."""

    def work() -> None:
        while sum(each(burst=True, tick=None) for each in works) and not stop.is_set():
            pass

    through_outages(work, stop, burst=True)


def _fixed(roles: Roles) -> tuple[tuple[str, ...], ...]:
    return FIXED_IN_REFERENCE if roles.replay else FIXED_IN_WORKER


def run_webhooks(
    settings: Settings, stop: threading.Event, *, burst: bool = False, following: Following | None = None
) -> None:
    """Deliver verdicts to the webhook until `stop`."""
    webhooks.check_settings(settings.webhook)
    following = following or Following(settings, None, "webhooks", FIXED_IN_WORKER)
    stop_on_signals(stop)
    following.hear_signals()

    with opened(settings.telemetry, "webhooks"):
        through_outages(delivering(following, stop, burst), stop, burst=burst)


def _read(argv: Sequence[str]) -> tuple[argparse.Namespace, Roles]:
    parser = _parser()
    arguments = parser.parse_args(list(argv))
    if arguments.processes < 1:
        parser.error("--processes is at least 1")
    if arguments.processes > 1 and arguments.only != "verify":
        parser.error("--processes goes with --only verify: what else there is runs once in each process")
    return arguments, roles_of(parser, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="countersign worker", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--burst", action="store_true", help="end when no job is left")
    parser.add_argument("--processes", type=int, default=1, help="with --only verify: how many processes")
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--sheet", type=int, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
