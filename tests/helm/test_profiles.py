"""The profiles: values to start from, each for one kind of place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helm_python as helm
import kubernetes_validate
import pytest
import yaml

from tests.helm import crds, schema
from tests.helm.rendered import Release, Values, container

FOLDER = schema.CHART / "profiles"
NAMES = ("trial-cpu", "single-gpu", "marketplace")


def values_of(name: str) -> Values:
    found: Values = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    return found


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def release(chart: helm.Chart, name: str) -> Release:
    return Release(chart, values_of(name))


def test_there_are_no_others() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(NAMES)


def test_it_lints(name: str) -> None:
    report = helm.lint(schema.CHART, values_of(name), strict=True, kube_version="v1.30.0")
    assert report["errors"] == []
    assert [found for found in report["messages"] if found["severity"] > 1] == []


@pytest.mark.parametrize("version", ["1.25", "1.33"])
def test_kubernetes_knows_every_field(release: Release, version: str) -> None:
    for item in release.objects:
        if item["kind"] in crds.SCHEMAS:
            crds.validate(item)
        else:
            kubernetes_validate.validate(item, version, strict=True)


def test_the_program_takes_its_settings(release: Release) -> None:
    assert [backend.model for backend in release.settings().backends][:1] == ["my-model"]


def test_every_secret_is_someone_elses(release: Release) -> None:
    assert not [item for item in release.objects if item["kind"] == "Secret"]
    for pod in release.pods().values():
        for variable in container(pod).get("env", ()):
            if variable["name"] not in {"COUNTERSIGN_CONFIG", "HOME", "BASE_URL", "SECONDS", "MODEL", "VERDICTS"}:
                assert "value" not in variable, variable["name"]


def named(pod: dict[str, Any]) -> set[str]:
    spec = container(pod)
    whole = {source["secretRef"]["name"] for source in spec.get("envFrom", ())}
    single = [variable["valueFrom"]["secretKeyRef"]["name"] for variable in spec["env"] if "valueFrom" in variable]
    return whole | set(single)


def test_a_trial_is_small_and_needs_no_gpu(chart: helm.Chart) -> None:
    release = Release(chart, values_of("trial-cpu"))
    assert "gpu" not in yaml.safe_dump(release.objects)
    replicas = {item["spec"]["replicas"] for item in release.objects if item["kind"] == "Deployment"}
    assert replicas == {1}
    assert release.of("StatefulSet")["metadata"]["name"] == "countersign-valkey"
    assert {item["kind"] for item in release.objects}.isdisjoint({"HorizontalPodAutoscaler", "PodDisruptionBudget"})


def test_a_single_gpu_is_the_references(chart: helm.Chart) -> None:
    pods = Release(chart, values_of("single-gpu")).pods()
    asked = {
        name: container(pod).get("resources", {}).get("limits", {}).get("nvidia.com/gpu", 0)
        for name, pod in pods.items()
    }
    assert {name: count for name, count in asked.items() if count} == {"countersign-reference-my-model": 1}
    reference = pods["countersign-reference-my-model"]
    assert reference["runtimeClassName"] == "nvidia"
    mounts = {mount["mountPath"] for mount in container(reference)["volumeMounts"]}
    assert {"/dev/shm", "/home/countersign/.cache", "/models"} <= mounts


def test_a_marketplace_trusts_nobody(chart: helm.Chart) -> None:
    release = Release(chart, values_of("marketplace"))
    settings = release.settings()
    assert not any(backend.trusted for backend in settings.backends)
    assert settings.models["my-model"].second_reference is not None
    assert settings.verification.on_reject == "retry"
    assert release.kinds("-valkey") == set()
    policies = {item["metadata"]["name"] for item in release.objects if item["kind"] == "NetworkPolicy"}
    parts = ("proxy", "worker", "reference", "webhooks")
    assert policies == {f"countersign-{part}" for part in parts}
    for item in release.objects:
        if item["kind"] == "NetworkPolicy":
            assert all(rule["to"] for rule in item["spec"]["egress"]), item["metadata"]["name"]
    scaled = {item["metadata"]["name"] for item in release.objects if item["kind"] == "ScaledObject"}
    assert scaled == {
        "countersign-worker",
        "countersign-reference-my-model",
        "countersign-second-reference-my-model",
    }
    pods = release.pods()
    assert "countersign-backends" in named(pods["countersign-proxy"])
    assert {item["kind"] for item in release.objects} >= {"ServiceMonitor", "PodMonitor", "PrometheusRule"}
    assert not any("countersign-backends" in named(pod) for name, pod in pods.items() if name != "countersign-proxy")


def test_what_a_profile_names_is_explained_in_it(name: str) -> None:
    """Every Secret and claim of a profile, but for what all of them share, is in the comment at its top."""
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    top = text.partition("\n\n")[0]
    values = values_of(name)
    wanted = [values["existingSecret"]] if name != "single-gpu" else []
    wanted += [values.get(part, {}).get("existingSecret", "") for part in ("redis", "proxy", "test")]
    wanted += [values.get("reference", {}).get("cacheClaim", "") if name == "single-gpu" else ""]
    for secret in filter(None, wanted):
        assert secret in top, secret


def test_missing_profiles_are_noted(chart: helm.Chart) -> None:
    values = values_of("marketplace")
    notes = Release(chart, values).notes
    assert "settings.models.my-model.profile is not among" in notes
    assert "files.my-model-2\\.json=PATH" in notes
    whole = Release(chart, values | {"files": {"my-model.json": "{}", "my-model-2.json": "{}"}}).notes
    assert "is not among" not in whole


def test_the_commands_in_them_name_them() -> None:
    for name in NAMES:
        text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
        path = f"helm/profiles/{name}.yaml"
        assert f"-f {path}" in text
        assert (Path(schema.CHART).parent / path).is_file()
