"""The checks of one generation, or of all choices of a response, combined into one word.

any check rejects                                                            → reject
else any is withheld                                                         → withheld
audited in form `full`, structure and distance pass, and selection and margin
  each pass or do not apply because of the request                           → pass
not audited, structure passes, selection as above                            → unaudited
no checks at all                                                             → unverified
anything else                                                                → inconclusive

What the client asked for (a repetition penalty, say) can keep selection and margin from applying, and both for the
same reasons. That is the client's choice and no doubt about the backend, so it stands in no answer's way to `pass`,
and the check says so itself. Everything else that keeps a check from deciding does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from policies.checks import Check, Result, Verdict, VerdictWord

IDS_FORM = "ids_form: the reference was asked for the claimed ids alone"

_WORST_FIRST = (
    VerdictWord.REJECT,
    VerdictWord.WITHHELD,
    VerdictWord.INCONCLUSIVE,
    VerdictWord.UNVERIFIED,
    VerdictWord.UNAUDITED,
    VerdictWord.PASS,
)
_RESULTS_WORST_FIRST = (Result.REJECT, Result.WITHHELD, Result.INCONCLUSIVE, Result.PASS)


def combine(checks: Iterable[Check], *, audited: bool, full: bool = True) -> Verdict:
    """The verdict of one generation. `audited` says that it was chosen for replay, `full` in which form.

    A replay that failed comes here as an inconclusive `distance` check, so it can never pass, and neither can one of
    form `ids`, which sees no rival that the claim leaves out. Reasons are those of the checks that do not pass,
    rejects first.
    """
    kept = tuple(checks)
    word = _word(kept, audited)
    reasons = _reasons(kept)
    if word is VerdictWord.PASS and not full:
        word, reasons = VerdictWord.INCONCLUSIVE, (*reasons, IDS_FORM)
    return Verdict(word, kept, reasons, audited)


def over_choices(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict of a whole response: the worst word, and for each check name the worst check.

    Audited only when every choice was. No choices at all are `unverified`. A reject's level is the bound over all
    choices together: its own times their number, at most 1.
    """
    if not verdicts:
        return Verdict(VerdictWord.UNVERIFIED, (), ())
    worst: dict[str, Check] = {}
    for check in (check for verdict in verdicts for check in verdict.checks):
        known = worst.get(check.name)
        if known is None or _severity(check) < _severity(known):
            worst[check.name] = check
    word = min((verdict.word for verdict in verdicts), key=_WORST_FIRST.index)
    reasons = dict.fromkeys(
        reason
        for verdict in sorted(verdicts, key=lambda verdict: _WORST_FIRST.index(verdict.word))
        for reason in verdict.reasons
    )
    checks = tuple(_over(check, len(verdicts)) for check in worst.values())
    return Verdict(word, checks, tuple(reasons), all(verdict.audited for verdict in verdicts))


def _over(check: Check, choices: int) -> Check:
    return check if check.level is None else dataclasses.replace(check, level=min(1.0, check.level * choices))


def _word(checks: tuple[Check, ...], audited: bool) -> VerdictWord:
    if not checks:
        return VerdictWord.UNVERIFIED
    results = {check.result for check in checks}
    if Result.REJECT in results:
        return VerdictWord.REJECT
    if Result.WITHHELD in results:
        return VerdictWord.WITHHELD
    if not (_passes(checks, "structure") and _clean(checks, "selection")):
        return VerdictWord.INCONCLUSIVE
    if not audited:
        return VerdictWord.UNAUDITED
    if _passes(checks, "distance") and _clean(checks, "margin"):
        return VerdictWord.PASS
    return VerdictWord.INCONCLUSIVE


def _passes(checks: tuple[Check, ...], name: str) -> bool:
    named = [check for check in checks if check.name == name]
    return bool(named) and all(check.result is Result.PASS for check in named)


def _clean(checks: tuple[Check, ...], name: str) -> bool:
    """Passes, or does not apply because of the request."""
    named = [check for check in checks if check.name == name]
    return bool(named) and all(
        check.result is Result.PASS or (check.result is Result.INCONCLUSIVE and check.by_request) for check in named
    )


def _severity(check: Check) -> tuple[int, bool, float]:
    # Of two inconclusive checks the one the client did not cause is the worse, of two rejects the surer one.
    return _RESULTS_WORST_FIRST.index(check.result), check.by_request, 0.0 if check.level is None else check.level


def _reasons(checks: tuple[Check, ...]) -> tuple[str, ...]:
    failing = [check for check in checks if check.result is not Result.PASS]
    failing.sort(key=lambda check: _RESULTS_WORST_FIRST.index(check.result))
    return tuple(dict.fromkeys(check.reason or f"{check.name}: {check.result.value}" for check in failing))
