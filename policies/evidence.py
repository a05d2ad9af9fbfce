"""What one generation leaves behind: ids, claim, seed, parameters, and how it ended.

Shapes use G for output tokens, P for prompt tokens and W for the width of the claim (21 for top-20:
the sampled token and up to twenty others). Logprobs are natural logarithms of raw probabilities
(before temperature), as vLLM reports them with `--logprobs-mode raw_logprobs`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Logprobs = NDArray[np.float32]
Endpoint = Literal["chat", "completions"]
ReplayForm = Literal["full", "ids"]

PAD_ID = -1
MASKED = -9999.0
"""What vLLM writes for a token its grammar forbids, and for a logprob that is not finite."""
TOP_LOGPROBS = 20
"""Alternatives every backend is asked for per token."""

WITHHELD_FAULTS = frozenset(
    {
        "no_logprobs",
        "no_token_ids",
        "no_prompt_ids",
        "bad_logprobs",
        "bad_ids",
        "invalid_json",
        "bad_routed_experts",
        "line_too_long",
        "too_large",
        "too_deep",
        "after_end",
        "odd_answer",
        "unreadable",
    }
)
"""Faults only the backend can cause."""
EXCUSED_FAULTS = frozenset(
    {
        *("client_left", "proxy_stopped", "proxy_overloaded", "internal_error"),
        *("upstream_closed", "upstream_timeout", "upstream_error"),
        *("no_tokenizer", "evidence_too_large", "unknown_fields"),
    }
)
"""Faults that are not the backend's doing, or no evidence of cheating."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters as the backend was told, every default made explicit.

    `seed` is the seed of this very choice: the request's seed plus the choice's index, as vLLM derives it.
    `client_seed` marks a seed the client chose, which therefore earns no standing.
    `top_k` ≤ 0 is off. `grammar` marks structured outputs and required or named tools, which mask logits
    before both sampling and logprobs.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    client_seed: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    grammar: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts the backend billed for the whole response, and what the tap counted itself.

    The counted figures span every choice (and every prompt) of the response, as the billed ones do. The total, the
    cached part of the prompt and the reasoning part of the completion are None where the backend did not state them.
    """

    prompt_tokens: int
    completion_tokens: int
    counted_prompt_tokens: int
    counted_completion_tokens: int
    total_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


def _no_ids() -> Ids:
    return np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """Evidence of one generation.

    Attributes:
        id: 32 hex digits, ours, shared by all choices of one response.
        runtime, precision, engine, speculative: the backend's, as the operator declares them: key of its sampling
            noise, precision of its weights, engine version with hardware and kernels, speculative decoding.
        stream: the backend was asked to stream, which it is not where `buffer` re-streams its answer.
        request: the JSON body as it went to the backend.
        asked: the JSON body as the client sent it; empty where that is not known.
        prompt_ids: int32 (P,), as the backend reports them; empty when it did not.
        output_ids: int32 (G,).
        claim_ids: int32 (G, W), sampled token first, then the backend's top-k without it; −1 pads.
        claim_logprobs: float32 (G, W), natural log; −inf pads; −9999 is vLLM's sentinel.
        routed_experts: integers (P+G−1, layers, experts per token) or None.
        text, reasoning, tool_calls: what the client was shown: the content (a refusal counts as content), the
            reasoning a parser took out of it, and name and arguments of each tool call.
        shown_sha256: SHA-256 (hex) of the body as the client got it, an error of the proxy's in its place or at its end
            included, less what says something of the answer (an inline verdict, keep-alive comments); of what was sent
            until then where the client left. Empty where nothing was sent.
        faults: short codes of what the backend withheld or broke, such as `no_logprobs`.
        complete: the backend finished the answer (finish reason seen and, in a stream, a terminal frame).
        created, first_token_seconds, total_seconds: Unix seconds; seconds after the request went up.
    """

    id: str
    endpoint: Endpoint
    backend: str
    model: str
    sampling: Sampling
    index: int = 0
    owner: str = ""
    runtime: str = ""
    precision: str = ""
    engine: str = ""
    speculative: bool = False
    stream: bool = False
    created: float = 0.0
    request: bytes = b""
    asked: bytes = b""
    prompt_ids: Ids = field(default_factory=_no_ids)
    output_ids: Ids = field(default_factory=_no_ids)
    claim_ids: Ids = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    claim_logprobs: Logprobs = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[tuple[str, str], ...] = ()
    shown_sha256: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    usage: Usage | None = None
    routed_experts: NDArray[np.integer] | None = None
    faults: tuple[str, ...] = ()
    complete: bool = True
    first_token_seconds: float | None = None
    total_seconds: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """What the reference computes for the same ids, one row per output token.

    Attributes:
        ids: int32 (G, X), emitted token first; −1 pads, which may stand between ids.
        logprobs: float32 (G, X), natural log; −inf pads.
        form: `full` holds the reference's own top-k beside the claimed ids; `ids` holds only the claimed ids, so
            ranks, Jaccard and omitted mass do not exist.
        own: columns, the emitted token's among them, that are the reference's own top-k; claimed ids outside it
            stand after them. None when every column is its own. Meaningless in form `ids`.
        routed_experts: integers (P+G−1 or P+G, layers, experts per token), as `Evidence.routed_experts`, or of the
            output's part alone (G−1 or G rows, from position P on); None when the reference captures none.
        prompt_ids: the reference's own rendering of the request, or None when it cannot render it.
        reference: name and version of what replayed.
    """

    ids: Ids
    logprobs: Logprobs
    form: ReplayForm = "full"
    prompt_ids: Ids | None = None
    reference: str = ""
    own: int | None = None
    routed_experts: NDArray[np.integer] | None = None
