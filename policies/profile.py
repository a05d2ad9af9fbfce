"""What honest answers look like: the calibrated nulls of the distance, margin and routing checks.

A profile belongs to one key (which model, runtime, precision and engine were compared with which reference) and
holds cells. A cell is one check's score, on replays of one form, under one condition (`label`, such as `single` or
`batch8`), in one temperature band and one length band. It keeps the scores of all its calibration responses, so that
a new score's conformal p-value (1 + #{scores ≥ new}) / (n + 1) can be told (Vovk; exact when the response is
exchangeable with them), and mean and standard deviation of the logarithm, from which a parametric tail follows.

Null hypothesis of everything here, calibrated and not exact: the response is one more draw from the condition that
one of the matching cells was measured under. Which one is not known, so the most lenient speaks. One unit is one
response: its tokens are not independent.

Over many responses evidence needs no shape of tail: that a score lies above all n of a cell has a known law, whatever
the scores' (`betting.calibrated`). For bets in [0, 1] the same becomes a bound: `bet` is 0 up to the largest score of
the matching cells and 1 from some honest standard deviations beyond; a bet above 0 has probability at most
`mu0` = 1 − δ^(1/n) in all but a share δ of calibrations (Wilks' tolerance limit, 1941), δ being divided by the number
of cells. That makes δ part of the price: evidence 1/α from bets accuses wrongly with probability at most α + δ.

Temperature bands are 0, (0, 0.5], (0.5, 1], (1, 1.5] and above. Length bands begin at 16·2ⁱ; a response is judged by
the longest calibrated band it fills, whose null has the larger spread of the two.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from policies._cells import (
    FEWEST_RESPONSES,
    SHORTEST_BAND,
    Cell,
    Row,
    Spread,
    bands,
    fit_cells,
    length_band,
    rounded,
    spreads,
    temperature_band,
    validate,
)
from policies.errors import ProfileError
from policies.evidence import Evidence, Replay

__all__ = [
    "FEWEST_RESPONSES",
    "SHORTEST_BAND",
    "Cell",
    "Placement",
    "Profile",
    "ProfileKey",
    "Row",
    "Spread",
    "bands",
    "fit",
    "length_band",
    "response_name",
    "temperature_band",
]

VERSION = 2
DELTA = 1e-6
"""Probability that any of a profile's `mu0` is too small."""
LONGEST_REACH = 8
"""A length band serves responses of up to this multiple of where it begins when no longer one was calibrated."""
BET_REACH = 2.0
"""Standard deviations of the log score beyond the largest calibrated one at which a bet is 1."""
BAR = 0.2
"""Log score (22 %) above the largest calibrated one at which a response counts as beyond it for standing, and the least
reach of a bet: answers to other questions than the calibration's may drift a little more."""


class ProfileKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was compared with what. Another key is another null.

    Attributes:
        model: the model's name, as the operator declares it.
        runtime, precision, engine: the backend's, as declared.
        reference: name of the reference, as `Replay.reference` spells it.
        top_k: alternatives per token.
        mode: vLLM's `--logprobs-mode`.
    """

    model: str
    runtime: str
    precision: str
    reference: str
    engine: str = ""
    top_k: int = 20
    mode: str = "raw_logprobs"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one score lies among honest ones.

    Attributes:
        p: conformal p-value in the most lenient matching cell.
        n: that cell's calibration responses.
        beyond: the score lies above every calibration score of every matching cell.
        tail: parametric tail probability, the largest over the spreads of the matching cells. None when nothing ever
            drifted; then nothing rejects and every bet is 0.
        bet, mu0: for `betting.bounded`.
        exceeds, n_least, groups: for `betting.calibrated`: the score lies at least `BAR` above `usual`, in its
            logarithm; responses of the smallest matching cell; in how many groups of cells responses can fall.
        usual: largest calibrated score of the matching cells.
        label: condition of the most lenient cell.
    """

    p: float
    n: int
    beyond: bool
    tail: float | None
    bet: float
    mu0: float
    exceeds: bool
    n_least: int
    groups: int
    usual: float
    label: str

    @property
    def plausible(self) -> float:
        """How probable so high a score is: counted inside the calibrated range, extrapolated beyond it."""
        return (self.tail or 0.0) if self.beyond else self.p


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Calibrated nulls of one key.

    Attributes:
        responses: different responses measured.
        tokens: their output tokens.
        delta: probability that any `mu0` of a cell is too small.
        created: Unix seconds.
        made: how it came about, for people: versions, machines, arguments. Judges nothing.
    """

    key: ProfileKey
    cells: tuple[Cell, ...]
    responses: int
    tokens: int
    delta: float = DELTA
    created: float = 0.0
    version: int = VERSION
    made: dict[str, str] = {}

    @classmethod
    def from_json(cls, text: str | bytes) -> Profile:
        """Reads a profile back. Raises ProfileError when it is malformed or of another version."""
        try:
            version = msgspec.json.decode(text, type=_Versioned).version
            if version != VERSION:
                raise ProfileError(f"profile of version {version}, this is version {VERSION}: calibrate again")
            profile = msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise ProfileError(f"not a profile: {error}") from error
        if not profile.cells or not 0 < profile.delta < 1:
            raise ProfileError("a profile without cells, or with an impossible delta")
        for cell in profile.cells:
            validate(cell)
        return profile

    def to_json(self) -> str:
        """The profile as indented JSON, stable under re-reading."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode() + "\n"

    def canonical(self) -> bytes:
        """The bytes that name a profile by their SHA-256: JSON with sorted keys, without spaces, ASCII."""
        return json.dumps(json.loads(msgspec.json.encode(self)), sort_keys=True, separators=(",", ":")).encode()

    def mismatch(self, evidence: Evidence, replay: Replay) -> str:
        """In which part of the key a response is not what was calibrated; empty when in none."""
        key = self.key
        for what, has, wanted in (
            ("model", evidence.model, key.model),
            ("runtime", evidence.runtime, key.runtime),
            ("precision", evidence.precision, key.precision),
            ("engine", evidence.engine, key.engine),
            ("reference", replay.reference, key.reference),
        ):
            if has != wanted:
                return f"{what} is {has!r}, the profile was measured with {wanted!r}"
        if evidence.claim_ids.ndim == 2 and evidence.claim_ids.shape[1] - 1 > key.top_k:
            return f"the claim lists {evidence.claim_ids.shape[1] - 1} alternatives, the profile {key.top_k}"
        return ""

    def matching(self, check: str, *, form: str, temperature: float, length: int) -> list[Cell]:
        """The cells that speak for a response of this temperature and length, as `judge` has them."""
        cells = [cell for cell in self.cells if cell.check == check and cell.form == form]
        return _matching(cells, temperature, length)

    def judge(self, check: str, *, form: str, temperature: float, length: int, score: float) -> Placement | None:
        """Places one response's score; None when no cell speaks for its temperature and length.

        `length` counts positions as the check's calibration rows do; at least 16.
        """
        cells = [cell for cell in self.cells if cell.check == check and cell.form == form]
        matching = _matching(cells, temperature, length)
        if not matching:
            return None
        score = rounded(score)
        usual = max(cell.scores[-1] for cell in matching)
        p, n, label = max((cell.p(score), cell.n, cell.label) for cell in matching)
        known = spreads(matching, cells)
        floor = max(cell.floor for cell in matching)
        return Placement(
            p=p,
            n=n,
            beyond=score > usual,
            tail=max((spread.tail(score, floor) for spread in known), default=None),
            bet=_bet(score, usual, floor, known),
            mu0=max(cell.mu0 for cell in matching),
            exceeds=bool(known) and math.log((score + floor) / (usual + floor)) > BAR,
            n_least=min(cell.n for cell in matching),
            groups=_groups([cell for cell in self.cells if cell.check == check]),
            usual=usual,
            label=label,
        )


class _Versioned(msgspec.Struct):
    version: int = 1


def fit(
    rows: Iterable[Row],
    key: ProfileKey,
    *,
    created: float = 0.0,
    delta: float = DELTA,
    made: Mapping[str, str] | None = None,
) -> Profile:
    """A profile from the scores of honest responses, as the checks' `calibration_rows` give them.

    `created` and `made` are stored as given.

    Raises:
        ProfileError: a row cannot be used, or no condition has `FEWEST_RESPONSES` different responses.
    """
    rows = tuple(rows)
    tokens: dict[str, int] = {}
    for row in rows:
        tokens[row.response] = max(tokens.get(row.response, 0), row.tokens)
    cells = fit_cells(rows, delta)
    if not cells:
        raise ProfileError(f"no condition has {FEWEST_RESPONSES} responses of {SHORTEST_BAND} tokens")
    return Profile(key, cells, len(tokens), sum(tokens.values()), delta, created, made=dict(made or {}))


def response_name(evidence: Evidence) -> str:
    """Names a response by what it says, so that the same answer to the same prompt is not counted twice."""
    digest = hashlib.blake2b(evidence.prompt_ids.tobytes() + b"/" + evidence.output_ids.tobytes(), digest_size=12)
    return digest.hexdigest()


def _matching(cells: list[Cell], temperature: float, length: int) -> list[Cell]:
    """Per label the longest length band that the response fills, in its temperature band.

    A temperature band that was not calibrated is served by its calibrated neighbours when there are some on both
    sides, and by none otherwise. Where nothing that matches ever drifted, all cells of the check speak, so that an
    engine which agrees bit for bit under one load is not condemned for drifting under another.
    """
    band = temperature_band(temperature)
    present = {cell.temperature for cell in cells}
    wanted = {band}
    if band not in present:
        below, above = [b for b in present if b < band], [b for b in present if b > band]
        wanted = {max(below), min(above)} if below and above else set()
    longest: dict[tuple[str, int], Cell] = {}
    for cell in cells:
        if cell.temperature in wanted and cell.length <= length:
            known = longest.get((cell.label, cell.temperature))
            if known is None or cell.length > known.length:
                longest[cell.label, cell.temperature] = cell
    matching = [cell for cell in longest.values() if length <= cell.length * LONGEST_REACH]
    return cells if matching and all(cell.scores[-1] == 0 for cell in matching) else matching


def _groups(cells: list[Cell]) -> int:
    """Bound on the number of different sets of cells that responses can be held against: a form, a temperature band or
    the gap beside it, and a length at which a label's longest band begins or its reach ends."""
    lengths, temperatures = {cell.length for cell in cells}, {cell.temperature for cell in cells}
    return 2 * len(lengths) * (len(temperatures) + 1) * len({cell.form for cell in cells})


def _bet(score: float, usual: float, floor: float, known: list[Spread]) -> float:
    if not known or score <= usual:
        return 0.0
    reach = max(BET_REACH * max(spread.sd for spread in known), BAR)
    return min(1.0, math.log((score + floor) / (usual + floor)) / reach)
