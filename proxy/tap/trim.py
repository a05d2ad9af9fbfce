"""Evidence of one response within a bound, by leaving something out: first the request as it came, which no check reads
and whose hash is kept elsewhere, then what is largest, expert ids before claims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from policies.evidence import Evidence

TRIMMED = "evidence_too_large"
"""The fault of evidence that lacks something that checks read. An honest answer to a huge request can be so large."""


def trimmed(choices: Sequence[Evidence], most: int) -> list[Evidence]:
    """The same choices in at most `most` bytes before compression, where leaving that out can achieve it."""
    found = list(choices)
    if _size(found) > most:
        found = [one if one.asked is one.request else replace(one, asked=b"") for one in found]
    if _size(found) > most:
        found = [_without_experts(one) for one in found]
    if _size(found) > most:
        found = [_without_claim(one) for one in found]
    return found


def _size(choices: Sequence[Evidence]) -> int:
    """Bytes of everything that can be large; prompts and requests that choices share count once, as when packed."""
    shared = {id(one.prompt_ids): one.prompt_ids.nbytes for one in choices}
    shared |= {id(body): len(body) for one in choices for body in (one.request, one.asked)}
    return sum(shared.values()) + sum(map(_own, choices))


def _own(one: Evidence) -> int:
    arrays = one.output_ids.nbytes + one.claim_ids.nbytes + one.claim_logprobs.nbytes
    experts = 0 if one.routed_experts is None else one.routed_experts.nbytes
    calls = sum(len(name) + len(said) for name, said in one.tool_calls)
    return arrays + experts + 4 * (len(one.text) + len(one.reasoning) + calls)


def _without_experts(one: Evidence) -> Evidence:
    if one.routed_experts is None:
        return one
    return replace(one, routed_experts=None, faults=(*one.faults, TRIMMED))


def _without_claim(one: Evidence) -> Evidence:
    if not one.claim_ids.size:
        return one
    faults = one.faults if TRIMMED in one.faults else (*one.faults, TRIMMED)
    return replace(
        one, claim_ids=np.zeros((0, 0), np.int32), claim_logprobs=np.zeros((0, 0), np.float32), faults=faults
    )
