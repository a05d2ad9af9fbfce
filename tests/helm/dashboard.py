"""The chart's Grafana dashboard.

`python -m tests.helm.dashboard` writes the file anew; a test fails when it is stale.
"""

from __future__ import annotations

import json
from typing import Any

from tests.helm import rows_of_traffic, rows_of_verdicts
from tests.helm.panel import Panel
from tests.helm.schema import CHART

DASHBOARD = CHART / "files" / "dashboard.json"

_OURS = 'namespace=~"$namespace",service=~"$release"'
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS, _MOST, _HEIGHT = 3, 4, 8

Json = dict[str, Any]
ROWS = rows_of_traffic.ROWS | rows_of_verdicts.ROWS


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
        top += 1
        for first in range(0, len(members), _MOST):
            line = members[first : first + _MOST]
            width = 24 // max(_COLUMNS, len(line))
            for column, panel in enumerate(line):
                panels.append(_graph(panel, _place(column * width, top, width, _HEIGHT)))
            top += _HEIGHT
    return [panel | {"id": number} for number, panel in enumerate(panels, 1)]


def _place(left: int, top: int, width: int, height: int) -> Json:
    return {"x": left, "y": top, "w": width, "h": height}


def _graph(panel: Panel, place: Json) -> Json:
    custom = {"fillOpacity": 20 if panel.stacked else 0, "stacking": {"mode": "normal" if panel.stacked else "none"}}
    least: Json = {} if panel.signed else {"min": 0}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom} | least, "overrides": []},
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
