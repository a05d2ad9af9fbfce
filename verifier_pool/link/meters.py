"""Counters, gauges and histograms of one process, and their values at one moment.

One source for what Prometheus reads (`verifier_pool.link.exposition`) and what is sent by OTLP
(`verifier_pool.link.otlp`). The SDK's own instruments take several microseconds a call; these take a few tenths of one,
on any thread.

Names and units are OpenTelemetry's (`gen_ai.server.request.duration`, `s`). Labels are names that the operator
chose, or words of ours: never an id, a key, or what a client or a backend said. Where something else gets in all the
same, a bound on the series of each instrument holds: what is beyond is counted under `other`.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal

import msgspec

Kind = Literal["counter", "gauge", "histogram"]
Values = tuple[str, ...]
"""Values of labels, in the order of their names."""
Labels = Mapping[str, object]
Observed = Iterable[tuple[float, Labels]]

MOST_SERIES = 2000
"""Series of one instrument, beyond which what is new is counted under `other`."""
OTHER = "other"
_LARGEST = 2.0**53
"""Beyond it a sum takes in no more ones: whatever is counted is cut there, so that one value spoils no sum."""

FAST = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Bounds in seconds, for what should take none."""
DURATION = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
"""Bounds in seconds that the conventions advise for the duration of an operation."""
WAITING = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Bounds in seconds, for what waits in queues."""


class Spread(msgspec.Struct):
    """One series of a histogram: how many values fell at most at each bound, and above all, each counted once; their
    sum."""

    counts: list[int]
    sum: float = 0.0


Point = float | Spread


class Family(msgspec.Struct):
    """One instrument with its values, at one moment. `bounds` are a histogram's, upper and inclusive."""

    name: str
    kind: Kind
    unit: str
    help: str
    labels: Values
    points: dict[Values, Point]
    bounds: tuple[float, ...] = ()


class Counter:
    """Goes up. `add` takes its labels by name, all of them."""

    kind: Kind = "counter"

    def __init__(self, name: str, unit: str, help: str, labels: Sequence[str] = ()) -> None:
        self.name, self.unit, self.help, self.labels = name, unit, help, tuple(labels)
        self._key = _picker(self.labels)
        self._points: dict[Any, float] = {}
        self._lock = threading.Lock()
        if not labels:
            self._points[()] = 0.0

    def add(self, amount: float, labels: Labels | None = None) -> None:
        """Count; what is no number counts nothing. Raises KeyError where a label is missing."""
        key, amount = self._key(labels), _cut(amount)
        with self._lock:
            try:
                self._points[key] += amount
            except KeyError:
                key = _admitted(key, self._points, self.labels)
                self._points[key] = self._points.get(key, 0.0) + amount

    def read(self) -> Family:
        """Its values now."""
        with self._lock:
            points = dict(self._points)
        return Family(
            self.name, self.kind, self.unit, self.help, self.labels, {_values(k): v for k, v in points.items()}
        )


class Gauge(Counter):
    """Goes up and down."""

    kind: Kind = "gauge"

    def set(self, value: float, labels: Labels | None = None) -> None:
        """It is this now. Raises KeyError where a label is missing."""
        key = self._key(labels)
        with self._lock:
            if key not in self._points:
                key = _admitted(key, self._points, self.labels)
            self._points[key] = value

    def replace(self, values: Observed) -> None:
        """These are all values now; whatever had another one has none."""
        fresh: dict[Any, float] = {}
        for value, labels in values:
            fresh[_admitted(self._key(labels), fresh, self.labels)] = value
        with self._lock:
            self._points = fresh


class Histogram:
    """Counts values by where they lie between `bounds`, which ascend."""

    kind: Kind = "histogram"

    def __init__(
        self, name: str, unit: str, help: str, labels: Sequence[str] = (), *, bounds: Sequence[float] = DURATION
    ) -> None:
        self.name, self.unit, self.help, self.labels = name, unit, help, tuple(labels)
        self.bounds = tuple(map(float, bounds))
        self._key = _picker(self.labels)
        self._points: dict[Any, Spread] = {}
        self._lock = threading.Lock()
        if not labels:
            self._points[()] = self._empty()

    def record(self, value: float, labels: Labels | None = None) -> None:
        """Count a value; what is no number counts as 0. Raises KeyError where a label is missing."""
        key, value = self._key(labels), _cut(value)
        at = bisect_left(self.bounds, value)
        with self._lock:
            spread = self._points.get(key)
            if spread is None:
                key = _admitted(key, self._points, self.labels)
                spread = self._points.setdefault(key, self._empty())
            spread.counts[at] += 1
            spread.sum += value

    def read(self) -> Family:
        """Its values now."""
        with self._lock:
            points = {key: Spread(list(spread.counts), spread.sum) for key, spread in self._points.items()}
        return Family(
            self.name,
            self.kind,
            self.unit,
            self.help,
            self.labels,
            {_values(key): spread for key, spread in points.items()},
            self.bounds,
        )

    def _empty(self) -> Spread:
        return Spread([0] * (len(self.bounds) + 1))


class Meters:
    """The instruments of one process, in the order of their making."""

    def __init__(self) -> None:
        self._readers: list[Callable[[], Family]] = []

    def counter(self, name: str, unit: str, help: str, labels: Sequence[str] = ()) -> Counter:
        """A new counter."""
        counter = Counter(name, unit, help, labels)
        self._readers.append(counter.read)
        return counter

    def gauge(self, name: str, unit: str, help: str, labels: Sequence[str] = ()) -> Gauge:
        """A new gauge."""
        gauge = Gauge(name, unit, help, labels)
        self._readers.append(gauge.read)
        return gauge

    def histogram(
        self, name: str, unit: str, help: str, labels: Sequence[str] = (), *, bounds: Sequence[float] = DURATION
    ) -> Histogram:
        """A new histogram."""
        histogram = Histogram(name, unit, help, labels, bounds=bounds)
        self._readers.append(histogram.read)
        return histogram

    def observe(
        self, name: str, unit: str, help: str, labels: Sequence[str], look: Callable[[], Observed], kind: Kind = "gauge"
    ) -> None:
        """A gauge, or a counter, whose values `look` says whenever somebody reads."""
        self._readers.append(lambda: family(name, kind, unit, help, labels, look()))

    def read(self) -> list[Family]:
        """All values now."""
        return [reader() for reader in self._readers]


def family(name: str, kind: Kind, unit: str, help: str, labels: Sequence[str], observed: Observed) -> Family:
    """What was observed elsewhere, as an instrument would say it."""
    key = _picker(labels)
    points: dict[Values, Point] = {_values(key(given)): float(value) for value, given in observed}
    return Family(name, kind, unit, help, tuple(labels), points)


def merged(*pages: Iterable[Family]) -> list[Family]:
    """What several processes say, as one: sums. Of two kinds or bounds under one name the first is kept."""
    found: dict[str, Family] = {}
    for page in pages:
        for each in page:
            known = found.get(each.name)
            if known is None:
                found[each.name] = msgspec.structs.replace(each, points={k: _copied(v) for k, v in each.points.items()})
            elif (known.kind, known.labels, known.bounds) == (each.kind, each.labels, each.bounds):
                _add(known.points, each.points)
    return list(found.values())


def _add(points: dict[Values, Point], more: Mapping[Values, Point]) -> None:
    for key, point in more.items():
        known = points.get(key)
        if known is None:
            points[key] = _copied(point)
        elif isinstance(known, Spread) and isinstance(point, Spread):
            known.counts = [a + b for a, b in zip(known.counts, point.counts, strict=True)]
            known.sum += point.sum
        elif not isinstance(known, Spread) and not isinstance(point, Spread):
            points[key] = known + point


def _copied(point: Point) -> Point:
    return Spread(list(point.counts), point.sum) if isinstance(point, Spread) else point


def _cut(value: float) -> float:
    """`value` where it can be added up; an int of any size is none."""
    if -_LARGEST <= value <= _LARGEST:
        return value
    return _LARGEST if value > 0 else -_LARGEST if value < 0 else 0.0


def _picker(labels: Sequence[str]) -> Callable[[Any], Any]:
    return itemgetter(*labels) if labels else lambda _: ()


def _admitted(key: Any, points: Mapping[Any, object], labels: Sequence[str]) -> Any:
    """Where a new series is counted: under `other` once there are too many."""
    if len(points) < MOST_SERIES:
        return key
    return OTHER if len(labels) == 1 else (OTHER,) * len(labels)


def _values(key: Any) -> Values:
    return tuple(map(str, key)) if isinstance(key, tuple) else (str(key),)
