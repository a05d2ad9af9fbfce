"""The structure check's rules on billed tokens. All are exact: the tap counts what came."""

from __future__ import annotations

from policies._findings import Finding, rejected, withheld
from policies.evidence import Evidence, Usage
from policies.media import asked_with_media


def findings(evidence: Evidence) -> list[Finding]:
    """Broken rules of a finished answer's usage."""
    if not evidence.complete or evidence.faults:
        return []
    usage = evidence.usage
    if usage is None:
        return [withheld("no_usage", "a finished answer came without usage")]
    found = []
    # What an encoder reads is billed as prompt, and has no ids.
    prompt = usage.prompt_tokens if asked_with_media(evidence) else usage.counted_prompt_tokens
    for kind, billed, counted in (
        ("prompt", usage.prompt_tokens, prompt),
        ("completion", usage.completion_tokens, usage.counted_completion_tokens),
    ):
        if billed != counted:
            found.append(rejected("usage_mismatch", f"{billed} {kind} tokens billed, {counted} counted"))
    return found + _detail_findings(usage, prompt)


def _detail_findings(usage: Usage, prompt: int) -> list[Finding]:
    """Figures that are parts or sums of others."""
    found = []
    total = usage.prompt_tokens + usage.completion_tokens
    if usage.total_tokens is not None and usage.total_tokens != total:
        text = f"{usage.total_tokens} tokens billed in total, prompt and completion add up to {total}"
        found.append(rejected("usage_mismatch", text))
    for kind, part, whole in (
        ("cached", usage.cached_tokens, prompt),
        ("reasoning", usage.reasoning_tokens, usage.counted_completion_tokens),
    ):
        if part is not None and not 0 <= part <= whole:
            found.append(rejected("usage_mismatch", f"{part} {kind} tokens billed of {whole} that came"))
    return found
