"""The verification job. It looks at what Redis holds about a response and does the next thing.

It may run twice, at once, or again after a crash: what a stage stores is written once, and one verdict comes of it. The
order matters for honesty: whether a response is audited is chosen before any check has run, and its replay is asked for
with token ids only, so neither the claim nor a check's result can colour it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, NamedTuple, cast

import orjson
from rq import get_current_job

from policies import audit, codec, distance, margin, routing
from policies._storage import keeps
from policies.case import Shared, pack, sha256
from policies.checks import VerdictWord
from policies.documents import document
from policies.errors import BundleError, EvidenceError, NoSealingKey, OtherVersion, ReplayError, SealError
from policies.evidence import Evidence, Replay, ReplayForm
from policies.judging import Grounds
from policies.receipt import Facts, facts_of
from policies.transcript import Recorder
from policies.unit import Unit, declaration_of, of_response
from policies.verification import Verification, traced, unverified
from verifier_pool import declarations, history, metrics
from verifier_pool.context import NO_MODEL, Context, current
from verifier_pool.judge import for_each_choice, grounds_of, on_grounds
from verifier_pool.link.queue import SECOND_UNCHECKED, audited_key, evidence_key, intent_key, verdict_key
from verifier_pool.link.telemetry import log, names
from verifier_pool.packing import unpack_outcomes
from verifier_pool.replays import can_replay, outcome_key, request_key, request_of, response_of, vouching_key
from verifier_pool.standing import audit_rate
from verifier_pool.tokenizer import spelling_of
from verifier_pool.traced import verifying
from verifier_pool.units import accusing, confirmed, of_unverified
from verifier_pool.vouching import Counsel
from verifier_pool.whose import whose

logger = logging.getLogger(__name__)

ASKED = "replaying"
"""What a pass returns that has asked for a replay."""
WAITING = "waiting for a canary"
"""What a pass returns whose response is judged again once there is one (`verifier_pool.vouching`)."""
CALIBRATED = (distance.NAME, margin.NAME, routing.NAME)
"""Checks of a replay that may accuse."""
FOLD_SECONDS = 1.0


class _Held(NamedTuple):
    """What Redis holds about a response, decrypted, and its replays also as they are stored; None where there is
    nothing."""

    verdict: bytes | None
    evidence: bytes | None
    intent: bytes | None
    audited: bytes | None
    replayed: bytes | None
    replayed_again: bytes | None
    stored_replay: bytes | None = None
    stored_second: bytes | None = None


def verify(id: str) -> str:
    """Bring a recorded response one stage further: its replay, its second replay, or its verdict.

    Returns:
        The verdict's word, `replaying`, or `waiting for a canary`.

    Raises:
        OtherVersion: a worker of another version reads the evidence, not this one.
        EvidenceError: the evidence is unreadable; the verdict says so, and the job stays among the failed
            ones for a person to look at.
    """
    context = current()
    held = _held(context, id)
    intent = document(held.intent) or {}
    where = {name: str(intent.get(name, "")) for name in ("backend", "model")}
    with log.about(id=id, **where), verifying(intent, id, get_current_job()) as span:
        word = _advanced(context, id, held)
        if span is not None:
            span.set({names.OUTCOME: word})
        return word


def _advanced(context: Context, id: str, held: _Held) -> str:
    if held.verdict is not None:
        if held.replayed is not None or held.replayed_again is not None:
            _forget(context, id)  # a replay ran twice, and its second outcome came after the verdict
        word = str(orjson.loads(held.verdict).get("verdict"))
        if held.evidence is not None and not keeps(_retain(context, document(held.intent)), word):
            context.store.redis.unlink(evidence_key(id))  # it came after its verdict, `proxy_lost`
        return word
    if held.evidence is None:
        return _settle_unverified(context, id, "evidence_expired")
    try:
        choices = codec.unpack(held.evidence)
        if not choices or any(choice.id != id for choice in choices):
            raise EvidenceError("the evidence holds no choice, or another response's")
    except OtherVersion:
        raise
    except EvidenceError:
        _settle_unverified(context, id, "evidence_unreadable")
        _do_not_retry()
        raise
    return _Response(context, id, choices, held).advance()


def give_up(job_id: str, reason: str) -> None:
    """A job of this response will not run again: close it with the reason, by who is to blame for it, unless a verdict
    is there."""
    context, id = current(), response_of(job_id)
    _settle_unverified(context, id, *_blamed(context, id, reason))


def _blamed(context: Context, id: str, reason: str) -> tuple[str, int]:
    """The reason, and how many tokens it kept from being judged."""
    try:
        held = _held(context, id)
        if held.verdict is not None or held.evidence is None:
            return reason, 0
        response = _Response(context, id, codec.unpack(held.evidence), held)
    except (EvidenceError, OtherVersion):
        return reason, 0
    tokens = sum(len(choice.output_ids) for choice in response.choices)
    return whose(reason, response.choices, response.judged), tokens


class _Weighed(NamedTuple):
    """A response that is judged: its verification, its unit, and what the verdict rests on."""

    verification: Verification
    unit: Unit
    grounds: Grounds


class _Response:
    """One response in one pass."""

    def __init__(self, context: Context, id: str, choices: Sequence[Evidence], held: _Held) -> None:
        self._context = context
        self._id = id
        self._held = held
        self._intent = document(held.intent) or {}
        # Evidence is handed out, and does not say whose it is.
        owner = str(self._intent.get("owner", ""))
        self._choices = choices = [replace(choice, owner=choice.owner or owner) for choice in choices]
        self._model = context.settings.models.get(choices[0].model, NO_MODEL)
        self._fit = [choice for choice in choices if can_replay(choice)]

    @property
    def choices(self) -> Sequence[Evidence]:
        """What is judged."""
        return self._choices

    def judged(self, choices: Sequence[Evidence]) -> Unit:
        """What would come of these choices of it, for nobody to hear of."""
        context, name = self._context, choices[0].model
        replays = self._replays(again=False) if choices is self._choices else None
        spelling, profile = spelling_of(self._model), context.profiles.get(name)
        grounds = grounds_of(self._model, spelling=spelling, profile=profile, replays=replays)
        verification = on_grounds(choices, grounds)
        orjson.dumps(verification)
        facts_of(choices, self._intent, b"", declared=declaration_of(choices[0]))
        with suppress(BundleError):  # a verdict does without
            pack(choices, grounds, Shared.of(profile, None, ""))
        return of_response(choices, verification, context.secret, operator=False)

    def advance(self) -> str:
        """The next stage; see `verify`."""
        chosen = self._chosen()
        first = self._replays(again=False) if self._has_reference(again=False) else None
        if chosen and first is None and self._has_reference(again=False):
            return self._ask(again=False)
        weighed = self._weighed(chosen, first)
        return weighed if isinstance(weighed, str) else self._settle(weighed)

    def _weighed(self, chosen: bool, first: Sequence[Replay | ReplayError] | None) -> _Weighed | str:
        """The verification of the response and its unit in the backend's standing, or that it is replayed first."""
        context, choices, name = self._context, self._choices, self._choices[0].model
        profile, second_profile = context.profiles.get(name), context.second_profiles.get(name)
        spelling = spelling_of(self._model)
        grounds = grounds_of(
            self._model,
            spelling=None if spelling is None else Recorder(spelling),
            profile=profile,
            replays=first if chosen else None,
            declaration_expired=declarations.expired(context.store.redis, choices[0].backend, choices[0].runtime),
            earlier=history.note(context.store.redis, context.secret, choices, self._model.vocab_size),
        )
        operator = self._intent.get("operator") is True
        verification = on_grounds(choices, grounds)
        unit = of_response(
            choices,
            verification,
            context.secret,
            operator=operator,
            profile=context.profile_names.get(name, ""),
            delta=profile.delta if profile is not None else 0.0,
        )
        if not chosen and self._has_reference(again=False) and (first is not None or _doubtful(verification)):
            # The verdict hears this replay. The unit does not: it was made before, of what every answer is asked.
            if first is None:
                return self._ask(again=False)
            grounds = replace(grounds, replays=first)
            verification = on_grounds(choices, grounds) | {"extra_replay": True}
            otherwise = self._unvouched(again=False) if _rejecting(verification) else None
            return otherwise or _Weighed(verification, unit, grounds)
        if (accusing(unit) or _rejecting(verification)) and (otherwise := self._unvouched(again=False)) is not None:
            return otherwise
        if accusing(unit) and self._has_reference(again=True):
            again = self._replays(again=True)
            if again is None:
                return self._ask(again=True)
            repeated = on_grounds(choices, replace(grounds, profile=second_profile, replays=again))
            told = of_response(choices, repeated, context.secret, operator=operator)
            if accusing(told) and (otherwise := self._unvouched(again=True)) is not None:
                return otherwise
            unit, found = confirmed(unit, told)
            verification["second_reference"] = asdict(found)
        return _Weighed(verification, unit, grounds)

    def _unvouched(self, *, again: bool) -> str | None:
        """What this pass comes to because the reference was not shown sound since it replayed the response; None when
        it was, or cannot be."""
        held = self._held
        outcome, stored = (held.replayed_again, held.stored_second) if again else (held.replayed, held.stored_replay)
        if outcome is None:
            return None
        vouching, model = self._context.vouching, self._choices[0].model
        match vouching.counsel(self._id, model, outcome, second=again, stored=stored):
            case Counsel.WAITS:
                return WAITING
            case Counsel.FORGOTTEN:
                return _advanced(self._context, self._id, _held(self._context, self._id))
        return None

    def _settle(self, weighed: _Weighed) -> str:
        context, choice, verification = self._context, self._choices[0], weighed.verification
        redis = context.store.redis
        verification |= traced(self._intent)
        changed = declarations.note(redis, verification, choice.runtime)
        retained = keeps(_retain(context, document(self._held.intent)), verification["verdict"])
        case = context.parts.case_of(self._choices, weighed.grounds)
        kept = context.parts.keep(choice, weighed.grounds, case) if retained else None
        if context.store.settle(verification, weighed.unit, self._facts(weighed, case), kept):
            metrics.decided(self._choices, verification["decided"], audited=bool(verification["audited"]))
            if changed:
                declarations.count(redis, choice.backend)
            if verification.get("second_reference", {}).get("unchecked"):
                redis.hincrby(SECOND_UNCHECKED, choice.backend, 1)
        if self._held.replayed is not None:
            _forget(context, self._id)
        if not retained:
            redis.unlink(evidence_key(self._id))  # which the step that stored the verdict knew only by the intent
        _fold(context, choice.backend)
        return str(verification["verdict"])

    def _facts(self, weighed: _Weighed, case: bytes) -> Facts:
        """What the receipt says besides the verification. `case` is empty where there is none."""
        context, choice = self._context, self._choices[0]
        twice = "second_reference" in weighed.verification
        return facts_of(
            self._choices,
            self._intent,
            self._held.evidence or b"",
            declared=declaration_of(choice),
            replay=sha256(case),
            second_replay=sha256(self._held.replayed_again or b"") if twice else "",
            profile=context.profile_hashes.get(choice.model, ""),
            second_profile=context.second_profile_hashes.get(choice.model, "") if twice else "",
        )

    def _chosen(self) -> bool:
        """Whether the response is audited, from the secret, its id and its backend's past alone; the same in every run.

        It is chosen once and kept: the rate may change between two passes, and a second choice could then hang on what
        the first pass met.
        """
        if self._held.audited is not None:
            return self._held.audited == b"1"
        context, settings, choice = self._context, self._context.settings, self._choices[0]
        rate = audit_rate(context.store.redis, settings.audit, choice.backend, declaration_of(choice))
        chosen = audit.chosen(context.secret, self._id, rate)
        return context.store.choose(self._id, chosen, settings.verification.evidence_ttl)

    def _has_reference(self, *, again: bool) -> bool:
        """Whether it can be replayed: by these settings, or because another worker, with others, asked already."""
        if (self._model.second_reference if again else self._model.reference) is not None:
            return True
        if (self._held.replayed_again if again else self._held.replayed) is not None:
            return True
        # What was never chosen for or against an audit was never asked about.
        return self._held.audited is not None and self._context.stages.asked(self._id, second=again)

    def _replays(self, *, again: bool) -> list[Replay | ReplayError] | None:
        """What came of each choice's replay by the reference, or again by the second one; None while nothing did."""
        if not self._fit:
            return for_each_choice(self._choices, [])
        data = self._held.replayed_again if again else self._held.replayed
        return None if data is None else for_each_choice(self._choices, unpack_outcomes(data, self._fit))

    def _ask(self, *, again: bool) -> str:
        context = self._context
        form: ReplayForm = "full" if audit.wants_full(context.secret, self._id, context.settings.audit.full) else "ids"
        experts = self._model.experts is not None
        requests = [request_of(choice, form, experts) for choice in self._fit]
        context.stages.ask(self._id, self._choices[0].model, requests, self._intent, second=again)
        return ASKED


def _held(context: Context, id: str) -> _Held:
    keys = [verdict_key(id), evidence_key(id), intent_key(id), audited_key(id)]
    keys += [outcome_key(id), outcome_key(id, second=True)]
    found = _Held(*cast("list[bytes | None]", context.store.redis.mget(keys)))
    evidence, replayed, again = (_opened(context, keys[at], found[at]) for at in (1, 4, 5))
    return found._replace(
        evidence=evidence,
        replayed=replayed,
        replayed_again=again,
        stored_replay=found.replayed,
        stored_second=found.replayed_again,
    )


def _opened(context: Context, key: str, stored: bytes | None) -> bytes | None:
    """A value as it was before it was encrypted; what cannot be decrypted is as good as damaged.

    Raises OtherVersion where its key is not here: a worker that has it may come.
    """
    try:
        return None if stored is None else context.store.sealer.open(stored, key.encode())
    except NoSealingKey as error:
        raise OtherVersion(str(error)) from error
    except SealError:
        return b""


def _rejecting(verification: Verification) -> bool:
    """Whether a replay speaks against the answer, or a choice of it."""
    checks = [*verification["checks"]]
    for choice in verification.get("choices", ()):
        checks += choice["checks"]
    return any(check["name"] in CALIBRATED and check["result"] == "reject" for check in checks)


def _doubtful(verification: Verification) -> bool:
    """Whether the checks that need no reference speak against the answer or its declaration."""
    return verification["verdict"] == VerdictWord.REJECT or declarations.fitting(verification) is not None


def _settle_unverified(context: Context, id: str, reason: str, tokens: int = 0) -> str:
    intent = context.store.intent(id)
    verification = unverified(id, reason, intent, time.time())
    if context.store.settle(verification, of_unverified(verification, intent, tokens)):
        logger.warning("verification %s ends unverified: %s", id, reason, extra={"id": id, "reason": reason})
        _fold(context, verification["backend"])
    _forget(context, id)
    if not keeps(_retain(context, intent), verification["verdict"]):
        context.store.redis.unlink(evidence_key(id))
    return str(verification["verdict"])


def _retain(context: Context, intent: Mapping[str, Any] | None) -> object:
    """What is kept of the evidence of a response; where its intent is gone, what is of keys that do not say."""
    return context.settings.storage.retain if intent is None else intent.get("retain")


def _forget(context: Context, id: str) -> None:
    """Free what replays left, now that the verdict is there; what a crash keeps of it expires by itself."""
    kinds = (request_key, outcome_key, vouching_key)
    keys = [key(id, second=second) for key in kinds for second in (False, True)]
    context.store.redis.unlink(*keys)


def _fold(context: Context, backend: str) -> None:
    """Let the standing follow, once a second: a fold costs more than some checks, however many units it counts.

    The verdict stands whatever becomes of this; what is left is folded between jobs and by the timer.
    """
    if time.monotonic() < context.folded.get(backend, float("-inf")) + FOLD_SECONDS:
        return
    context.folded[backend] = time.monotonic()
    try:
        context.standings.fold(backend)
    except ValueError as error:
        logger.error("the standing of backend %s cannot be kept: %s", backend, type(error).__name__)


def _do_not_retry() -> None:
    job = get_current_job()
    if job is not None:
        job.retries_left = 0
