"""A backend's standing as a value: what was counted so far, under one declaration.

Everything a later decision depends on is in here, so that a record and the next units make the next record.
"""

from __future__ import annotations

import msgspec
import numpy as np
import zstandard

from policies import eprocess
from policies.eprocess import COMPONENTS, Floats
from policies.unit import PROCESSES, declaration_name

TRIAL = "trial"
TRUSTED = "trusted"
SUSPECT = "suspect"
QUARANTINED = "quarantined"
STATES = (TRIAL, TRUSTED, SUSPECT, QUARANTINED)

WINDOW = 1024
"""Units that corroboration looks back on."""
LAST_ACCUSING = 20
LONGEST_TRAIL = 200
"""Entries of the audit trail. The operator's own are the last to go."""
MOST_POINTS = 120
"""Points that the chart of the evidence keeps; older ones are thinned."""
_LARGEST = 64 * 1024 * 1024
"""Bytes that a record may hold uncompressed."""
HALF_LIFE = 500
"""Units after which one counts half in recent coverage."""


class Heard(msgspec.Struct, frozen=True, array_like=True):
    """A counted unit with outcomes of a replay: its number, client key, x and mu0 by process, as far as it has any."""

    n: int
    key: str
    operator: bool
    outcomes: dict[str, tuple[float, float]]


class Accusing(msgspec.Struct, frozen=True):
    """A generation that spoke against its backend: the verification's id, Unix seconds, which processes failed."""

    id: str
    at: float
    processes: tuple[str, ...]


class Entry(msgspec.Struct, frozen=True):
    """One line of the audit trail: who did what, when (Unix seconds) and why, between which states."""

    at: float
    by: str
    action: str
    why: str
    before: str
    after: str


class Accusation(msgspec.Struct, frozen=True):
    """The evidence that sufficed: at which unit, on which processes (`exact` or `replayed`), log10 of it, and the level
    at most at which an honest backend is accused like this: the life's share of α, plus δ where profiles took part."""

    at: float
    n: int
    basis: str
    log10: float
    level: float


class Left(msgspec.Struct, frozen=True, array_like=True):
    """Generations left undecided for one reason, their output tokens, and whose doing it is."""

    generations: int
    tokens: int
    blame: str


class Coverage(msgspec.Struct, frozen=True):
    """What was served and decided, in generations and output tokens; why the rest was not, by code."""

    generations: int = 0
    tokens: int = 0
    decided: int = 0
    decided_tokens: int = 0
    audited: int = 0
    replayed: int = 0
    left: dict[str, Left] = {}

    @property
    def ratio(self) -> float | None:
        """Decided ÷ served, in tokens; None when nothing was served."""
        return self.decided_tokens / self.tokens if self.tokens else None


class Earned(msgspec.Struct, frozen=True):
    """What trust rests on: only units that may speak earn it, and all that a backend leaves undecided costs it.

    Attributes:
        decided, replayed: units that could be decided, and that a replay judged.
        withheld, asked: units with missing evidence, of how many.
        recent_served, recent_decided, recent_excused: output tokens, with half the weight every `HALF_LIFE` units;
            excused is what the request or we kept from being decided.
    """

    decided: int = 0
    replayed: int = 0
    withheld: int = 0
    asked: int = 0
    recent_served: float = 0.0
    recent_decided: float = 0.0
    recent_excused: float = 0.0

    @property
    def recent(self) -> float | None:
        """Recently decided, of what request and we let be decided; None when there was nothing."""
        possible = self.recent_served - self.recent_excused
        return min(1.0, self.recent_decided / possible) if possible > 0 else None


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One backend under one declaration, in one life (a pardon begins another).

    Attributes:
        number: counts the backend's lives over all declarations, from 1; its share of α follows (`standing.budget`).
        state, since, reasons: the state, since when (Unix seconds), in plain words why.
        log_m, log_r: evidence and suspicion, 7·8 logarithms each (`policies.eprocess`).
        n: units counted in them. `outside`: units that were not, by reason.
        heard: the last `WINDOW` counted units that had a replay.
        profiles: calibration error δ of every profile that took part, by name.
        day, day_heard, day_keys: units of the current day (days since 1970) by client key, and those that counted;
            `day_against`: of keys that spoke against the backend, counted or not, up to which of their units all count.
        pardoned_at: when a pardon began this life, 0 where none did. `heard_at`: Unix seconds of the last unit.
        learnt_from: `earned.decided` when it was declared again.
        trusted_once: it has been trusted in this life.
        held: the operator's reason for a quarantine by hand. `change`: what contradicts the declaration.
    """

    backend: str
    declaration: dict[str, str]
    number: int
    began: float
    since: float
    state: str = TRIAL
    reasons: tuple[str, ...] = ()
    log_m: tuple[float, ...] = (eprocess.NOTHING,) * (len(PROCESSES) * COMPONENTS)
    log_r: tuple[float, ...] = (eprocess.NOTHING,) * (len(PROCESSES) * COMPONENTS)
    n: int = 0
    outside: dict[str, int] = {}
    coverage: Coverage = Coverage()
    earned: Earned = Earned()
    heard: tuple[Heard, ...] = ()
    accusing: tuple[Accusing, ...] = ()
    chart: tuple[tuple[int, float], ...] = ()
    profiles: dict[str, float] = {}
    day: int = 0
    day_heard: dict[str, int] = {}
    day_keys: dict[str, int] = {}
    day_against: dict[str, int] = {}
    pardoned_at: float = 0.0
    heard_at: float = 0.0
    learnt_from: int = 0
    trusted_once: bool = False
    accused: Accusation | None = None
    held: str = ""
    change: str = ""
    trail: tuple[Entry, ...] = ()

    @property
    def name(self) -> str:
        """Names the declaration."""
        return declaration_name(self.declaration)

    @property
    def m(self) -> Floats:
        """Evidence by process and stake, (7, 8), in logarithms."""
        return np.array(self.log_m).reshape(len(PROCESSES), COMPONENTS)

    @property
    def r(self) -> Floats:
        """Suspicion likewise."""
        return np.array(self.log_r).reshape(len(PROCESSES), COMPONENTS)

    @property
    def log_evidence(self) -> float:
        """Logarithm of the evidence against it."""
        return float(eprocess.log_evidence(self.m))

    @property
    def log_suspicion(self) -> float:
        """Suspicion, as `eprocess.log_suspicion` has it."""
        return float(eprocess.log_suspicion(self.r, self.n))


def pack(record: Record) -> bytes:
    """Bytes of a record: msgpack, compressed, some 10 kB."""
    return zstandard.ZstdCompressor(level=1).compress(msgspec.msgpack.encode(record))


def unpack(data: bytes) -> Record:
    """A record from its bytes. Raises msgspec.DecodeError (a ValueError) where they are none."""
    try:
        raw = zstandard.ZstdDecompressor().decompress(data, max_output_size=_LARGEST)
    except zstandard.ZstdError as error:
        raise msgspec.DecodeError("not a record") from error
    return msgspec.msgpack.decode(raw, type=Record)
