"""Wrong values stop a release, and the message names them."""

from __future__ import annotations

import json

import helm_python as helm
import kubernetes_validate
import pytest

from policies.errors import SettingsError
from policies.settings import parse_settings
from tests.helm import schema
from tests.helm.rendered import MOE, Release, Values


def test_schema_is_what_the_settings_say() -> None:
    assert schema.SCHEMA.read_text(encoding="utf-8") == schema.text(), "run python -m tests.helm.schema"


SERVER = {"name": "a", "url": "https://gpu.example.com", "model": "m"}

WRONG: list[tuple[Values, str]] = [
    ({"proxi": {}}, "proxi"),
    ({"proxy": {"replica": 2}}, "replica"),
    ({"proxy": {"replicas": -1}}, "/proxy/replicas"),
    ({"proxy": {"port": 80}}, "/proxy/port"),
    ({"proxy": {"drainSeconds": "5m"}}, "/proxy/drainSeconds"),
    ({"reference": {"gpu": {"count": "two"}}}, "/reference/gpu/count"),
    ({"reference": {"gpus": 1}}, "gpus"),
    ({"reference": {"perModel": {"moe": {"gpu": {"counts": 2}}}}}, "counts"),
    ({"reference": {"perModel": {"moe": {"enabled": False}}}}, "enabled"),
    ({"worker": {"gpu": {"count": 1}}}, "gpu"),
    ({"worker": {"processes": 0}}, "/worker/processes"),
    ({"webhooks": {"processes": 2}}, "processes"),
    ({"allInOne": "yes"}, "/allInOne"),
    ({"monitoring": {"podMonitor": {"port": 80}}}, "/monitoring/podMonitor/port"),
    ({"monitoring": {"podMonitor": {"enable": True}}}, "enable"),
    ({"monitoring": {"rules": {"coverageShare": 50}}}, "/monitoring/rules/coverageShare"),
    ({"networkPolicy": {"collector": {"ports": []}}}, "/networkPolicy/collector/ports"),
    ({"settings": {"metrics": {"every": 0}}}, "/settings/metrics/every"),
    ({"settings": {"metrics": {"endpoint": "http://user:word@collector"}}}, "/settings/metrics/endpoint"),
    ({"networkPolicy": {"redis": {"ports": []}}}, "/networkPolicy/redis/ports"),
    ({"settings": {"durability": {"replicas": -1}}}, "/settings/durability/replicas"),
    ({"settings": {"durability": {"fsync": True}}}, "fsync"),
    ({"image": {"proxy": {"digest": "latest"}}}, "/image/proxy/digest"),
    ({"redis": {"url": "redis://user:secret@host"}}, "url"),
    ({"networkPolicy": {"enabled": "yes"}}, "/networkPolicy/enabled"),
    ({"files": {"countersign.yaml": ""}}, "countersign.yaml"),
    ({"settings": {"backendz": []}}, "backendz"),
    ({"settings": {"audit": {"rate": 1.5}}}, "/settings/audit/rate"),
    ({"settings": {"backends": [SERVER | {"url": "gpu.example.com"}]}}, "/settings/backends/0/url"),
    ({"settings": {"backends": [{"name": "a"}]}}, "url"),
    ({"settings": {"backends": [SERVER | {"engine": "two\nlines"}]}}, "/settings/backends/0/engine"),
    ({"settings": {"backends": [SERVER | {"served_model": "a\u202eb"}]}}, "/settings/backends/0/served_model"),
    ({"settings": {"models": {"m": {"reference": {"kind": "vllm_engine"}}}}}, "path"),
    ({"settings": {"models": {"m": {"reference": {"kind": "vllm_engine", "path": None}}}}}, "path"),
    ({"settings": {"models": {"m": {"reference": {"kind": "vllm_http", "url": ""}}}}}, "url"),
    ({"settings": {"models": {"m": {"reference": {"kind": "vllm_http", "path": "/m"}}}}}, "url"),
    ({"settings": {"models": {"m": {"second_reference": {"kind": "vllm_http", "url": "http://h"}}}}}, "second_profile"),
    ({"settings": {"models": {"m": {"second_profile": "/etc/countersign/b.json"}}}}, "second_reference"),
    ({"settings": {"telemetry": {"traces": "file"}}}, "file"),
    ({"settings": {"deliveries": {"networks": ["intranet"]}}}, "/settings/deliveries/networks/0"),
    ({"settings": {"bounds": {"request_bytes": 1e300}}}, "/settings/bounds/request_bytes"),
    # Neither secrets nor what the chart sets belong in a ConfigMap.
    ({"settings": {"backends": [SERVER | {"api_key": "k"}]}}, "api_key"),
    ({"settings": {"audit": {"secret": "s"}}}, "secret"),
    ({"settings": {"webhook": {"url": "https://x", "secret": "s"}}}, "secret"),
    ({"settings": {"metrics": {"token": "t" * 20}}}, "token"),
    ({"settings": {"keys": []}}, "keys"),
    ({"settings": {"redis_url": "redis://x"}}, "redis_url"),
    ({"settings": {"port": 1}}, "port"),
    ({"proxy": {"env": [{"name": "COUNTERSIGN_AUDIT__SECRET", "value": "s"}]}}, "/proxy/env/0"),
    ({"proxy": {"env": [{"name": "COUNTERSIGN_RECEIPTS__SIGNING_KEYS", "value": "s"}]}}, "/proxy/env/0"),
    ({"worker": {"env": [{"name": "COUNTERSIGN_RECEIPTS__SIGNING_KEYS__0", "value": "s"}]}}, "/worker/env/0"),
    ({"worker": {"env": [{"name": "COUNTERSIGN_STORAGE__encryption_keys__12", "value": "s"}]}}, "/worker/env/0"),
    ({"settings": {"receipts": {"signing_keys": "s"}}}, "signing_keys"),
    ({"worker": {"env": [{"name": "HF_TOKEN", "value": "s"}]}}, "/worker/env/0"),
    ({"proxy": {"env": [{"name": "COUNTERSIGN_PORT", "value": "1"}]}}, "/proxy/env/0/name"),
    ({"proxy": {"env": [{"name": "COUNTERSIGN_port", "value": "1"}]}}, "/proxy/env/0/name"),
    # However it is spelt, and in whatever it hides.
    ({"proxy": {"env": [{"name": "COUNTERSIGN_audit__secret", "value": "s"}]}}, "/proxy/env/0"),
    ({"webhooks": {"env": [{"name": "COUNTERSIGN_WEBHOOK", "value": "{secret: s}"}]}}, "/webhooks/env/0/value"),
    ({"proxy": {"env": [{"name": "COUNTERSIGN_BACKENDS", "value": "[{API_KEY: s}]"}]}}, "/proxy/env/0/value"),
    ({"worker": {"env": [{"name": "COUNTERSIGN_METRICS", "value": "{token: s}"}]}}, "/worker/env/0/value"),
    ({"worker": {"env": [{"name": "COUNTERSIGN_METRICS", "value": '{"token": "s"}'}]}}, "/worker/env/0/value"),
    ({"proxy": {"env": [{"name": "HTTPS_PROXY", "value": "http://user:word@host"}]}}, "/proxy/env/0/value"),
    ({"reference": {"env": [{"name": "OTEL_EXPORTER_OTLP_HEADERS", "value": "a=b"}]}}, "/reference/env/0"),
    ({"settings": {"backends": [SERVER | {"url": "https://user:word@host"}]}}, "/settings/backends/0/url"),
    ({"settings": {"webhook": {"url": "https://user:word@host"}}}, "/settings/webhook"),
    ({"proxy": {"env": [{"name": "COUNTERSIGN_ADMIN__KEYS", "value": "[]"}]}}, "/proxy/env/0"),
    ({"proxy": {"env": [{"name": "COUNTERSIGN_Admin__Keys__0__name", "value": "ops"}]}}, "/proxy/env/0"),
    ({"proxy": {"env": [{"name": "COUNTERSIGN_ADMIN", "value": "{port: 1}"}]}}, "/proxy/env/0/name"),
    ({"proxy": {"env": [{"name": "COUNTERSIGN_ADMIN__KEYS", "valueFrom": {}}]}}, "/proxy/env/0/name"),
    # What the chart sets elsewhere, a section that would replace it included.
    ({"proxy": {"env": [{"name": "COUNTERSIGN_ADMIN__PORT", "value": "1"}]}}, "/proxy/env/0/name"),
    ({"proxy": {"env": [{"name": "COUNTERSIGN_ADMIN__HOST", "value": "::"}]}}, "/proxy/env/0/name"),
    ({"worker": {"env": [{"name": "COUNTERSIGN_METRICS__PORT", "value": "1"}]}}, "/worker/env/0/name"),
    ({"webhooks": {"env": [{"name": "COUNTERSIGN_METRICS__HOST", "value": "::"}]}}, "/webhooks/env/0/name"),
    ({"reference": {"env": [{"name": "COUNTERSIGN_METRICS", "value": "{otlp: true}"}]}}, "/reference/env/0/name"),
    ({"worker": {"env": [{"name": "COUNTERSIGN_REDIS_URL", "valueFrom": {}}]}}, "/worker/env/0/name"),
    ({"worker": {"env": [{"name": "HOME", "value": "/"}]}}, "/worker/env/0/name"),
    ({"settings": {"metrics": {"port": 1234}}}, "port"),
    ({"settings": {"metrics": {"host": "1.2.3.4"}}}, "host"),
    # A rule whose key is misspelt would let everything through, a label that the chart owns find no pod.
    ({"networkPolicy": {"admin": {"from": [{"podselector": {}}]}}}, "/networkPolicy/admin/from/0"),
    ({"networkPolicy": {"proxy": {"from": [{}]}}}, "/networkPolicy/proxy/from/0"),
    ({"networkPolicy": {"worker": {"egress": [{"toos": []}]}}}, "toos"),
    ({"networkPolicy": {"proxy": {"egress": [{"from": []}]}}}, "/networkPolicy/proxy/egress/0"),
    ({"networkPolicy": {"reference": {"egress": [{"ports": [{"ports": 1}]}]}}}, "/networkPolicy/reference/egress/0"),
    ({"networkPolicy": {"dns": {"to": [{"ipBlock": {"cidr": "bad"}}]}}}, "/networkPolicy/dns/to/0"),
    ({"networkPolicy": {"dns": {"to": [{"ipBlock": {"cidr": "10.0.0.256/8"}}]}}}, "/networkPolicy/dns/to/0"),
    ({"networkPolicy": {"dns": {"to": [{"ipBlock": {"cidr": "10.0.0.0/8", "expect": []}}]}}}, "/networkPolicy/dns"),
    ({"networkPolicy": {"redis": {"to": [{"podSelector": {"matchLabel": {}}}]}}}, "/networkPolicy/redis/to/0"),
    ({"networkPolicy": {"collector": {"to": [{"podSelector": {}, "ipBlock": {"cidr": "::/0"}}]}}}, "/networkPolicy"),
    ({"commonLabels": {"app.kubernetes.io/name": "x"}}, "app.kubernetes.io/name"),
    ({"commonLabels": {"a b": "c"}}, "a b"),
    ({"commonLabels": {"team": "x y"}}, "/commonLabels/team"),
    ({"commonLabels": {"team": "x" * 64}}, "/commonLabels/team"),
    ({"proxy": {"podAnnotations": {"a/b/c": "x"}}}, "a/b/c"),
    ({"worker": {"nodeSelector": {"gpu": "a b"}}}, "/worker/nodeSelector/gpu"),
    ({"image": {"proxy": {"repository": "Not a name"}}}, "/image/proxy/repository"),
    ({"image": {"verifier": {"tag": "a:b"}}}, "/image/verifier/tag"),
    ({"fullnameOverride": "1"}, "/fullnameOverride"),
    ({"nameOverride": "a.b"}, "/nameOverride"),
    ({"proxy": {"podLabels": {"app.kubernetes.io/component": "x"}}}, "app.kubernetes.io/component"),
    ({"reference": {"podLabels": {"countersign/model": "x"}}}, "countersign/model"),
    ({"monitoring": {"podMonitor": {"labels": {"helm.sh/chart": "x"}}}}, "helm.sh/chart"),
    ({"monitoring": {"prometheus": {"url": "https://user:word@host"}}}, "/monitoring/prometheus/url"),
    ({"monitoring": {"prometheus": {"selector": "{a=b}"}}}, "/monitoring/prometheus/selector"),
    ({"monitoring": {"prometheus": {"selector": 'job="x'}}}, "/monitoring/prometheus/selector"),
    ({"monitoring": {"prometheus": {"selector": "job=x"}}}, "/monitoring/prometheus/selector"),
    ({"monitoring": {"serviceMonitor": {"interval": "15"}}}, "/monitoring/serviceMonitor/interval"),
    ({"monitoring": {"rules": {"rejectShare": 1.2}}}, "/monitoring/rules/rejectShare"),
    ({"monitoring": {"rule": {}}}, "rule"),
    ({"proxy": {"autoscaling": {"inFlights": 5}}}, "inFlights"),
    ({"proxy": {"autoscaling": {"minReplicas": 0}}}, "/proxy/autoscaling/minReplicas"),
    ({"proxy": {"autoscaling": {"waiting": 5}}}, "waiting"),
    ({"reference": {"autoscaling": {"maxReplicas": "many"}}}, "/reference/autoscaling/maxReplicas"),
    ({"webhooks": {"autoscaling": {"enabled": True}}}, "autoscaling"),
    ({"topologySpread": [{"topologyKey": "zone"}]}, "/topologySpread/0"),
    ({"topologySpread": [{"topologyKey": "z", "maxSkew": 1, "whenUnsatisfiable": "Maybe"}]}, "whenUnsatisfiable"),
    ({"worker": {"resources": {"request": {}}}}, "request"),
    ({"worker": {"resources": {"requests": {"memory": "1 GB"}}}}, "/worker/resources/requests/memory"),
    ({"reference": {"tolerations": [{"keyy": "gpu"}]}}, "keyy"),
    ({"proxy": {"affinity": {"podAntiAffinities": {}}}}, "podAntiAffinities"),
    ({"test": {"verdicts": ["passed"]}}, "/test/verdicts/0"),
    ({"test": {"verdicts": []}}, "/test/verdicts"),
    ({"test": {"key": "sk-something"}}, "key"),
]


@pytest.mark.parametrize(("values", "named"), WRONG, ids=[f"{at}-{named}" for at, (_, named) in enumerate(WRONG)])
def test_wrong_values_are_refused_by_name(chart: helm.Chart, values: Values, named: str) -> None:
    with pytest.raises(helm.HelmValuesError, match=named):
        chart.render(values, name="countersign")


SETS_ITSELF = {"api_key", "secret", "token", "keys", "redis_url", "port", "host", "https://user:word@host"}
SETS_ITSELF |= {"durability", "http://user:word@collector"}
"""What the chart refuses because it is a secret, or the chart's own."""
CONTRADICTIONS: dict[str, Values] = {
    "reference.perModel.typo": {"settings": MOE, "reference": {"perModel": {"typo": {"replicas": 2}}}},
    "reference.perModel.moe.second": {"settings": MOE, "reference": {"perModel": {"moe": {"second": {"replicas": 2}}}}},
    "test.model": {"settings": MOE, "test": {"existingSecret": "key", "model": "mo"}},
    "test.model: nothing": {"test": {"existingSecret": "key"}},
    "settings.durability.aof": {"settings": {"durability": {"aof": True}}},
    "settings.durability.replicas": {"settings": {"durability": {"replicas": 1}}},
    "proxy.admin.port": {"proxy": {"port": 8701, "admin": {"enabled": True, "existingSecret": "ops"}}},
    "settings.backends: two are called a": {"settings": {"models": {"m": {}}, "backends": [SERVER, SERVER]}},
    "settings.backends: the model m of a": {"settings": {"backends": [SERVER]}},
    "settings.breaker.longest": {"settings": {"breaker": {"longest": 1.5}}},
    "settings.breaker.longest: it is": {"settings": {"breaker": {"open_seconds": 61}}},
    "settings.verification.verdict_ttl": {"settings": {"verification": {"verdict_ttl": 3599}}},
    "settings.verification.verdict_ttl: it": {"settings": {"verification": {"evidence_ttl": 604801}}},
    "settings.verification.replay_wait": {"settings": {"verification": {"replay_wait": 3600}}},
    "settings.verification.replay_wait: it": {"settings": {"verification": {"evidence_ttl": 900}}},
    "redis.bundled.maxmemory": {"redis": {"bundled": {"maxmemory": "4gb"}}},
    "redis.bundled.maxmemory: it is": {
        "redis": {"bundled": {"maxmemory": "512mb", "resources": {"limits": {"memory": 512 * 2**20}}}}
    },
}


OF_THE_PROGRAM = [
    values
    for values in [*(wrong for wrong, _ in WRONG), *CONTRADICTIONS.values()]
    if values.keys() == {"settings"} and not SETS_ITSELF & set(json.dumps(values).split('"'))
]


@pytest.mark.parametrize("values", OF_THE_PROGRAM, ids=str)
def test_no_rule_about_settings_is_the_charts_alone(values: Values) -> None:
    secret = {"COUNTERSIGN_WEBHOOK__SECRET": "whsec_AAAA"}
    tree = {"models": {"m": {}}} | values["settings"]
    with pytest.raises(SettingsError):
        parse_settings(json.dumps(tree), secret)


@pytest.mark.parametrize(
    "settings",
    [
        {"breaker": {"open_seconds": 60, "longest": 60}},
        {"deliveries": {"networks": ["10.20.0.0/16", "10.0.0.5", "fd00::/8", "::1"]}},
        {"verification": {"evidence_ttl": 901, "verdict_ttl": 901}},
        {"verification": {"replay_wait": 3599, "evidence_ttl": 3600, "verdict_ttl": 3600}},
        {"models": {"m": {"second_reference": None, "second_profile": None, "reference": None}}},
    ],
    ids=str,
)
def test_what_the_program_takes_the_chart_does(chart: helm.Chart, settings: Values) -> None:
    assert Release(chart, {"settings": settings}).settings() == parse_settings(
        json.dumps(settings | {"host": "0.0.0.0", "redis_url": "redis://countersign-valkey:6379/0"}), {}
    )


ALLOWED: dict[str, Values] = {
    "what the rest of a section is": {"proxy": {"env": [{"name": "COUNTERSIGN_ADMIN__WATCH_SECONDS", "value": "0"}]}},
    "where keys are": {
        "worker": {"env": [{"name": "COUNTERSIGN_STORAGE__ENCRYPTION_KEYS_FILE", "value": "/etc/keys/storage"}]}
    },
    "public keys": {"worker": {"env": [{"name": "COUNTERSIGN_PROFILE_KEYS", "value": "[]"}]}},
    "as much as there is": {"redis": {"bundled": {"maxmemory": "1gb", "resources": {"limits": {"memory": "1.5Gi"}}}}},
    "labels of series": {"monitoring": {"prometheus": {"selector": 'job="gate", cluster=~"eu-.*"'}}},
    "no limit": {"redis": {"bundled": {"maxmemory": "900gb", "resources": {"limits": {"memory": None}}}}},
    "the metrics' port": {"proxy": {"port": 9464}, "monitoring": {"podMonitor": {"port": 9464}}},
    "Kubernetes' own rules": {
        "commonLabels": {"team": "inference"},
        "networkPolicy": {
            "enabled": True,
            "proxy": {"from": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"role": "ingress"}}}]},
            "worker": {"egress": [{"ports": [{"port": "https", "protocol": "TCP"}, {"port": 9000, "endPort": 9100}]}]},
            "dns": {"to": [{"ipBlock": {"cidr": "fd00::/8", "except": ["fd00:ec2::254/128"]}}]},
            "redis": {"to": [{"podSelector": {"matchExpressions": [{"key": "a", "operator": "In", "values": ["b"]}]}}]},
        },
    },
}


@pytest.mark.parametrize("what", ALLOWED)
def test_right_values_are_taken(chart: helm.Chart, what: str) -> None:
    for item in Release(chart, ALLOWED[what]).objects:
        kubernetes_validate.validate(item, "1.33", strict=True)


@pytest.mark.parametrize("named", CONTRADICTIONS)
def test_values_that_contradict_each_other_are_refused_by_name(chart: helm.Chart, named: str) -> None:
    with pytest.raises(helm.HelmError, match=named):
        chart.render(CONTRADICTIONS[named], name="countersign")


def test_a_label_that_is_said_twice_is_there_once(chart: helm.Chart) -> None:
    """Reading what was rendered is strict; whatever says it most closely holds, and what the chart goes by always."""
    pod: Values = {"podLabels": {"team": "pod"}, "podAnnotations": {"checksum/config": "x", "team": "pod"}}
    own = {"enabled": True, "labels": {"team": "own"}}
    release = Release(
        chart,
        {
            "settings": MOE,
            "commonLabels": {"team": "all"},
            "monitoring": {
                "credentials": {"existingSecret": "prometheus-key"},
                **dict.fromkeys(("serviceMonitor", "podMonitor", "rules", "dashboard"), own),
            },
            **dict.fromkeys(("proxy", "worker", "reference", "webhooks"), pod),
        },
    )
    deployments = [item for item in release.objects if item["kind"] == "Deployment"]
    assert len(deployments) == 4
    for item in deployments:
        assert item["metadata"]["labels"]["team"] == "all"
        inside = item["spec"]["template"]["metadata"]
        assert inside["labels"]["team"] == inside["annotations"]["team"] == "pod"
        assert len(inside["annotations"]["checksum/config"]) == 64
        assert item["spec"]["selector"]["matchLabels"].items() <= inside["labels"].items()
    for kind in ("ServiceMonitor", "PodMonitor", "PrometheusRule"):
        assert release.of(kind)["metadata"]["labels"]["team"] == "own"
    assert release.of("ConfigMap", "-dashboard")["metadata"]["labels"]["team"] == "own"


def test_text_that_looks_like_something_else_stays_text(chart: helm.Chart) -> None:
    """YAML has numbers and truths that are names all the same."""
    for name in ("true", "null", "e3", "y"):
        secrets: Values = {"existingSecret": "1", "redis": {"existingSecret": "0x10", "existingSecretKey": "1e3"}}
        values = secrets | {"fullnameOverride": name, "nameOverride": name, "files": {"1": "x"}}
        values |= {"models": {"existingClaim": "8"}, "proxy": {"priorityClassName": "true"}}
        for item in Release(chart, values, name=name).objects:
            kubernetes_validate.validate(item, "1.33", strict=True)
    with pytest.raises(helm.HelmError, match="fullnameOverride: a Service's name begins with a letter"):
        chart.render({}, name="1")
