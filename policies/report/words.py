"""What an examination means, in plain words: for the page, and for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from policies.examination import Examination, Outcome
from policies.report.reading import readable

FAULTS = {
    Outcome.UNREADABLE: "This is no evidence bundle that can be read.",
    Outcome.BAD_SIGNATURE: "This proves nothing: its receipt is not what was signed.",
    Outcome.UNTRUSTED_KEY: "This proves nothing yet: nobody you trust signed it.",
    Outcome.HASH_MISMATCH: "This proves nothing: it is not what its receipt is about.",
    Outcome.NOT_DERIVABLE: "This does not show its verdict: the evidence does not lead to it.",
    Outcome.NOT_IN_LOG: "This is signed, and not shown to be in the operator's log.",
    Outcome.CONTRADICTS_PINS: "This contradicts what you pinned: the log forked, or a receipt was written anew.",
    Outcome.DAMAGED: "This was changed after it was written.",
}

CHECKS = {
    "structure": "Ids, text, prompt, end and bill of the answer fit each other and the request.",
    "selection": "With the request's seed, the probabilities that the backend claims lead to these very tokens.",
    "distance": "The probabilities that the backend claims are those that a reference computes for the declared model.",
    "margin": "With the request's seed, the reference would have drawn these tokens itself.",
    "routing": "The experts that the backend reports are those that the reference's model sends these tokens to.",
}
"""What holds where a check passes."""

NUMBERS = {
    "score": "the one number that decides; 0 is no difference at all",
    "p": "share of honest answers that score at least as high, counted over the calibration's (1/(n + 1) at least)",
    "n": "honest answers behind that",
    "tail": "how probable so high a score is where it lies beyond all of them, by their spread",
    "tokens": "tokens of the answer",
    "compared": "tokens whose probability both sides have",
    "drift_tokens": "tokens at which claim and replay differ by more than rounding",
    "abs_mean": "mean difference of the emitted tokens' logarithms of probability, in nats",
    "abs_max": "the largest of them",
    "topk_jaccard": "share of the likeliest tokens that both sides list; 1 is all",
    "omitted_mass": "probability, by the reference, of its likeliest tokens that the claim leaves out",
    "checked": "tokens whose draw could be repeated",
    "violations": "tokens that another one should have beaten",
    "losing": "tokens that another one beats under the reference",
    "losing_far": "those beaten by over 0.2 nats",
    "worst_margin": "by how much the worst of them loses, in nats",
    "findings": "rules that the answer breaks",
    "excess_mass": "most by which the claimed probabilities of a token exceed 1",
    "entry_mismatch": "share of experts that differ",
}
"""What the numbers of the checks are."""

TRUST = (
    "What was not checked here: that the reference's numbers follow from the declared model, that the profile was "
    "measured on honest answers, and that the declaration is right. For these the operator's signature stands."
)


def trust(found: Examination) -> str:
    """What an examination leaves to the operator's word."""
    return TRUST if not found.left else f"{TRUST} Nor was this compared: {'; '.join(found.left)}."


def headline(found: Examination) -> str:
    """What the bundle comes to, in one sentence."""
    return FAULTS[found.outcome] if found.outcome is not Outcome.VERIFIED else sentence(said(found))


def said(found: Examination) -> dict[str, Any]:
    """The verification that was signed, as it can be shown."""
    return readable({} if found.receipt is None else found.receipt.verification)


def sentence(verification: Mapping[str, Any]) -> str:
    """A verdict (`readable`) in one sentence."""
    word, reason = str(verification["verdict"]), _first(verification)
    backend, model = verification.get("backend", ""), verification.get("model", "")
    match word:
        case "pass":
            return f"Passed: the backend {backend!r} answered what {model!r}, as declared, answers to this request."
        case "unaudited":
            return (
                f"Nothing speaks against this answer of the backend {backend!r}; it was not replayed, so that it is "
                f"{model!r} was not shown."
            )
        case "reject":
            words = f"Rejected: this is not what {model!r}, as declared, answers to this request ({reason})."
            return words + _level(verification)
        case "withheld":
            return f"Withheld: the backend {backend!r} left evidence out that it had to give ({reason})."
        case "inconclusive":
            return f"Undecided: no check speaks against this answer, and not all could decide ({reason})."
    return f"Nothing was checked ({reason})."


def outcome_words(check: Mapping[str, Any]) -> str:
    """What one check found, in a sentence."""
    name, result, reason = str(check["name"]), check["result"], str(check["reason"])
    what = CHECKS.get(name, "")
    if result == "pass":
        return what
    words = reason.partition(": ")[2] or reason or "no reason is given"
    match result:
        case "reject":
            level = check.get("level")
            bound = f" An honest answer is rejected like this with a probability of at most {number(level)}."
            return f"Not so: {words}.{bound if level else ''}"
        case "withheld":
            return f"Not shown, and only the backend can have caused that: {words}."
    return f"Undecided: {words}."


def number(value: float | int | None) -> str:
    """A number for people."""
    if value is None:
        return "none"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def moment(seconds: float | None) -> str:
    """A time (Unix seconds) for people, in UTC."""
    if seconds is None:
        return ""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return "no such time"


def _first(verification: Mapping[str, Any]) -> str:
    reason = str(next(iter(verification["reasons"]), "no reason is given"))
    return reason.partition(": ")[2] or reason


def _level(verification: Mapping[str, Any]) -> str:
    levels = [check.get("level") for check in verification["checks"] if check.get("result") == "reject"]
    known = [level for level in levels if isinstance(level, int | float)]
    if not known:
        return ""
    least = min(known)
    if not least:
        return " No honest answer is rejected like this."
    return f" An honest one is rejected like this with a probability of at most {number(least)}."
