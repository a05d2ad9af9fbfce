"""What a packed record holds, field by field. Free text is bytes, because it may hold lone surrogates."""

from __future__ import annotations

import msgspec

from policies.evidence import Endpoint


class PackedUsage(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    prompt_tokens: int
    completion_tokens: int
    counted_prompt_tokens: int
    counted_completion_tokens: int
    total_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class PackedSampling(msgspec.Struct, forbid_unknown_fields=True):
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    client_seed: bool
    max_tokens: int | None
    min_tokens: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    ignore_eos: bool
    stop: tuple[bytes, ...]
    stop_token_ids: tuple[int, ...]
    include_stop_str_in_output: bool
    logit_bias: tuple[tuple[int, float], ...]
    allowed_token_ids: tuple[int, ...]
    bad_words: tuple[bytes, ...]
    grammar: bool


class PackedClaim(msgspec.Struct, forbid_unknown_fields=True):
    rows: int
    width: int
    ids: bytes
    logprobs: bytes


class PackedExperts(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, int, int]
    data: bytes


class PackedChoice(msgspec.Struct, forbid_unknown_fields=True):
    id: bytes
    endpoint: Endpoint
    backend: bytes
    model: bytes
    sampling: PackedSampling
    index: int
    owner: bytes
    runtime: bytes
    precision: bytes
    engine: bytes
    speculative: bool
    stream: bool
    created: float
    request: bytes | None
    prompt_ids: bytes | None
    output_ids: bytes
    claim: PackedClaim
    text: bytes
    finish_reason: bytes | None
    stop_reason: int | bytes | None
    usage: PackedUsage | None
    routed_experts: PackedExperts | None
    faults: tuple[bytes, ...]
    complete: bool
    first_token_seconds: float | None
    total_seconds: float | None
    reasoning: bytes = b""
    tool_calls: tuple[tuple[bytes, bytes], ...] = ()
    shown_sha256: bytes = b""
    asked: bytes | None = None


class Record(msgspec.Struct, forbid_unknown_fields=True):
    v: int
    choices: list[PackedChoice]
