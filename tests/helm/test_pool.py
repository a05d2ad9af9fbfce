"""Who takes work in a release: CPU workers, one set of references per model, the webhook sender."""

from __future__ import annotations

import json
from typing import Any

import helm_python as helm
import pytest

from tests.helm.rendered import MOE, OTHER, VARIANTS, Release, Values, container
from verifier_pool import flying


def commands(release: Release) -> dict[str, list[str]]:
    """Command of every worker process, by its Deployment."""
    return {
        item["metadata"]["name"]: container(item["spec"]["template"]["spec"])["command"]
        for item in release.objects
        if item["kind"] == "Deployment" and not item["metadata"]["name"].endswith("-proxy")
    }


def test_each_kind_of_work_has_pods_of_its_own(chart: helm.Chart) -> None:
    assert commands(Release(chart, VARIANTS["gpu"])) == {
        "countersign-worker": ["countersign", "worker", "--only", "verify", "--processes", "4"],
        "countersign-reference-moe": ["countersign", "worker", "--only", "replay", "--model", "moe"],
        "countersign-webhooks": ["countersign", "worker", "--only", "webhooks"],
    }


def test_only_what_the_settings_need_is_started(chart: helm.Chart) -> None:
    alone = {"countersign-worker": ["countersign", "worker", "--only", "verify"]}
    # Clients register webhooks whatever the settings say.
    sender = {"countersign-webhooks": ["countersign", "worker", "--only", "webhooks"]}
    assert commands(Release(chart, {})) == alone | sender
    assert commands(Release(chart, {"webhooks": {"enabled": False}})) == alone
    assert commands(Release(chart, VARIANTS["proxy-only"])) == {}


def test_all_in_one_is_one_process(chart: helm.Chart) -> None:
    release = Release(chart, VARIANTS["all-in-one"])
    assert commands(release) == {"countersign-worker": ["countersign", "worker"]}
    worker = container(release.pods()["countersign-worker"])
    assert worker["image"].startswith("countersign/verifier:")
    assert worker["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert release.of("Deployment", "-worker")["spec"]["replicas"] == 1
    egress = release.of("NetworkPolicy", "-worker")["spec"]["egress"]
    assert egress[-1]["to"][0]["ipBlock"]["cidr"] == "0.0.0.0/0"
    assert not [item for item in release.objects if item["metadata"]["name"].endswith(("-webhooks", "-moe"))]


def test_all_in_one_without_an_engine_asks_for_no_gpu(chart: helm.Chart) -> None:
    worker = container(Release(chart, {"allInOne": True}).pods()["countersign-worker"])
    assert worker["image"].startswith("countersign/proxy:")
    assert "gpu" not in json.dumps(worker)


@pytest.mark.parametrize("seconds", [None, 120])
@pytest.mark.parametrize("variant", ["gpu", "all-in-one"])
def test_who_is_told_to_stop_may_finish(chart: helm.Chart, variant: str, seconds: int | None) -> None:
    values = VARIANTS[variant]
    rules = {} if seconds is None else {"verification": {"job_timeout": seconds}}
    given = values | {"settings": values.get("settings", {}) | rules}
    job_timeout = Release(chart, given).settings().verification.job_timeout
    assert seconds in (None, job_timeout)
    for name, pod in Release(chart, given).pods().items():
        replays = "reference" in name or variant == "all-in-one"
        if not name.endswith("-proxy") and container(pod)["command"][:2] == ["countersign", "worker"]:
            times = flying.SLOWEST if replays else 1
            assert pod["terminationGracePeriodSeconds"] == times * job_timeout + 60, name


def test_an_engine_gets_its_gpus_and_waits_for_weights(chart: helm.Chart) -> None:
    release = Release(chart, VARIANTS["gpu"])
    pod = release.pods()["countersign-reference-moe"]
    reference = container(pod)
    assert reference["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert pod["runtimeClassName"] == "nvidia"
    assert pod["nodeSelector"] == {"gpu": "h200"}
    assert pod["tolerations"][0]["key"] == "nvidia.com/gpu"
    for name in ("startupProbe", "livenessProbe"):
        probe = reference[name]
        assert probe["periodSeconds"] * probe["failureThreshold"] >= 3600, name
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
    assert volumes["cache"]["persistentVolumeClaim"] == {"claimName": "kernels"}
    assert volumes["models"]["persistentVolumeClaim"] == {"claimName": "weights", "readOnly": True}
    mounts = {mount["mountPath"]: mount for mount in reference["volumeMounts"]}
    assert {"/dev/shm", "/models", "/etc/countersign", "/tmp", "/home/countersign/.cache"} <= mounts.keys()
    assert {mount["name"] for mount in mounts.values()} == volumes.keys()


@pytest.mark.parametrize(("suffix", "surge"), [("-worker", 1), ("-reference-moe", 0), ("-webhooks", 1)])
def test_a_rollout_needs_no_gpu_more_than_there_are(chart: helm.Chart, suffix: str, surge: int) -> None:
    rolling = Release(chart, VARIANTS["gpu"]).of("Deployment", suffix)["spec"]["strategy"]["rollingUpdate"]
    assert rolling == {"maxSurge": surge, "maxUnavailable": 1 - surge}


def test_what_needs_no_engine_has_neither_its_image_nor_a_gpu(chart: helm.Chart) -> None:
    release = Release(chart, VARIANTS["gpu"])
    for name in ("countersign-worker", "countersign-webhooks"):
        pod = release.pods()[name]
        assert container(pod)["image"] == "countersign/proxy:0.1.0"
        assert "gpu" not in json.dumps(pod)
        assert "shm" not in json.dumps(pod)
    assert release.of("Deployment", "-worker")["spec"]["replicas"] == 3


def test_each_model_has_references_of_its_own(chart: helm.Chart) -> None:
    release = Release(chart, VARIANTS["several-models"])
    found = {name: command for name, command in commands(release).items() if "reference" in name}
    assert {command[-1] for command in found.values()} == {"moe", "Qwen/Qwen3-8B"}
    moe, served = release.of("Deployment", "-moe"), release.of("Deployment", next(n for n in found if "qwen" in n))
    assert moe["spec"]["replicas"] == 3
    assert container(moe["spec"]["template"]["spec"])["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert moe["spec"]["template"]["spec"]["nodeSelector"] == {"gpu": "h200"}
    assert served["spec"]["replicas"] == 1
    other = served["spec"]["template"]["spec"]
    assert container(other)["image"] == "countersign/proxy:0.1.0"
    assert "gpu" not in json.dumps(other)
    assert served["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == 1


def test_a_second_reference_has_pods_of_its_own(chart: helm.Chart) -> None:
    engine = {"kind": "vllm_engine", "path": "/models/m"}
    model = {"reference": engine, "second_reference": engine, "second_profile": "/p.json"}
    own = {
        "replicas": 2,
        "gpu": {"count": 2},
        "second": {"gpu": {"resource": "amd.com/gpu"}, "nodeSelector": {"a": "b"}},
    }
    values = {"settings": {"models": {"m": model}}, "reference": {"perModel": {"m": own}}}
    release = Release(chart, values)
    replay = ["countersign", "worker", "--only", "replay", "--model", "m", "--reference"]
    found = {name: command for name, command in commands(release).items() if "reference" in name}
    assert found == {
        "countersign-reference-m": [*replay, "first"],
        "countersign-second-reference-m": [*replay, "second"],
    }
    first, second = (release.pods()[name] for name in found)
    assert container(first)["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert container(second)["resources"]["limits"] == {"amd.com/gpu": 2}
    assert "nodeSelector" not in first
    assert second["nodeSelector"] == {"a": "b"}
    budgets = [item["metadata"]["name"] for item in release.objects if item["kind"] == "PodDisruptionBudget"]
    assert set(budgets) == {"countersign-proxy", *commands(release)}


NAMES = (
    "a",
    "a.2",
    "a.b",
    "a-b",
    "a/b",
    "a_b",
    "a-second",
    "second-a",
    "A-B",
    "-a-b",
    "模型",
    "x" * 30,
    "x" * 40,
    "x" * 41,
    "Qwen/Qwen3-8B:free",
)


def test_any_model_has_a_name_that_kubernetes_takes_and_nobody_shares(chart: helm.Chart) -> None:
    served = {"kind": "vllm_http", "url": "http://a"}
    model = {"reference": served, "second_reference": served, "second_profile": "/p.json"}
    models = dict.fromkeys(NAMES, model)
    for release_name in ("countersign", "a" * 53):
        release = Release(chart, {"settings": {"models": models}}, name=release_name)
        deployments = [item for item in release.objects if item["kind"] == "Deployment" and "-reference-" in str(item)]
        names = {item["metadata"]["name"] for item in deployments}
        labels = {item["metadata"]["labels"]["countersign/model"] for item in deployments}
        assert len(names) == len(labels) == 2 * len(NAMES)
        for name in names | labels:
            assert len(name) <= 63
            assert name == name.lower()
            assert name[0].isalnum()
            assert name[-1].isalnum()
        asked = [container(item["spec"]["template"]["spec"])["command"][5:] for item in deployments]
        assert sorted(asked) == sorted([n, "--reference", which] for n in NAMES for which in ("first", "second"))


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS.keys())
def test_probes_ask_for_what_the_process_does(chart: helm.Chart, values: Values) -> None:
    release = Release(chart, values)
    for name, command in commands(release).items():
        spec: Any = container(release.pods()[name])
        role = [word for word in command[2:] if command[-2] != "--processes" or word not in command[-2:]]
        assert spec["startupProbe"]["exec"]["command"] == ["python3", "-m", "verifier_pool.ready", *role]
        assert spec["livenessProbe"]["exec"]["command"] == ["python3", "-m", "verifier_pool.ready", "--alive", *role]
        assert spec["livenessProbe"]["timeoutSeconds"] > 5


def test_disruption_budgets_are_one_per_set_of_pods(chart: helm.Chart) -> None:
    release = Release(chart, {"settings": OTHER})
    budgets = [item["metadata"]["name"] for item in release.objects if item["kind"] == "PodDisruptionBudget"]
    assert set(budgets) == {"countersign-proxy", *commands(release)}


def test_durability_reaches_the_program_and_the_store(chart: helm.Chart) -> None:
    release = Release(chart, VARIANTS["persistent"])
    assert release.settings().durability.aof
    args = container(release.pods()["countersign-valkey"])["args"]
    assert args[args.index("--appendonly") + 1] == "yes"
    assert args[args.index("--appendfsync") + 1] == "always"
    relaxed = {"redis": {"bundled": {"persistence": {"enabled": True}}}}
    assert "--appendfsync" not in container(Release(chart, relaxed).pods()["countersign-valkey"])["args"]
    away = Release(chart, VARIANTS["external-redis"]).settings().durability
    assert (away.aof, away.replicas) == (True, 1)


@pytest.mark.parametrize("name", ["proxy", "worker", "reference-moe", "webhooks"])
def test_the_store_is_named_by_the_same_secret_everywhere(chart: helm.Chart, name: str) -> None:
    release = Release(chart, {"settings": MOE, "redis": {"existingSecret": "redis", "existingSecretKey": "url"}})
    env = {variable["name"]: variable for variable in container(release.pods()[f"countersign-{name}"])["env"]}
    assert env["COUNTERSIGN_REDIS_URL"]["valueFrom"] == {"secretKeyRef": {"name": "redis", "key": "url"}}
