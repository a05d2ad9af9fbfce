"""What of a client's request decides the prompt: the part a reference renders for itself."""

from __future__ import annotations

import re
from datetime import date, timedelta
from typing import Any

import orjson

from policies.errors import ReplayError
from policies.media import has_media

_SAMPLING = frozenset(
    {
        "stream", "stream_options", "n", "best_of", "use_beam_search", "seed", "temperature", "top_p", "top_k",
        "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "length_penalty", "logit_bias",
        "allowed_token_ids", "bad_words", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos",
        "min_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids",
        "return_token_ids", "return_tokens_as_token_ids", "echo", "user", "metadata", "store", "service_tier",
        "request_id", "priority", "cache_salt", "session_id", "kv_transfer_params", "ec_transfer_params",
        "vllm_xargs", "include_reasoning", "parallel_tool_calls", "stream_interval",
        "routed_experts_prompt_start", "thinking_token_budget",
    }
)  # fmt: skip
"""Fields that shape sampling or the answer's form; some would make a reference refuse what it can render."""


def prompt_fields(request: bytes, model: str) -> dict[str, Any] | None:
    """The request without what only matters for sampling, addressed to the reference's own model name.

    None when two honest servers may render it differently: a prompt cut to the server's own length, media that
    a processor expands, or embeddings.

    Raises:
        ReplayError: `bad_request` when the recorded request is no JSON object.
    """
    try:
        body = orjson.loads(request)
    except orjson.JSONDecodeError as error:
        raise ReplayError("bad_request", "the recorded request is not JSON") from error
    if not isinstance(body, dict):
        raise ReplayError("bad_request", "the recorded request is not an object")
    if body.get("truncate_prompt_tokens") is not None or body.get("prompt_embeds") is not None or has_media(body):
        return None
    kept = {key: value for key, value in body.items() if key not in _SAMPLING}
    # A prompt that filled the backend's context must still fit beside one generated token here.
    return kept | {"model": model, "max_tokens": 1}


def prompt_index(request: bytes, choice: int) -> int:
    """Which of a completions request's prompts a choice belongs to: vLLM numbers choices prompt by prompt."""
    try:
        n = orjson.loads(request).get("n")
    except (orjson.JSONDecodeError, AttributeError):
        n = None
    return choice // n if isinstance(n, int) and n > 0 else choice


_DATES = {
    "%d %b %Y": r"\d{1,2} [A-Z][a-z]{2} \d{4}",
    "%d %B %Y": r"\d{1,2} [A-Z][a-z]+ \d{4}",
    "%b %d, %Y": r"[A-Z][a-z]{2} \d{1,2}, \d{4}",
    "%B %d, %Y": r"[A-Z][a-z]+ \d{1,2}, \d{4}",
    "%Y-%m-%d": r"\d{4}-\d{2}-\d{2}",
    "%d/%m/%Y": r"\d{2}/\d{2}/\d{4}",
    "%m/%d/%Y": r"\d{2}/\d{2}/\d{4}",
}
"""How chat templates write dates, and what any date looks like then."""


def same_but_for_the_date(ours: str, theirs: str, today: date) -> bool:
    """Whether two rendered prompts differ in nothing but dates, where ours names a day around `today`.

    Some chat templates print the day (or the day before) they are rendered, and a replay may come days after the
    answer. Two days back and one ahead allow for the servers' time zones.
    """
    pattern = escaped = re.escape(ours)
    for days in range(-2, 2):
        day = today + timedelta(days=days)
        for form, any_date in _DATES.items():
            pattern = pattern.replace(re.escape(day.strftime(form)), any_date)
    return pattern != escaped and re.fullmatch(pattern, theirs) is not None
