"""A bundle beside what a client pinned: whether the log forked meanwhile, or a receipt was written anew."""

from __future__ import annotations

from collections.abc import Sequence

from policies import merkle
from policies._examined import Examination, Outcome
from policies.bundle import Place
from policies.errors import ForkedLog
from policies.head import Head, follow
from policies.pins import Pinned


def compare_pins(
    found: Examination, shown: Head | None, place: Place | None, pins: Pinned, growth: Sequence[bytes] | None
) -> None:
    """Hold the receipt, and the head that it is under, against pins.

    Args:
        shown: that head; None where the receipt is not shown under one that counts.
        place: where it is in the log.
        growth: the proof that the smaller of the two logs is how the larger one begins; None where there is none.
    """
    assert found.receipt is not None
    if any(each.about in ("signature", "key") for each in found.faults):
        found.left.append("what you pinned: a bundle that is signed by others contradicts nobody")
        return
    _receipt(found, pins)
    if pins.head is None:
        found.left.append("the log with the one that you know: you pinned no head of it")
    elif shown is not None and place is not None:
        _head(found, pins.head, shown, place, growth)


def _receipt(found: Examination, pins: Pinned) -> None:
    assert found.receipt is not None
    known, shown = pins.leaves.get(found.receipt.id), found.receipt.leaf.hex()
    if known is None:
        found.left.append("the receipt with one that you saw before: you pinned none of this answer")
    elif known == shown:
        found.good("pinned receipt", "It is the very receipt that you pinned of this answer.")
    else:
        words = (
            f"You pinned another receipt of this answer: {known}, and this one is {shown}. Its verdict was written "
            "anew; together with the receipt that you have, this one convicts whoever signed both."
        )
        found.bad("pinned receipt", Outcome.CONTRADICTS_PINS, words)


def _head(found: Examination, known: Head, shown: Head, place: Place, growth: Sequence[bytes] | None) -> None:
    try:
        if growth is None and _differ_in_size_alone(known, shown):
            if not _follows(found, known, shown, place):
                return
        else:
            follow(known, shown, growth or ())
    except ForkedLog as error:
        found.bad("pinned head", Outcome.CONTRADICTS_PINS, f"The log is not the one that you pinned: {error}.")
        return
    found.good("pinned head", f"The log is the one that you pinned when it had {known.size} receipts.")


def _differ_in_size_alone(known: Head, shown: Head) -> bool:
    """Whether it takes a proof to tell that they are of one log, or are not."""
    took_back = shown.size < known.size and shown.time > known.time
    return shown.log == known.log and 0 < known.size != shown.size and not took_back


def _follows(found: Examination, known: Head, shown: Head, place: Place) -> bool:
    """Whether the log that was pinned follows from the receipt's proof, where that says so. Raises ForkedLog."""
    assert found.receipt is not None
    before = None
    if known.size < shown.size:
        before = merkle.earlier(known.size, shown.size, place.index, found.receipt.leaf, place.path)
    if before is None:
        first, second = sorted((known.size, shown.size))
        found.left.append(
            f"the log of {shown.size} receipts with the one of {known.size} that you pinned, which takes a proof: give "
            f"what GET /v1/log/consistency?first={first}&second={second} answers as --consistency"
        )
        return False
    if before != known.root:
        what = f"the log of {shown.size} receipts began with others than the {known.size} that were seen"
        raise ForkedLog(what, known.token, shown.token)
    return True
