"""Wrong values stop a release, and the message names them."""

from __future__ import annotations

import helm_python as helm
import pytest

from tests.helm import schema
from tests.helm.rendered import MOE, Values


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
    # Neither secrets nor what the chart sets belong in a ConfigMap.
    ({"settings": {"backends": [SERVER | {"api_key": "k"}]}}, "api_key"),
    ({"settings": {"audit": {"secret": "s"}}}, "secret"),
    ({"settings": {"webhook": {"url": "https://x", "secret": "s"}}}, "secret"),
    ({"settings": {"metrics": {"token": "t" * 20}}}, "token"),
    ({"settings": {"keys": []}}, "keys"),
    ({"settings": {"redis_url": "redis://x"}}, "redis_url"),
    ({"settings": {"port": 1}}, "port"),
    ({"proxy": {"env": [{"name": "COUNTERSIGN_AUDIT__SECRET", "value": "s"}]}}, "/proxy/env/0"),
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
    ({"monitoring": {"prometheus": {"url": "https://user:word@host"}}}, "/monitoring/prometheus/url"),
    ({"monitoring": {"prometheus": {"selector": "{a=b}"}}}, "/monitoring/prometheus/selector"),
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


CONTRADICTIONS: dict[str, Values] = {
    "reference.perModel.typo": {"settings": MOE, "reference": {"perModel": {"typo": {"replicas": 2}}}},
    "reference.perModel.moe.second": {"settings": MOE, "reference": {"perModel": {"moe": {"second": {"replicas": 2}}}}},
    "test.model": {"settings": MOE, "test": {"existingSecret": "key", "model": "mo"}},
    "test.model: nothing": {"test": {"existingSecret": "key"}},
    "settings.durability.aof": {"settings": {"durability": {"aof": True}}},
    "settings.durability.replicas": {"settings": {"durability": {"replicas": 1}}},
}


@pytest.mark.parametrize("named", CONTRADICTIONS)
def test_values_that_contradict_each_other_are_refused_by_name(chart: helm.Chart, named: str) -> None:
    with pytest.raises(helm.HelmError, match=named):
        chart.render(CONTRADICTIONS[named], name="countersign")
