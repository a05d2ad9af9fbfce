"""Counters, gauges and histograms, and the text that Prometheus reads, by its own parser."""

from __future__ import annotations

import math
import threading
import timeit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from verifier_pool.link.exposition import metric_name, page
from verifier_pool.link.meters import MOST_SERIES, OTHER, Family, Meters, Spread, family, merged

ANY = st.text(max_size=30)


def samples(families: list[Family]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for each in text_string_to_metric_families(page(families).decode())
        for sample in each.samples
    }


@given(ANY, ANY, st.floats(allow_nan=False))
def test_whatever_a_label_holds_comes_back(first: str, second: str, value: float) -> None:
    meters = Meters()
    meters.gauge("a.b", "By", "What\nit \\ is", ("x.y", "z")).set(value, {"x.y": first, "z": second})
    # Prometheus takes an empty label for none at all.
    labels = {name: text for name, text in {"x_y": first, "z": second}.items() if text}
    assert samples(meters.read()) == {("a_b_bytes", tuple(sorted(labels.items()))): value}


@given(st.lists(st.floats(-10, 100), max_size=50), st.lists(st.floats(-10, 100), min_size=1, max_size=8, unique=True))
def test_a_histogram_counts_what_is_at_most_each_bound(values: list[float], bounds: list[float]) -> None:
    meters, bounds = Meters(), sorted(bounds)
    histogram = meters.histogram("h", "s", "", ["k"], bounds=bounds)
    histogram.record(0.0, {"k": "another"})
    for value in values:
        histogram.record(value, {"k": "v"})
    found = samples(meters.read())
    if values:
        for bound in bounds:
            at = ("h_seconds_bucket", (("k", "v"), ("le", repr(float(bound)))))
            assert found[at] == sum(value <= bound for value in values)
        assert found["h_seconds_bucket", (("k", "v"), ("le", "+Inf"))] == len(values)
        assert found["h_seconds_count", (("k", "v"),)] == len(values)
        assert math.isclose(found["h_seconds_sum", (("k", "v"),)], math.fsum(values), abs_tol=1e-9)


def test_numbers_that_are_none_are_spelt_as_prometheus_does() -> None:
    meters = Meters()
    gauge = meters.gauge("g", "1", "", ["k"])
    for name, value in {"nan": math.nan, "more": math.inf, "less": -math.inf}.items():
        gauge.set(value, {"k": name})
    found = {labels[0][1]: value for (_, labels), value in samples(meters.read()).items()}
    assert math.isnan(found["nan"])
    assert (found["more"], found["less"]) == (math.inf, -math.inf)


@pytest.mark.parametrize(
    ("name", "unit", "kind", "expected"),
    [
        ("gen_ai.server.request.duration", "s", "histogram", "gen_ai_server_request_duration_seconds"),
        ("gen_ai.client.token.usage", "{token}", "histogram", "gen_ai_client_token_usage"),
        ("countersign.requests", "{request}", "counter", "countersign_requests_total"),
        ("countersign.replay.busy", "s", "counter", "countersign_replay_busy_seconds_total"),
        ("process.memory.usage", "By", "gauge", "process_memory_usage_bytes"),
    ],
)
def test_names_follow_the_conventions(name: str, unit: str, kind: str, expected: str) -> None:
    assert metric_name(name, unit, kind) == expected


NUMBERS = st.integers(-(10**400), 10**400) | st.floats()


@given(st.lists(NUMBERS, max_size=20))
def test_no_number_raises_or_spoils_a_sum(numbers: list[float]) -> None:
    meters = Meters()
    counter, histogram = meters.counter("c", "1", ""), meters.histogram("h", "s", "", bounds=(1.0,))
    for number in numbers:
        counter.add(number)
        histogram.record(number)
    (counted,), (spread,) = (each.points.values() for each in meters.read())
    assert isinstance(spread, Spread)
    assert math.isfinite(counted)  # type: ignore[arg-type]
    assert math.isfinite(spread.sum)
    assert sum(spread.counts) == len(numbers)
    page(meters.read())


def test_there_are_no_more_series_than_are_allowed() -> None:
    meters = Meters()
    counter = meters.counter("c", "1", "", ("model", "status"))
    histogram = meters.histogram("h", "s", "", ["model"])
    for number in range(MOST_SERIES + 500):
        counter.add(1, {"model": number, "status": 200})
        histogram.record(1.0, {"model": number})
    for found in meters.read():
        assert len(found.points) <= MOST_SERIES + 1
    counted, spread = meters.read()
    assert counted.points[OTHER, OTHER] == 500
    assert spread.points[OTHER,] == Spread(spread.points[OTHER,].counts, 500.0)  # type: ignore[union-attr]
    counter.add(1, {"model": 3, "status": 200})
    assert meters.read()[0].points["3", "200"] == 2


def test_a_label_that_is_missing_is_a_mistake() -> None:
    counter = Meters().counter("c", "1", "", ("a", "b"))
    with pytest.raises(KeyError):
        counter.add(1, {"a": "x"})


def test_what_has_no_labels_begins_at_nothing() -> None:
    meters = Meters()
    meters.counter("c", "1", "")
    meters.histogram("h", "s", "")
    meters.counter("labelled", "1", "", ["k"])
    text = page(meters.read()).decode()
    assert "c_total 0.0" in text
    assert "h_seconds_count 0.0" in text
    assert "labelled" not in text


def test_threads_lose_nothing() -> None:
    meters = Meters()
    counter, histogram = meters.counter("c", "1", "", ["k"]), meters.histogram("h", "s", "")

    def work() -> None:
        for _ in range(20_000):
            counter.add(1, {"k": "v"})
            histogram.record(0.5)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counted, spread = meters.read()
    assert counted.points == {("v",): 80_000}
    assert spread.points[()].sum == 40_000  # type: ignore[union-attr]


def test_what_is_read_does_not_change() -> None:
    meters = Meters()
    histogram = meters.histogram("h", "s", "", bounds=(1.0,))
    before = meters.read()
    histogram.record(0.5)
    assert before[0].points == {(): Spread([0, 0])}


def test_processes_add_up() -> None:
    def process(n: int) -> list[Family]:
        meters = Meters()
        meters.counter("c", "1", "", ["k"]).add(n, {"k": "v"})
        meters.gauge("g", "1", "").set(n)
        histogram = meters.histogram("h", "s", "", bounds=(1.0, 2.0))
        histogram.record(n)
        return meters.read()

    one, two = process(1), process(2)
    counted, gauge, spread = merged(one, two, [])
    assert counted.points == {("v",): 3}
    assert gauge.points == {(): 3}
    assert spread.points == {(): Spread([1, 1, 0], 3.0)}
    assert merged(one)[2].points == {(): Spread([1, 0, 0], 1.0)}
    odd = family("c", "counter", "1", "", ("k", "more"), [(5.0, {"k": "v", "more": "x"})])
    assert merged(one, [odd])[0].points == {("v",): 1}


def test_counting_is_cheap() -> None:
    """Some tenths of a microsecond on a machine with nothing else to do."""
    meters = Meters()
    counter = meters.counter("c", "1", "", ("model", "backend", "status"))
    histogram = meters.histogram("h", "s", "", ["endpoint"])

    def best(call: str) -> float:
        names = {"counter": counter, "histogram": histogram}
        return min(timeit.repeat(call, globals=names, number=10_000, repeat=7)) / 10_000

    assert best("counter.add(1, {'model': 'm', 'backend': 'b', 'status': 200})") < 3e-6
    assert best("histogram.record(0.0031, {'endpoint': 'chat'})") < 4e-6
