"""Whether what the sampler did to an answer can be done again: its logits from a claim, its noise from the seed."""

from __future__ import annotations

from collections.abc import Sequence

from policies import noise
from policies._processors import Processed, process
from policies._request import extras
from policies.evidence import Evidence
from policies.media import asked_with_media


def not_replayable(evidence: Evidence, eos_token_ids: Sequence[int], bad_words: Sequence[Sequence[int]] | None) -> str:
    """The request's parameter that changes logits or noise before sampling in a way not replayed here."""
    sampling, others = evidence.sampling, extras(evidence)
    changed = {
        "repetition_penalty": sampling.repetition_penalty != 1.0,
        "bad_words (the model's tokenizer is not declared)": bool(sampling.bad_words) and bad_words is None,
        "min_tokens (the model's eos_token_ids are not declared)": sampling.min_tokens > 0 and not eos_token_ids,
        "watermarking": bool(others.watermarking),
    }
    names = [name for name, is_changed in changed.items() if is_changed]
    return f"not_replayed: the request sets {', '.join(names)}" if names else ""


def no_race(evidence: Evidence, name: str) -> str:
    """Why the noise of a runtime cannot be recomputed for an answer at T > 0, or nothing."""
    runtime, sampling = noise.RUNTIMES.get(name), evidence.sampling
    if runtime is None:
        return f"unknown_runtime: the sampling noise of {name or 'an undeclared runtime'!r} is not known"
    # vLLM takes −1 for no seed.
    if sampling.seed is None or sampling.seed == -1:
        return "no_seed: the request went up without a seed"
    if runtime.needs_prompt and not len(evidence.prompt_ids):
        return "no_prompt_ids: the noise depends on the prompt's length, which is not known"
    if runtime.needs_prompt and asked_with_media(evidence):
        return "media: the noise depends on the prompt's length, which ids that stand for media need not tell"
    return ""


def processed(evidence: Evidence, eos_token_ids: Sequence[int], bad_words: Sequence[Sequence[int]] | None) -> Processed:
    """The claim of one generation as the sampler saw it, up to the temperature."""
    rows = min(len(evidence.output_ids), len(evidence.claim_ids))
    return process(
        evidence.sampling,
        evidence.output_ids,
        evidence.claim_ids[:rows],
        evidence.claim_logprobs[:rows],
        stop_ids=(*eos_token_ids, *evidence.sampling.stop_token_ids),
        bad_words=bad_words if evidence.sampling.bad_words and bad_words else (),
    )
