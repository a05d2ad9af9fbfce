"""Is the evidence whole, possible and consistent? Needs nothing but the evidence and the model's tokenizer.

Null hypothesis: a vLLM server with `raw_logprobs` produced this answer to this request. The rules below are exact for
it, so a reject's level is 0, but for three statistical ones (`policies._unlikely`: re-tokenised answers, answers that
end too late or too early, repeated answers), whose rejects state their own, tiny level. One answer is one unit of
evidence. Two kinds of finding are kept apart:

reject    the evidence contradicts itself or the request: probabilities that cannot be, a text that its ids do not
          spell, other prompt ids than the reference renders, billed tokens that never came, a finish reason that the
          ids deny.
withheld  the evidence is missing or unusable in a way only the backend can cause: the tap's own faults, missing or
          too few entries, NaN, −9999 where no grammar was asked for, repeated, unsorted or foreign ids. An unsorted
          or repeated list claims nothing impossible, so it is no lie, but no honest server sends one.

An answer that broke off (`complete` is false, a fault that is not the backend's doing, or vLLM's own `abort`, which a
restart gives to all requests in flight) is checked as far as it came and is at best inconclusive; what it would have
ended with is not held against it. Neither are prompt ids that stand for media (`policies.media`): no one else can
render them, and such an answer is at best inconclusive, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from policies import _billed, _delivered, _grammar, _unlikely
from policies._claimed import claim_findings
from policies._findings import Finding, rejected, undecided, withheld
from policies._request import extras, prompt_given, repeats
from policies._unlikely import REPEATED_LEVEL, Earlier
from policies.checks import Check, Result
from policies.evidence import EXCUSED_FAULTS, WITHHELD_FAULTS, Evidence, Ids
from policies.hazard import stop_ids
from policies.media import asked_with_media
from policies.spelling import Spelling

__all__ = ["NAME", "REPEATED_LEVEL", "SHORTEST_CONTEXT", "Earlier", "check"]

NAME = "structure"

_FAULT_WORDS = {
    "no_logprobs": "tokens came without logprobs",
    "no_token_ids": "the answer came without token ids",
    "no_prompt_ids": "the answer came without prompt ids",
    "bad_logprobs": "a token's logprob is missing or no number",
    "bad_ids": "token ids are missing, misspelt or contradict the logprobs",
    "invalid_json": "the backend sent JSON that cannot be read",
    "bad_routed_experts": "the expert ids cannot be read or have the wrong shape",
    "line_too_long": "the backend sent a line over the limit",
    "too_large": "the answer is over the size limit",
    "too_deep": "the backend sent JSON nested deeper than the limit",
    "after_end": "the backend went on after the end of its answer",
    "odd_answer": "the answer says something in a way, or in a place, in which no engine does",
    "unreadable": "what the backend sent breaks whoever reads it",
    "evidence_too_large": "the evidence is over the size limit, and part of it was not kept",
    "unknown_fields": "the answer has fields that cannot be checked",
    "client_left": "the client went away before the answer was finished",
    "proxy_stopped": "the proxy was stopped before the answer was finished",
    "proxy_overloaded": "the proxy held too much of unfinished answers and gave this one up",
    "internal_error": "the proxy failed over the answer",
    "upstream_closed": "the backend closed the connection before the answer was finished",
    "upstream_timeout": "the backend fell silent",
    "upstream_error": "the backend reported an error",
    "no_tokenizer": "no tokenizer is declared to read the evidence with",
}
_FINISH_REASONS = {"stop", "length", "tool_calls", "repetition"}
_ABORTED = "abort"
_UNCLAIMED = frozenset({"no_tokenizer", "evidence_too_large"})
"""Faults of ours, with which a claim may be missing."""
_NOTHING_CAME = frozenset({"no_token_ids", "no_logprobs", "bad_logprobs"})
"""Faults that an answer aborted before its first token always has."""

SHORTEST_CONTEXT = 256
"""Tokens every served model takes; an answer cut short of this was not cut by an undeclared `max_model_len`."""


class _Stops(NamedTuple):
    """Ids that end this answer, and whether they are all declared, so that a missing one means something."""

    ids: frozenset[int]
    known: bool


def check(
    evidence: Evidence,
    *,
    vocab_size: int | None = None,
    max_model_len: int | None = None,
    eos_token_ids: Iterable[int] = (),
    rendered_prompt: Ids | None = None,
    spelling: Spelling | None = None,
    earlier: Earlier | None = None,
) -> Check:
    """The structure check of one generation, complete or not.

    Args:
        vocab_size: number of ids the declared model can emit.
        max_model_len: longest prompt plus answer.
        eos_token_ids: ids that end an answer of the declared model.
        rendered_prompt: int32 (P,), the reference's own rendering of the request; where there is none, ids that the
            request itself gave are compared.
        spelling: the declared model's tokenizer; without it the text is not held against the ids.
        earlier: what is remembered of the backend's answers to the same request; None when nothing could be asked.

    Metrics: `tokens`, `prompt_tokens`, `findings` (number of rules broken), `excess_mass` (largest Σp − 1 over a
    position's listed ids), `prompt_compared` (1 when the prompt was held against the reference's own rendering),
    `text_compared` (1 when the text was held against the ids), `extra_tokens` (ids more than the canonical ones),
    `noncanonical` (distinct spellings that are not canonical), `stopped`, `hazard_low`, `hazard_high`, `too_long`,
    `too_early` (`policies.hazard.Hazard`), `repeats` (1 when this very answer came before by another seed). None where
    a number cannot be had.
    """
    eos = frozenset(map(int, eos_token_ids))
    unreadable = bool(_UNCLAIMED.intersection(evidence.faults)) and not evidence.claim_ids.size
    faults = _faults(evidence)
    findings = [withheld(code, _FAULT_WORDS.get(code, "")) for code in faults if code in WITHHELD_FAULTS]
    excess: float | None = None
    if not unreadable:
        stops = _stops(evidence, eos)
        claimed, excess = claim_findings(evidence, vocab_size, stops.ids if stops.known else None)
        findings += claimed
    media = asked_with_media(evidence)
    findings += _id_findings(evidence, vocab_size, media=media)
    sound = all(finding.result is Result.INCONCLUSIVE for finding in findings)
    evidence = _grammar.as_masked(evidence)
    if media:
        rendered_prompt = None
        findings.append(undecided("media", "the request holds more than text, which nothing here can be held against"))
    elif rendered_prompt is None:
        rendered_prompt = prompt_given(evidence)
    findings += _prompt_findings(evidence, rendered_prompt)
    findings += _end_findings(evidence, max_model_len, eos)
    findings += _billed.findings(evidence)
    text = _delivered.Delivered()
    if sound and spelling is not None:
        stops = _stops(evidence, eos)
        text = _delivered.check(evidence, spelling, stops.ids, known=stops.known)
        findings += text.findings
    metrics: dict[str, float | int | None] = {
        "tokens": len(evidence.output_ids),
        "prompt_tokens": len(evidence.prompt_ids),
        "findings": 0,
        "excess_mass": excess,
        "prompt_compared": int(rendered_prompt is not None and len(evidence.prompt_ids) > 0),
        "text_compared": int(text.compared),
    }
    if sound and len(evidence.output_ids):
        more, numbers = _unlikely.findings(
            evidence, eos_token_ids=eos, vocab_size=vocab_size, spelling=spelling, earlier=earlier
        )
        findings += more
        metrics |= numbers
    metrics["findings"] = len({finding.code for finding in findings})
    return _judged(evidence, findings, metrics)


def _judged(evidence: Evidence, findings: list[Finding], metrics: dict[str, float | int | None]) -> Check:
    for result in (Result.REJECT, Result.WITHHELD):
        those = [finding for finding in findings if finding.result is result]
        if those:
            texts = {finding.code: finding.text for finding in reversed(those)}
            reason = "; ".join(f"{code}: {text}" for code, text in reversed(texts.items()))
            level = min(finding.level for finding in those) if result is Result.REJECT else None
            return Check(NAME, result, reason, level=level, metrics=metrics)
    others = [(code, _FAULT_WORDS.get(code, "an unknown fault")) for code in _faults(evidence)]
    others += [(finding.code, finding.text) for finding in findings]
    if others:
        reason = "; ".join(f"{code}: {text}" for code, text in others)
        return Check(NAME, Result.INCONCLUSIVE, reason, metrics=metrics)
    if not evidence.complete:
        return Check(NAME, Result.INCONCLUSIVE, "incomplete: the answer was not finished", metrics=metrics)
    return Check(NAME, Result.PASS, metrics=metrics)


def _faults(evidence: Evidence) -> tuple[str, ...]:
    if evidence.finish_reason == _ABORTED and not len(evidence.output_ids) and not evidence.text:
        return tuple(code for code in evidence.faults if code not in _NOTHING_CAME)
    return evidence.faults


def _id_findings(evidence: Evidence, vocab_size: int | None, *, media: bool) -> list[Finding]:
    ids = evidence.output_ids
    findings = []
    if _foreign(ids, vocab_size):
        findings.append(withheld("bad_ids", "an output id is outside the vocabulary"))
    # Ids that stand for media need not be ones that the model can emit.
    if _foreign(evidence.prompt_ids, None if media else vocab_size):
        findings.append(withheld("bad_ids", "a prompt id is outside the vocabulary"))
    finished = evidence.complete and not evidence.faults and evidence.finish_reason != _ABORTED
    if not len(ids) and finished:
        findings.append(withheld("no_token_ids", "a finished answer holds no token"))
    return findings


def _foreign(ids: Ids, vocab_size: int | None) -> bool:
    return bool(ids.size) and bool(ids.min() < 0 or (vocab_size is not None and ids.max() >= vocab_size))


def _prompt_findings(evidence: Evidence, rendered: Ids | None) -> list[Finding]:
    ids = evidence.prompt_ids
    if not len(ids):
        missing = evidence.complete and not evidence.faults
        return [withheld("no_prompt_ids", "the answer came without prompt ids")] if missing else []
    if rendered is None or np.array_equal(ids, rendered):
        return []
    common = min(len(ids), len(rendered))
    differ = np.flatnonzero(ids[:common] != rendered[:common])
    at = int(differ[0]) if len(differ) else common
    text = f"the backend's {len(ids)} prompt ids leave the {len(rendered)} rendered from the request at position {at}"
    return [rejected("prompt_mismatch", text)]


def _end_findings(evidence: Evidence, max_model_len: int | None, eos: frozenset[int]) -> list[Finding]:
    sampling = evidence.sampling
    ids = evidence.output_ids
    aborted = [undecided("aborted", "the backend aborted the answer")] if evidence.finish_reason == _ABORTED else []
    if not len(ids) or WITHHELD_FAULTS.intersection(evidence.faults):
        return aborted
    findings = []
    limit = sampling.max_tokens
    if limit is not None and len(ids) > limit:
        findings.append(rejected("too_many_tokens", f"{len(ids)} tokens, {limit} were asked for"))
    stops = _stops(evidence, eos)
    early = np.flatnonzero(np.isin(ids[:-1], sorted(stops.ids)))
    early = early[early + 1 >= sampling.min_tokens]
    if len(early):
        text = f"token {int(early[0])} ends an answer, yet {len(ids) - 1 - int(early[0])} tokens follow"
        findings.append(rejected("tokens_after_stop", text))
    if aborted:
        return findings + aborted
    if evidence.complete and not EXCUSED_FAULTS.intersection(evidence.faults):
        findings += _finish_findings(evidence, max_model_len, stops)
    return findings


def _stops(evidence: Evidence, eos: frozenset[int]) -> _Stops:
    return _Stops(stop_ids(evidence, eos), known=bool(eos) or evidence.sampling.ignore_eos)


def _finish_findings(evidence: Evidence, max_model_len: int | None, stops: _Stops) -> list[Finding]:
    reason = evidence.finish_reason
    repetition = extras(evidence).repetition_detection
    if reason not in _FINISH_REASONS or (reason == "repetition" and repetition is None):
        return [withheld("bad_finish_reason", f"the answer ended with {reason!r:.60}")]
    stopped = _stopped(evidence, stops)
    full = _full(evidence, max_model_len)
    # A tool call replaces `stop`, and in an unstreamed answer `length` and `repetition` too.
    if reason == "length" and full is False:
        text = (
            f"finished by length after {len(evidence.output_ids)} tokens, {evidence.sampling.max_tokens} were asked for"
        )
        return [rejected("finish_mismatch", text)]
    if reason == "length" and full is None:
        return [undecided("no_max_model_len", "finished by length, and the model's longest answer is not declared")]
    if reason == "length" and stopped and evidence.output_ids[-1] in stops.ids:
        return [rejected("finish_mismatch", "finished by length, yet the last token ends an answer")]
    if reason == "stop" and stopped is False:
        return [rejected("finish_mismatch", "finished by stop, yet the last token ends no answer")]
    if reason == "repetition" and repeats(evidence.output_ids, repetition) is False:
        return [rejected("finish_mismatch", "finished by repetition, yet the answer's end does not repeat itself")]
    if reason == "tool_calls" and stopped is False and full is False and repetition is None:
        return [rejected("finish_mismatch", "finished by a tool call, yet the last token ends no answer")]
    if reason in ("stop", "repetition") and len(evidence.output_ids) < evidence.sampling.min_tokens:
        least, tokens = evidence.sampling.min_tokens, len(evidence.output_ids)
        text = f"finished by {reason} after {tokens} tokens, at least {least} were asked for"
        # Where the grammar leaves nothing but a stop token and `min_tokens` forbids it, vLLM emits what it likes.
        blank = evidence.sampling.grammar
        return [undecided("finish_undecided", text) if blank else rejected("finish_mismatch", text)]
    return []


def _stopped(evidence: Evidence, stops: _Stops) -> bool | None:
    """Whether a stop id or stop string ended the answer; None when that cannot be known."""
    sampling = evidence.sampling
    last = int(evidence.output_ids[-1])
    stop_reason = evidence.stop_reason
    if last in stops.ids:
        return not (isinstance(stop_reason, int) and stop_reason != last)
    if isinstance(stop_reason, str) and sampling.stop:
        return stop_reason in sampling.stop
    # A grammar ends an answer once nothing more may follow.
    if sampling.stop or sampling.grammar or not stops.known:
        return None
    return False


def _full(evidence: Evidence, max_model_len: int | None) -> bool | None:
    """Whether the answer is as long as it may be; None when that cannot be known."""
    limit = evidence.sampling.max_tokens
    if limit is not None and len(evidence.output_ids) >= limit:
        return True
    length = len(evidence.prompt_ids) + len(evidence.output_ids)
    if max_model_len is not None:
        return length >= max_model_len
    return False if length < SHORTEST_CONTEXT else None
