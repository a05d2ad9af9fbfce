"""What honest answers look like: null distributions of the distance metrics, measured on a trusted backend.

A profile belongs to one key (which model, runtime and precision were compared with which reference) and holds arms.
An arm is one calibration condition (`label`, such as `single` or `batch8`) in one temperature band and one length
band. For each metric it stores the empirical quantiles with their count, and mean and standard deviation of the
logarithm, from which a prediction bound for one more response follows (see `tail`).

Temperature bands are 0, (0, 0.5], (0.5, 1], (1, 1.5] and above. Length bands begin at 16·2ⁱ positions that drift at
all; a response is judged by the longest calibrated band it fills, whose null has the larger spread of the two.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import msgspec
import numpy as np

from policies._tails import student_tail
from policies.errors import ProfileError

VERSION = 1
SHORTEST_BAND = 16
"""Positions under which one response says too little."""
LONGEST_REACH = 8
"""A length band serves responses of up to this multiple of where it begins when no longer one was calibrated."""
FEWEST_RESPONSES = 8
"""Responses an arm needs."""
LEAST_SD = 0.05
"""Least standard deviation of a log metric: a handful of responses may agree by chance."""
QUANTILES = (0.5, 0.9, 0.95, 0.99, 1.0)
_EDGES = (0.0, 0.5, 1.0, 1.5, math.inf)
FLOOR = 1e-2
"""Added before taking logarithms: amounts far under it are alike. The unit of the logs would otherwise be the
smallest amount ever seen, and a backend whose answers all left out a mass of 1e-7 stand accused at 1e-5, which one
candidate at the end of the list makes. On SmolLM2 (CPU) it also sets FP8-rounded weights farther apart, in honest
standard deviations, in every deciding metric: 12.6 instead of 11.6 (`drift_topk`) to 4.8 instead of 2.5."""

Row: TypeAlias = Mapping[str, "float | int | str | None"]


class ProfileKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was compared with what. Another key is another null.

    Attributes:
        model: the model's name, as the operator declares it.
        runtime, precision: the backend's, as declared.
        reference: name of the reference, as `Replay.reference` spells it.
        top_k: alternatives per token.
        mode: vLLM's `--logprobs-mode`.
        form: the replay's form, `full` or `ids`.
    """

    model: str
    runtime: str
    precision: str
    reference: str
    top_k: int = 20
    mode: str = "raw_logprobs"
    form: str = "full"


class Null(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One metric over the responses of an arm.

    Attributes:
        n: responses.
        mean, sd: of log(metric + floor), natural logarithm; sd with n − 1.
        quantiles: of the metric itself, keyed by probability.
        floor: in the metric's unit.
    """

    n: int
    mean: float
    sd: float
    quantiles: dict[str, float]
    floor: float = 1e-6


class Arm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One calibration condition in one temperature band and one length band.

    Attributes:
        label: the condition; batch size, prefill chunking, another machine.
        temperature: index of the temperature band.
        tokens: drifting positions at which the band begins.
        nulls: by metric.
    """

    label: str
    temperature: int
    tokens: int
    nulls: dict[str, Null]


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Calibrated nulls of one key.

    Attributes:
        responses: responses measured in all.
        still: responses among them with under 16 drifting positions, which fit no arm.
        tokens: output tokens measured in all.
        created: Unix seconds.
    """

    key: ProfileKey
    arms: tuple[Arm, ...]
    responses: int
    still: int
    tokens: int
    created: float = 0.0
    version: int = VERSION

    @classmethod
    def from_json(cls, text: str | bytes) -> Profile:
        """Reads a profile back. Raises ProfileError when it is malformed."""
        try:
            profile = msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise ProfileError(f"not a profile: {error}") from error
        if profile.version != VERSION:
            raise ProfileError(f"profile of version {profile.version}, this is version {VERSION}")
        if not profile.arms:
            raise ProfileError("a profile without arms")
        for arm in profile.arms:
            if arm.tokens < SHORTEST_BAND or not 0 <= arm.temperature < len(_EDGES):
                raise ProfileError(f"arm {arm.label!r} has an impossible band")
            if any(null.n < 2 or not null.sd >= 0 or not null.floor > 0 for null in arm.nulls.values()):
                raise ProfileError(f"arm {arm.label!r} has a null from fewer than two responses, or without spread")
        return profile

    def to_json(self) -> str:
        """The profile as indented JSON, stable under re-reading."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode() + "\n"

    def matching(self, temperature: float, positions: int) -> tuple[Arm, ...]:
        """Arms that speak for a response; empty when none does.

        Per label the longest length band that the response fills. A temperature band that was not calibrated is
        served by its calibrated neighbours when there are some on both sides, and by none otherwise.
        """
        band = temperature_band(temperature)
        bands = {arm.temperature for arm in self.arms}
        if band in bands:
            wanted = {band}
        else:
            below, above = [b for b in bands if b < band], [b for b in bands if b > band]
            wanted = {max(below), min(above)} if below and above else set()
        longest: dict[tuple[str, int], Arm] = {}
        for arm in self.arms:
            if arm.temperature in wanted and arm.tokens <= positions:
                known = longest.get((arm.label, arm.temperature))
                if known is None or arm.tokens > known.tokens:
                    longest[arm.label, arm.temperature] = arm
        return tuple(arm for arm in longest.values() if positions <= arm.tokens * LONGEST_REACH)


def temperature_band(temperature: float) -> int:
    """Index of the temperature band: 0 for greedy, then one per edge."""
    return next(index for index, edge in enumerate(_EDGES) if temperature <= edge)


def length_band(positions: int) -> int:
    """Where the length band of so many drifting positions begins; 0 under the shortest."""
    if positions < SHORTEST_BAND:
        return 0
    return SHORTEST_BAND << int(math.log2(positions // SHORTEST_BAND))


def tail(null: Null, value: float) -> float:
    """Probability that one more honest response shows `value` or more.

    Null: log(metric + floor) of the arm's responses and of this one are independent draws of one normal distribution,
    so (x − mean)/(sd·√(1 + 1/n)) follows Student's t with n − 1 degrees of freedom. Levels far below 1/n extrapolate
    that shape beyond what was seen; few responses make the bound wide by themselves.
    """
    if math.isnan(value):
        return 1.0
    deviation = math.log(max(value, 0.0) + null.floor) - null.mean
    return student_tail(deviation / (max(null.sd, LEAST_SD) * math.sqrt(1 + 1 / null.n)), null.n - 1)


def fit(rows: Iterable[Row], key: ProfileKey, *, created: float = 0.0) -> Profile:
    """A profile from measured honest responses.

    Args:
        rows: one mapping per response (or per prefix of one, as `distance.calibration_rows` gives them) with
            `temperature`, `tokens`, `drift_tokens`, optionally `arm` (the condition's label) and `response` (a row
            with `response` 0 is a prefix of a response counted elsewhere), and any number of metrics that are 0 or
            more; those that are None are left out.
        created: Unix seconds, stored as given.

    Raises:
        ProfileError: a row lacks a field, or no arm has `FEWEST_RESPONSES` responses.
    """
    groups: dict[tuple[str, int, int], list[dict[str, float]]] = defaultdict(list)
    responses = still = tokens = 0
    for row in rows:
        try:
            whole = bool(row.get("response", 1))
            positions = int(_number(row, "drift_tokens"))
            band = temperature_band(_number(row, "temperature"))
            responses += whole
            tokens += int(_number(row, "tokens")) if whole else 0
        except (TypeError, ValueError, StopIteration) as error:
            raise ProfileError(f"a row cannot be used: {error}") from error
        if length_band(positions):
            groups[str(row.get("arm") or ""), band, length_band(positions)].append(_metrics(row))
        else:
            still += whole
    arms = tuple(
        Arm(label, band, length, _nulls(measured))
        for (label, band, length), measured in sorted(groups.items())
        if len(measured) >= FEWEST_RESPONSES
    )
    if not arms:
        raise ProfileError(
            f"no condition has {FEWEST_RESPONSES} responses of {SHORTEST_BAND} drifting tokens "
            f"({responses} responses measured, {still} with less drift than that)"
        )
    return Profile(key, arms, responses, still, tokens, created)


_NOT_METRICS = frozenset({"temperature", "tokens", "arm", "response", "compared", "drift_tokens"})


def _number(row: Row, name: str) -> float:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ValueError(f"{name} is {value!r}")
    return float(value)


def _metrics(row: Row) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in row.items()
        if name not in _NOT_METRICS and isinstance(value, int | float) and math.isfinite(value) and value >= 0
    }


def _nulls(measured: list[dict[str, float]]) -> dict[str, Null]:
    names = sorted({name for metrics in measured for name in metrics})
    nulls = {}
    for name in names:
        values = np.array([metrics[name] for metrics in measured if name in metrics])
        # What hardly ever left 0 has no spread to judge the next answer by.
        if np.count_nonzero(values) < FEWEST_RESPONSES:
            continue
        logs = np.log(values + FLOOR)
        quantiles = {str(q): float(np.quantile(values, q)) for q in QUANTILES}
        nulls[name] = Null(len(values), float(logs.mean()), float(logs.std(ddof=1)), quantiles, FLOOR)
    return nulls
