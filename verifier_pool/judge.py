"""From evidence to a verification: CPU checks, what a blind replay found when there was one, one verdict."""

from __future__ import annotations

import time
from collections.abc import Sequence

from policies import distance, margin, routing, selection, structure
from policies.checks import Check, Result, Verdict
from policies.errors import ReplayError
from policies.evidence import Evidence, Ids, Replay, ReplayForm
from policies.media import asked_with_media
from policies.profile import Profile
from policies.settings import ModelSettings
from policies.structure import Earlier
from policies.thinking import tags_of
from policies.verdict import combine, over_choices
from policies.verification import Verification, describe
from verifier_pool.bad_words import forbidden_ids
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
    """Judge the choices of one response.

    Args:
        replays: what came of each choice's replay; None when the response was not audited.
        declaration_expired: the backend's declared runtime was contradicted (`verifier_pool.declarations`).
        earlier: what is remembered of the backend's answers to the same request, per choice (`verifier_pool.history`).

    Raises:
        ValueError: there is no choice.
    """
    if not choices:
        raise ValueError("a response without choices cannot be judged")
    came = [None] * len(choices) if replays is None else replays
    before = earlier or [None] * len(choices)
    with step(names.CHECKS, {names.CHOICES: len(choices)}):
        checks = [
            cpu_checks(
                choice,
                model,
                replay.prompt_ids if isinstance(replay, Replay) else None,
                declaration_expired=declaration_expired,
                earlier=known,
            )
            for choice, replay, known in zip(choices, came, before, strict=True)
        ]
    with step(names.JUDGE, {names.CHOICES: len(choices)}) as span:
        verdicts = [
            _judge_one(choice, found, replay, model, profile, declaration_expired)
            for choice, found, replay in zip(choices, checks, came, strict=True)
        ]
        overall = verdicts[0] if len(verdicts) == 1 else over_choices(verdicts)
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
    """The checks that need no reference, though `structure` uses its rendering of the prompt where there is one."""
    spelling = spelling_of(model)
    return [
        structure.check(
            choice,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            eos_token_ids=model.eos_token_ids,
            rendered_prompt=rendered_prompt,
            spelling=spelling,
            earlier=earlier,
        ),
        selection.check(
            choice,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            bad_words=forbidden_ids(choice, model),
            tags=tags_of(spelling),
            declaration_expired=declaration_expired,
        ),
    ]


def _judge_one(
    choice: Evidence,
    checks: list[Check],
    replay: Replay | ReplayError | None,
    model: ModelSettings,
    profile: Profile | None,
    declaration_expired: bool,
) -> Verdict:
    """`checks` are those of the CPU."""
    if isinstance(replay, Replay):
        contradicted = declaration_expired or any(selection.fitting_runtime(check.reason) for check in checks)
        checks.append(distance.check(choice, replay, profile))
        checks.append(
            margin.check(
                choice,
                replay,
                profile,
                eos_token_ids=model.eos_token_ids,
                bad_words=forbidden_ids(choice, model),
                contradicted=contradicted,
                experts=bool(model.experts),
                tags=tags_of(spelling_of(model)),
            )
        )
    elif isinstance(replay, ReplayError):
        checks += [Check(name, Result.INCONCLUSIVE, replay.reason) for name in (distance.NAME, margin.NAME)]
    if model.experts:
        checks += _routing(choice, replay, profile, model.experts)
    full = not isinstance(replay, Replay) or replay.form == "full"
    return combine(checks, audited=replay is not None, full=full)


def _routing(
    choice: Evidence, replay: Replay | ReplayError | None, profile: Profile | None, experts: int
) -> list[Check]:
    if isinstance(replay, Replay):
        return [routing.check(choice, replay, profile, experts=experts)]
    found = routing.obstacle(choice, experts)
    if found is None and isinstance(replay, ReplayError):
        found = Check(routing.NAME, Result.INCONCLUSIVE, replay.reason)
    return [] if found is None else [found]
