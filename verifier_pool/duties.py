"""What a worker does, each on one queue: verify, replay, deliver."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from policies.errors import SettingsError
from policies.settings import ReferenceSettings, Settings
from verifier_pool import context, dead_letters, jobs, webhooks
from verifier_pool.following import Following
from verifier_pool.link.orders import Order, carry_out
from verifier_pool.link.queue import VERIFY_QUEUE, WEBHOOK_QUEUE
from verifier_pool.link.resealing import Resealing
from verifier_pool.link.sealing import Sealer
from verifier_pool.link.signing import signer_of
from verifier_pool.loop import Loop
from verifier_pool.profile_facts import all_facts
from verifier_pool.reference.base import Reference
from verifier_pool.replay_loop import ReplayLoop
from verifier_pool.rewriting import rewrite_in_turn
from verifier_pool.roles import Roles, check_model, check_replays
from verifier_pool.runtime import connect
from verifier_pool.senders import senders
from verifier_pool.stages import Stages
from verifier_pool.standstill import Standstill
from verifier_pool.store import Store
from verifier_pool.sweeper import sweep_in_turn
from verifier_pool.tokenizer import spelling_of

logger = logging.getLogger("countersign.worker")

_NO_LIMITS = ReferenceSettings(kind="vllm_http", url="http://")

Worked = Callable[..., int]
"""Serves one queue: called with `burst` and `tick`, it returns how many jobs it did."""


@dataclass(frozen=True, slots=True)
class Served:
    """One reference that this process runs."""

    model: str
    second: bool
    reference: Reference
    limits: ReferenceSettings


def check_verifying(settings: Settings) -> None:
    """Raises SettingsError for a profile or a tokenizer that cannot be read."""
    context.read_profiles(settings)
    context.read_profiles(settings, second=True)
    for name, model in settings.models.items():
        # Without it texts would not be held against ids, and every verdict would say less than it could.
        if model.tokenizer is not None and spelling_of(model) is None:
            expected = f"a readable tokenizer.json or its folder, not {model.tokenizer!r}"
            raise SettingsError(f"models.{name}.tokenizer", expected)


def verifying(following: Following, stop: threading.Event) -> Worked:
    """Checks, verdicts and standings, of all models. Raises SettingsError for what they need and cannot be read."""
    settings = following.settings
    check_verifying(settings)
    held = [context.read_profiles(settings), context.read_profiles(settings, second=True)]
    following.begin(all_facts(settings, *held))
    standstill = Standstill()

    def work(*, burst: bool, tick: Callable[[], None] | None) -> int:
        with connected(following.settings) as store:
            store.signer.check()
            secret = settings.audit.secret
            known = secret.get_secret_value().encode() if secret else store.audit_secret()

            def use(now: Settings) -> None:
                context.use(context.Context(now, store, held[0], known, held[1]))

            def take(now: Settings) -> dict[str, Any]:
                check_verifying(now)
                held[:] = context.read_profiles(now), context.read_profiles(now, second=True)
                store.renew(now.verification.verdict_ttl)
                store.signer.renew(now.receipts)
                use(now)
                return all_facts(now, *held)

            use(following.settings)
            following.take = take
            following.look(store.redis)
            resealing = Resealing(store.redis, store.sealer)

            def timer() -> None:
                here = context.current()
                sweep_in_turn(store, here.settings.verification)
                resealing.look()
                here.standings.fold_left()
                rewrite_in_turn(store.redis, here.settings.storage.rewrite_seconds)

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


def replaying(
    settings: Settings,
    stop: threading.Event,
    served: Served,
    follows: Following | None,
    *,
    burst: bool,
    tick: Callable[[], None] | None,
) -> int:
    """Replay. A process that does nothing else `follows` its settings here."""
    with connected(settings) as store:

        def between() -> None:
            if follows is not None:
                follows.look(store.redis)
            if tick is not None:
                tick()

        stages = Stages(store.redis, settings.verification, store.sealer)
        loop = ReplayLoop(
            served.model, served.reference, stages, stop, limits=served.limits, second=served.second, on_tick=between
        )
        logger.info("ready: taking replays of %s", served.model)
        done = loop.serve(burst=burst)
        if follows is not None:
            follows.leave(store.redis)
        return done


def delivering(following: Following, stop: threading.Event, burst: bool) -> Callable[[], None]:
    """Delivers verdicts and events to webhooks, `deliveries.senders` at once."""

    def work() -> None:
        with connected(following.settings) as store:

            def take(now: Settings) -> dict[str, Any]:
                webhooks.check_settings(now.webhook)
                context.use(context.Context(now, store))
                return {}

            def between() -> None:
                following.look(store.redis)
                here = context.current()
                webhooks.drain_outbox(store, here.settings, here.directory)

            take(following.settings)
            following.take = take
            loop = Loop(WEBHOOK_QUEUE, store.redis, stop, on_failed=webhooks.dead_letter, on_tick=between)
            with senders(store.redis, 0 if burst else following.settings.deliveries.senders - 1):
                logger.info("ready: delivering webhooks")
                loop.serve(burst=burst)
            following.leave(store.redis)

    return work


@contextlib.contextmanager
def references(settings: Settings, roles: Roles) -> Iterator[list[Served]]:
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


@contextlib.contextmanager
def connected(settings: Settings) -> Iterator[Store]:
    with contextlib.closing(connect(settings)) as redis:
        yield Store(
            redis,
            verdict_ttl=settings.verification.verdict_ttl,
            webhook=settings.webhook is not None,
            signer=signer_of(redis, settings),
            sealer=Sealer.of(settings.storage),
        )
