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
    ({"settings": {"keys": []}}, "keys"),
    ({"settings": {"redis_url": "redis://x"}}, "redis_url"),
    ({"settings": {"port": 1}}, "port"),
    ({"proxy": {"env": [{"name": "COUNTERSIGN_AUDIT__SECRET", "value": "s"}]}}, "/proxy/env/0"),
    ({"worker": {"env": [{"name": "HF_TOKEN", "value": "s"}]}}, "/worker/env/0"),
    ({"proxy": {"env": [{"name": "COUNTERSIGN_PORT", "value": "1"}]}}, "/proxy/env/0/name"),
]


@pytest.mark.parametrize(("values", "named"), WRONG, ids=[named for _, named in WRONG])
def test_wrong_values_are_refused_by_name(chart: helm.Chart, values: Values, named: str) -> None:
    with pytest.raises(helm.HelmValuesError, match=named):
        chart.render(values, name="countersign")


CONTRADICTIONS: dict[str, Values] = {
    "reference.perModel.typo": {"settings": MOE, "reference": {"perModel": {"typo": {"replicas": 2}}}},
    "reference.perModel.moe.second": {"settings": MOE, "reference": {"perModel": {"moe": {"second": {"replicas": 2}}}}},
    "settings.durability.aof": {"settings": {"durability": {"aof": True}}},
    "settings.durability.replicas": {"settings": {"durability": {"replicas": 1}}},
}


@pytest.mark.parametrize("named", CONTRADICTIONS)
def test_values_that_contradict_each_other_are_refused_by_name(chart: helm.Chart, named: str) -> None:
    with pytest.raises(helm.HelmError, match=named):
        chart.render(CONTRADICTIONS[named], name="countersign")
