"""The spans of workers: what they are around, and what they say."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from opentelemetry.trace import SpanKind
from rq.job import Job

from policies.errors import ReplayError
from policies.verification import Verification
from verifier_pool.flights import Fate, Flight
from verifier_pool.link.telemetry import names
from verifier_pool.link.telemetry.spans import of_verdict
from verifier_pool.link.telemetry.tracing import Attributes, Spanned, ago, of_worker

Around = AbstractContextManager[Spanned | None]


def verifying(intent: dict[str, Any], id: str, job: Job | None) -> Around:
    """Around one pass over a response; what came before it was waiting for it."""
    about: dict[str, str | None] = {
        names.ID: id,
        names.STAGE: None if job is None else str(job.meta.get("stage", "verify")),
    }
    _waited(intent.get("trace"), job, about)
    known: dict[str, str | None] = {
        names.BACKEND: str(intent.get("backend", "")),
        names.MODEL: str(intent.get("model", "")),
    }
    return _around(names.VERIFY, intent.get("trace"), about | known, role=SpanKind.CONSUMER)


def deciding(verification: Verification) -> Around:
    """Around storing a verdict."""
    return _around(names.VERDICT, verification.get("trace"), of_verdict(verification))


def delivering(verification: Verification | None, job: Job | None, tries: int) -> Around:
    """Around one try of a webhook, which is the how manieth."""
    if verification is None:
        return nullcontext()
    context, id = verification.get("trace"), str(verification["id"])
    _waited(context, job, {names.ID: id, names.STAGE: "webhook"})
    return _around(names.WEBHOOK, context, {names.ID: id, names.TRY: tries}, role=SpanKind.CLIENT)


def replayed(batch: Sequence[tuple[Flight, Fate]], model: str, reference: str, in_flight: int) -> None:
    """These replays are over: how each waited, and how it went."""
    tracing = of_worker()
    if tracing is None:
        return
    for flight, fate in batch:
        job = flight.job
        context, id = job.meta.get("trace"), job.id.partition("-")[0]
        began = ago(time.monotonic() - flight.began)
        _waited(context, job, {names.ID: id, names.STAGE: str(job.meta.get("stage", "replay"))}, began)
        reasons = [each.reason for each in flight.outcomes if isinstance(each, ReplayError)]
        why = flight.why if fate is Fate.FELL else reasons[0] if reasons else None
        told: Attributes = {
            names.ID: id,
            names.MODEL: model,
            names.REFERENCE: reference,
            names.TOKENS: flight.tokens,
            names.BATCH: in_flight,
            names.SECOND: flight.second,
            names.OUTCOME: fate.value,
        }
        tracing.past(names.REPLAY, context, began, None, told, failed=why)


def _around(kind: str, context: object, attributes: Attributes, *, role: SpanKind = SpanKind.INTERNAL) -> Around:
    tracing = of_worker()
    return nullcontext() if tracing is None else tracing.span(kind, context, attributes, role=role)


def _waited(context: object, job: Job | None, about: Attributes, until: int | None = None) -> None:
    tracing = of_worker()
    if tracing is None or job is None or job.enqueued_at is None:
        return
    queued = int(job.enqueued_at.timestamp() * 1e9)
    told = {**about, names.DESTINATION: str(job.origin)}
    tracing.past(names.QUEUE, context, queued, until, told, role=SpanKind.CONSUMER)
