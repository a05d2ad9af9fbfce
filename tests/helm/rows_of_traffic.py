"""The dashboard's rows about what proxies and backends do."""

from __future__ import annotations

from tests.helm.panel import Panel, quantiles

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
            "Answers per second by the status that clients got; 499 is a client that left. A rejected answer that its "
            "client did not get counts as delivered.",
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
            "As clients see it. Only a scrape with the token sees it.",
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
            "As clients see it. Only a scrape with the token sees it.",
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
            "Time it took to acknowledge the intents, without which no answer goes on.",
            quantiles("countersign_store_duration_seconds", 0.5, 0.99),
            "s",
        ),
        Panel(
            "For an inline verdict",
            "How long clients waited that asked for the verdict with the answer. Only a scrape with the token sees it.",
            quantiles("countersign_inline_wait_duration_seconds", 0.5, 0.95),
            "s",
        ),
    ),
}
