"""The chart, rendered and linted by Helm's own engine."""

from __future__ import annotations

import functools
import inspect
import ipaddress

import helm_python as helm
import kubernetes_validate
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.settings import parse_settings
from policies.subscription import may_reach
from proxy import serve
from proxy.recorder import Recorder
from tests.helm import crds, schema
from tests.helm.rendered import MOE, OTHER, VARIANTS, Release, Values, container

ODD = (
    *("127.0.0.1", "10.1.2.3", "169.254.169.254", "100.100.100.100", "192.0.0.170", "::1", "::a00:1", "fec0::1"),
    *("::ffff:10.0.0.1", "64:ff9b::a00:1", "64:ff9b:1::a00:1", "fd00:ec2::254", "2002:a00:1::", "2001:0:a00:1::"),
)
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


@functools.cache
def _external(chart: helm.Chart) -> Release:
    return Release(chart, VARIANTS["external-redis"])


@pytest.fixture(params=VARIANTS)
def release(request: pytest.FixtureRequest, chart: helm.Chart) -> Release:
    return Release(chart, VARIANTS[request.param])


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS.keys())
def test_lint_is_clean(values: Values) -> None:
    report = helm.lint(schema.CHART, values, strict=True, kube_version="v1.30.0")
    assert report["errors"] == []
    assert [found for found in report["messages"] if found["severity"] > 1] == []


@pytest.mark.parametrize("version", ["1.25", "1.33"])
def test_kubernetes_knows_every_field(release: Release, version: str) -> None:
    for item in release.objects:
        if item["kind"] in crds.SCHEMAS:
            crds.validate(item)
        else:
            kubernetes_validate.validate(item, version, strict=True)


def test_every_pod_is_locked_down(release: Release) -> None:
    for name, pod in release.pods().items():
        assert pod["automountServiceAccountToken"] is False, name
        # A service called countersign would otherwise set COUNTERSIGN_PORT=tcp://… in every pod.
        assert pod["enableServiceLinks"] is False, name
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        context = container(pod)["securityContext"]
        assert context["readOnlyRootFilesystem"] is True, name
        assert context["allowPrivilegeEscalation"] is False, name
        assert context["capabilities"] == {"drop": ["ALL"]}, name


def test_selectors_match_their_own_pods_only(release: Release) -> None:
    """One set of pods each; a network policy may be for all pods of a component."""
    labels = {
        item["metadata"]["name"]: item["spec"]["template"]["metadata"]["labels"]
        for item in release.objects
        if "template" in item.get("spec", {})
    }
    for item in release.objects:
        selector = item.get("spec", {}).get("selector") or item.get("spec", {}).get("podSelector")
        if not selector:
            continue
        wanted = selector.get("matchLabels", selector)
        hits = [own for own in labels.values() if wanted.items() <= own.items()]
        if item["kind"] == "ServiceMonitor":
            services = [other for other in release.objects if other["kind"] == "Service"]
            assert sum(wanted.items() <= other["metadata"]["labels"].items() for other in services) == 1
        elif item["kind"] == "PodMonitor":
            (among,) = item["spec"]["selector"]["matchExpressions"]
            parts = {own[among["key"]] for own in hits}
            assert parts - {"proxy", "valkey", "test"} == parts & set(among["values"]), item["metadata"]["name"]
        elif item["kind"] == "NetworkPolicy":
            assert len({own["app.kubernetes.io/component"] for own in hits}) <= 1, item["metadata"]["name"]
        else:
            assert len(hits) == 1, item["metadata"]["name"]


def test_names_are_unique(release: Release) -> None:
    names = [(item["kind"], item["metadata"]["name"]) for item in release.objects]
    assert len(set(names)) == len(names)


def test_proxy_is_probed_where_it_listens(chart: helm.Chart) -> None:
    release = Release(chart, {"proxy": {"port": 9000, "service": {"port": 80}}})
    proxy = container(release.pods()["countersign-proxy"])
    assert proxy["command"][:2] == ["countersign", "serve"]
    assert proxy["ports"] == [{"name": "http", "containerPort": 9000}]
    assert proxy["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert proxy["startupProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert proxy["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}
    settings = release.settings()
    assert (settings.host, settings.port) == ("0.0.0.0", 9000)
    (port,) = release.of("Service", "countersign")["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (80, "http")
    (url,) = [env for env in container(release.pods()["countersign-test-stream"])["env"] if env["name"] == "BASE_URL"]
    assert url["value"] == "http://countersign:80"


@pytest.mark.parametrize(("drain", "stop"), [(600, 15), (10, 10), (0, 0)])
def test_drain_comes_from_one_value(chart: helm.Chart, drain: int, stop: int) -> None:
    pod = Release(chart, {"proxy": {"drainSeconds": drain}}).pods()["countersign-proxy"]
    assert container(pod)["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", str(stop)]
    assert serve._parser().parse_args(container(pod)["command"][2:]).drain == drain
    closing, recording = serve._SHUTDOWN_SECONDS, inspect.signature(Recorder.stop).parameters["timeout"].default
    assert pod["terminationGracePeriodSeconds"] == stop + drain + closing + recording


def test_settings_reach_the_program(chart: helm.Chart) -> None:
    release = Release(chart, VARIANTS["gpu"])
    secrets = {
        "COUNTERSIGN_WEBHOOK__SECRET": "whsec_AAAA",
        "COUNTERSIGN_BACKENDS__0__API_KEY": "upstream",
        "COUNTERSIGN_KEYS": "[{name: app, sha256: " + "ab" * 32 + "}]",
    }
    settings = release.settings(secrets)
    assert settings.models["moe"].vocab_size == 151936
    assert settings.backends[0].routed_experts == "buffer"
    assert settings.backends[0].api_key is not None
    assert settings.bounds.request_bytes == 67108864
    assert settings.keys[0].name == "app"
    assert settings.redis_url == "redis://countersign-valkey:6379/0"
    config = release.of("ConfigMap")
    assert config["data"]["moe.json"] == '{"checks": {}}\n'


def test_defaults_parse(chart: helm.Chart) -> None:
    assert Release(chart, {}).settings().verification == parse_settings("", {}).verification


def test_new_settings_restart_the_pods(chart: helm.Chart) -> None:
    def sums(values: Values) -> set[str]:
        objects = Release(chart, values).objects
        pods = [item["spec"]["template"] for item in objects if item["kind"] == "Deployment"]
        return {pod["metadata"]["annotations"]["checksum/config"] for pod in pods}

    assert len(sums({})) == 1
    assert sums({}) != sums({"settings": {"audit": {"rate": 0.5}}})
    assert sums({}) == sums({"proxy": {"replicas": 5}})


def test_secrets_come_by_reference_only(chart: helm.Chart) -> None:
    release = Release(chart, VARIANTS["external-redis"] | {"existingSecret": "shared"})
    for part in ("proxy", "worker", "webhooks"):
        spec = container(release.pods()[f"countersign-{part}"])
        assert spec["envFrom"] == [{"secretRef": {"name": "shared"}}, {"secretRef": {"name": f"for-{part}"}}]
        env = {variable["name"]: variable for variable in spec["env"]}
        reference = {"secretKeyRef": {"name": "redis", "key": "redis-url"}}
        assert env["COUNTERSIGN_REDIS_URL"] == {"name": "COUNTERSIGN_REDIS_URL", "valueFrom": reference}
        assert {name for name, variable in env.items() if "value" in variable} == {"COUNTERSIGN_CONFIG", "HOME"}
    assert release.settings().redis_url is None
    assert not [item for item in release.objects if item["kind"] == "Secret"]


def test_bundled_valkey_goes_when_redis_is_given(chart: helm.Chart) -> None:
    assert Release(chart, VARIANTS["external-redis"]).kinds("-valkey") == set()
    bundled = Release(chart, {})
    assert bundled.kinds("-valkey") == {"StatefulSet", "Service", "NetworkPolicy"}
    args = container(bundled.pods()["countersign-valkey"])["args"]
    assert args[args.index("--maxmemory-policy") + 1] == "noeviction"


def test_persistent_valkey_writes_to_its_claim(chart: helm.Chart) -> None:
    release = Release(chart, VARIANTS["persistent"])
    (claim,) = release.of("StatefulSet")["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["storageClassName"] == "fast"
    assert claim["spec"]["resources"]["requests"]["storage"] == "5Gi"
    pod = release.pods()["countersign-valkey"]
    args = container(pod)["args"]
    assert args[args.index("--appendonly") + 1] == "yes"
    assert "volumes" not in pod


def test_network_policies(chart: helm.Chart) -> None:
    release = Release(chart, VARIANTS["external-redis"])
    proxy = release.of("NetworkPolicy", "-proxy")["spec"]
    (rule,) = proxy["ingress"]
    assert rule["ports"] == [{"port": 8700}]
    assert rule["from"][0] == {"podSelector": {}}
    own = Release(chart, VARIANTS["external-redis"]).of("Pod", "-test-stream")["metadata"]["labels"]
    assert rule["from"][1]["podSelector"]["matchLabels"].items() <= own.items()
    assert proxy["egress"][-1]["to"][0]["ipBlock"]["except"] == ["169.254.0.0/16"]
    for part in ("worker", "reference"):
        spec = release.of("NetworkPolicy", f"-{part}")["spec"]
        assert "ingress" not in spec
        assert "Ingress" in spec["policyTypes"]
        assert [sorted(port["port"] for port in rule["ports"]) for rule in spec["egress"]] == [[53, 53], [6379, 26379]]
    receivers = release.of("NetworkPolicy", "-webhooks")["spec"]["egress"][-1]["to"][0]["ipBlock"]
    assert {"10.0.0.0/8", "169.254.0.0/16"} <= set(receivers["except"])


@given(st.ip_addresses() | st.sampled_from(sorted(map(ipaddress.ip_address, ODD), key=str)))
def test_webhooks_reach_no_more_than_the_sender_would(chart: helm.Chart, address: IPAddress) -> None:
    """The policy is a second lock of the same door."""
    release = _external(chart)
    allowed = any(
        address in ipaddress.ip_network(block["cidr"])
        and not any(address in ipaddress.ip_network(net) for net in block["except"])
        for peer in release.of("NetworkPolicy", "-webhooks")["spec"]["egress"][-1]["to"]
        if (block := peer["ipBlock"]) and ipaddress.ip_network(block["cidr"]).version == address.version
    )
    assert not allowed or may_reach(str(address))


def test_webhooks_reach_the_open_internet(chart: helm.Chart) -> None:
    for address in map(ipaddress.ip_address, ("1.1.1.1", "193.0.0.1", "2606:4700::1111", "2a00:1450::1")):
        assert may_reach(str(address))
        blocks = [
            peer["ipBlock"] for peer in _external(chart).of("NetworkPolicy", "-webhooks")["spec"]["egress"][-1]["to"]
        ]
        (block,) = [each for each in blocks if ipaddress.ip_network(each["cidr"]).version == address.version]
        assert address in ipaddress.ip_network(block["cidr"])
        assert not any(address in ipaddress.ip_network(net) for net in block["except"])


def test_only_what_uses_it_reaches_the_bundled_valkey(chart: helm.Chart) -> None:
    release = Release(chart, {"settings": MOE})
    (rule,) = release.of("NetworkPolicy", "-valkey")["spec"]["ingress"]
    allowed = {peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in rule["from"]}
    users = {
        item["metadata"]["labels"]["app.kubernetes.io/component"]
        for item in release.objects
        if item["kind"] == "Deployment"
    }
    assert allowed == users == {"proxy", "worker", "reference", "webhooks"}


def test_images(chart: helm.Chart) -> None:
    pods = Release(chart, VARIANTS["persistent"]).pods()
    assert container(pods["countersign-proxy"])["image"] == "countersign/proxy@sha256:" + "a" * 64
    assert container(pods["countersign-worker"])["image"] == "countersign/proxy@sha256:" + "a" * 64
    engine = Release(chart, VARIANTS["gpu"]).pods()["countersign-reference-moe"]
    assert container(engine)["image"] == "countersign/verifier:0.1.0"


def test_notes_warn_of_what_is_missing(chart: helm.Chart) -> None:
    bare = Release(chart, {}).notes
    assert "COUNTERSIGN_KEYS" in bare
    assert "trials" in bare
    assert "none is replayed" in bare
    complete = Release(chart, VARIANTS["external-redis"] | {"settings": MOE, "existingSecret": "shared"}).notes
    for word in ("COUNTERSIGN_KEYS", "trials", "nobody", "none is replayed", "is false"):
        assert word not in complete
    assert "rollout status deployment/countersign-reference-moe" in complete
    for part in ("worker", "reference", "webhooks"):
        values = {"settings": MOE, part: {"enabled": False}}
        assert f"{part}.enabled is false" in Release(chart, values).notes


def test_notes_tell_of_policies_that_shut_something_out(chart: helm.Chart) -> None:
    def notes(policy: Values, **more: object) -> str:
        return Release(chart, {"settings": OTHER, "networkPolicy": {"enabled": True, **policy}, **more}).notes

    rule: Values = {"to": [{"ipBlock": {"cidr": "10.0.0.5/32"}}]}
    peer: Values = {"namespaceSelector": {}}
    for more in ({}, {"allInOne": True}):
        assert "the reference of Qwen/Qwen3-8B is a vLLM server" in notes({}, **more)
        assert "is a vLLM server" not in notes({"reference": {"egress": [rule]}}, **more)
    assert "is a vLLM server" not in notes({}, reference={"enabled": False})
    assert "is a vLLM server" not in notes({"enabled": False})
    scraped: Values = {"serviceMonitor": {"enabled": True}}
    unseen = "Prometheus may not read the proxies' metrics"
    assert unseen in notes({"proxy": {"from": [peer]}}, monitoring=scraped)
    assert unseen not in notes({"proxy": {"from": [peer]}, "monitoring": {"from": [peer]}}, monitoring=scraped)
    assert unseen not in notes({}, monitoring=scraped) + notes({"proxy": {"from": [peer]}})


def test_long_release_names_fit(chart: helm.Chart) -> None:
    for item in Release(chart, {"settings": OTHER}, name="a" * 53).objects:
        assert len(item["metadata"]["name"]) <= 63


def test_the_proxy_may_use_what_its_bounds_let_it_hold(chart: helm.Chart) -> None:
    release = Release(chart, {})
    limit = container(release.pods()["countersign-proxy"])["resources"]["limits"]["memory"]
    assert limit.endswith("Gi")
    evidence = inspect.signature(Recorder.__init__).parameters["max_bytes"].default
    assert int(limit[:-2]) * 2**30 > release.settings().bounds.held_bytes + evidence + 2**28


def test_every_template_is_rendered_by_some_values(chart: helm.Chart) -> None:
    """So that none escapes what is held of all variants."""
    made = {path for values in VARIANTS.values() for path, text in Release(chart, values).files.items() if text.strip()}
    folder = schema.CHART / "templates"
    templates = [path for path in folder.rglob("*.yaml") if not path.name.startswith("_")]
    assert len(templates) >= 15
    for template in templates:
        assert any(path.endswith(f"templates/{template.relative_to(folder)}") for path in made), template.name
