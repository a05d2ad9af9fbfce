"""What the proxy counts of its requests, who sees what, and what looking costs."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from policies.settings import Settings, TelemetrySettings, TimeoutSettings, hash_key
from proxy.generation import Generation
from proxy.metrics import Metrics
from proxy.relay.clock import Clock
from proxy.tap.bill import MOST
from tests.proxy.conftest import Rig
from tests.support import wire
from tests.support.fake_backend import Close, FakeBackend
from tests.support.running import RunningProxy, settings_for
from tests.support.valkey import Valkey
from tests.support.waiting import PATIENCE, wait_until
from verifier_pool.link.exposition import bears
from verifier_pool.link.meters import Family, Spread
from verifier_pool.link.telemetry.resource import resource_of

TOKEN = "t" * 20
BEARER = {"authorization": f"Bearer {TOKEN}"}
METRICS = {"token": TOKEN}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "count"}]}


def read(page: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


def value(page: str, name: str, **labels: str) -> float:
    return sum(number for own, number in read(page).get(name, []) if labels.items() <= own.items())


def test_a_stream_is_told_under_the_conventions_names(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(metrics=METRICS)
    rig.backend.script = wire.stream(pause=0.02)
    answer = rig.chat(stream=True)
    assert answer.status_code == 200
    rig.recorded(answer.headers["x-countersign-id"])
    wait_until(lambda: value(rig.http.get("/metrics").text, "gen_ai_client_token_usage_count"))
    page = rig.http.get("/metrics", headers=BEARER).text
    genai = {"gen_ai_operation_name": "chat", "gen_ai_provider_name": "vllm", "gen_ai_request_model": "m"}
    for name in (
        "gen_ai_server_request_duration_seconds",
        "gen_ai_server_time_to_first_token_seconds",
        "gen_ai_server_time_per_output_token_seconds",
        "gen_ai_client_operation_duration_seconds",
        "gen_ai_client_operation_time_to_first_chunk_seconds",
        "countersign_overhead_duration_seconds",
        "countersign_overhead_first_token_duration_seconds",
        "countersign_store_duration_seconds",
    ):
        own = genai if name.startswith("gen_ai") else {}
        assert value(page, f"{name}_count", **own) == 1, name
    evidence = rig.evidence(answer.headers["x-countersign-id"])
    usage = "gen_ai_client_token_usage_sum"
    assert value(page, usage, gen_ai_token_type="output", backend="b1") == len(evidence.output_ids) > 1
    assert value(page, usage, gen_ai_token_type="input", backend="b1") == len(evidence.prompt_ids) > 0
    whole = value(page, "gen_ai_server_request_duration_seconds_sum")
    first = value(page, "gen_ai_server_time_to_first_token_seconds_sum")
    added = value(page, "countersign_overhead_duration_seconds_sum")
    added_first = value(page, "countersign_overhead_first_token_duration_seconds_sum")
    assert 0 < added_first <= added < whole
    assert added_first < first < whole
    assert value(page, "gen_ai_client_operation_duration_seconds_sum") <= whole


def test_a_failure_has_its_type_and_no_first_token(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(metrics=METRICS, relay={"retries": 0})
    rig.backend.script = [Close()]
    assert rig.chat().status_code == 502
    page = rig.http.get("/metrics", headers=BEARER).text
    assert value(page, "gen_ai_server_request_duration_seconds_count", error_type="502") == 1
    assert value(page, "gen_ai_server_time_to_first_token_seconds_count") == 0
    assert value(page, "gen_ai_client_token_usage_count") == 0


def test_tokens_of_other_endpoints_are_as_billed(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(metrics=METRICS)
    body = b'{"object":"list","data":[],"model":"served","usage":{"prompt_tokens":9,"total_tokens":9}}'
    rig.backend.script = [wire.whole(body)]
    assert rig.http.post("/v1/embeddings", json={"model": "m", "input": "x"}).status_code == 200
    page = rig.http.get("/metrics").text
    labels = {"gen_ai_operation_name": "embeddings", "gen_ai_token_type": "input"}
    assert value(page, "gen_ai_client_token_usage_sum", **labels) == 9


@pytest.mark.parametrize("digits", [18, 19, 308, 310, 5000])
def test_no_bill_breaks_a_request_or_a_sum(
    make_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture, digits: int
) -> None:
    """A client's connection lives on, what comes after the answer is done, and honest counts still add up."""
    rig = make_rig(metrics=METRICS)
    body = b'{"object":"list","data":[],"model":"served","usage":{"prompt_tokens":%s,"total_tokens":9}}'
    with caplog.at_level("INFO", "proxy"):
        for count in (b"9" * digits, b"9" * digits, b"9"):
            rig.backend.script = [wire.whole(body % count)]
            assert rig.http.post("/v1/embeddings", json={"model": "m", "input": "x"}).status_code == 200
        wait_until(lambda: [record.message for record in caplog.records].count("served") == 3)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    (spread,) = of(rig.proxy.services.metrics, "gen_ai.client.token.usage").points.values()
    assert isinstance(spread, Spread)
    assert spread.sum in (9, 2 * MOST + 9)


def test_a_status_is_a_label_only_where_it_is_a_usual_one() -> None:
    """It is a backend's to choose, and there are two hundred."""
    metrics = Metrics()
    for status in range(200, 600):
        metrics.served(generation(), Clock(TimeoutSettings()), status, None)
    told = {values[2] for values in of(metrics, "countersign.requests").points}
    assert {"200", "404", "429", "499", "502", "4xx", "5xx"} <= told
    assert len(told) < 30
    errors = {values[-1] for values in of(metrics, "gen_ai.server.request.duration").points}
    assert errors - {""} <= told
    assert sum(of(metrics, "countersign.requests").points.values()) == 400  # type: ignore[arg-type]


def test_operations_have_one_name_in_metrics_and_traces(make_rig: Callable[..., Rig], tmp_path: Path) -> None:
    spans = tmp_path / "spans"
    paths = ["/v1/responses", "/v1/messages", "/v1/embeddings"]
    telemetry = {"traces": "file", "file": str(spans), "service_name": "gate"}
    rig = make_rig(metrics=METRICS, telemetry=telemetry, relay={"passthrough": paths})
    for path in paths:
        rig.backend.script = [wire.whole(b'{"model":"served"}')]
        assert rig.http.post(path, json={"model": "m", "input": "x", "max_tokens": 4}).status_code == 200

    def told() -> set[str]:
        page = read(rig.http.get("/metrics", headers=BEARER).text)
        return {own["gen_ai_operation_name"] for own, _ in page.get("gen_ai_server_request_duration_seconds_count", [])}

    def traced() -> set[str]:
        lines = spans.read_text().splitlines() if spans.exists() else []
        return {json.loads(line)["attributes"].get("gen_ai.operation.name") for line in lines} - {None}

    # The last of them is counted, and its request's span over, after its client has the answer.
    wait_until(lambda: "embeddings" in told() & traced())
    assert told() == traced() == {"chat", "embeddings"}


def test_the_token_shows_everything_and_does_nothing(make_rig: Callable[..., Rig]) -> None:
    keys = [
        {"name": "app", "sha256": hash_key("app-key")},
        {"name": "root", "sha256": hash_key("root-key"), "admin": True},
    ]
    rig = make_rig(metrics=METRICS, keys=keys)
    for key, private in {TOKEN: True, "root-key": True, "app-key": False, TOKEN + "x": False, "": False}.items():
        headers = {"authorization": f"Bearer {key}"} if key else {}
        page = rig.http.get("/metrics", headers=headers)
        assert page.status_code == 200
        assert ("countersign_backend_state" in page.text) is private
        assert ("countersign_verdicts_total" in page.text) is private
        assert ("countersign_queue_jobs" in page.text) is private
        assert "countersign_in_flight" in page.text
    assert rig.http.post("/v1/chat/completions", json=CHAT, headers=BEARER).status_code == 401
    assert rig.http.get("/v1/backends", headers=BEARER).status_code == 401
    assert rig.http.get("/v1/models", headers=BEARER).status_code == 401


@given(st.text(max_size=60))
def test_no_other_text_bears_a_token(text: str) -> None:
    token = Settings.model_validate({"metrics": METRICS}).metrics.token
    assert bears(f"Bearer {TOKEN}", token)
    assert bears(text, token) == (
        text.partition(" ")[0].lower() == "bearer" and text.partition(" ")[2].strip() == TOKEN
    )
    assert not bears(text, None)
    assert not bears(None, token)


def test_looking_holds_up_nobody(backend: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis stands still, so whoever may see everything waits for it, and nobody else does."""
    monkeypatch.setattr("verifier_pool.link.fleet.ANSWER_SECONDS", 3600.0)
    monkeypatch.setattr("verifier_pool.link.fleet.FRESH_SECONDS", 0.0)
    keys = [{"name": "k", "sha256": hash_key("sk-k")}]
    with (
        Valkey() as own,
        RunningProxy(settings_for(backend.url, metrics=METRICS, keys=keys), own.url) as proxy,
        httpx.Client(base_url=proxy.url, timeout=PATIENCE) as http,
    ):
        assert "countersign_queue_jobs" in http.get("/metrics", headers=BEARER).text
        fleet = proxy.services.metrics._fleet
        assert fleet is not None
        own.freeze()
        pages: list[httpx.Response] = []
        looking = threading.Thread(
            target=lambda: pages.append(httpx.get(f"{proxy.url}/metrics", headers=BEARER, timeout=PATIENCE))
        )
        looking.start()
        wait_until(fleet._lock.locked)
        for _ in range(20):
            assert http.get("/healthz").status_code == 200
            assert http.get("/metrics").status_code == 200
        assert looking.is_alive()
        own.kill()
        looking.join(PATIENCE)
        (page,) = pages
        # What the process itself knows is there all the same.
        assert "countersign_in_flight" in page.text
        assert "countersign_queue_jobs" not in page.text


def test_whether_redis_answers_is_told(backend: FakeBackend) -> None:
    backend.script = [wire.whole(wire.BODY)]
    with (
        Valkey() as own,
        RunningProxy(settings_for(backend.url, metrics=METRICS), own.url) as proxy,
        httpx.Client(base_url=proxy.url, timeout=PATIENCE) as http,
    ):
        assert value(http.get("/metrics").text, "countersign_store_up") == 1
        own.kill()
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
        page = http.get("/metrics", headers=BEARER).text
        assert value(page, "countersign_store_up") == 0
        assert value(page, "countersign_store_outages_total") == 1
        assert "countersign_queue_jobs" not in page
        # Of what cannot be recorded the tokens are counted all the same.
        assert value(page, "gen_ai_client_token_usage_sum", gen_ai_token_type="output") > 0


class Collector(ThreadingHTTPServer):
    """Takes OTLP over HTTP, and keeps it."""

    def __init__(self) -> None:
        self.taken: list[ExportMetricsServiceRequest] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                collector.taken.append(ExportMetricsServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.daemon_threads = True
        self.thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.thread.join()
        self.server_close()


def test_a_collector_gets_what_prometheus_reads(backend: FakeBackend, valkey: Valkey) -> None:
    backend.script = [wire.whole(wire.BODY)]
    with Collector() as collector:
        sent = {"otlp": True, "every": 1.0, "endpoint": f"http://127.0.0.1:{collector.server_port}/v1/metrics"}
        with RunningProxy(
            settings_for(backend.url, metrics=METRICS | sent, telemetry={"service_name": "gate"}), valkey.url
        ) as proxy:
            assert httpx.post(f"{proxy.url}/v1/chat/completions", json=CHAT).status_code == 200
            wait_until(lambda: collector.taken)
        last = collector.taken[-1]  # at the proxy's end
    (resource,) = last.resource_metrics
    about = {each.key: each.value.string_value for each in resource.resource.attributes}
    # As spans have it.
    assert about.items() >= resource_of(TelemetrySettings(service_name="gate"), "proxy").attributes.items()
    assert (about["service.name"], about["countersign.process"]) == ("gate", "proxy")
    (scope,) = resource.scope_metrics
    metrics = {metric.name: metric for metric in scope.metrics}
    requests = metrics["countersign.requests"]
    assert (requests.unit, requests.sum.is_monotonic, requests.sum.aggregation_temporality) == ("{request}", True, 2)
    (point,) = requests.sum.data_points
    labels = {each.key: each.value.string_value for each in point.attributes}
    assert (labels, point.as_double) == ({"model": "m", "backend": "b1", "status": "200"}, 1)
    assert 0 < point.start_time_unix_nano < point.time_unix_nano
    duration = metrics["gen_ai.server.request.duration"]
    assert duration.unit == "s"
    (spread,) = duration.histogram.data_points
    assert (spread.count, sum(spread.bucket_counts), len(spread.bucket_counts)) == (
        1,
        1,
        len(spread.explicit_bounds) + 1,
    )
    assert {each.key for each in spread.attributes} == {
        "gen_ai.operation.name",
        "gen_ai.provider.name",
        "gen_ai.request.model",
    }
    assert metrics["countersign.in_flight"].HasField("gauge")
    # And what is for admins, as whoever has the collector is one.
    assert "countersign.verdicts" in metrics


def test_a_collector_that_is_away_ends_nothing(backend: FakeBackend, valkey: Valkey) -> None:
    backend.script = [wire.whole(wire.BODY)]
    sent = {"otlp": True, "every": 1.0, "endpoint": "http://127.0.0.1:9/v1/metrics"}
    with RunningProxy(settings_for(backend.url, metrics=sent), valkey.url) as proxy:
        time.sleep(1.5)
        assert httpx.post(f"{proxy.url}/v1/chat/completions", json=CHAT).status_code == 200


def generation() -> Generation:
    return Generation("0" * 32, owner="o", endpoint="chat", model="m", mode="async", stream=True, backend="b")


def of(metrics: Metrics, name: str) -> Family:
    (found,) = [family for family in metrics.read(private=True) if family.name == name]
    return found


async def test_time_is_put_down_to_whom_it_belongs() -> None:
    metrics, clock = Metrics(), Clock(TimeoutSettings())
    clock.went_up()
    async with clock.deadline() as deadline:
        await clock.reading(asyncio.sleep(0.05, b"x"), deadline)
        clock.began()
        clock.showing()
        await clock.writing(asyncio.sleep(0.05))
        await clock.reading(asyncio.sleep(0.05, b"x"), deadline)
    metrics.served(generation(), clock, 200, (3, 5))
    sums = {
        name: next(iter(of(metrics, name).points.values()))
        for name in (
            "countersign.overhead.duration",
            "countersign.overhead.first_token.duration",
            "gen_ai.server.time_to_first_token",
            "gen_ai.client.operation.duration",
        )
    }
    added, added_first, first, asked = (spread.sum for spread in sums.values() if isinstance(spread, Spread))
    assert 0 <= added_first <= added < 0.15
    assert 0.05 <= first < asked
    assert asked >= 0.15
