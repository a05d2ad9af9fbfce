"""Names of spans, and which attributes each may have. docs/telemetry.md lists the same.

`gen_ai.*`, `error.type`, `server.*`, `http.*`, `url.*` and `messaging.*` are OpenTelemetry's own (semantic conventions
1.44); the rest is ours.
"""

from __future__ import annotations

REQUEST = "request"
"""Stands for the two spans whose names OpenTelemetry makes of operation and model, such as `chat smollm2`: that of the
request (kind SERVER), and ..."""
UPSTREAM = "upstream"
"""... that of asking one backend (kind CLIENT)."""
GENERATION = "countersign.generation"
PLACE = "countersign.place"
INLINE = "countersign.inline_wait"
RECORD = "countersign.record"
QUEUE = "countersign.queue"
VERIFY = "countersign.verify"
CHECKS = "countersign.checks"
JUDGE = "countersign.judge"
VERDICT = "countersign.verdict"
REPLAY = "countersign.replay"
WEBHOOK = "countersign.webhook"

FIRST_TOKEN = "first_token"
"""The one event there is, of UPSTREAM."""

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
MODEL = "gen_ai.request.model"
STREAM = "gen_ai.request.stream"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
ERROR = "error.type"
HOST, PORT = "server.address", "server.port"
METHOD, PATH, STATUS = "http.request.method", "url.path", "http.response.status_code"
DESTINATION = "messaging.destination.name"
ID = "countersign.id"
BACKEND = "countersign.backend"
MODE = "countersign.mode"
CHOICES = "countersign.choices"
WORD = "countersign.verdict"
REASONS = "countersign.reasons"
AUDITED = "countersign.audited"
STAGE = "countersign.stage"
OUTCOME = "countersign.outcome"
TOKENS = "countersign.tokens"
BATCH = "countersign.batch"
SECOND = "countersign.second_reference"
REFERENCE = "countersign.reference"
SIZE = "countersign.evidence.size"
TRY = "countersign.try"

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    REQUEST: (METHOD, PATH, STATUS, OPERATION, PROVIDER, MODEL, STREAM, MODE, ID, BACKEND, ERROR),
    GENERATION: (ID, MODE, MODEL, BACKEND, ERROR),
    PLACE: (MODEL, ERROR),
    UPSTREAM: (
        OPERATION,
        PROVIDER,
        MODEL,
        STREAM,
        HOST,
        PORT,
        BACKEND,
        ID,
        INPUT_TOKENS,
        OUTPUT_TOKENS,
        FIRST_CHUNK,
        STATUS,
        ERROR,
    ),
    INLINE: (WORD, ERROR),
    RECORD: (ID, BACKEND, SIZE, CHOICES, OUTCOME),
    QUEUE: (DESTINATION, ID, STAGE),
    VERIFY: (ID, BACKEND, MODEL, STAGE, OUTCOME, ERROR),
    CHECKS: (CHOICES, ERROR),
    JUDGE: (CHOICES, WORD, ERROR),
    VERDICT: (ID, BACKEND, MODEL, WORD, REASONS, AUDITED, ERROR),
    REPLAY: (ID, MODEL, REFERENCE, TOKENS, BATCH, SECOND, OUTCOME, ERROR),
    WEBHOOK: (ID, TRY, STATUS, OUTCOME, ERROR),
}
"""By span, which attributes it may have; others are refused (`tracing`)."""
