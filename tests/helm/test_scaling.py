"""How many pods there are, and by what."""

from __future__ import annotations

from typing import Any

import helm_python as helm
import pytest

from tests.helm.queries import selectors
from tests.helm.rendered import MOE, VARIANTS, Release, Values

PROMETHEUS: Values = {"prometheus": {"url": "http://prometheus:9090"}}
ON: Values = {"autoscaling": {"enabled": True}}


@pytest.fixture(scope="module")
def scaled(chart: helm.Chart) -> Release:
    return Release(chart, VARIANTS["scaled"])


def test_the_proxy_is_scaled_by_requests_in_service(scaled: Release) -> None:
    scaler = scaled.of("HorizontalPodAutoscaler")["spec"]
    assert scaler["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "countersign-proxy"}
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (3, 30)
    (metric,) = scaler["metrics"]
    assert metric["type"] == "Pods"
    assert metric["pods"]["metric"] == {"name": "countersign_in_flight"}
    assert metric["pods"]["target"] == {"type": "AverageValue", "averageValue": "250"}
    assert scaler["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 300


def test_workers_are_scaled_by_all_that_waits(scaled: Release) -> None:
    spec = scaled.of("ScaledObject", "countersign-worker")["spec"]
    (trigger,) = spec["triggers"]
    assert trigger["metadata"]["serverAddress"] == "http://prometheus.monitoring:9090"
    assert trigger["metadata"]["threshold"] == "400"
    assert trigger["metadata"]["ignoreNullValues"] == "false"
    assert trigger["authenticationRef"] == {"name": "bearer"}
    query = trigger["metadata"]["query"]
    assert query == 'sum(max by (backend) (countersign_backlog{namespace="prod",service="countersign"}))'
    assert selectors(query) == {"countersign_backlog": {"namespace", "service", "backend"}}


def test_references_are_scaled_by_what_waits_of_their_model(scaled: Release) -> None:
    found = {
        item["metadata"]["name"]: item["spec"]
        for item in scaled.objects
        if item["kind"] == "ScaledObject" and "-reference-" in item["metadata"]["name"]
    }
    moe = found.pop("countersign-reference-moe")
    ((_, qwen),) = found.items()
    assert (moe["minReplicaCount"], moe["maxReplicaCount"], moe["cooldownPeriod"]) == (0, 16, 1200)
    assert (qwen["minReplicaCount"], qwen["maxReplicaCount"]) == (0, 4)
    assert 'backend=~"cheap"' in moe["triggers"][0]["metadata"]["query"]
    assert 'backend=~"qwen[.]eu"' in qwen["triggers"][0]["metadata"]["query"]
    targets = {item["metadata"]["name"] for item in scaled.objects if item["kind"] == "Deployment"}
    assert {moe["scaleTargetRef"]["name"], qwen["scaleTargetRef"]["name"]} <= targets


def test_who_is_scaled_has_no_number_of_its_own(chart: helm.Chart, scaled: Release) -> None:
    def counted(release: Release) -> dict[str, bool]:
        deployments = [item for item in release.objects if item["kind"] == "Deployment"]
        return {item["metadata"]["name"]: "replicas" in item["spec"] for item in deployments}

    assert {name for name, has in counted(scaled).items() if has} == {"countersign-webhooks"}
    assert all(counted(Release(chart, VARIANTS["several-models"])).values())
    assert not {item["kind"] for item in Release(chart, VARIANTS["several-models"]).objects} & {
        "ScaledObject",
        "HorizontalPodAutoscaler",
    }


def test_pods_are_spread_as_told(chart: helm.Chart, scaled: Release) -> None:
    def spread(release: Release, name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = release.pods()[name]["topologySpreadConstraints"]
        return found

    for name, pod in scaled.pods().items():
        if not name.endswith("-test-stream"):
            (rack,) = pod["topologySpreadConstraints"]
            labels = scaled.of("Deployment", name)["spec"]["template"]["metadata"]["labels"]
            assert rack["labelSelector"]["matchLabels"].items() <= labels.items()
            assert (rack["topologyKey"], rack["maxSkew"], rack["whenUnsatisfiable"]) == ("rack", 2, "DoNotSchedule")
    usual = spread(Release(chart, {}), "countersign-proxy")
    assert [each["topologyKey"] for each in usual] == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
    assert "topologySpreadConstraints" not in Release(chart, {"topologySpread": []}).pods()["countersign-proxy"]


WRONG: dict[str, Values] = {
    "monitoring.prometheus.url: worker.autoscaling": {"worker": ON},
    "proxy.autoscaling.maxReplicas": {"proxy": {"autoscaling": {"enabled": True, "minReplicas": 3, "maxReplicas": 2}}},
    "worker.autoscaling.maxReplicas": {
        "worker": {"autoscaling": {"enabled": True, "minReplicas": 9}},
        "monitoring": PROMETHEUS,
    },
    "reference.autoscaling.minReplicas": {
        "settings": MOE,
        "reference": {"autoscaling": {"enabled": True, "minReplicas": 0}},
        "monitoring": PROMETHEUS,
    },
    "worker.autoscaling.minReplicas": {
        "worker": {"autoscaling": {"enabled": True, "minReplicas": 0}},
        "monitoring": PROMETHEUS,
    },
    "worker.autoscaling.enabled: an all-in-one": {"worker": ON, "allInOne": True},
    "reference.autoscaling.enabled: an all-in-one": {"reference": ON, "allInOne": True},
    "reference.autoscaling.enabled: settings.backends": {
        "settings": MOE | {"backends": []},
        "reference": ON,
        "monitoring": PROMETHEUS,
    },
}


@pytest.mark.parametrize("named", WRONG)
def test_what_cannot_be_scaled_is_refused_by_name(chart: helm.Chart, named: str) -> None:
    with pytest.raises(helm.HelmError, match=named):
        chart.render(WRONG[named], name="countersign")
