"""An examination as lines of text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from policies.evidence import Replay
from policies.examination import Examination, Outcome
from policies.report import nulls
from policies.report.escape import cut, visible
from policies.report.reading import readable
from policies.report.words import NUMBERS, headline, moment, number, outcome_words, sentence, trust

_WIDTH = 116
_NAMED = ("score", "p", "n", "tail", "tokens", "checked", "violations", "losing", "worst_margin", "findings")
"""Numbers that are shown, in this order; a page shows all."""


def as_lines(name: str, found: Examination) -> list[str]:
    """What a terminal shows of a bundle; nothing in them moves a cursor."""
    return [visible(line) for line in _lines(name, found)]


def _lines(name: str, found: Examination) -> Iterator[str]:
    known = found.receipt
    yield f"{name}: {found.outcome.name.lower().replace('_', ' ')}"
    yield from _wrapped(headline(found), "  ")
    if known is not None:
        if found.outcome is not Outcome.VERIFIED:
            yield from _wrapped(f"What it says all the same: {sentence(readable(known.verification))}", "  ")
        said = readable(known.verification)
        yield f"  {known.id}, asked {moment(said['created'])}, decided {moment(said['decided'])}"
    yield ""
    for each in found.findings:
        yield from _row("ok" if each.fault is None else "NO", each.about, each.words)
    if known is not None:
        yield ""
        said = readable(found.derived or known.verification)
        yield from _checks(found, said)
        yield ""
        yield from _wrapped(trust(found), "  ")


def _checks(found: Examination, said: Mapping[str, Any]) -> Iterator[str]:
    several = said["choices"]
    shown: set[str] = set()
    for at, one in enumerate(several or [said]):
        if several:
            yield f"  choice {one['index']}: {one['verdict']}"
        for check in one["checks"]:
            yield from _row(check["result"], check["name"], outcome_words(check))
            metrics = check["metrics"]
            known = [name for name in _NAMED if metrics.get(name) is not None]
            shown.update(known)
            if known:
                yield " " * 16 + "  ".join(f"{name}={number(metrics[name])}" for name in known)
            yield from _placed(found, at, check)
    if shown:
        yield ""
        yield "  the numbers"
        for name in _NAMED:
            if name in shown:
                yield from _row("", name, NUMBERS[name])


def _placed(found: Examination, at: int, check: Mapping[str, Any]) -> Iterator[str]:
    """Where its score lies among honest ones."""
    grounds = found.grounds
    if grounds is None or grounds.replays is None or at >= len(found.choices):
        return
    replay = grounds.replays[at]
    cells = nulls.cells_of(grounds.profile, check, found.choices[at], replay if isinstance(replay, Replay) else None)
    if cells:
        yield from _wrapped(nulls.words(check, cells), " " * 16)


def _row(mark: str, name: str, words: str) -> Iterator[str]:
    first, *rest = _wrapped(cut(words, 2000), " " * 16)
    yield (
        f"  {cut(name, 13):<13} {first.strip()}"
        if not mark
        else f"  {cut(mark, 13):<13} {cut(name, 13)}: {first.strip()}"
    )
    yield from rest


def _wrapped(text: str, indent: str) -> Sequence[str]:
    plain = visible(text)
    return textwrap.wrap(plain, _WIDTH, initial_indent=indent, subsequent_indent=indent) or [indent]
