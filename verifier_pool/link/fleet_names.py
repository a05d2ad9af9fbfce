"""Names of the metrics that Redis holds the values of (`verifier_pool.link.fleet`): kind, unit and meaning."""

from __future__ import annotations

from verifier_pool.link.meters import Kind

About = tuple[str, Kind, str, str]

JOBS: About = (
    "countersign.queue.jobs",
    "gauge",
    "{job}",
    "Jobs of a queue: waiting, running, to be tried later, or dead letters",
)
OLDEST: About = ("countersign.queue.oldest", "gauge", "s", "Age of the oldest job that waits in a queue")
WORKERS: About = ("countersign.queue.workers", "gauge", "{process}", "Workers that take jobs of a queue")
UNDELIVERED: About = ("countersign.webhook.outbox", "gauge", "{event}", "Events that no delivery was queued for yet")
UNDELIVERED_OLDEST: About = ("countersign.webhook.outbox.oldest", "gauge", "s", "Age of the oldest of those events")
UNTOLD: About = ("countersign.webhook.untold", "counter", "{event}", "Events dropped because the outbox was full")
UNDECIDED: About = (
    "countersign.undecided",
    "gauge",
    "{generation}",
    "Generations without a verdict, those being served among them",
)
VERDICTS: About = ("countersign.verdicts", "counter", "{generation}", "Verdicts")
AUDITED: About = ("countersign.audited", "counter", "{generation}", "Verdicts on audited generations")
REASONS: About = (
    "countersign.verdict.reasons",
    "counter",
    "{generation}",
    "Verdicts that gave a reason, by its code; one may give several",
)
CHECKS: About = ("countersign.checks", "counter", "{generation}", "What checks said, of all choices the worst, and why")
LAG: About = ("countersign.backlog.oldest", "gauge", "s", "Age of the oldest recorded generation without a verdict")
UNITS: About = ("countersign.standing.units.waiting", "gauge", "{unit}", "Units of evidence that no standing holds yet")
DROPPED: About = ("countersign.standing.units.dropped", "counter", "{unit}", "Units of evidence that were lost")
UNREPEATED: About = (
    "countersign.standing.units.unrepeated",
    "counter",
    "{unit}",
    "Accusing units whose replay the second reference could not repeat",
)
KNOWN_ANSWERS: About = (
    "countersign.canaries",
    "counter",
    "{event}",
    "Replays with known answers that passed or failed, restarts that followed, answers left undecided for them",
)
TOKENS: dict[About, str] = {
    ("countersign.backend.tokens.served", "counter", "{token}", "Output tokens that standing counted"): "served",
    (
        "countersign.backend.tokens.decided",
        "counter",
        "{token}",
        "Output tokens that standing counted and verdicts decided",
    ): "decided",
}
"""Counters of a backend's tokens, by what they count (`policies.tally`)."""
STANDING: dict[About, str] = {
    (
        "countersign.backend.evidence_log10",
        "gauge",
        "1",
        "Logarithm (base 10) of the evidence against a backend: its e-value",
    ): "evidence_log10",
    (
        "countersign.backend.evidence_needed_log10",
        "gauge",
        "1",
        "Logarithm (base 10) of the evidence that accuses",
    ): "needed_log10",
    (
        "countersign.backend.suspicion_log10",
        "gauge",
        "1",
        "Logarithm (base 10) of what makes a backend suspect, of recent answers alone",
    ): "suspicion_log10",
    ("countersign.backend.life", "gauge", "1", "Which life of the backend this is; a pardon begins another"): "life",
}
"""Metrics of a backend's standing, by where `policies.standing.brief` has their values."""
