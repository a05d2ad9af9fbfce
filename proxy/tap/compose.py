"""From what was collected of a response to its evidence."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from policies.evidence import Evidence, Ids, Usage
from proxy.tap.choice import ChoiceRecord
from proxy.tap.claim import fitted
from proxy.tap.experts import decode_experts
from proxy.tap.trim import trimmed

if TYPE_CHECKING:
    from proxy.tap.collect import Collector


def compose(found: Collector, meta: dict[str, Any]) -> list[Evidence]:
    """One Evidence per choice that began; a cleanly ended response accounts for every choice asked for. `meta`
    overrides fields."""
    clean = found.terminal and not ({"upstream_error", "invalid_json"} & found.faults.keys())
    began = {index for index, record in found.choices.items() if record.started}
    indices = set(range(found.expected)) if clean else began
    usage = found.counted()
    made = [_one(found, index, usage, meta) for index in sorted(indices or {0})]
    return trimmed(made, found.allowed.evidence)


def _one(found: Collector, index: int, usage: Usage | None, meta: dict[str, Any]) -> Evidence:
    prepared = found.prepared
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
    sampling = prepared.sampling
    if sampling.seed is not None:
        sampling = replace(sampling, seed=sampling.seed + index % prepared.n)
    values: dict[str, Any] = {
        "id": "",
        "endpoint": prepared.endpoint,
        "backend": "",
        "model": prepared.served_model,
        "sampling": sampling,
        "index": index,
        "stream": prepared.upstream_stream,
        "request": prepared.body,
        "prompt_ids": np.zeros(0, np.int32) if prompt_ids is None else prompt_ids,
        "output_ids": output_ids,
        "claim_ids": claim_ids,
        "claim_logprobs": claim_logprobs,
        "text": record.transcript.text,
        "reasoning": record.transcript.reasoning,
        "tool_calls": record.transcript.tool_calls,
        "finish_reason": record.finish_reason,
        "stop_reason": record.stop_reason,
        "usage": usage,
        "routed_experts": experts,
        "faults": tuple(faults),
        "complete": found.terminal and record.finish_reason is not None,
    }
    return Evidence(**(values | meta))


def _faults(
    found: Collector, record: ChoiceRecord, output_ids: Ids, claim_ids: Ids, prompt_ids: Ids | None
) -> dict[str, None]:
    faults = {**found.faults, **record.faults}
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
