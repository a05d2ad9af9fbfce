"""The answer, token by token, shaded by how far claim and replay differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies._comparison import compare
from policies._margins import RIVAL_MARGIN
from policies._margins import measure as measure_margins
from policies.errors import CountersignError
from policies.evidence import Evidence, Replay
from policies.judging import Grounds, forbidden_ids
from policies.report.escape import characters, cut, escaped, lines

MOST_TOKENS = 10_000
"""Tokens of one choice that are shown."""
WORST = 8
EDGES = (0.5, 1.0, 2.0, 4.0)
"""Shades begin at these multiples of what honest answers reach."""
USUAL = 0.05
"""Nats that stand in for what honest answers reach, where nothing was calibrated."""
_GAPS = "\n\t"

_Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    """One token: its text, what is known of it, and its shade from 0 to `len(EDGES)`."""

    at: int
    id: int
    text: str
    claimed: float
    replayed: float
    apart: float
    margin: float
    shade: int


def rows(choice: Evidence, replay: Replay | None, grounds: Grounds, usual: float | None) -> list[Row]:
    """The tokens of a choice. What is not known of one is NaN.

    Args:
        usual: the largest deciding score of honest answers, in nats.
    """
    count = min(len(choice.output_ids), MOST_TOKENS)
    apart = replayed = margin = np.full(count, np.nan)
    if replay is not None:
        comparison = compare(choice, replay)
        apart = _padded(np.where(comparison.changed, comparison.apart, 0.0), count)
        replayed = _padded(replay.logprobs[:, 0].astype(np.float64), count)
        margin = _margins(choice, replay, grounds, count)
    claimed = _padded(choice.claim_logprobs[:, 0].astype(np.float64) if choice.claim_logprobs.size else [], count)
    edges = np.array(EDGES) * (usual or USUAL)
    shades = np.where(np.isfinite(apart), np.searchsorted(edges, np.nan_to_num(apart), side="right"), 0)
    texts = _texts(choice, grounds, count)
    ids = choice.output_ids[:count].tolist()
    numbers = (column.tolist() for column in (claimed, replayed, apart, margin, shades))
    return [Row(at, *values) for at, values in enumerate(zip(ids, texts, *numbers, strict=True))]


def answer(found: Sequence[Row], total: int) -> str:
    """The tokens as HTML."""
    more = f"<p class=note>The first {len(found):,} of {total:,} tokens.</p>" if len(found) < total else ""
    return f'<div class="answer" dir="ltr">{"".join(map(_token, found))}</div>{more}'


def worst(found: Sequence[Row]) -> str:
    """A table of the tokens that differ most."""
    apart = sorted((row for row in found if row.apart > 0), key=lambda row: (-row.apart, row.at))[:WORST]
    if not apart:
        return ""
    head = "<tr><th>place<th>token<th>claimed<th>replayed<th>apart<th>loses by</tr>"
    body = [
        f"<tr><td>{row.at}<td><bdi>{_shown(row)}</bdi><td>{_nats(row.claimed)}<td>{_nats(row.replayed)}"
        f"<td>{_nats(row.apart)}<td>{_nats(row.margin)}</tr>"
        for row in apart
    ]
    note = "<p class=note>Natural logarithms of probabilities, and differences of them (nats).</p>"
    return lines(["<h3>Tokens that differ most</h3>", '<table class="numbers worst">', head, *body, "</table>", note])


def _token(row: Row) -> str:
    classes = f"s{row.shade}" + (" lost" if row.margin > RIVAL_MARGIN else "")
    text = _shown(row).replace("\n", "↵\n")
    return f'<bdi class="{classes}" title="{escaped(_title(row), _GAPS)}">{text}</bdi>'


def _shown(row: Row) -> str:
    return escaped(cut(row.text), _GAPS) if row.text else "◦"


def _title(row: Row) -> str:
    said = [f"token {row.at}, id {row.id}", f"claimed {_nats(row.claimed)} ({_share(row.claimed)})"]
    if math.isfinite(row.replayed):
        said.append(f"replayed {_nats(row.replayed)} ({_share(row.replayed)})")
    if math.isfinite(row.apart):
        said.append(f"claim and replay are {_nats(row.apart)} nats apart")
    if row.margin > 0:
        said.append("can never have been drawn" if math.isinf(row.margin) else f"loses by {_nats(row.margin)} nats")
    return "\n".join(said)


def _texts(choice: Evidence, grounds: Grounds, count: int) -> list[str]:
    pieces = None
    if grounds.spelling is not None:
        try:
            pieces = grounds.spelling.pieces(choice.output_ids)
        except CountersignError:
            pieces = None
    if pieces is None:
        return [f"#{id} " for id in choice.output_ids[:count].tolist()]
    return characters(pieces[:count])


def _margins(choice: Evidence, replay: Replay, grounds: Grounds, count: int) -> _Floats:
    """By how much each token loses the reference's race; NaN where that cannot be told."""
    try:
        words = forbidden_ids(choice, grounds.spelling)
        found = measure_margins(choice, replay, eos_token_ids=grounds.declared.eos_token_ids, bad_words=words)
    except (CountersignError, AssertionError, ValueError, LookupError):
        return np.full(count, np.nan)
    return _padded(np.where(found.decided, found.margin, np.nan), count)


def _padded(values: _Floats | Sequence[float], count: int) -> _Floats:
    found = np.full(count, np.nan)
    kept = np.asarray(values, np.float64)[:count]
    found[: len(kept)] = kept
    return found


def _nats(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.4f}".replace("-", "−").replace("inf", "∞")


def _share(logprob: float) -> str:
    return "no number" if math.isnan(logprob) else f"{100 * math.exp(min(logprob, 0.0)):.3g} %"
