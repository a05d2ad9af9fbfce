"""What the proxy and the workers agree on in Redis: names of queues, jobs, keys and channels.

Nothing here opens a connection. What changes several of them in one step is in `verifier_pool.link.scripts`.

    intent:ID    JSON, written before the request goes up; holds owner, backend and its declaration, model, mode
    open         sorted set of ids without a verdict, scored by the second they count as lost
    evidence:ID  packed evidence (policies.codec), deleted with its TTL
    verdict:ID   the verification as JSON, written once (SET NX); first writer wins
    case:ID:SHA256  what a verdict rests on beside the evidence (policies.case), by the SHA-256 that the receipt tells;
                 stored with the verdict
    part:SHA256  what many cases share: a profile as canonical JSON, the added tokens of a tokenizer
    verdicts     channel: an id is published when its verdict is stored
    outbox       sorted set of ids whose verdict, and of `event:ID` whose event, webhooks still have to be told, scored
                 by its second; bounded by `MOST_TOLD`
    event:ID     an event for webhooks that is about no single verdict, JSON
    webhooks, webhook-…  webhooks that were registered, and what becomes of events (`link.endpoints`, `link.deliveries`)
    untold       events that found the outbox full and were dropped, a number
    declaration:BACKEND  hash of declared runtimes that the backend's answers contradicted, JSON each
    runtime-changes      hash: by backend, answers that fitted another runtime than the declared one
    waiting:BACKEND      sorted set of ids with a job but no verdict, scored by the second they were queued
    waiting-sizes:BACKEND  hash: by id, bytes in Redis that wait for its verdict
    waiting-bytes:BACKEND  their sum
    audited:ID   whether the secret choice took a response, written once, so that a second run chooses alike

Standing (verifier_pool.standing):

    units:BACKEND     list of units (policies.unit) as JSON, in the order of their verdicts, that no record holds yet
    unfolded          set of backends that have any
    standing:BACKEND  hash: `version`, an integer, and by name of its declaration a packed record (policies.standing)
    standing-seen:BACKEND:KIND  sorted set of names of units that were counted (KIND u) and of prompts that failed (p),
                      scored by the second they were last met
    standings         hash: by `BACKEND:DECLARATION` what others need to know, JSON (`standing_field`)
    units-dropped     hash: by backend, units that were not folded: the list was full, or they could not be read
    second-unchecked  hash: by backend, units whose accusing replay the second reference could not repeat

Counted:

    tally:BACKEND     hash: how many verdicts said what (policies.tally), kept for `REMEMBERED` after the last one
    canaries          hash: by `MODEL:passed`, `MODEL:failed`, `MODEL:restarts` and `MODEL:unsound`
                      (`verifier_pool.vouching`), how often
"""

from __future__ import annotations

import hashlib
import re

from verifier_pool import TAG

PREFIX = TAG + ":"
VERIFY_QUEUE = "countersign-verify"
WEBHOOK_QUEUE = "countersign-webhooks"
VERIFY_JOB = "verifier_pool.jobs.verify"
WEBHOOK_JOB = "verifier_pool.webhooks.deliver"
OPEN = PREFIX + "open"
OUTBOX = PREFIX + "outbox"
UNTOLD = PREFIX + "untold"
ENDPOINTS = PREFIX + "webhooks"
VERDICTS = PREFIX + "verdicts"
RUNTIME_CHANGES = PREFIX + "runtime-changes"
UNFOLDED = PREFIX + "unfolded"
STANDINGS = PREFIX + "standings"
UNITS_DROPPED = PREFIX + "units-dropped"
SECOND_UNCHECKED = PREFIX + "second-unchecked"
CANARIES = PREFIX + "canaries"
EVENT = "event:"
"""Begins an entry of the outbox that names an event."""
AUDIT_SECRET = PREFIX + "audit-secret"
MOST_TOLD = 1_000_000
"""Events that wait in the outbox, at most: some hundred megabytes. Only where nobody takes them out."""

RETRY_SECONDS = (1, 5, 30)
"""Waits before a verification is tried again."""

REMEMBERED = 30 * 86_400
"""Seconds for which a unit or prompt is remembered after it was met, as long as there are at most `MOST_REMEMBERED` of
its kind."""
MOST_REMEMBERED = 100_000
KINDS = ("u", "p")
"""How the names of units and of prompts begin."""
MOST_UNITS = 100_000
"""Units of one backend that wait for a worker; more are dropped and counted."""


def queue_of(model: str, *, second: bool = False) -> str:
    """Name of the queue of a model's reference, or of its second one; odd characters give way to a hash."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", model)
    if safe != model:
        safe += "-" + hashlib.sha256(model.encode("utf-8", "backslashreplace")).hexdigest()[:12]
    return f"countersign-replay{'2' if second else ''}-{safe}"


def tally_key(backend: str) -> str:
    """Key of what is counted of the backend's verdicts, a hash."""
    return f"{PREFIX}tally:{backend}"


def intent_key(id: str) -> str:
    """Key of the intent, JSON."""
    return f"{PREFIX}intent:{id}"


def evidence_key(id: str) -> str:
    """Key of the packed evidence."""
    return f"{PREFIX}evidence:{id}"


def verdict_key(id: str) -> str:
    """Key of the verification, JSON."""
    return f"{PREFIX}verdict:{id}"


def content_keys(id: str) -> list[str]:
    """Keys of all that there may be of a response's prompt and answer, but its case."""
    replays = [f"{PREFIX}{kind}{which}:{id}" for kind in ("replayed", "replay-request") for which in ("", "2")]
    return [evidence_key(id), *replays]


def case_key(id: str, sha256: str) -> str:
    """Key of what a verdict rests on beside the evidence, by its SHA-256 in hex."""
    return f"{PREFIX}case:{id}:{sha256}"


def part_key(sha256: str) -> str:
    """Key of what many cases share, by its SHA-256 in hex."""
    return f"{PREFIX}part:{sha256}"


def declaration_key(backend: str) -> str:
    """Key of the backend's contradicted declarations, a hash by runtime."""
    return f"{PREFIX}declaration:{backend}"


def answers_key(backend: str, prompt: str) -> str:
    """Key of the answers a backend gave to one request, a hash (verifier_pool.history)."""
    return f"{PREFIX}answers:{backend}:{prompt}"


def answered_key(backend: str) -> str:
    """Key of the sorted set of a backend's answers keys."""
    return f"{PREFIX}answered:{backend}"


def waiting_key(backend: str) -> str:
    """Key of the backend's generations that wait for their verdict (`scripts.note_waiting`)."""
    return f"{PREFIX}waiting:{backend}"


def waiting_sizes_key(backend: str) -> str:
    """Key of how many bytes each of them has in Redis, a hash by id."""
    return f"{PREFIX}waiting-sizes:{backend}"


def waiting_bytes_key(backend: str) -> str:
    """Key of the sum of that."""
    return f"{PREFIX}waiting-bytes:{backend}"


def audited_key(id: str) -> str:
    """Key of the secret choice about a response."""
    return f"{PREFIX}audited:{id}"


def event_key(id: str) -> str:
    """Key of the body of a webhook event."""
    return f"{PREFIX}event:{id}"


def units_key(backend: str) -> str:
    """Key of the backend's units that no record holds yet, a list."""
    return f"{PREFIX}units:{backend}"


def standing_key(backend: str) -> str:
    """Key of the backend's records, a hash by name of the declaration."""
    return f"{PREFIX}standing:{backend}"


def seen_key(backend: str, name: str) -> str:
    """Key of the backend's memory of names like this one (`policies.standing.names`), a sorted set.

    Units and prompts have one each: there are many more units, and they must not make it forget prompts.
    """
    return f"{PREFIX}standing-seen:{backend}:{name[:1]}"


def standing_field(backend: str, declaration: str) -> str:
    """Field of `STANDINGS` for a backend under the declaration of that name (`policies.unit.declaration_name`).

    Its value is JSON: `policies.standing.brief` of the record. A new backend has none.
    """
    return f"{backend}:{declaration}"
