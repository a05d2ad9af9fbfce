"""`countersign worker`: turns recorded evidence into verdicts until told to stop.

There are three kinds of work. Verifying is CPU work on one queue for all models. Replaying drains the queue of one
reference, with many replays in flight. Delivering webhooks waits for receivers on the internet. By default one process
does all of it: verification in its main thread, a thread for each reference, and delivery in a child process, so that
a slow receiver holds up nothing. With `--only` it does one kind, and any number of such processes share the work.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from policies.errors import SettingsError
from policies.reload import FIXED_IN_REFERENCE, FIXED_IN_WORKER
from policies.settings import ReferenceSettings, Settings
from verifier_pool import context, dead_letters, jobs, webhooks
from verifier_pool.following import Following
from verifier_pool.loop import Loop
from verifier_pool.metrics_page import shown
from verifier_pool.orders import Order, carry_out
from verifier_pool.parents import stop_with
from verifier_pool.profile_facts import all_facts
from verifier_pool.queue import VERIFY_QUEUE, WEBHOOK_QUEUE
from verifier_pool.reference.base import Reference
from verifier_pool.replay_loop import ReplayLoop
from verifier_pool.roles import EVERYTHING, Roles, add_arguments, check_model, check_replays, roles_of
from verifier_pool.runtime import Child, connect, read_settings, stop_on_signals, supervise, through_outages
from verifier_pool.settings_file import settings_path
from verifier_pool.stages import Stages
from verifier_pool.standstill import Standstill
from verifier_pool.store import Store
from verifier_pool.sweeper import sweep_in_turn
from verifier_pool.takeover import take_over
from verifier_pool.telemetry import log
from verifier_pool.telemetry.tracing import opened
from verifier_pool.tokenizer import spelling_of

logger = logging.getLogger("countersign.worker")

COMMAND = (sys.executable, "-m", "countersign", "worker")


@dataclass(frozen=True, slots=True)
class Served:
    """One reference that this process runs."""

    model: str
    second: bool
    reference: Reference
    limits: ReferenceSettings


def main(argv: Sequence[str]) -> int:
    """Run a worker; returns its exit code. Raises SettingsError, and StoreUnavailable with `--burst`."""
    arguments, roles = _read(argv)
    settings = read_settings(arguments.config)
    log.configure(settings.telemetry.log_level, texts=settings.telemetry.log_texts)
    connect(settings).close()  # a wrong URL is said now, not after a reference took minutes to load
    stop = threading.Event()
    if arguments.parent is not None:
        stop_with(arguments.parent, stop)
    with shown(settings.metrics, arguments.sheet):
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
        _check_verifying(settings)
        stop_on_signals(stop)
        command += ["--only", "verify", *(["--burst"] if arguments.burst else [])]
        patience = settings.verification.job_timeout + 30
        return supervise(command, arguments.processes, stop, patience=patience, burst=arguments.burst)
    child = None
    if settings.webhook is not None and arguments.only is None and not arguments.burst:
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
    verifying = _verifying(following, stop) if roles.verify else None
    with opened(settings.telemetry, roles.name), _references(settings, roles) as served:
        stop_on_signals(stop)
        following.hear_signals()
        replaying = [
            partial(_replaying, settings, stop, each, None if roles.verify or number else following)
            for number, each in enumerate(served)
        ]

        def tick() -> None:
            if child is not None:
                child.keep()

        try:
            for each in served:
                said = "what accuses a backend of model %s is replayed by %s too" if each.second else None
                logger.info(said or "model %s is replayed by %s", each.model, each.reference.name or "a server")
            if burst:
                _exhaust([*([verifying] if verifying else []), *replaying], stop)
            else:
                _work(verifying, replaying, stop, tick)
        finally:
            if child is not None:
                child.end()
            context.use(None)
            logger.info("stopped")


Worked = Callable[..., int]
"""Serves one queue: called with `burst` and `tick`, it returns how many jobs it did."""


def _work(
    verifying: Worked | None, replaying: Sequence[Worked], stop: threading.Event, tick: Callable[[], None]
) -> None:
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
        for number, work in enumerate(replaying)
    ]
    for each in threads:
        each.start()
    try:
        if verifying is not None:
            through_outages(partial(verifying, burst=False, tick=tick), stop)
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


def _check_verifying(settings: Settings) -> None:
    context.read_profiles(settings)
    context.read_profiles(settings, second=True)
    for name, model in settings.models.items():
        # Without it texts would not be held against ids, and every verdict would say less than it could.
        if model.tokenizer is not None and spelling_of(model) is None:
            expected = f"a readable tokenizer.json or its folder, not {model.tokenizer!r}"
            raise SettingsError(f"models.{name}.tokenizer", expected)


def _fixed(roles: Roles) -> tuple[tuple[str, ...], ...]:
    return FIXED_IN_REFERENCE if roles.replay else FIXED_IN_WORKER


def _verifying(following: Following, stop: threading.Event) -> Worked:
    settings = following.settings
    _check_verifying(settings)
    held = [context.read_profiles(settings), context.read_profiles(settings, second=True)]
    following.begin(all_facts(settings, *held))
    standstill = Standstill()

    def work(*, burst: bool, tick: Callable[[], None] | None) -> int:
        with _connected(following.settings) as store:
            take_over(store.redis)
            secret = settings.audit.secret
            known = secret.get_secret_value().encode() if secret else store.audit_secret()

            def use(now: Settings) -> None:
                context.use(context.Context(now, store, held[0], known, held[1]))

            def take(now: Settings) -> dict[str, Any]:
                _check_verifying(now)
                held[:] = context.read_profiles(now), context.read_profiles(now, second=True)
                store.renew(now.verification.verdict_ttl)
                use(now)
                return all_facts(now, *held)

            use(following.settings)
            following.take = take
            following.look(store.redis)

            def timer() -> None:
                here = context.current()
                sweep_in_turn(store, here.settings.verification)
                here.standings.fold_left()

            def between() -> None:
                following.look(store.redis)
                here = context.current()
                carry_out(store.redis, partial(_ordered, here))
                here.standings.fold_left(0.2)
                if tick is not None:
                    tick()

            loop = Loop(
                VERIFY_QUEUE,
                store.redis,
                stop,
                on_failed=jobs.give_up,
                on_tick=between,
                on_timer=timer,
                standstill=standstill,
            )
            logger.info("ready: taking verifications")
            done = loop.serve(burst=burst)
            context.current().standings.fold_left()
            following.leave(store.redis)
            return done

    return work


def _ordered(here: context.Context, order: Order) -> list[dict[str, Any]]:
    """Do what an admin asks of the workers."""
    return dead_letters.act(here.store.redis, here.settings, order.action, order.ids, actor=order.by)


def _replaying(
    settings: Settings,
    stop: threading.Event,
    served: Served,
    follows: Following | None,
    *,
    burst: bool,
    tick: Callable[[], None] | None,
) -> int:
    """Replay. A process that does nothing else `follows` its settings here."""
    with _connected(settings) as store:

        def between() -> None:
            if follows is not None:
                follows.look(store.redis)
            if tick is not None:
                tick()

        stages = Stages(store.redis, settings.verification)
        loop = ReplayLoop(
            served.model, served.reference, stages, stop, limits=served.limits, second=served.second, on_tick=between
        )
        logger.info("ready: taking replays of %s", served.model)
        done = loop.serve(burst=burst)
        if follows is not None:
            follows.leave(store.redis)
        return done


@contextlib.contextmanager
def _references(settings: Settings, roles: Roles) -> Iterator[list[Served]]:
    """The references of these roles, started; closed at the end, or when one does not start."""
    if not roles.replay:
        yield []
        return
    check_model(settings, roles)
    with contextlib.ExitStack() as closing:
        served: list[Served] = []
        for second in (False, True):
            if roles.which == ("first" if second else "second"):
                continue
            opened = context.open_references(settings, second=second, model=roles.model)
            for name, reference in opened.items():
                closing.callback(reference.close)
                model = settings.models.get(name, context.NO_MODEL)
                limits = (model.second_reference if second else model.reference) or _NO_LIMITS
                served.append(Served(name, second, reference, limits))
        check_replays(roles, served)
        yield served


_NO_LIMITS = ReferenceSettings(kind="vllm_http", url="http://")


def run_webhooks(
    settings: Settings, stop: threading.Event, *, burst: bool = False, following: Following | None = None
) -> None:
    """Deliver verdicts to the webhook until `stop`."""
    webhooks.check_settings(settings.webhook)
    following = following or Following(settings, None, "webhooks", FIXED_IN_WORKER)
    stop_on_signals(stop)
    following.hear_signals()

    def work() -> None:
        with _connected(following.settings) as store:

            def take(now: Settings) -> dict[str, Any]:
                webhooks.check_settings(now.webhook)
                context.use(context.Context(now, store))
                return {}

            def between() -> None:
                following.look(store.redis)
                webhooks.drain_outbox(store, context.current().settings)

            take(following.settings)
            following.take = take
            loop = Loop(WEBHOOK_QUEUE, store.redis, stop, on_failed=webhooks.dead_letter, on_tick=between)
            logger.info("ready: delivering webhooks")
            loop.serve(burst=burst)
            following.leave(store.redis)

    with opened(settings.telemetry, "webhooks"):
        through_outages(work, stop, burst=burst)


@contextlib.contextmanager
def _connected(settings: Settings) -> Iterator[Store]:
    store = Store(
        connect(settings),
        verdict_ttl=settings.verification.verdict_ttl,
        webhook=settings.webhook is not None,
    )
    with contextlib.closing(store.redis):
        yield store


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
