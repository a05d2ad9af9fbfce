"""The dashboard's rows about verdicts, and what makes them."""

from __future__ import annotations

from tests.helm.panel import Panel, everywhere, quantiles

_BAD = everywhere('countersign_verdicts_total{OURS,verdict="reject"}', "backend", "backend, verdict")
_ALL = everywhere("countersign_verdicts_total{OURS}", "backend", "backend, verdict")
_DECIDED = everywhere("countersign_backend_tokens_decided_total{OURS}", "backend")
_SERVED = everywhere("countersign_backend_tokens_served_total{OURS}", "backend")
_WHY = everywhere('countersign_checks_total{OURS,result="inconclusive"}', "check, reason", "backend, check, reason")
_STATE = "max by (backend, state) (countersign_backend_state{OURS}) == 1"

ROWS: dict[str, tuple[Panel, ...]] = {
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
            "Standing still",
            "Processes of which nothing succeeds, by what they do.",
            (("sum by (stage, model) (countersign_worker_standstill{OURS})", "{{stage}} {{model}}"),),
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
        Panel(
            "Events arrive after",
            "Until a webhook had it, failed tries included.",
            quantiles("countersign_webhook_delay_seconds", 0.5, 0.95),
            "s",
        ),
        Panel(
            "Events that nobody was told",
            "Waiting in the outbox, and dropped from it per hour because it was full.",
            (
                ("max(countersign_webhook_outbox{OURS})", "waiting"),
                ("max(increase(countersign_webhook_untold_total{OURS}[1h]))", "dropped"),
            ),
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
