"""Who masked a claim's entries: the grammar a request asks for, one the server binds of itself, or nobody.

A grammar is written into the logits before they are sampled and before the logprobs are taken, so masked tokens show
as −9999 and the rest is renormalised. It is known where the request asks for it, or where the operator declares that
the model's servers bind one (`models.NAME.grammar`). Besides, some servers bind one to every request that offers
tools, by a flag (`--tool-strict-level`) or by their tool parser's own habit (vLLM 0.32: glm47's, Cohere's). There
masked entries are no lie that could be proven, and no excuse either: what they keep from being checked stays open, and
is the backend's to answer for.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from policies._request import extras
from policies.evidence import MASKED, Evidence


def unasked(evidence: Evidence) -> bool:
    """Whether entries are masked that only the server's own grammar for tools can have masked."""
    return not evidence.sampling.grammar and has_masks(evidence) and offers_tools(evidence)


def as_masked(evidence: Evidence) -> Evidence:
    """The evidence with its sampling as it was, where the server bound a grammar of its own."""
    return replace(evidence, sampling=replace(evidence.sampling, grammar=True)) if unasked(evidence) else evidence


def has_masks(evidence: Evidence) -> bool:
    """Whether any entry of the claim is masked."""
    values = evidence.claim_logprobs
    return bool(((values <= MASKED) & np.isfinite(values)).any())


def offers_tools(evidence: Evidence) -> bool:
    """Whether the request offers tools, to be called or not."""
    return evidence.endpoint == "chat" and bool(extras(evidence).tools)


def obstacle(evidence: Evidence) -> tuple[str, bool]:
    """Why the claim cannot be held against an unmasked replay, and whether the request is why; empty where it can."""
    if evidence.sampling.grammar:
        return "grammar: a grammar masked the logits, the reference's are unmasked", True
    if unasked(evidence):
        return "masked_by_server: the logits are masked, yet no grammar was asked for or declared", False
    return "", False
