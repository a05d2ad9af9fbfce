"""The admin API in the chart, and settings that pods follow."""

from __future__ import annotations

from typing import Any

import helm_python as helm
import pytest

from policies.settings import parse_settings
from tests.helm.rendered import VARIANTS, Release, container

OPS = "[{name: ops, sha256: " + "a" * 64 + "}]"


def test_it_has_a_port_and_a_service_of_its_own(chart: helm.Chart) -> None:
    release = Release(chart, VARIANTS["admin"])
    proxy = container(release.pods()["countersign-proxy"])
    assert {port["name"]: port["containerPort"] for port in proxy["ports"]} == {"http": 8700, "admin": 9000}
    admin = release.of("Service", "-admin")["spec"]
    assert (admin["type"], admin["ports"]) == ("ClusterIP", [{"name": "admin", "port": 80, "targetPort": "admin"}])
    (public,) = release.of("Service", "countersign")["spec"]["ports"]
    assert public["targetPort"] == "http"
    labels = next(
        item["spec"]["template"]["metadata"]["labels"]
        for item in release.objects
        if item["kind"] == "Deployment" and item["metadata"]["name"].endswith("-proxy")
    )
    assert admin["selector"].items() <= labels.items()


def test_its_keys_come_from_a_secret_and_the_program_takes_them(chart: helm.Chart) -> None:
    release = Release(chart, VARIANTS["admin"])
    env = {each["name"]: each for each in container(release.pods()["countersign-proxy"])["env"]}
    reference = {"secretKeyRef": {"name": "admins", "key": "admin-keys"}}
    assert env["COUNTERSIGN_ADMIN__KEYS"] == {"name": "COUNTERSIGN_ADMIN__KEYS", "valueFrom": reference}
    variables = {name: each["value"] for name, each in env.items() if "value" in each and name != "COUNTERSIGN_CONFIG"}
    settings = parse_settings("", {**variables, "COUNTERSIGN_ADMIN__KEYS": OPS} | {"HOME": "/"})
    assert (settings.admin.host, settings.admin.port, settings.admin.keys[0].name) == ("0.0.0.0", 9000, "ops")
    for name, pod in release.pods().items():
        if name != "countersign-proxy":
            assert "ADMIN" not in str(container(pod).get("env")), name


def test_without_it_there_is_nothing_of_it(chart: helm.Chart) -> None:
    release = Release(chart, {})
    assert "-admin" not in str([item["metadata"]["name"] for item in release.objects])
    assert "ADMIN" not in str(release.pods())


def test_only_those_who_are_named_reach_it(chart: helm.Chart) -> None:
    def ports(values: dict[str, Any]) -> list[tuple[int, Any]]:
        rules = Release(chart, values).of("NetworkPolicy", "-proxy")["spec"]["ingress"]
        return [(rule["ports"][0]["port"], rule.get("from")) for rule in rules]

    named = VARIANTS["admin"]
    assert ports(named) == [(8700, None), (9000, [{"podSelector": {"matchLabels": {"role": "ops"}}}])]
    assert ports(named | {"networkPolicy": {"enabled": True}}) == [(8700, None)]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"proxy": {"admin": {"enabled": True}}}, "existingSecret"),
        ({"proxy": {"admin": {"enabled": True, "existingSecret": "s", "port": 80}}}, "port"),
        ({"proxy": {"admin": {"keys": []}}}, "keys"),
        ({"settings": {"admin": {"keys": []}}}, "keys"),
        ({"settings": {"admin": {"port": 1}}}, "port"),
        ({"settings": {"admin": {"host": "0.0.0.0"}}}, "host"),
        ({"settingsChange": "reload"}, "settingsChange"),
    ],
)
def test_what_cannot_be_is_refused_by_name(chart: helm.Chart, values: dict[str, Any], said: str) -> None:
    with pytest.raises(Exception, match=said):
        Release(chart, values)


def test_its_other_settings_are_settings(chart: helm.Chart) -> None:
    release = Release(chart, {"settings": {"admin": {"audit_entries": 5, "watch_seconds": 0.5}}})
    assert release.settings().admin.audit_entries == 5


def test_pods_that_follow_their_settings_are_not_replaced(chart: helm.Chart) -> None:
    def annotations(values: dict[str, Any]) -> list[Any]:
        objects = Release(chart, values).objects
        pods = [item["spec"]["template"]["metadata"] for item in objects if item["kind"] == "Deployment"]
        return [pod.get("annotations") for pod in pods]

    live = VARIANTS["admin"]
    assert annotations(live) == annotations(live | {"settings": live["settings"] | {"audit": {"rate": 0.5}}})
    assert all("checksum/config" not in (found or {}) for found in annotations(live))
    assert all("checksum/config" in found for found in annotations({}))
    # The file is a link in a folder that is mounted whole: one that is mounted by itself would never change.
    for name, pod in Release(chart, live).pods().items():
        mounts = {each["name"]: each for each in container(pod).get("volumeMounts", ())}
        if "config" in mounts:
            assert "subPath" not in mounts["config"], name
