"""compose.yaml: one machine with one GPU."""

from __future__ import annotations

import re
from typing import Any

import helm_python as helm
import pytest
import yaml
from compose_spec import PyCompose

from proxy import serve
from tests.helm import schema
from tests.helm.rendered import Release
from tests.images.dockerfile import ROOT, stages
from verifier_pool import ready, worker

FILE = ROOT / "compose.yaml"
OURS = ("proxy", "worker", "reference", "webhooks")


def composed(**variables: str) -> dict[str, Any]:
    """The file with its variables replaced and its anchors merged."""
    text = re.sub(
        r"\$\{(\w+):-([^}]*)\}", lambda found: variables.get(found[1], found[2]), FILE.read_text(encoding="utf-8")
    )
    assert "${" not in text
    tree: dict[str, Any] = yaml.safe_load(text)
    return tree


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = composed()["services"]
    return found


def test_the_specification_knows_every_key() -> None:
    known = PyCompose.from_yaml(yaml.safe_dump(composed()))
    assert set(known.service_names()) == {"valkey", *OURS}


def test_a_wrong_key_is_refused() -> None:
    tree = composed()
    tree["services"]["proxy"]["healthchek"] = {}
    with pytest.raises(ValueError, match="healthchek"):
        PyCompose.from_yaml(yaml.safe_dump(tree))


@pytest.mark.parametrize("name", OURS)
def test_each_runs_a_command_of_its_image(services: dict[str, Any], name: str) -> None:
    service = services[name]
    target = "verifier" if name == "reference" else "proxy"
    assert service["image"] == f"countersign/{target}:latest"
    if "build" in service:
        assert service["build"]["target"] == target
        assert target in stages()
    command = service["command"]
    if name != "proxy":
        assert command[0] == "worker"
        worker._parser().parse_args(command[1:])
        assert service["healthcheck"]["test"][1:4] == ["python3", "-m", "verifier_pool.ready"]
        probe = ready._parser().parse_args(service["healthcheck"]["test"][4:])
        assert probe.alive
        assert probe.only == command[-1]


def test_every_image_is_built_once(services: dict[str, Any]) -> None:
    built = [service["image"] for service in services.values() if "build" in service]
    assert sorted(built) == ["countersign/proxy:latest", "countersign/verifier:latest"]
    assert {services[name]["image"] for name in OURS} == set(built)


def test_all_kinds_of_work_are_done_once(services: dict[str, Any]) -> None:
    work = [service["command"][2] for name, service in services.items() if name in OURS and name != "proxy"]
    assert sorted(work) == ["replay", "verify", "webhooks"]


def test_one_gpu_is_the_references(services: dict[str, Any]) -> None:
    asked = {
        name: service["deploy"]["resources"]["reservations"]["devices"]
        for name, service in services.items()
        if "deploy" in service
    }
    assert asked == {"reference": [{"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}]}
    assert services["reference"]["shm_size"] == "2gb"
    assert services["reference"]["healthcheck"]["start_period"] == "30m"


@pytest.mark.parametrize("name", ["valkey", *OURS])
def test_each_is_locked_down_and_comes_back(services: dict[str, Any], name: str) -> None:
    service = services[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["restart"] == "unless-stopped"
    assert not {"privileged", "network_mode", "pid"} & service.keys()


def test_homes_are_the_users_that_the_images_name(services: dict[str, Any]) -> None:
    for name in OURS:
        user, group = stages()["verifier" if name == "reference" else "proxy"].last("USER").split(":")
        (home,) = [entry for entry in services[name]["tmpfs"] if entry.startswith("/home/countersign:")]
        assert {f"uid={user}", f"gid={group}"} <= set(home.partition(":")[2].split(","))
    # Kernels that were compiled are loaded from there.
    assert all(entry.endswith("exec") for entry in services["reference"]["tmpfs"])


def test_only_what_must_reaches_anything_outside(services: dict[str, Any]) -> None:
    assert composed()["networks"]["store"] == {"internal": True}
    outside = {name for name, service in services.items() if "outside" in service["networks"]}
    assert outside == {"proxy", "webhooks"}
    assert {name for name, service in services.items() if "ports" in service} == {"proxy"}
    assert services["proxy"]["ports"] == ["127.0.0.1:8700:8700"]


def test_no_secret_is_in_it(services: dict[str, Any]) -> None:
    for name in OURS:
        assert services[name]["env_file"] == ["countersign.env"]
        store = {"COUNTERSIGN_REDIS_URL": "redis://valkey:6379/0"}
        # The published port and the image's health check do not follow the settings, so these follow them.
        port = {"COUNTERSIGN_PORT": services[name]["ports"][0].rpartition(":")[2]} if name == "proxy" else {}
        assert services[name]["environment"] == store | port
    assert "environment" not in services["valkey"]


def test_what_is_in_hand_may_be_finished(services: dict[str, Any]) -> None:
    """As long as the chart lets it."""
    values = {"settings": {"models": {"m": {"reference": {"kind": "vllm_engine", "path": "/models/m"}}}}}
    with helm.Chart.load(schema.CHART) as chart:
        pods = Release(chart, values).pods()
    for name, part in {"worker": "worker", "reference": "reference-m"}.items():
        minutes = int(services[name]["stop_grace_period"].removesuffix("m"))
        assert minutes * 60 >= pods[f"countersign-{part}"]["terminationGracePeriodSeconds"]
    drain = serve._parser().parse_args(services["proxy"]["command"][1:]).drain
    assert services["proxy"]["stop_grace_period"] == f"{int(drain) // 60}m15s"


def test_the_store_keeps_what_it_is_given(services: dict[str, Any]) -> None:
    command = services["valkey"]["command"]
    assert command[command.index("--appendonly") + 1] == "yes"
    assert command[command.index("--maxmemory-policy") + 1] == "noeviction"
    assert services["valkey"]["volumes"] == ["valkey:/data"]
    for name in OURS:
        assert services[name]["depends_on"] == {"valkey": {"condition": "service_healthy"}}


def test_digests_reach_the_build() -> None:
    digest = "sha256:" + "a" * 64
    given = composed(PYTHON_DIGEST=digest, VLLM_DIGEST=digest)["services"]
    assert given["proxy"]["build"]["args"] == {"PYTHON_DIGEST": digest}
    assert given["reference"]["build"]["args"] == {"PYTHON_DIGEST": digest, "VLLM_DIGEST": digest}
