"""What Prometheus and Grafana are told: monitors, alerts, the dashboard."""

from __future__ import annotations

import json
from typing import Any

import helm_python as helm
import pytest

from tests.helm import dashboard
from tests.helm.queries import parsed, selectors
from tests.helm.rendered import MOE, VARIANTS, Release


@pytest.fixture(scope="module")
def release(chart: helm.Chart) -> Release:
    return Release(chart, VARIANTS["scaled"])


def rules(release: Release) -> dict[str, Any]:
    (group,) = release.of("PrometheusRule")["spec"]["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def test_nothing_of_it_is_there_unless_asked_for(chart: helm.Chart) -> None:
    bare = Release(chart, {"settings": MOE}).objects
    assert not {item["kind"] for item in bare} & {"ServiceMonitor", "PrometheusRule"}
    assert [item["metadata"]["name"] for item in bare if item["kind"] == "ConfigMap"] == ["countersign"]


def test_the_proxys_service_is_scraped_with_an_admin_key(release: Release) -> None:
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


def test_alerts_are_about_this_release(release: Release) -> None:
    found = rules(release)
    assert {"CountersignRejects", "CountersignBacklog", "CountersignBreakerOpen", "CountersignBackendAccused"} <= set(
        found
    )
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
        for label in ("backend", "reason", "model"):
            if f"$labels.{label}" in summary:
                assert label in parsed(rule["expr"]).prettify(), rule["alert"]


def test_thresholds_come_from_values_and_settings(chart: helm.Chart) -> None:
    values = VARIANTS["scaled"] | {
        "settings": MOE | {"verification": {"max_backlog": 2000}},
        "monitoring": {"rules": {"enabled": True, "rejectShare": 0.2, "backlogShare": 0.25, "errorShare": 0.5}},
        "proxy": {},
        "worker": {},
        "reference": {},
    }
    found = rules(Release(chart, values))
    assert found["CountersignBacklog"]["expr"].endswith("> 500")
    assert found["CountersignRejects"]["expr"].endswith("> 0.2")
    assert found["CountersignBackendErrors"]["expr"].endswith("> 0.5")


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
