"""Everything that can be checked of an evidence bundle by itself, one finding per question, and what it comes to.

Nothing here needs a network, a GPU or the model. What is taken on whose word is said in each finding: a replay's
numbers are the operator's, signed; that they follow from the model is not checked here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite

from policies import bundle as bundles
from policies import case as cases
from policies import codec, head, jws, lax
from policies._answered import compare_answer
from policies._examined import Examination, Finding, Outcome
from policies._pinned import compare_pins
from policies._request import read_leniently
from policies._requested import compare_request
from policies.errors import BundleError, CountersignError, EvidenceError, ReceiptError
from policies.head import Head
from policies.pins import Pinned
from policies.receipt import compare, digest, seed_commitment, verify_receipt
from policies.rederivation import derive, differences
from policies.served import compare_served, was_withheld
from policies.spelling import Spelling
from policies.unit import declaration_of

__all__ = ["Examination", "Finding", "Outcome", "examine"]

MOST_DIFFERENCES = 5
_ODD = (CountersignError, ValueError, ArithmeticError, LookupError, TypeError, RecursionError)


def examine(
    data: bytes,
    trusted: Mapping[str, bytes] | None = None,
    *,
    any_key: bool = False,
    spelling: Spelling | None = None,
    tokenizer: str = "",
    request: bytes | None = None,
    answer: bytes | None = None,
    pins: Pinned | None = None,
    growth: Sequence[bytes] | None = None,
) -> Examination:
    """Check a bundle. Never raises for what it holds.

    Args:
        trusted: keys that are trusted, by `kid`; a `kid` alone (b"") is a pin: its key is taken from the bundle.
        any_key: whoever signed it is taken at their word.
        spelling: the declared model's tokenizer, where it is at hand, and `tokenizer`, the SHA-256 of its file. Without
            it, what it said when the answer was judged is said again.
        request, answer: bodies that a client sent and got, to be held against what was signed.
        pins: what a client remembers of the log. `growth`: the proof that the log of the pinned head and that of the
            bundle's continue each other.
    """
    found = Examination()
    try:
        bundle, whole = bundles.unpack(data)
    except BundleError as error:
        found.bad("bundle", Outcome.UNREADABLE, f"{error}.")
        return found
    keys = bundle.known_keys | {kid: key for kid, key in (trusted or {}).items() if key}
    _signature(found, bundle, keys)
    _key(found, bundle, trusted, any_key)
    _evidence(found, bundle)
    _case(found, bundle)
    if found.receipt is not None:
        _asked(found, request)
        _given(found, request, answer)
        signed = _log(found, bundle, keys, trusted)
        if pins is not None:
            compare_pins(found, signed, bundle.log, pins, growth)
        _verdict(found, bundle, spelling, tokenizer)
    if whole:
        found.good("bundle", "The file is whole.")
    else:
        found.bad("bundle", Outcome.DAMAGED, "The file was changed after it was written: its checksum does not hold.")
    return found


def _signature(found: Examination, bundle: bundles.Bundle, keys: Mapping[str, bytes]) -> None:
    try:
        found.receipt = verify_receipt(bundle.receipt, keys)
    except ReceiptError as error:
        found.bad("signature", Outcome.BAD_SIGNATURE, f"The receipt is not what was signed: {error}.")
        return
    if list(map(jws.kid_of, bundle.keys)) != _signers(found.receipt.kid, bundle.log):
        words = "The keys in the bundle are not those that receipt and log are signed with."
        found.bad("signature", Outcome.BAD_SIGNATURE, words)
        return
    words = "The receipt is signed with the key {}: nothing in it was changed after that."
    found.good("signature", words.format(found.receipt.kid))


def _signers(kid: str, log: bundles.Place | None) -> list[str]:
    """By which keys receipt and head say they are signed."""
    try:
        return [kid] if log is None else list(dict.fromkeys([kid, jws.kid_in(log.head, head.KIND)]))
    except ReceiptError:
        return [kid]


def _key(found: Examination, bundle: bundles.Bundle, trusted: Mapping[str, bytes] | None, any_key: bool) -> None:
    if found.receipt is None:
        return
    kid = found.receipt.kid
    if trusted and kid in trusted:
        found.good("key", "That key is one of those you trust.")
    elif trusted:
        words = f"The receipt is signed by the key {kid}, which is not among the {len(trusted)} that you trust."
        found.bad("key", Outcome.UNTRUSTED_KEY, words)
    elif any_key:
        found.good("key", "Whose key that is was not asked.")
    else:
        words = f"Nothing says whose key {kid} is: anybody can sign a bundle. Compare it with the operator's keys."
        found.bad("key", Outcome.UNTRUSTED_KEY, words)


def _evidence(found: Examination, bundle: bundles.Bundle) -> None:
    try:
        choices = codec.unpack(bundle.evidence)
        if not choices:
            raise EvidenceError("it holds no answer")
    except EvidenceError as error:
        found.bad("evidence", Outcome.HASH_MISMATCH, f"The evidence cannot be read: {error}.")
        return
    found.choices = choices
    if found.receipt is None:
        return
    known, first = found.receipt, choices[0]
    wrong = []
    for name, data in (("evidence", bundle.evidence), ("sent", first.request), ("request", first.asked)):
        # The request as it came may have been too large to be kept.
        if (name != "request" or data) and (known.hashes[name] or "") != (digest(data) if data else ""):
            wrong.append(_HASHED[name])
    if (known.hashes["served"] or "") != first.shown_sha256:
        wrong.append("what the client was served")
    if (known.statement["seed"] or "") != seed_commitment(first.id, [choice.sampling.seed for choice in choices]):
        wrong.append("the seeds")
    if any(choice.id != known.id for choice in choices):
        wrong.append("the answer's id")
    times = {"first_token": first.first_token_seconds, "total": first.total_seconds}
    if any(known.statement["times"][name] != _finite(seconds) for name, seconds in times.items()):
        wrong.append("the times")
    declared = {"backend": first.backend} | declaration_of(first)
    if dict(known.statement["declared"]) != declared:
        wrong.append("what the backend is declared to run")
    if wrong:
        words = f"Not what the receipt is about: {', '.join(wrong)}."
        found.bad("evidence", Outcome.HASH_MISMATCH, words)
    else:
        found.good("evidence", "Request, answer, claim and seeds are those that the receipt names.")


_HASHED = {"evidence": "the evidence", "sent": "the request as it was sent on", "request": "the client's request"}


def _case(found: Examination, bundle: bundles.Bundle) -> None:
    try:
        case = found.case = cases.unpack(bundle.case)
    except BundleError as error:
        found.bad("replay", Outcome.HASH_MISMATCH, f"What the verdict rests on cannot be read: {error}.")
        return
    if found.receipt is None:
        return
    hashes, wrong = found.receipt.hashes, []
    if hashes["replay"] != digest(bundle.case):
        wrong.append("the replay")
    # Where nothing was calibrated there is no profile, in the case or in the receipt.
    if (hashes["profile"] or "") != case.profile:
        wrong.append("the profile")
    if tuple(bundle.named_parts) != case.named or len(bundle.parts) != len(case.named):
        wrong.append("the profile or the tokenizer's tokens")
    if case.id != found.receipt.id:
        wrong.append("the id of the replay")
    if wrong:
        found.bad("replay", Outcome.HASH_MISMATCH, f"Not what the receipt is about: {', '.join(dict.fromkeys(wrong))}.")
    elif case.audited:
        found.good("replay", "The reference's numbers and the profile are those that the receipt names.")
    else:
        found.good("replay", "The answer was not replayed. What it was judged by is what the receipt names.")


def _finite(seconds: float | None) -> float | None:
    return seconds if seconds is not None and isfinite(seconds) else None


def _asked(found: Examination, request: bytes | None) -> None:
    """Whether the evidence is of the request beside it, which the receipt says of both by the operator's word alone."""
    if not found.choices:
        return
    first = found.choices[0]
    try:
        compared = compare_request(found.choices, _body_of(found, request))
    except _ODD as error:
        found.bad("sampling", Outcome.HASH_MISMATCH, f"Evidence and request cannot be compared: {error}.")
        return
    found.left += compared.left
    if compared.wrong:
        words = f"The evidence is of another request than the one beside it: {_few(compared.wrong)}."
        found.bad("sampling", Outcome.HASH_MISMATCH, words)
    elif first.request:
        found.good("sampling", "The evidence is of the request beside it: its seed, its parameters, its limits.")


def _body_of(found: Examination, request: bytes | None) -> bytes:
    """The request as it came: from the evidence, or as the client has it."""
    assert found.receipt is not None
    if found.choices[0].asked or request is None or found.receipt.hashes["request"] != digest(request):
        return found.choices[0].asked
    return request


def _few(words: Sequence[str]) -> str:
    more = f", and {len(words) - MOST_DIFFERENCES} more" if len(words) > MOST_DIFFERENCES else ""
    return ", ".join(words[:MOST_DIFFERENCES]) + more


def _given(found: Examination, request: bytes | None, answer: bytes | None) -> None:
    """What a client has of its own."""
    assert found.receipt is not None
    if answer is None:
        found.left.append("the evidence with the answer that was served (--answer), of which it says the hash alone")
    for about, data in (("request", request), ("answer", answer)):
        if data is None:
            continue
        try:
            if about == "request":
                compare(found.receipt, about, data)
            else:
                compare_served(found.receipt, data)
        except ReceiptError as error:
            found.bad(about, Outcome.HASH_MISMATCH, f"The {about} that you gave is {error}.")
        else:
            words = f"It is about the very {about} that you gave"
            if about == "request" or not found.choices:
                found.good(about, f"{words}.")
            else:
                _answered(found, words, data, _body_of(found, request))


def _answered(found: Examination, words: str, answer: bytes, request: bytes) -> None:
    """Whether the evidence is of the answer that was served."""
    assert found.receipt is not None
    if was_withheld(found.receipt, answer):
        found.left.append("the answer, which was withheld: the client was told that it is rejected")
        found.good("answer", "What you were given says that the answer was rejected, and names this very receipt.")
        return
    asked = read_leniently(request)
    hides = asked is None or lax.boolean(asked.get("include_reasoning")) is False
    compared = compare_answer(found.choices, answer, hides_reasoning=hides)
    found.left += compared.left
    if compared.wrong:
        words = f"{words}, and the evidence is of another one: {_few(compared.wrong)}."
        found.bad("answer", Outcome.HASH_MISMATCH, words)
    elif compared.left:
        found.good("answer", f"{words}, and so is the evidence, as far as both could be compared.")
    else:
        found.good("answer", f"{words}, and so is the evidence: it says what that answer says.")


def _log(
    found: Examination, bundle: bundles.Bundle, keys: Mapping[str, bytes], trusted: Mapping[str, bytes] | None
) -> Head | None:
    """The head that the receipt is shown under; None where it is under none that counts."""
    assert found.receipt is not None
    if bundle.log is None:
        found.bad("log", Outcome.NOT_IN_LOG, "The bundle holds nothing that shows the receipt in the operator's log.")
        return None
    try:
        signed = head.verify_head(bundle.log.head, keys)
        head.verify_inclusion(signed, found.receipt.leaf, bundle.log.index, bundle.log.path)
    except ReceiptError as error:
        found.bad("log", Outcome.NOT_IN_LOG, f"The receipt is not shown to be in the operator's log: {error}.")
        return None
    if trusted and signed.kid not in trusted:
        words = f"The head of the log is signed by the key {signed.kid}, which is not among those that you trust."
        found.bad("log", Outcome.UNTRUSTED_KEY, words)
        return None
    words = f"The receipt is number {bundle.log.index} of the {signed.size} in the operator's log {signed.log}."
    found.good("log", words)
    return signed


def _verdict(found: Examination, bundle: bundles.Bundle, spelling: Spelling | None, tokenizer: str) -> None:
    assert found.receipt is not None
    if found.case is None or not found.choices:
        found.bad("verdict", Outcome.NOT_DERIVABLE, "The verdict cannot be derived: what it rests on cannot be read.")
        return
    if spelling is not None and found.case.tokenizer != tokenizer:
        words = "The verdict was not derived: the tokenizer that was given is not the one it was judged with."
        found.bad("verdict", Outcome.NOT_DERIVABLE, words)
        return
    if found.case.rules != cases.RULES:
        words = (
            f"The verdict was made by the rules of version {found.case.rules}; these are of version {cases.RULES}. "
            "Verify with the release that made it."
        )
        found.bad("verdict", Outcome.NOT_DERIVABLE, words)
        return
    try:
        grounds = found.case.grounds(found.choices, bundle.named_parts, spelling)
        found.derived = derive(found.choices, grounds)
    except _ODD as error:
        found.bad("verdict", Outcome.NOT_DERIVABLE, f"The verdict cannot be derived: {error}.")
        return
    found.grounds = grounds
    if grounds.spelling is None:
        found.left.append("the answer's tokens with its text: no tokenizer is declared")
    wrong = differences(found.receipt.verification, found.derived)
    if not wrong:
        found.good("verdict", f"Judged again, the evidence gives the same verdict: {found.derived['verdict']}.")
        return
    more = f", and {len(wrong) - MOST_DIFFERENCES} more" if len(wrong) > MOST_DIFFERENCES else ""
    words = f"Judged again, the evidence gives another verification: {'; '.join(wrong[:MOST_DIFFERENCES])}{more}."
    found.bad("verdict", Outcome.NOT_DERIVABLE, words)
