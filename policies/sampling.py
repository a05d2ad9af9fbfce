"""The sampling parameters a request resolves to."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from policies import lax
from policies.evidence import Endpoint, Sampling

DEFAULTS: dict[str, float | int] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
}
"""vLLM 0.32's own defaults, where neither the request nor the model's generation config says otherwise."""

COMPLETIONS_MAX_TOKENS = 16
_COLDEST = 1e-2
_GREEDY = 1e-5
_RARE = (
    "min_tokens",
    "ignore_eos",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
)
_GRAMMAR_FORMATS = ("json_object", "json_schema", "structural_tag")


def missing_defaults(fields: Mapping[str, Any], generation_config: Mapping[str, Any]) -> dict[str, float | int]:
    """The parameters the request leaves open, as vLLM would fill them in."""
    found: dict[str, float | int] = {}
    for name, default in DEFAULTS.items():
        if fields.get(name) is None:
            declared = generation_config.get(name)
            found[name] = default if declared is None else declared
    return found


def seed_given(fields: Mapping[str, Any]) -> int | None:
    """The request's own seed; None when it has none (`null` and −1 mean none to vLLM).

    A seed vLLM refuses counts as the request's, and is refused there.
    """
    value = fields.get("seed")
    if value is None:
        return None
    seed = lax.integer(value)
    return None if seed == -1 else (seed or 0)


def resolve(
    endpoint: Endpoint,
    fields: Mapping[str, Any],
    generation_config: Mapping[str, Any],
    *,
    seed: int,
    client_seed: bool,
    grammar: str = "asked",
) -> Sampling:
    """Sampling parameters in effect for `fields`, whose defaults are already explicit.

    `grammar` says where servers bind one of their own (`ModelSettings.grammar`).

    As vLLM does, a temperature below 1e-5 is greedy and switches top-p, top-k and min-p off, and one below
    0.01 is raised to it. In chat without a limit, `max_tokens` is the generation config's `max_new_tokens`.
    """
    numbers = {
        name: value if type(value := fields.get(name)) is float and isfinite(value) else _number(value, default)
        for name, default in DEFAULTS.items()
    }
    temperature = numbers["temperature"]
    if 0 < temperature < _COLDEST:
        temperature = _COLDEST
    greedy = temperature < _GREEDY
    return Sampling(
        temperature=temperature,
        top_p=1.0 if greedy else numbers["top_p"],
        top_k=0 if greedy else max(0, int(numbers["top_k"])),
        min_p=0.0 if greedy else numbers["min_p"],
        seed=seed,
        client_seed=client_seed,
        max_tokens=_max_tokens(endpoint, fields, generation_config),
        repetition_penalty=numbers["repetition_penalty"],
        presence_penalty=numbers["presence_penalty"],
        frequency_penalty=numbers["frequency_penalty"],
        grammar=_has_grammar(endpoint, fields, grammar),
        **({} if fields.keys().isdisjoint(_RARE) else _rare(fields)),
    )


def _rare(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What few requests say anything of."""
    return {
        "min_tokens": lax.integer(fields.get("min_tokens")) or 0,
        "ignore_eos": bool(lax.boolean(fields.get("ignore_eos"))),
        "stop": lax.strings(fields.get("stop")),
        "stop_token_ids": lax.integers(fields.get("stop_token_ids")),
        "include_stop_str_in_output": bool(lax.boolean(fields.get("include_stop_str_in_output"))),
        "logit_bias": _logit_bias(fields.get("logit_bias")),
        "allowed_token_ids": lax.integers(fields.get("allowed_token_ids")),
        "bad_words": lax.strings(fields.get("bad_words")),
    }


def _number(value: Any, default: float) -> float:
    found = lax.number(value)
    return float(default) if found is None else found


def _max_tokens(endpoint: Endpoint, fields: Mapping[str, Any], generation_config: Mapping[str, Any]) -> int | None:
    if endpoint == "completions":
        return lax.integer(fields.get("max_tokens"))
    for value in (fields.get("max_completion_tokens"), fields.get("max_tokens")):
        if value is not None:
            return lax.integer(value)
    return lax.integer(generation_config.get("max_new_tokens"))


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        return ()
    pairs = ((lax.integer(key), lax.number(bias)) for key, bias in value.items())
    return tuple((key, bias) for key, bias in pairs if key is not None and bias is not None)


def _has_grammar(endpoint: Endpoint, fields: Mapping[str, Any], servers: str) -> bool:
    """Whether a grammar masks the logits: structured outputs, forced tools, strict ones, or calls one at a time."""
    response_format = fields.get("response_format")
    if isinstance(response_format, dict) and response_format.get("type") in _GRAMMAR_FORMATS:
        return True
    if fields.get("structured_outputs") is not None:
        return True
    if [name for name, value in fields.items() if name[:7] == "guided_" and value is not None]:
        return True
    if endpoint != "chat":
        return False
    tools = fields.get("tools")
    if servers == "always" or (servers == "tools" and tools):
        return True
    choice = fields.get("tool_choice")
    if choice == "required" or isinstance(choice, dict):
        return True
    if choice == "none" or not isinstance(tools, list) or not tools:
        return False
    return lax.boolean(fields.get("parallel_tool_calls")) is False or any(map(_is_strict, tools))


def _is_strict(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and lax.boolean(function.get("strict")) is True
