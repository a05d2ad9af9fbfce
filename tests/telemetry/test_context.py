"""Whose trace it is: what a client may say of it, what backends are told, and who is traced at all."""

from __future__ import annotations

import gzip
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from policies.errors import SettingsError
from policies.settings import Settings, TelemetrySettings
from policies.traceparent import decode
from proxy.app import create_app
from tests.proxy.conftest import Rig, backend, make_rig, second, valkey
from tests.support import wire
from tests.support.fake_backend import Close, FakeBackend
from tests.support.toy_http import Handler, served
from tests.support.waiting import ends, wait_until
from tests.telemetry.stack import Span
from verifier_pool.link.queue import intent_key
from verifier_pool.link.telemetry import names
from verifier_pool.link.telemetry.tracing import Tracing

__all__ = ["backend", "make_rig", "second", "valkey"]

TRACE, SPAN = "ab" * 16, "cd" * 8
THEIRS = f"00-{TRACE}-{SPAN}-01"


class Traced:
    """A rig whose spans go to a file."""

    def __init__(self, make: Callable[..., Rig], folder: Path, *urls: str, **sections: Any) -> None:
        self._path = folder / "spans.jsonl"
        told = {"traces": "file", "file": str(self._path)} | sections.pop("telemetry", {})
        self.rig = make(*urls, telemetry=told, **sections)
        self.rig.backend.script = [wire.whole(wire.BODY)]

    def spans(self) -> list[Span]:
        """All that ended so far."""
        tracing = self.rig.proxy.services.tracing
        assert tracing is not None
        tracing._processor.force_flush(5000)
        return [orjson.loads(line) for line in self._path.read_bytes().splitlines()]

    def root(self) -> Span:
        """Of the only request."""
        wait_until(lambda: any(span["kind"] == "server" for span in self.spans()))
        (root,) = [span for span in self.spans() if span["kind"] == "server"]
        return root


@pytest.mark.parametrize(
    ("setting", "trace", "parent", "links"),
    [
        ("ignore", None, None, []),
        ("link", None, None, [f"{TRACE}-{SPAN}"]),
        ("parent", TRACE, SPAN, []),
    ],
)
def test_a_clients_trace(
    make_rig: Callable[..., Rig],
    tmp_path: Path,
    setting: str,
    trace: str | None,
    parent: str | None,
    links: list[str],
) -> None:
    made = Traced(make_rig, tmp_path, telemetry={"client_context": setting})
    assert made.rig.chat({"traceparent": THEIRS, "tracestate": "a=b"}).status_code == 200
    root = made.root()
    assert (root["parent"], root["links"]) == (parent, links)
    assert root["trace"] == TRACE if trace else root["trace"] != TRACE


@pytest.mark.parametrize(
    "given", ["", "00-1-2-01", f"00-{'0' * 32}-{SPAN}-01", f"{THEIRS}-x", "x" * 9000, f"{THEIRS}, {THEIRS}"]
)
def test_what_is_no_context_counts_for_nothing(make_rig: Callable[..., Rig], tmp_path: Path, given: str) -> None:
    made = Traced(make_rig, tmp_path, telemetry={"client_context": "parent"})
    made.rig.chat({"traceparent": given})
    root = made.root()
    assert (root["parent"], root["links"]) == (None, [])


def test_two_of_them_count_for_nothing(make_rig: Callable[..., Rig], tmp_path: Path) -> None:
    made = Traced(make_rig, tmp_path, telemetry={"client_context": "parent"})
    twice = [("traceparent", THEIRS), ("traceparent", THEIRS.replace("ab", "ef"))]
    made.rig.http.post("/v1/chat/completions", json={"model": "m", "messages": []}, headers=twice)
    assert made.root()["parent"] is None


@pytest.mark.parametrize("flags", ["00", "01", "ff"])
def test_no_client_decides_whether_it_is_traced(make_rig: Callable[..., Rig], tmp_path: Path, flags: str) -> None:
    none = Traced(make_rig, tmp_path, telemetry={"sampling": 0, "client_context": "parent"})
    given = {"traceparent": f"00-{TRACE}-{SPAN}-{flags}"}
    id = none.rig.chat(given).headers["x-countersign-id"]
    none.rig.recorded(id)
    assert none.spans() == []
    assert "trace" not in orjson.loads(none.rig.redis.get(intent_key(id)) or b"")
    every = Traced(make_rig, tmp_path / "..", telemetry={"client_context": "parent", "file": str(tmp_path / "all")})
    every._path = tmp_path / "all"
    every.rig.chat(given)
    assert every.root()["trace"] == TRACE


def test_a_share_of_requests_is_traced(tmp_path: Path) -> None:
    tracing = Tracing(TelemetrySettings(traces="file", file=str(tmp_path / "spans"), sampling=0.25), "test")
    drawn = sum(tracing.drawn() for _ in range(4000))
    tracing.close()
    assert 800 < drawn < 1200


TOLD = {"traceparent": THEIRS, "tracestate": "a=b", "baggage": "c=d", "b3": THEIRS, "uber-trace-id": "x:y:0:1"}


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
def test_backends_are_told_nothing(make_rig: Callable[..., Rig], tmp_path: Path, traced: bool, path: str) -> None:
    made = Traced(make_rig, tmp_path, telemetry={"sampling": int(traced), "client_context": "parent"})
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "input": "x"}
    assert made.rig.http.post(path, json=body, headers=TOLD).status_code == 200
    got = made.rig.backend.last
    assert not {b"traceparent", b"tracestate", b"baggage", b"b3", b"uber-trace-id"} & set(got.headers)
    assert TRACE.encode() not in got.raw_headers + got.body


@pytest.mark.parametrize("traced", [False, True])
def test_a_backend_that_may_know_joins_the_trace(make_rig: Callable[..., Rig], tmp_path: Path, traced: bool) -> None:
    declared = {"name": "b1", "model": "m", "served_model": "served", "trace_context": True}
    with FakeBackend([wire.whole(wire.BODY)]) as server:
        made = Traced(
            make_rig,
            tmp_path,
            telemetry={"sampling": int(traced)},
            backends=[{**declared, "url": server.url}],
        )
        made.rig.chat(TOLD)
        got = server.last.headers
    assert b"baggage" not in got
    if not traced:
        assert (got[b"traceparent"], got[b"tracestate"]) == (THEIRS.encode(), b"a=b")
        return
    root = made.root()
    context = decode(got[b"traceparent"].decode())
    assert context is not None
    assert b"tracestate" not in got
    assert f"{context.trace_id:032x}" == root["trace"]
    (client,) = [span for span in made.spans() if span["kind"] == "client"]
    assert f"{context.span_id:016x}" == client["span"]


def test_each_backend_that_is_asked_has_a_span(
    make_rig: Callable[..., Rig], second: FakeBackend, tmp_path: Path
) -> None:
    made = Traced(make_rig, tmp_path, second.url, "http://127.0.0.1:9")
    made.rig.backend.script = [Close()]
    second.script = [wire.whole(b'{"error": {"message": "canary"}}', 500)]
    answer = made.rig.chat()
    assert answer.status_code >= 500
    root = made.root()
    clients = [span for span in made.spans() if span["kind"] == "client"]
    asked = {span["attributes"][names.BACKEND]: span["attributes"][names.ERROR] for span in clients}
    assert asked["b1"] == "upstream_failed"
    assert asked["b2"] in ("500", "upstream_failed")
    assert asked.get("b3", "backend_unavailable") == "backend_unavailable"
    generations = {span["span"] for span in made.spans() if span["name"] == names.GENERATION}
    assert {span["parent"] for span in clients} <= generations
    assert root["failed"]
    assert all(span["failed"] for span in clients)
    assert root["attributes"][names.ERROR] == str(answer.status_code)
    assert "canary" not in str(made.spans())
    # What the proxy decides itself has its verdict's span.
    wait_until(lambda: any(span["name"] == names.VERDICT for span in made.spans()))


def test_a_stream_that_breaks_ends_as_broken(make_rig: Callable[..., Rig], tmp_path: Path) -> None:
    made = Traced(make_rig, tmp_path)
    made.rig.backend.script = [wire.SSE_HEAD, wire.chunk(wire.ROLE), wire.chunk(wire.CONTENT[0]), Close()]
    made.rig.chat(stream=True)
    made.root()
    (client,) = [span for span in made.spans() if span["kind"] == "client"]
    assert (client["failed"], client["attributes"][names.ERROR]) == (True, "broken")
    assert [event["name"] for event in client["events"]] == [names.FIRST_TOKEN]


def test_a_bug_ends_its_spans(make_rig: Callable[..., Rig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Traced(make_rig, tmp_path)
    monkeypatch.setattr("proxy.relay.attempt.prepare", lambda *_, **__: 1 / 0)
    assert made.rig.chat().status_code == 500
    assert made.root()["failed"]
    (generation,) = [span for span in made.spans() if span["name"] == names.GENERATION]
    assert generation["attributes"][names.ERROR] == "ZeroDivisionError"


def test_untraced_requests_cost_nothing(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.backend.script = [wire.whole(wire.BODY)]
    assert rig.proxy.services.tracing is None
    assert not any(type(app).__name__ == "TracedEndpoint" for app in rig.proxy.app.relayed.values())  # type: ignore[attr-defined]
    id = rig.chat({"traceparent": THEIRS}).headers["x-countersign-id"]
    rig.recorded(id)
    assert TRACE.encode() not in (rig.redis.get(intent_key(id)) or b"")


def test_opentelemetrys_own_switch(
    make_rig: Callable[..., Rig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    rig = make_rig(telemetry={"traces": "file", "file": str(tmp_path / "spans")})
    rig.backend.script = [wire.whole(wire.BODY)]
    assert rig.chat().status_code == 200
    assert (tmp_path / "spans").read_bytes() == b""


@pytest.mark.parametrize("name", ["OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "OTEL_TRACES_SAMPLER", "OTEL_BSP_MAX_QUEUE_SIZE"])
def test_opentelemetrys_other_variables_break_nothing(
    make_rig: Callable[..., Rig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "always_off" if name.endswith("SAMPLER") else "1")
    made = Traced(make_rig, tmp_path)
    assert made.rig.chat().status_code == 200
    assert made.root()["name"] == "chat m"


@contextmanager
def collector(answer: int = 200) -> Iterator[tuple[str, list[tuple[dict[str, str], bytes]]]]:
    """An OpenTelemetry collector: its URL, and what it was sent."""
    got: list[tuple[dict[str, str], bytes]] = []

    class Collector(Handler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            got.append(({name.lower(): value for name, value in self.headers.items()}, body))
            self.send_response(answer)
            self.send_header("content-length", "0")
            self.end_headers()

    with served(Collector) as url:
        yield url, got


@pytest.mark.parametrize("by", ["setting", "environment"])
def test_a_collector_gets_the_spans(make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    with collector() as (url, got):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Basic%20secret")
        told = {"traces": "otlp"}
        if by == "setting":
            told["endpoint"] = f"{url}/v1/traces"
        else:
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        rig = make_rig(telemetry=told)
        rig.backend.script = [wire.whole(wire.BODY)]
        id = rig.chat().headers["x-countersign-id"]
        wait_until(lambda: len(got) >= 1)
        headers, body = got[0]
    assert headers["authorization"] == "Basic secret"
    request = ExportTraceServiceRequest()
    request.ParseFromString(gzip.decompress(body) if headers.get("content-encoding") == "gzip" else body)
    spans = [span for each in request.resource_spans for scope in each.scope_spans for span in scope.spans]
    kept = {item.key: item.value.string_value for span in spans for item in span.attributes}
    assert kept[names.ID] == id


def test_nobody_waits_for_a_collector(make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verifier_pool.link.telemetry.exporters._SECONDS", 3600.0)
    monkeypatch.setattr("verifier_pool.link.telemetry.tracing._END_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces"
        rig = make_rig(telemetry={"traces": "otlp", "endpoint": url})
        rig.backend.script = [wire.whole(wire.BODY)]
        tracing = rig.proxy.services.tracing
        assert tracing is not None
        wait_until(lambda: rig.chat().status_code == 200 and select.select([silent], [], [], 0)[0])
        asked, _ = silent.accept()
        with asked:
            for _ in range(20):
                assert rig.chat().status_code == 200
            ends(tracing.close)
            assert asked.recv(4, socket.MSG_PEEK) == b"POST"
            assert not select.select([silent], [], [], 0)[0], "it is still the first try"
    # What it says of the collector it says while this test runs.
    wait_until(lambda: all(thread.name != "spans" for thread in threading.enumerate()))


@pytest.mark.parametrize(
    ("told", "key"),
    [
        ({"traces": "file"}, "telemetry"),
        ({"traces": "file", "file": "/nonexistent/spans"}, "telemetry.file"),
    ],
)
def test_a_file_that_cannot_be_written_stops_the_start(told: dict[str, str], key: str) -> None:
    with pytest.raises((SettingsError, ValueError), match=key):
        create_app(Settings.model_validate({"telemetry": told}), "redis://127.0.0.1:1")


@pytest.mark.parametrize("url", ["http://user:secret@collector/v1/traces", "collector:4318", "http://a b"])
def test_an_endpoint_holds_no_secret(url: str) -> None:
    with pytest.raises(ValueError, match="endpoint"):
        TelemetrySettings(traces="otlp", endpoint=url)
