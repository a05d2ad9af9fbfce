"""What Prometheus and Grafana are told: monitors, alerts, the dashboard."""

from __future__ import annotations

import json
from typing import Any

import helm_python as helm
import pytest

from policies.errors import SettingsError
from tests.helm import dashboard
from tests.helm.queries import parsed, selectors
from tests.helm.rendered import MOE, VARIANTS, Release, Values, container


@pytest.fixture(scope="module")
def release(chart: helm.Chart) -> Release:
    return Release(chart, VARIANTS["scaled"])


def rules(release: Release) -> dict[str, Any]:
    groups = release.of("PrometheusRule")["spec"]["groups"]
    found = [rule for group in groups for rule in group["rules"]]
    assert len({rule["alert"] for rule in found}) == len(found)
    return {rule["alert"]: rule for rule in found}


def test_nothing_of_it_is_there_unless_asked_for(chart: helm.Chart) -> None:
    bare = Release(chart, {"settings": MOE}).objects
    assert not {item["kind"] for item in bare} & {"ServiceMonitor", "PodMonitor", "PrometheusRule"}
    assert [item["metadata"]["name"] for item in bare if item["kind"] == "ConfigMap"] == ["countersign"]


def test_the_proxys_service_is_scraped_with_the_token(release: Release) -> None:
    monitor = release.of("ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("http", "/metrics")
    credentials = {"name": "prometheus-key", "key": "token"}
    assert endpoint["authorization"] == {"type": "Bearer", "credentials": credentials}
    service = release.of("Service", "countersign")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert monitor["metadata"]["labels"]["release"] == "prometheus"


def test_a_scrape_without_a_key_carries_none(chart: helm.Chart) -> None:
    monitor = Release(chart, {"monitoring": {"serviceMonitor": {"enabled": True}}}).of("ServiceMonitor")
    assert "authorization" not in monitor["spec"]["endpoints"][0]


def test_workers_pods_are_scraped_with_the_token(release: Release) -> None:
    monitor = release.of("PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["path"], endpoint["interval"]) == ("metrics", "/metrics", "15s")
    assert endpoint["authorization"] == release.of("ServiceMonitor")["spec"]["endpoints"][0]["authorization"]
    # As their alerts and panels are told from those of other releases.
    assert endpoint["relabelings"] == [{"targetLabel": "service", "replacement": "countersign"}]
    (among,) = monitor["spec"]["selector"]["matchExpressions"]
    parts = set()
    for item in release.objects:
        if item["kind"] != "Deployment":
            continue
        labels = item["spec"]["template"]["metadata"]["labels"]
        spec = container(item["spec"]["template"]["spec"])
        own = labels[among["key"]]
        parts.add(own)
        assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert ("metrics" in {port["name"] for port in spec.get("ports", ())}) == (own in among["values"])
        (token,) = [each for each in spec["env"] if each["name"] == "COUNTERSIGN_METRICS__TOKEN"]
        assert token["valueFrom"]["secretKeyRef"] == {"name": "prometheus-key", "key": "token"}
    assert parts == {"proxy", *among["values"]}


def test_settings_say_where_workers_show_their_metrics(chart: helm.Chart, release: Release) -> None:
    metrics = release.settings().metrics
    assert (metrics.host, metrics.port) == ("0.0.0.0", 9464)
    with pytest.raises(SettingsError, match="metrics"):
        release.settings({"COUNTERSIGN_METRICS__TOKEN": "null"})
    assert Release(chart, {"settings": MOE}).settings().metrics.port is None
    asked: Values = {"settings": {"metrics": {"otlp": True}}}
    monitoring: Values = {"podMonitor": {"enabled": True, "port": 9000}, "credentials": {"existingSecret": "key"}}
    merged = Release(chart, asked | {"monitoring": monitoring}).settings().metrics
    assert (merged.port, merged.otlp) == (9000, True)


def test_other_pods_reach_no_worker_without_a_token(chart: helm.Chart) -> None:
    with pytest.raises(helm.HelmError, match=r"monitoring\.podMonitor\.enabled: it needs"):
        chart.render({"monitoring": {"podMonitor": {"enabled": True}}}, name="countersign")


PEER: Values = {"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}


@pytest.mark.parametrize("peers", [[], [PEER]])
def test_policies_let_the_scrape_through(chart: helm.Chart, peers: list[Values]) -> None:
    values = VARIANTS["scaled"] | {
        "networkPolicy": {"enabled": True, "proxy": {"from": [{"podSelector": {}}]}, "monitoring": {"from": peers}}
    }
    release = Release(chart, values)
    for part in ("worker", "reference", "webhooks"):
        (rule,) = release.of("NetworkPolicy", f"-{part}")["spec"]["ingress"]
        assert rule["ports"] == [{"port": 9464}]
        assert rule.get("from", []) == peers
    (rule,) = release.of("NetworkPolicy", "-proxy")["spec"]["ingress"]
    assert all(peer in rule["from"] for peer in peers)
    closed = Release(chart, {"settings": MOE, "networkPolicy": {"enabled": True}})
    assert "ingress" not in closed.of("NetworkPolicy", "-worker")["spec"]


@pytest.mark.parametrize("sent", [{"metrics": {"otlp": True}}, {"telemetry": {"traces": "otlp"}}])
def test_policies_let_a_collector_be_reached(chart: helm.Chart, sent: Values) -> None:
    collector = {"ports": [4318], "to": [PEER]}
    values: Values = {"settings": MOE | sent, "networkPolicy": {"enabled": True, "collector": collector}}
    wanted = {"ports": [{"port": 4318}], "to": [PEER]}
    for part in ("proxy", "worker", "reference", "webhooks"):
        assert wanted in Release(chart, values).of("NetworkPolicy", f"-{part}")["spec"]["egress"]
        bare = Release(chart, values | {"settings": MOE}).of("NetworkPolicy", f"-{part}")
        assert wanted not in bare["spec"]["egress"]


def test_there_is_an_alert_for_whatever_may_go_wrong(release: Release) -> None:
    assert set(rules(release)) == {
        "CountersignGone",
        "CountersignStoreDown",
        "CountersignStoreSlow",
        "CountersignBreakerOpen",
        "CountersignBackendErrors",
        "CountersignSettings",
        "CountersignBackendAccused",
        "CountersignRejects",
        "CountersignNoVerdicts",
        "CountersignCoverage",
        "CountersignReceiptKeys",
        "CountersignUnrecorded",
        "CountersignDropped",
        "CountersignNoWorkers",
        "CountersignStandstill",
        "CountersignNoReference",
        "CountersignReferenceUnsound",
        "CountersignBacklog",
        "CountersignLag",
        "CountersignDeadLetters",
        "CountersignWebhooks",
        "CountersignWebhookFailures",
        "CountersignWebhooksLate",
        "CountersignUntold",
    }


def test_alerts_are_about_this_release(release: Release) -> None:
    found = rules(release)
    for rule in found.values():
        for labels in selectors(rule["expr"]).values():
            assert {"namespace", "service"} <= labels
        assert rule["expr"].count('{namespace="prod",service="countersign"') == rule["expr"].count("{")
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in {"warning", "critical"}


def test_alerts_name_what_they_are_about(release: Release) -> None:
    """A label in a summary is one that the expression leaves."""
    for rule in rules(release).values():
        summary = rule["annotations"]["summary"]
        for label in ("backend", "reason", "model", "state", "queue", "reference"):
            if f"$labels.{label}" in summary:
                assert label in parsed(rule["expr"]).prettify(), rule["alert"]


def test_thresholds_come_from_values_and_settings(chart: helm.Chart) -> None:
    values = VARIANTS["scaled"] | {
        "settings": MOE | {"verification": {"max_backlog": 2000}},
        "monitoring": {
            "rules": {
                "enabled": True,
                "rejectShare": 0.2,
                "backlogShare": 0.25,
                "errorShare": 0.5,
                "coverageShare": 0.75,
                "lagSeconds": 90,
                "storeSeconds": 0.125,
            }
        },
        "proxy": {},
        "worker": {},
        "reference": {},
    }
    found = rules(Release(chart, values))
    assert found["CountersignBacklog"]["expr"].endswith("> 500")
    assert found["CountersignRejects"]["expr"].endswith("> 0.2")
    assert found["CountersignBackendErrors"]["expr"].endswith("> 0.5")
    assert found["CountersignCoverage"]["expr"].endswith("< 0.75")
    assert found["CountersignLag"]["expr"].endswith("> 90")
    assert found["CountersignWebhooks"]["expr"].count("> 90") == 2
    assert found["CountersignWebhooksLate"]["expr"].endswith("> 90")
    assert found["CountersignStoreSlow"]["expr"].endswith("> 0.125")


def test_series_may_be_selected_by_other_labels(chart: helm.Chart) -> None:
    monitoring = {"rules": {"enabled": True}, "prometheus": {"selector": 'job="gate"'}}
    for rule in rules(Release(chart, {"monitoring": monitoring})).values():
        assert '{job="gate"' in rule["expr"]
        parsed(rule["expr"])


def test_the_dashboard_is_the_generated_one(release: Release) -> None:
    assert dashboard.DASHBOARD.read_text(encoding="utf-8") == dashboard.text(), "run python -m tests.helm.dashboard"
    config = release.of("ConfigMap", "-dashboard")
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert config["metadata"]["annotations"] == {"grafana_folder": "Inference"}
    assert json.loads(config["data"]["countersign.json"]) == dashboard.build()


def test_the_dashboards_panels_lie_beside_each_other() -> None:
    panels = dashboard.build()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + across, place["y"] + down) for across in range(place["w"]) for down in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in panels:
        for target in panel.get("targets", ()):
            parsed(target["expr"])
