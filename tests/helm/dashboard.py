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
_COLUMNS, _MOST, _HEIGHT = 3, 4, 8

Json = dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """One graph: its queries with a legend each. OURS in a query stands for the selection made at the top."""

    title: str
    description: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    stacked: bool = False
    signed: bool = False


def quantiles(histogram: str, *levels: float, by: str = "") -> tuple[tuple[str, str], ...]:
    """Queries for quantiles of a histogram of seconds, of one for each value of a label."""
    grouped, legend = (f"{by}, le", f"{{{{{by}}}}} ") if by else ("le", "")
    rate = f"sum by ({grouped}) (rate({histogram}_bucket{{OURS}}[$__rate_interval]))"
    return tuple((f"histogram_quantile({level}, {rate})", f"{legend}p{100 * level:g}") for level in levels)


def everywhere(counter: str, by: str, among: str = "") -> str:
    """Rate of a counter that Redis holds, and every proxy tells alike."""
    return f"sum by ({by}) (max by ({among or by}) (rate({counter}[$__rate_interval])))"


_BAD = everywhere('countersign_verdicts_total{OURS,verdict="reject"}', "backend", "backend, verdict")
_ALL = everywhere("countersign_verdicts_total{OURS}", "backend", "backend, verdict")
_DECIDED = everywhere("countersign_backend_tokens_decided_total{OURS}", "backend")
_SERVED = everywhere("countersign_backend_tokens_served_total{OURS}", "backend")
_WHY = everywhere('countersign_checks_total{OURS,result="inconclusive"}', "check, reason", "backend, check, reason")
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
            "Not answered yet. Only a scrape with the token sees this row.",
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
            "Added until the first bytes",
            "Of that, what passes before the answer's first bytes are on their way to the client.",
            quantiles("countersign_overhead_first_token_duration_seconds", 0.5, 0.95, 0.99),
            "s",
        ),
        Panel(
            "To the first byte",
            "As clients see it.",
            quantiles("gen_ai_server_time_to_first_token_seconds", 0.5, 0.95, 0.99),
            "s",
        ),
        Panel(
            "Per token",
            "Of streams, after the first, as clients see it.",
            quantiles("gen_ai_server_time_per_output_token_seconds", 0.5, 0.95),
            "s",
        ),
        Panel(
            "To the last byte",
            "As clients see it.",
            quantiles("gen_ai_server_request_duration_seconds", 0.5, 0.95, 0.99),
            "s",
        ),
        Panel(
            "Backends' first byte",
            "Time until each backend began its answer.",
            quantiles("gen_ai_client_operation_time_to_first_chunk_seconds", 0.95, by="backend"),
            "s",
        ),
        Panel(
            "Redis",
            "Time it took to acknowledge what a request waits for, before it goes up.",
            quantiles("countersign_store_duration_seconds", 0.5, 0.99),
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
            ((everywhere("countersign_verdicts_total{OURS}", "verdict", "backend, verdict"), "{{verdict}}"),),
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
            "The state of each backend. Only a scrape with the token sees it.",
            ((_STATE, "{{backend}}: {{state}}"),),
        ),
        Panel(
            "Audited",
            "Share of each backend's answers that is replayed. Only a scrape with the token sees it.",
            (("max by (backend) (countersign_backend_audit_rate{OURS})", "{{backend}}"),),
            "percentunit",
        ),
        Panel(
            "Covered",
            "Tokens of each backend that verdicts decided, of those that it served.",
            ((f"{_DECIDED} / {_SERVED}", "{{backend}}"),),
            "percentunit",
        ),
        Panel(
            "Undecided",
            "What checks could not decide, per second, and why.",
            ((_WHY, "{{check}}: {{reason}}"),),
            "reqps",
            stacked=True,
        ),
        Panel(
            "Evidence",
            "Logarithm of the evidence against each backend (its e-value); where it meets the other line it accuses.",
            (
                ("max by (backend) (countersign_backend_evidence_log10{OURS})", "{{backend}}"),
                ("max by (backend) (countersign_backend_evidence_needed_log10{OURS})", "{{backend}} accused"),
            ),
            signed=True,
        ),
        Panel(
            "Until the verdict",
            "Time from a backend's last byte on, by whether the answer was audited.",
            quantiles("countersign_verdict_delay_seconds", 0.5, 0.95, by="audited"),
            "s",
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
        Panel(
            "Lag",
            "Age of the oldest answer of each backend that has no verdict yet.",
            (("max by (backend) (countersign_backlog_oldest_seconds{OURS})", "{{backend}}"),),
            "s",
        ),
        Panel(
            "Jobs that wait",
            "By queue; replays by model.",
            (
                (
                    'max by (queue, model) (countersign_queue_jobs{OURS,state="waiting"})',
                    "{{queue}} {{model}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Their oldest",
            "Age of the oldest job that waits in each queue.",
            (("max by (queue, model) (countersign_queue_oldest_seconds{OURS})", "{{queue}} {{model}}"),),
            "s",
        ),
        Panel(
            "Workers",
            "Processes that take jobs of each queue.",
            (("max by (queue, model) (countersign_queue_workers{OURS})", "{{queue}} {{model}}"),),
        ),
        Panel(
            "Dead letters",
            "Jobs that failed for good and can be queued anew by hand.",
            (('max by (queue, model) (countersign_queue_jobs{OURS,state="dead"})', "{{queue}} {{model}}"),),
        ),
    ),
    "Workers": (
        Panel(
            "Replayed",
            "Tokens per second, of prompts and of answers, by model.",
            (("sum by (model) (rate(countersign_replay_tokens_total{OURS}[$__rate_interval]))", "{{model}}"),),
            stacked=True,
        ),
        Panel(
            "References at work",
            "Share of the time in which each had anything to replay.",
            (
                (
                    "sum by (model, pod) (rate(countersign_replay_busy_seconds_total{OURS}[$__rate_interval]))",
                    "{{model}} {{pod}}",
                ),
            ),
            "percentunit",
        ),
        Panel(
            "What replays come to",
            "Per second.",
            (("sum by (outcome) (rate(countersign_replays_total{OURS}[$__rate_interval]))", "{{outcome}}"),),
            "reqps",
            stacked=True,
        ),
        Panel(
            "Known answers",
            "Replays of references whose outcome is known, per hour; one that fails is started again.",
            (
                (
                    "max by (model, reference, result) (increase(countersign_canaries_total{OURS}[1h]))",
                    "{{model}} {{reference}}: {{result}}",
                ),
            ),
        ),
        Panel(
            "Jobs",
            "Per second, by stage.",
            (
                (
                    "sum by (stage, result) (rate(countersign_jobs_total{OURS}[$__rate_interval]))",
                    "{{stage}} {{result}}",
                ),
            ),
            "reqps",
            stacked=True,
        ),
        Panel(
            "A job takes",
            "By stage; a replay, in its reference.",
            quantiles("countersign_job_duration_seconds", 0.95, by="stage"),
            "s",
        ),
        Panel(
            "A job waits",
            "By stage.",
            quantiles("countersign_job_delay_seconds", 0.95, by="stage"),
            "s",
        ),
        Panel(
            "Events sent",
            "Tries per second to deliver one, by what came of it.",
            (("sum by (outcome) (rate(countersign_webhook_deliveries_total{OURS}[$__rate_interval]))", "{{outcome}}"),),
            "reqps",
            stacked=True,
        ),
    ),
    "Processes": (
        Panel(
            "Processor",
            "Cores in use, by pod.",
            (("sum by (pod) (rate(process_cpu_time_seconds_total{OURS}[$__rate_interval]))", "{{pod}}"),),
        ),
        Panel(
            "Memory",
            "By pod.",
            (("sum by (pod) (process_memory_usage_bytes{OURS})", "{{pod}}"),),
            "bytes",
        ),
        Panel(
            "Tokens",
            "Of prompts and of answers, per second.",
            (
                (
                    "sum by (gen_ai_token_type) (rate(gen_ai_client_token_usage_sum{OURS}[$__rate_interval]))",
                    "{{gen_ai_token_type}}",
                ),
            ),
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
