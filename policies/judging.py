"""From evidence to a verdict, as a function of values alone: a worker judges by it, and whoever judges again later.

What a verdict rests on beside the evidence is one value, `Grounds`: what the operator declares of the model, what its
tokenizer says, the profile, what came of the replays, and what was remembered. The same grounds give the same verdict
on any machine, but for the last digits of numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policies import distance, margin, routing, selection, structure
from policies.checks import Check, Result, Verdict
from policies.errors import ReplayError
from policies.evidence import Evidence, Ids, Replay
from policies.profile import Profile
from policies.settings import ModelSettings
from policies.spelling import Spelling
from policies.structure import Earlier
from policies.thinking import tags_of
from policies.verdict import combine, over_choices

Outcome = Replay | ReplayError
"""What came of one choice's replay."""


@dataclass(frozen=True, slots=True)
class Declared:
    """What the operator declares of a model, as far as checks use it: see `ModelSettings`."""

    vocab_size: int | None = None
    max_model_len: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    experts: int | None = None

    @classmethod
    def of(cls, model: ModelSettings) -> Declared:
        """That of the settings."""
        return cls(model.vocab_size, model.max_model_len, model.eos_token_ids, model.experts)


@dataclass(frozen=True, slots=True)
class Grounds:
    """What a verdict rests on, beside the evidence.

    Attributes:
        spelling: the declared model's tokenizer, where it can be read.
        replays: what came of each choice's replay; None when the response was not audited.
        declaration_expired: the backend's declared runtime was contradicted by answers before.
        earlier: what is remembered of the backend's answers to the same request, per choice; None when nothing could
            be asked.
    """

    declared: Declared = Declared()
    spelling: Spelling | None = None
    profile: Profile | None = None
    replays: Sequence[Outcome] | None = None
    declaration_expired: bool = False
    earlier: Sequence[Earlier | None] | None = None


def judge(choices: Sequence[Evidence], grounds: Grounds) -> tuple[list[Verdict], Verdict]:
    """The verdict of each choice of a response, and of the response.

    Raises:
        ValueError: there is no choice, or another number of replays or memories than of choices.
    """
    verdicts = verdicts_of(choices, checks_of(choices, grounds), grounds)
    return verdicts, overall_of(verdicts)


def checks_of(choices: Sequence[Evidence], grounds: Grounds) -> list[list[Check]]:
    """The checks of each choice that need no reference. Raises ValueError as `judge`."""
    if not choices:
        raise ValueError("a response without choices cannot be judged")
    return [
        cpu_checks(choice, grounds, came.prompt_ids if isinstance(came, Replay) else None, earlier=known)
        for choice, came, known in zip(choices, *_beside(choices, grounds), strict=True)
    ]


def verdicts_of(choices: Sequence[Evidence], checks: Sequence[list[Check]], grounds: Grounds) -> list[Verdict]:
    """The verdict of each choice, given `checks_of` them."""
    return [
        _judge_one(choice, found, came, grounds)
        for choice, found, came in zip(choices, checks, _beside(choices, grounds)[0], strict=True)
    ]


def overall_of(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict of the response."""
    return verdicts[0] if len(verdicts) == 1 else over_choices(verdicts)


def cpu_checks(
    choice: Evidence, grounds: Grounds, rendered_prompt: Ids | None = None, *, earlier: Earlier | None = None
) -> list[Check]:
    """The checks that need no reference, though `structure` uses its rendering of the prompt where there is one."""
    declared, spelling = grounds.declared, grounds.spelling
    return [
        structure.check(
            choice,
            vocab_size=declared.vocab_size,
            max_model_len=declared.max_model_len,
            eos_token_ids=declared.eos_token_ids,
            rendered_prompt=rendered_prompt,
            spelling=spelling,
            earlier=earlier,
        ),
        selection.check(
            choice,
            vocab_size=declared.vocab_size,
            eos_token_ids=declared.eos_token_ids,
            bad_words=forbidden_ids(choice, spelling),
            tags=tags_of(spelling),
            declaration_expired=grounds.declaration_expired,
        ),
    ]


def forbidden_ids(choice: Evidence, spelling: Spelling | None) -> Sequence[Sequence[int]] | None:
    """Token sequences of the choice's bad words; None where no tokenizer says."""
    words = choice.sampling.bad_words
    if not words:
        return ()
    if spelling is None:
        return None
    try:
        return selection.bad_word_ids(words, lambda text: spelling.encode(text).tolist())
    except (UnicodeError, TypeError):  # a lone surrogate, which vLLM's tokenizer cannot read either
        return None


def _beside(choices: Sequence[Evidence], grounds: Grounds) -> tuple[Sequence[Outcome | None], Sequence[Earlier | None]]:
    """What came of each choice's replay, and what is remembered of it."""
    nothing = [None] * len(choices)
    return (
        nothing if grounds.replays is None else grounds.replays,
        nothing if grounds.earlier is None else grounds.earlier,
    )


def _judge_one(choice: Evidence, checks: list[Check], came: Outcome | None, grounds: Grounds) -> Verdict:
    """`checks` are those of the CPU."""
    declared, profile, spelling = grounds.declared, grounds.profile, grounds.spelling
    checks = [*checks]
    if isinstance(came, Replay):
        fitting = any(selection.fitting_runtime(check.reason) for check in checks)
        checks.append(distance.check(choice, came, profile))
        checks.append(
            margin.check(
                choice,
                came,
                profile,
                eos_token_ids=declared.eos_token_ids,
                bad_words=forbidden_ids(choice, spelling),
                contradicted=grounds.declaration_expired or fitting,
                experts=bool(declared.experts),
                tags=tags_of(spelling),
            )
        )
    elif isinstance(came, ReplayError):
        checks += [Check(name, Result.INCONCLUSIVE, came.reason) for name in (distance.NAME, margin.NAME)]
    if declared.experts:
        checks += _routing(choice, came, profile, declared.experts)
    full = not isinstance(came, Replay) or came.form == "full"
    return combine(checks, audited=came is not None, full=full)


def _routing(choice: Evidence, came: Outcome | None, profile: Profile | None, experts: int) -> list[Check]:
    if isinstance(came, Replay):
        return [routing.check(choice, came, profile, experts=experts)]
    found = routing.obstacle(choice, experts)
    if found is None and isinstance(came, ReplayError):
        found = Check(routing.NAME, Result.INCONCLUSIVE, came.reason)
    return [] if found is None else [found]
