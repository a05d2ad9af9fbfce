"""From what was collected of a response to its evidence."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from policies.evidence import Evidence, Ids, Sampling, Usage
from policies.message import ODD
from proxy.tap.choice import ChoiceRecord
from proxy.tap.claim import fitted
from proxy.tap.experts import decode_experts
from proxy.tap.guarded import UNREADABLE_FAULT
from proxy.tap.trim import trimmed
from proxy.tap.types import Prepared

if TYPE_CHECKING:
    from proxy.tap.collect import Collector

_KEPT = (
    *("id", "endpoint", "backend", "model", "sampling", "index", "owner", "runtime", "precision", "engine"),
    *("speculative", "stream", "created", "request", "asked", "prompt_ids", "output_ids", "shown_sha256"),
    *("first_token_seconds", "total_seconds"),
)


def compose(found: Collector, meta: dict[str, Any]) -> list[Evidence]:
    """One Evidence per choice that began; a cleanly ended response accounts for every choice asked for. `meta`
    fills in what only its caller knows. Never raises: what cannot be composed is `unreadable`."""
    clean = found.terminal and not ({"upstream_error", "invalid_json"} & found.faults.keys())
    began = {index for index, record in found.choices.items() if record.started}
    indices = sorted((set(range(found.expected)) if clean else began) or {0})
    try:
        usage = found.counted()
        return trimmed([_one(found, index, usage, meta) for index in indices], found.allowed.evidence)
    except Exception:
        found.unreadable()
        return [unreadable(_begun(found, index, meta)) for index in indices]


def unreadable(evidence: Evidence) -> Evidence:
    """What is left of evidence that breaks whoever reads it: the ids, and the fault."""
    return Evidence(
        **{name: getattr(evidence, name) for name in _KEPT},
        faults=tuple(dict.fromkeys((*evidence.faults, UNREADABLE_FAULT))),
        complete=False,
    )


def _begun(found: Collector, index: int, meta: dict[str, Any]) -> Evidence:
    """The ids of a choice, and what is known without its backend."""
    record = found.choices.get(index) or ChoiceRecord()
    prompt_ids = found.prompt_of(index)
    values: dict[str, Any] = {
        "id": "",
        "endpoint": found.prepared.endpoint,
        "backend": "",
        "model": found.prepared.served_model,
        "sampling": _sampling(found.prepared, index),
        "index": index,
        "stream": found.prepared.upstream_stream,
        "request": found.prepared.body,
        "prompt_ids": np.zeros(0, np.int32) if prompt_ids is None else prompt_ids,
        "output_ids": np.array(record.ids, np.int32),
        "faults": tuple(found.faults | record.faults),
    }
    return Evidence(**(values | meta))


def _sampling(prepared: Prepared, index: int) -> Sampling:
    """With the choice's own seed."""
    sampling = prepared.sampling
    return sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + index % prepared.n)


def _one(found: Collector, index: int, usage: Usage | None, meta: dict[str, Any]) -> Evidence:
    record = found.choices.get(index) or ChoiceRecord()
    prompt_ids = found.prompt_of(index)
    output_ids = np.array(record.ids, np.int32)
    claim_ids, claim_logprobs = record.claim.arrays()
    if not len(output_ids) and record.claim.rows:
        output_ids = claim_ids[:, 0].copy()
        record.faults["no_token_ids"] = None
    faults = _faults(found, record, output_ids, claim_ids, prompt_ids)
    claim_ids, claim_logprobs = fitted(claim_ids, claim_logprobs, len(output_ids) if record.claim.present else None)
    experts = None
    if record.experts is not None:
        rows = None if prompt_ids is None or not len(output_ids) else len(prompt_ids) + len(output_ids) - 1
        experts = decode_experts(record.experts, rows)
        if experts is None:
            faults["bad_routed_experts"] = None
    return replace(
        _begun(found, index, meta),
        output_ids=output_ids,
        claim_ids=claim_ids,
        claim_logprobs=claim_logprobs,
        text=record.transcript.text,
        reasoning=record.transcript.reasoning,
        tool_calls=record.transcript.tool_calls,
        finish_reason=record.finish_reason,
        stop_reason=record.stop_reason,
        usage=usage,
        routed_experts=experts,
        faults=tuple(faults),
        complete=found.terminal and record.finish_reason is not None,
    )


def _faults(
    found: Collector, record: ChoiceRecord, output_ids: Ids, claim_ids: Ids, prompt_ids: Ids | None
) -> dict[str, None]:
    faults = {**found.faults, **record.faults}
    if record.transcript.torn:
        faults[ODD] = None
    claim = record.claim
    began = record.started or found.terminal
    if began and not len(output_ids):
        faults["no_token_ids"] = None
    if began and prompt_ids is None:
        faults["no_prompt_ids"] = None
    if not found.prepared.ids_as_tokens:
        faults["no_tokenizer"] = None
    elif began and not claim.present:
        faults["no_logprobs"] = None
    elif claim.bad_logprobs or (claim.present and (len(claim_ids) != len(output_ids) or not claim_ids.size)):
        faults["bad_logprobs"] = None
    named = claim_ids[: len(output_ids), 0] if claim_ids.size else output_ids[:0]
    if claim.bad_ids or bool(((named != output_ids[: len(named)]) & (named >= 0)).any()):
        faults["bad_ids"] = None
    elif bool((claim_ids[:, 0] < 0).any() if claim_ids.size else False) and claim.present:
        faults["bad_logprobs"] = None
    if found.faults.keys() & {"upstream_error"} and not record.started:
        return dict.fromkeys(found.faults)
    return faults
