"""From evidence to a verification: CPU checks, what a blind replay found when there was one, one verdict."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from policies import judging
from policies.checks import Check
from policies.errors import ReplayError
from policies.evidence import Evidence, Ids, Replay, ReplayForm
from policies.judging import Declared, Grounds
from policies.media import asked_with_media
from policies.profile import Profile
from policies.settings import ModelSettings
from policies.structure import Earlier
from policies.verification import Verification, describe
from verifier_pool.link.telemetry import names
from verifier_pool.link.telemetry.tracing import step
from verifier_pool.reference.base import Reference
from verifier_pool.replays import FINAL_REASONS, can_replay, request_of
from verifier_pool.tokenizer import spelling_of

NOTHING = "nothing_to_replay"
MEDIA = "media"


def judge(
    choices: Sequence[Evidence],
    *,
    model: ModelSettings,
    profile: Profile | None = None,
    replays: Sequence[Replay | ReplayError] | None = None,
    declaration_expired: bool = False,
    earlier: Sequence[Earlier | None] | None = None,
) -> Verification:
    """Judge the choices of one response, by what is declared of their model. See `on_grounds`."""
    more = {"profile": profile, "replays": replays, "declaration_expired": declaration_expired, "earlier": earlier}
    return on_grounds(choices, grounds_of(model, **more))


def on_grounds(choices: Sequence[Evidence], grounds: Grounds) -> Verification:
    """Judge the choices of one response.

    Raises:
        ValueError: there is no choice, or another number of replays or memories than of choices.
    """
    with step(names.CHECKS, {names.CHOICES: len(choices)}):
        checks = judging.checks_of(choices, grounds)
    with step(names.JUDGE, {names.CHOICES: len(choices)}) as span:
        verdicts = judging.verdicts_of(choices, checks, grounds)
        overall = judging.overall_of(verdicts)
        if span is not None:
            span.set({names.WORD: str(overall.word)})
    return describe(choices, verdicts, overall, time.time())


def for_each_choice(
    choices: Sequence[Evidence], replayed: Sequence[Replay | ReplayError]
) -> list[Replay | ReplayError]:
    """What came of each choice, given what came of those that can be replayed (`replays.can_replay`), in order."""
    came = iter(replayed)
    return [next(came) if can_replay(choice) else _obstacle(choice) for choice in choices]


def _obstacle(choice: Evidence) -> ReplayError:
    if asked_with_media(choice):
        return ReplayError(MEDIA, "the request holds more than text")
    return ReplayError(NOTHING, "prompt or output ids are missing")


def replay_choices(
    choices: Sequence[Evidence],
    reference: Reference,
    *,
    last_try: bool = True,
    form: ReplayForm = "full",
    experts: bool = False,
) -> list[Replay | ReplayError]:
    """Replay what can be replayed, all at once, and wait; a choice that cannot holds its error instead.

    `experts` asks for expert ids too, for choices that came with some.

    Raises:
        ReplayError: a passing trouble, when this is not the last try.
    """
    futures = [reference.submit(request_of(choice, form, experts)) for choice in choices if can_replay(choice)]
    came: list[Replay | ReplayError] = []
    try:
        for future in futures:
            try:
                came.append(future.result())
            except ReplayError as error:
                if not last_try and error.reason not in FINAL_REASONS:
                    raise
                came.append(error)
    finally:
        for future in futures:
            future.cancel()
    return for_each_choice(choices, came)


def cpu_checks(
    choice: Evidence,
    model: ModelSettings,
    rendered_prompt: Ids | None = None,
    *,
    declaration_expired: bool = False,
    earlier: Earlier | None = None,
) -> list[Check]:
    """The checks of one choice that need no reference, by what is declared of its model."""
    grounds = grounds_of(model, declaration_expired=declaration_expired)
    return judging.cpu_checks(choice, grounds, rendered_prompt, earlier=earlier)


def grounds_of(model: ModelSettings, **more: Any) -> Grounds:
    """What a verdict rests on, of a declared model; `more` of it (see `Grounds`)."""
    return Grounds(**{"declared": Declared.of(model), "spelling": spelling_of(model)} | more)
