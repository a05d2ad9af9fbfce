"""The chart's Grafana dashboard.

`python -m tests.helm.dashboard` writes the file anew; a test fails when it is stale.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.helm.schema import CHART

DASHBOARD = CHART / "files" / "dashboard.json"

_OURS = 'namespace=~"$namespace",service=~"$release"'
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS, _HEIGHT = 3, 8

Json = dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """One graph: its queries with a legend each. OURS in a query stands for the selection made at the top."""

    title: str
    description: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    stacked: bool = False


def quantiles(histogram: str, *levels: float) -> tuple[tuple[str, str], ...]:
    """Queries for quantiles of a histogram of seconds."""
    rate = f"sum by (le) (rate({histogram}_bucket{{OURS}}[$__rate_interval]))"
    return tuple((f"histogram_quantile({level}, {rate})", f"p{100 * level:g}") for level in levels)


_BAD = 'sum by (backend) (rate(countersign_verdicts_total{OURS,verdict="reject"}[$__rate_interval]))'
_ALL = "sum by (backend) (rate(countersign_verdicts_total{OURS}[$__rate_interval]))"
_STATE = "max by (backend, state) (countersign_backend_state{OURS}) == 1"

ROWS: dict[str, tuple[Panel, ...]] = {
    "Traffic": (
        Panel(
            "Requests by backend",
            "Answers per second, by the backend that gave them.",
            (("sum by (backend) (rate(countersign_requests_total{OURS}[$__rate_interval]))", "{{backend}}"),),
            "reqps",
            stacked=True,
        ),
        Panel(
            "Requests by status",
            "Answers per second by the status that clients got; 499 is a client that left.",
            (("sum by (status) (rate(countersign_requests_total{OURS}[$__rate_interval]))", "{{status}}"),),
            "reqps",
            stacked=True,
        ),
        Panel(
            "Requests being served",
            "By pod, streams included: what the autoscaler of the proxy goes by.",
            (("sum by (pod) (countersign_in_flight{OURS})", "{{pod}}"),),
            stacked=True,
        ),
        Panel(
            "Not let in",
            "Requests per second that a limit or a key kept out, by reason.",
            (("sum by (reason) (rate(countersign_refused_total{OURS}[$__rate_interval]))", "{{reason}}"),),
            "reqps",
            stacked=True,
        ),
    ),
    "Backends": (
        Panel(
            "Requests they have",
            "Not answered yet. Only an admin key's scrape sees this row.",
            (("sum by (backend) (countersign_backend_outstanding{OURS})", "{{backend}}"),),
            stacked=True,
        ),
        Panel(
            "Requests that wait for one",
            "Because every backend of their model is at its limit.",
            (("sum by (model) (countersign_queued{OURS})", "{{model}}"),),
            stacked=True,
        ),
        Panel(
            "Breakers",
            "Proxies whose breaker keeps a backend from being asked.",
            (
                (
                    'sum by (backend, state) (countersign_backend_breaker{OURS,state!="closed"})',
                    "{{backend}}: {{state}}",
                ),
            ),
        ),
        Panel(
            "Found well",
            "Share of the proxies whose probes find the backend well.",
            (("avg by (backend) (countersign_backend_up{OURS})", "{{backend}}"),),
            "percentunit",
        ),
    ),
    "Time": (
        Panel(
            "Added by the proxy",
            "All but waiting for the backend, the client and the verdict.",
            quantiles("countersign_overhead_duration_seconds", 0.5, 0.95, 0.99),
            "s",
        ),
        Panel(
            "To the first byte",
            "As clients see it.",
            quantiles("gen_ai_server_time_to_first_token_seconds", 0.5, 0.95, 0.99),
            "s",
        ),
        Panel(
            "To the last byte",
            "As clients see it.",
            quantiles("gen_ai_server_request_duration_seconds", 0.5, 0.95, 0.99),
            "s",
        ),
        Panel(
            "For an inline verdict",
            "How long clients waited that asked for the verdict with the answer.",
            quantiles("countersign_inline_wait_duration_seconds", 0.5, 0.95),
            "s",
        ),
    ),
    "Verdicts": (
        Panel(
            "Verdicts",
            "Per second, by word.",
            (("sum by (verdict) (rate(countersign_verdicts_total{OURS}[$__rate_interval]))", "{{verdict}}"),),
            "reqps",
            stacked=True,
        ),
        Panel(
            "Rejected",
            "Share of each backend's verdicts. One reject is about one answer; only a standing accuses a backend.",
            ((f"{_BAD} / {_ALL}", "{{backend}}"),),
            "percentunit",
        ),
        Panel(
            "Standing",
            "The state of each backend. Only an admin key's scrape sees it.",
            ((_STATE, "{{backend}}: {{state}}"),),
        ),
        Panel(
            "Audited",
            "Share of each backend's answers that is replayed. Only an admin key's scrape sees it.",
            (("max by (backend) (countersign_backend_audit_rate{OURS})", "{{backend}}"),),
            "percentunit",
        ),
    ),
    "Queues": (
        Panel(
            "Without a verdict yet",
            "Answers of each backend, queued or in hand: what the autoscalers of workers and references go by.",
            (("max by (backend) (countersign_backlog{OURS})", "{{backend}}"),),
            stacked=True,
        ),
        Panel(
            "Evidence that waits",
            "What those take of Redis.",
            (("max by (backend) (countersign_backlog_size_bytes{OURS})", "{{backend}}"),),
            "bytes",
            stacked=True,
        ),
        Panel(
            "Served unverified",
            "Answers per second whose evidence was not queued, by reason.",
            (("sum by (reason) (rate(countersign_unrecorded_total{OURS}[$__rate_interval]))", "{{reason}}"),),
            "reqps",
            stacked=True,
        ),
    ),
}


def build() -> Json:
    """The dashboard, as Grafana imports it."""
    return {
        "title": "Countersign",
        "uid": "countersign",
        "tags": ["countersign", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": _panels(),
    }


def _variables() -> list[Json]:
    source = {"name": "datasource", "label": "Source", "type": "datasource", "query": "prometheus"}
    return [
        source,
        _variable("namespace", "Namespace", "label_values(countersign_in_flight, namespace)"),
        _variable("release", "Release", 'label_values(countersign_in_flight{namespace=~"$namespace"}, service)'),
    ]


def _variable(name: str, label: str, query: str) -> Json:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _SOURCE,
        "query": query,
        "definition": query,
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panels() -> list[Json]:
    panels: list[Json] = []
    top = 0
    for row, members in ROWS.items():
        panels.append({"type": "row", "title": row, "collapsed": False, "gridPos": _place(0, top, 24, 1), "panels": []})
        width = 24 // max(_COLUMNS, len(members))
        for column, panel in enumerate(members):
            panels.append(_graph(panel, _place(column * width, top + 1, width, _HEIGHT)))
        top += 1 + _HEIGHT
    return [panel | {"id": number} for number, panel in enumerate(panels, 1)]


def _place(left: int, top: int, width: int, height: int) -> Json:
    return {"x": left, "y": top, "w": width, "h": height}


def _graph(panel: Panel, place: Json) -> Json:
    custom = {"fillOpacity": 20 if panel.stacked else 0, "stacking": {"mode": "normal" if panel.stacked else "none"}}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [_target(at, query, legend) for at, (query, legend) in enumerate(panel.queries)],
    }


def _target(at: int, query: str, legend: str) -> Json:
    expression = query.replace("OURS", _OURS)
    return {"refId": chr(ord("A") + at), "datasource": _SOURCE, "expr": expression, "legendFormat": legend}


def text() -> str:
    """What the committed file should hold."""
    return json.dumps(build(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    DASHBOARD.write_text(text(), encoding="utf-8")
