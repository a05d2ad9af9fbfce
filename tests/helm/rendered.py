"""Sets of values, and what they render to."""

from __future__ import annotations

from typing import Any

import helm_python as helm
import yaml

from policies.settings import Settings, parse_settings

Values = dict[str, Any]

MOE: Values = {
    "models": {
        "moe": {
            "tokenizer": "/models/moe",
            "vocab_size": 151936,
            "max_model_len": 40960,
            "profile": "/etc/countersign/moe.json",
            "reference": {"kind": "vllm_engine", "path": "/models/moe", "engine": {"max_num_seqs": 64}},
        }
    },
    "backends": [{"name": "cheap", "url": "https://gpu.example.com", "model": "moe", "routed_experts": "buffer"}],
    "webhook": {"url": "https://hooks.example.com/countersign"},
    "audit": {"rate": 0.05},
    "verification": {"job_timeout": 120},
    "bounds": {"request_bytes": 67108864},
}

OTHER: Values = {
    **MOE,
    "models": {
        **MOE["models"],
        "Qwen/Qwen3-8B": {"reference": {"kind": "vllm_http", "url": "http://10.0.0.5:8000"}},
        "unchecked": {"tokenizer": "/models/unchecked"},
    },
}
"""Two models with references of two kinds, and one without."""

QWEN: Values = {"name": "qwen.eu", "url": "https://qwen.example.com", "model": "Qwen/Qwen3-8B"}

VARIANTS: dict[str, Values] = {
    "default": {},
    "gpu": {
        "settings": MOE,
        "existingSecret": "shared",
        "worker": {"replicas": 3, "processes": 4},
        "reference": {
            "gpu": {"count": 2},
            "cacheClaim": "kernels",
            "runtimeClassName": "nvidia",
            "nodeSelector": {"gpu": "h200"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "startupSeconds": 3600,
        },
        "models": {"existingClaim": "weights"},
        "files": {"moe.json": '{"checks": {}}\n'},
    },
    "several-models": {
        "settings": OTHER,
        "reference": {"perModel": {"moe": {"replicas": 3, "gpu": {"count": 4}, "nodeSelector": {"gpu": "h200"}}}},
        "networkPolicy": {"enabled": True},
    },
    "admin": {
        "settings": MOE,
        "settingsChange": "live",
        "proxy": {"admin": {"enabled": True, "port": 9000, "existingSecret": "admins", "service": {"port": 80}}},
        "networkPolicy": {"enabled": True, "admin": {"from": [{"podSelector": {"matchLabels": {"role": "ops"}}}]}},
    },
    "all-in-one": {
        "settings": MOE,
        "allInOne": True,
        "networkPolicy": {"enabled": True},
        "models": {"existingClaim": "weights"},
    },
    "external-redis": {
        "settings": {"webhook": {"url": "https://hooks.example.com"}, "durability": {"aof": True, "replicas": 1}},
        "redis": {"existingSecret": "redis"},
        "proxy": {"existingSecret": "for-proxy", "drainSeconds": 600},
        "worker": {"existingSecret": "for-worker"},
        "webhooks": {"existingSecret": "for-webhooks"},
        "networkPolicy": {
            "enabled": True,
            "proxy": {"from": [{"podSelector": {}}]},
            "redis": {"ports": [6379, 26379]},
        },
    },
    "persistent": {
        "settings": {"durability": {"aof": True}},
        "redis": {"bundled": {"persistence": {"enabled": True, "size": "5Gi", "storageClass": "fast"}}},
        "networkPolicy": {"enabled": True},
        "imagePullSecrets": [{"name": "registry"}],
        "image": {"proxy": {"digest": "sha256:" + "a" * 64}},
        "commonLabels": {"team": "inference"},
    },
    "scaled": {
        "settings": OTHER | {"backends": [*MOE["backends"], QWEN]},
        "redis": {"existingSecret": "redis"},
        "proxy": {"autoscaling": {"enabled": True, "minReplicas": 3, "maxReplicas": 30, "inFlight": 250}},
        "worker": {"autoscaling": {"enabled": True, "waiting": 400}},
        "reference": {
            "autoscaling": {"enabled": True, "minReplicas": 0, "scaleDownSeconds": 1200},
            "perModel": {"moe": {"autoscaling": {"maxReplicas": 16}}},
        },
        "monitoring": {
            "credentials": {"existingSecret": "prometheus-key"},
            "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
            "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
            "rules": {"enabled": True, "labels": {"release": "prometheus"}},
            "dashboard": {"enabled": True, "annotations": {"grafana_folder": "Inference"}},
            "prometheus": {"url": "http://prometheus.monitoring:9090", "triggerAuthentication": "bearer"},
        },
        "test": {"existingSecret": "test-key", "model": "moe"},
        "topologySpread": [{"topologyKey": "rack", "maxSkew": 2, "whenUnsatisfiable": "DoNotSchedule"}],
    },
    "proxy-only": {
        "settings": MOE,
        "worker": {"enabled": False},
        "reference": {"enabled": False},
        "webhooks": {"enabled": False},
        "serviceAccount": {"create": False},
        "podDisruptionBudget": {"enabled": False},
        "fullnameOverride": "gate",
    },
}


class _Strict(yaml.SafeLoader):
    """Reads YAML as strictly as whoever may read the chart's: a key that is there twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping. Raises ConstructorError."""
        found = super().construct_mapping(node, deep)
        if len(found) != len(node.value):
            names = [key.value for key, _ in node.value]
            raise yaml.constructor.ConstructorError(None, None, f"keys that are there twice: {names}", node.start_mark)
        return found


class Release:
    """What one set of values renders to."""

    def __init__(self, chart: helm.Chart, values: Values, name: str = "countersign") -> None:
        self.files = chart.render(values, name=name, namespace="prod")
        self.notes = next(text for path, text in self.files.items() if path.endswith("NOTES.txt"))
        documents = [yaml.load_all(text, _Strict) for path, text in self.files.items() if path.endswith(".yaml")]
        self.objects: list[dict[str, Any]] = [item for stream in documents for item in stream if item]

    def of(self, kind: str, suffix: str = "") -> dict[str, Any]:
        """The one object of that kind whose name ends so."""
        found = [item for item in self.objects if item["kind"] == kind and item["metadata"]["name"].endswith(suffix)]
        assert len(found) == 1, (kind, suffix, [item["metadata"]["name"] for item in found])
        return found[0]

    def kinds(self, suffix: str) -> set[str]:
        return {item["kind"] for item in self.objects if item["metadata"]["name"].endswith(suffix)}

    def pods(self) -> dict[str, dict[str, Any]]:
        """Pod specs by the object's name."""
        pods = {}
        for item in self.objects:
            if item["kind"] == "Pod":
                pods[item["metadata"]["name"]] = item["spec"]
            elif "template" in item.get("spec", {}):
                pods[item["metadata"]["name"]] = item["spec"]["template"]["spec"]
        return pods

    def settings(self, environ: dict[str, str] | None = None) -> Settings:
        """What the program makes of the rendered countersign.yaml, and of Secrets where webhook or metrics need one."""
        config = next(item for item in self.objects if item["kind"] == "ConfigMap")
        text = config["data"]["countersign.yaml"]
        secret = {"COUNTERSIGN_WEBHOOK__SECRET": "whsec_AAAA"} if "\nwebhook:" in text else {}
        secret |= {"COUNTERSIGN_METRICS__TOKEN": "0" * 16} if "\nmetrics:" in text else {}
        return parse_settings(text, secret | (environ or {}))


def container(pod: dict[str, Any]) -> dict[str, Any]:
    only: dict[str, Any]
    (only,) = pod["containers"]
    return only
