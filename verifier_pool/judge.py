"""From evidence to a verification: CPU checks, a blind replay when audited, one verdict.

Order matters for honesty, not for speed: the reference is asked before any check has run, and with token ids
only, so neither the claim nor a CPU result can colour a replay.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from policies import distance, margin, routing, selection, structure
from policies.checks import Check, Result, Verdict
from policies.errors import ReplayError
from policies.evidence import Evidence, Ids, Replay, ReplayForm
from policies.profile import Profile
from policies.settings import ModelSettings
from policies.structure import Earlier
from policies.verdict import combine, over_choices
from policies.verification import Verification, describe
from verifier_pool.bad_words import forbidden_ids
from verifier_pool.reference.base import Reference, ReplayRequest
from verifier_pool.tokenizer import spelling_of

FINAL_REASONS = frozenset({"too_long", "refused", "bad_ids", "bad_request", "nothing_to_replay"})
"""Replay failures that trying again cannot cure."""


def judge(
    choices: Sequence[Evidence],
    *,
    model: ModelSettings,
    reference: Reference | None,
    profile: Profile | None,
    audited: bool,
    last_try: bool = True,
    declaration_expired: bool = False,
    form: ReplayForm = "full",
    earlier: Sequence[Earlier | None] | None = None,
) -> Verification:
    """Judge the choices of one response.

    Args:
        audited: chosen for replay; ignored without a reference.
        last_try: whether a passing trouble of the reference is final; then `distance` and `margin` are inconclusive
            with its reason.
        declaration_expired: the backend's declared runtime was contradicted (`verifier_pool.declarations`).
        form: `full` also takes the reference's own top 20; `ids` scores the claimed ids only, and never passes.
        earlier: what is remembered of the backend's answers to the same request, per choice (`verifier_pool.history`).

    Raises:
        ReplayError: the reference had a passing trouble and this is not the last try.
        ValueError: there is no choice.
    """
    if not choices:
        raise ValueError("a response without choices cannot be judged")
    replays: Sequence[Replay | ReplayError | None] = [None] * len(choices)
    if audited and reference is not None:
        replays = replay_choices(choices, reference, last_try=last_try, form=form, experts=model.experts is not None)
    verdicts = [
        _judge_one(choice, replay, model, profile, declaration_expired, before)
        for choice, replay, before in zip(choices, replays, earlier or [None] * len(choices), strict=True)
    ]
    overall = verdicts[0] if len(verdicts) == 1 else over_choices(verdicts)
    return describe(choices, verdicts, overall, time.time())


def replay_choices(
    choices: Sequence[Evidence],
    reference: Reference,
    *,
    last_try: bool,
    form: ReplayForm = "full",
    experts: bool = False,
) -> list[Replay | ReplayError]:
    """Replay what can be replayed, in one batch; a choice that cannot holds its error instead.

    `experts` asks for expert ids too, for choices that came with some.

    Raises:
        ReplayError: a passing trouble, when this is not the last try.
    """
    fit = [request_of(choice, form, experts) for choice in choices if _can_replay(choice)]
    replays = iter(_replay_batch(fit, reference, last_try))
    nothing = ReplayError("nothing_to_replay", "prompt or output ids are missing")
    return [next(replays) if _can_replay(choice) else nothing for choice in choices]


def _can_replay(choice: Evidence) -> bool:
    return len(choice.prompt_ids) > 0 and len(choice.output_ids) > 0


def _replay_batch(
    requests: Sequence[ReplayRequest], reference: Reference, last_try: bool
) -> list[Replay | ReplayError]:
    if not requests:
        return []
    try:
        return list(reference.replay(requests))
    except ReplayError as error:
        final = error.reason in FINAL_REASONS
        if not final and not last_try:
            raise
        if not final or len(requests) == 1:
            return [error] * len(requests)
    # One sequence spoils its batch; alone, the others still get their replay.
    return [result for request in requests for result in _replay_batch([request], reference, last_try)]


def request_of(choice: Evidence, form: ReplayForm = "full", experts: bool = False) -> ReplayRequest:
    """What a reference is told of a choice: ids, never a logprob."""
    return ReplayRequest(
        prompt_ids=choice.prompt_ids,
        output_ids=choice.output_ids,
        endpoint=choice.endpoint,
        request=choice.request,
        choice=choice.index,
        candidate_ids=choice.claim_ids,
        form=form,
        experts=experts and choice.routed_experts is not None,
    )


def cpu_checks(
    choice: Evidence,
    model: ModelSettings,
    rendered_prompt: Ids | None = None,
    *,
    declaration_expired: bool = False,
    earlier: Earlier | None = None,
) -> list[Check]:
    """The checks that need no reference, though `structure` uses its rendering of the prompt where there is one."""
    return [
        structure.check(
            choice,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            eos_token_ids=model.eos_token_ids,
            rendered_prompt=rendered_prompt,
            spelling=spelling_of(model),
            earlier=earlier,
        ),
        selection.check(
            choice,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            bad_words=forbidden_ids(choice, model),
            declaration_expired=declaration_expired,
        ),
    ]


def _judge_one(
    choice: Evidence,
    replay: Replay | ReplayError | None,
    model: ModelSettings,
    profile: Profile | None,
    declaration_expired: bool,
    earlier: Earlier | None,
) -> Verdict:
    rendered = replay.prompt_ids if isinstance(replay, Replay) else None
    checks = cpu_checks(choice, model, rendered, declaration_expired=declaration_expired, earlier=earlier)
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
