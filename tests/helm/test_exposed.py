"""What the chart and the documentation say of metrics, held against the pages of a running stack."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import helm_python as helm
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from redis import Redis
from rq import Queue
from rq.serializers import JSONSerializer

from benchmarks.demo.processes import free_ports
from tests.helm import dashboard, metrics_page
from tests.helm.queries import missing
from tests.helm.rendered import VARIANTS, Release
from tests.support.waiting import wait_until
from tests.telemetry.stack import KEY, Stack, running
from verifier_pool.link.queue import VERIFY_QUEUE

TOKEN = "scrape-" + "0" * 24
BEARER = {"authorization": f"Bearer {TOKEN}"}
CLIENT = {"authorization": f"Bearer {KEY}"}

Exposed = dict[str, dict[str, set[str]]]
"""Values by label by metric."""


@dataclass(frozen=True)
class Scraped:
    stack: Stack
    proxy: str
    worker: str
    exposed: Exposed


def chat(stack: Stack, marker: int, headers: dict[str, str], **more: Any) -> httpx.Response:
    body = {"model": "toy", "messages": [{"role": "user", "content": f"marker-{marker}-"}], "max_tokens": 16, **more}
    return httpx.post(f"{stack.url}/v1/chat/completions", json=body, headers=headers, timeout=120, trust_env=False)


def read(*pages: str) -> Exposed:
    found: Exposed = {}
    for page in pages:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                known = found.setdefault(sample.name, {})
                for label, value in sample.labels.items():
                    known.setdefault(label, set()).add(value)
    return found


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    """Proxy and worker after everything happened that counts."""
    (port,) = free_ports(1)
    metrics = {"port": port, "token": TOKEN}
    with running(tmp_path_factory.mktemp("stack"), metrics=metrics) as stack:
        inline = CLIENT | {"x-countersign-mode": "inline"}
        answers = [
            chat(stack, 1, CLIENT, stream=True),
            chat(stack, 2, CLIENT),
            chat(stack, 3, inline),
            chat(stack, 4, CLIENT, temperature=0.7, repetition_penalty=1.3),
        ]
        assert [answer.status_code for answer in answers] == [200] * 4
        assert chat(stack, 5, {}).status_code == 401
        broken = {"model": "toy", "input": "no chat"}
        httpx.post(f"{stack.url}/v1/embeddings", json=broken, headers=CLIENT, timeout=120, trust_env=False)
        for answer in answers:
            stack.verification(answer.headers["x-countersign-id"])
        with contextlib.closing(Redis.from_url(stack.valkey.url)) as redis:
            # No function that a worker runs.
            Queue(VERIFY_QUEUE, connection=redis, serializer=JSONSerializer).enqueue("os.getcwd", job_id="odd")
        wait_until(lambda: len(stack.receiver.requests) >= 4, what=lambda: stack.logs[-2000:])
        time.sleep(2.5)  # what is read of Redis is kept for two seconds, and a child writes once a second
        proxy = httpx.get(f"{stack.url}/metrics", headers=BEARER, trust_env=False).text
        worker = httpx.get(f"http://127.0.0.1:{port}/metrics", headers=BEARER, trust_env=False).text
        yield Scraped(stack, proxy, worker, read(proxy, worker))


def test_the_dashboard_asks_for_what_is_exposed(scraped: Scraped) -> None:
    targets = [target for panel in dashboard.build()["panels"] for target in panel.get("targets", ())]
    assert len(targets) > 40
    for target in targets:
        assert missing(target["expr"], scraped.exposed) == [], target["expr"]
        used = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
        assert all(label in target["expr"] for label in used), target


def test_alerts_and_scalers_ask_for_what_is_exposed(chart: helm.Chart, scraped: Scraped) -> None:
    release = Release(chart, VARIANTS["scaled"])
    groups = release.of("PrometheusRule")["spec"]["groups"]
    queries = [rule["expr"] for group in groups for rule in group["rules"]]
    scalers = [item for item in release.objects if item["kind"] == "ScaledObject"]
    own = [scaler["spec"]["triggers"][0]["metadata"]["query"] for scaler in scalers]
    # These are about the values' own backends, and no stack's.
    queries += [re.sub(r',backend=~"[^"]*"', "", query) for query in own]
    (metric,) = release.of("HorizontalPodAutoscaler")["spec"]["metrics"]
    queries.append(metric["pods"]["metric"]["name"])
    for query in queries:
        if 'queue=~"replay|second-replay"' in query:
            query = query.replace("|second-replay", "")  # this stack has no second reference
        assert missing(query, scraped.exposed) == [], query


def test_the_page_is_the_generated_one() -> None:
    assert metrics_page.PAGE.read_text(encoding="utf-8") == metrics_page.page(), "run python -m tests.helm.metrics_page"


EVENTS = {
    "countersign_admin_refused_total",
    "countersign_asked_another_total",
    "countersign_blocked_total",
    "countersign_backend_probes_total",
    "countersign_queue_wait_duration_seconds",
    "countersign_retried_total",
    "countersign_settings_reloads_total",
}
"""What begins to exist when something happens that did not happen here."""


def test_the_page_says_what_there_is(scraped: Scraped) -> None:
    told = {name: set(re.findall(r"`(\w+)`", labels)) for name, _, _, labels, *_ in metrics_page.rows()}
    there = {re.sub(r"_(bucket|sum|count)$", "", name): values for name, values in scraped.exposed.items()}
    assert there.keys() <= told.keys()
    assert told.keys() - there.keys() - EVENTS == set()
    for name, values in there.items():
        assert values.keys() - {"le"} <= told[name], name
        assert told[name] - values.keys() <= {"error_type"}, name


@pytest.mark.parametrize(
    "query", re.findall(r"`((?:max|sum|topk|histogram)[ _\w]*\(.*?)`", metrics_page.PAGE.read_text())
)
def test_queries_of_the_page_ask_for_what_is_exposed(query: str, scraped: Scraped) -> None:
    assert missing(query, scraped.exposed) == []


def test_who_shows_what_is_as_told(scraped: Scraped) -> None:
    public = read(httpx.get(f"{scraped.stack.url}/metrics", trust_env=False).text)
    names = {re.sub(r"_(bucket|sum|count)$", "", name) for name in public}
    by_name = {name: shown for name, *_, shown, _ in metrics_page.rows()}
    assert names
    for name in names:
        assert metrics_page.ANYBODY in by_name[name].split("; "), name
    hidden = {name for name, shown in by_name.items() if metrics_page.ADMINS in shown}
    assert len(hidden) > 20
    assert not hidden & names


def test_a_workers_page_is_for_the_token_alone(scraped: Scraped) -> None:
    (port,) = re.findall(r"port: (\d+)\n", (scraped.stack.folder / "countersign.yaml").read_text())[:1]
    url = f"http://127.0.0.1:{port}/metrics"
    assert httpx.get(url, trust_env=False).status_code == 401
    assert httpx.get(url, headers=CLIENT, trust_env=False).status_code == 401
    assert httpx.get(url + "/more", headers=BEARER, trust_env=False).status_code == 404


def test_no_label_holds_what_a_client_chose(scraped: Scraped) -> None:
    answers = scraped.stack.receiver.requests
    ids = re.findall(rb'"id":"([0-9a-f]{32})"', b"".join(body for _, body in answers))
    assert ids
    for page in (scraped.proxy, scraped.worker):
        for word in (KEY, TOKEN, "marker-", *(id.decode() for id in ids)):
            assert word not in page
    odd = {"model": 'no"such\nmodel{}', "messages": [{"role": "user", "content": "x"}]}
    httpx.post(f"{scraped.stack.url}/v1/chat/completions", json=odd, headers=CLIENT, trust_env=False)
    page = httpx.get(f"{scraped.stack.url}/metrics", headers=BEARER, trust_env=False).text
    assert "such" not in page


def test_sums_agree(scraped: Scraped) -> None:
    """What each process counted, and what Redis did, is the same four answers."""
    proxy = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for page in (scraped.proxy, scraped.worker)
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }

    def total(name: str, **labels: str) -> float:
        return sum(
            value for (known, own), value in proxy.items() if known == name and labels.items() <= dict(own).items()
        )

    assert total("countersign_requests_total", status="200") == 4
    verdicts = total("countersign_verdicts_total") - total("countersign_verdicts_total", verdict="unverified")
    assert verdicts == 4
    assert total("countersign_audited_total") == 4
    assert total("countersign_verdict_delay_seconds_count") == 4
    assert total("countersign_checks_total", check="structure") == 4
    assert total("countersign_replays_total", outcome="done") == 4
    assert total("countersign_replay_tokens_total") > 4 * 16
    assert total("countersign_webhook_deliveries_total", outcome="delivered") >= 4
    assert total("countersign_queue_workers", queue="verify") == 1
    assert total("countersign_backend_tokens_served_total") == 4 * 16
    assert total("gen_ai_client_token_usage_sum", gen_ai_token_type="output") == 4 * 16


def test_a_name_that_is_not_exposed_is_found() -> None:
    exposed = {"a_total": {"backend": {"x", "y"}}}
    assert missing("sum by (model) (rate(a_total[5m])) / b", exposed) == ["a_total{model}", "b"]
    assert missing('sum by (pod) (a_total{backend="x"})', exposed) == []
    assert missing('a_total{backend="z"}', exposed) == ["a_total{backend=z}"]
    assert missing('a_total{backend=~"x|z.*"}', exposed) == ["a_total{backend=x|z.*}"]
    assert missing('a_total{backend!="z",backend!~"q"}', exposed) == []
