"""A client's request, rewritten so that its answer carries evidence.

Only what evidence needs is rewritten; every other field goes up with the bytes it came with. A request that
vLLM would refuse stays one: a field with a value vLLM does not accept is passed on as it is, and so is a
combination it does not accept (`top_logprobs` without `logprobs`, `stream_options` without `stream`).

One known difference remains: vLLM lets a grammar bind from the first token when `include_reasoning` is
false; we always ask for the reasoning (its tokens are evidence) and take it out of the answer again, so
there the grammar binds after the reasoning.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from policies import lax
from policies.evidence import TOP_LOGPROBS, Endpoint
from policies.media import has_media
from policies.sampling import COMPLETIONS_MAX_TOKENS, missing_defaults, resolve, seed_given
from policies.settings import BackendSettings, ModelSettings
from proxy.tap.fields import GONE, refuse
from proxy.tap.rawjson import FALSE, TRUE, Object, raw, read_object, write
from proxy.tap.types import Asked, Prepared

if TYPE_CHECKING:
    from proxy.relay.body import Body

_USAGE = raw({"include_usage": True})
_spelled = lru_cache(maxsize=256, typed=True)(raw)
"""Defaults and names of models are the same in every request."""

TOP = TOP_LOGPROBS
"""Alternatives asked for per token. Chat drops the 20th when the sampled token is outside the top 20."""
_TOP = raw(TOP)


def prepare(body: Body, model: ModelSettings, backend: BackendSettings, *, seed: int) -> Prepared:
    """The request as it goes up, and what to remember of it.

    `seed` (below 2**62) is fresh and unpredictable; it is used unless the client gave its own.
    Raises InvalidRequest for refused fields.
    """
    endpoint: Endpoint = "chat" if body.endpoint == "chat" else "completions"
    fields, raws = dict(body.fields), dict(body.raws)
    refuse(fields)
    for name in GONE & raws.keys():
        del raws[name]

    client_seed = seed_given(fields)
    if client_seed is None:
        raws["seed"] = raw(seed)
    for name, default in missing_defaults(fields, model.generation_config).items():
        raws[name] = _spelled(default)
        fields[name] = default
    if endpoint == "completions" and fields.get("max_tokens") is None:
        raws["max_tokens"] = raw(COMPLETIONS_MAX_TOKENS)
        fields["max_tokens"] = COMPLETIONS_MAX_TOKENS

    logprobs = _ask_logprobs(endpoint, fields, raws)
    tokens_as_ids = bool(lax.boolean(fields.get("return_tokens_as_token_ids")))
    readable = logprobs is None or tokens_as_ids or model.tokenizer is not None
    if readable:
        _set_flag(fields, raws, "return_tokens_as_token_ids")
    reasoning = True
    if endpoint == "chat":
        reasoning = lax.boolean(fields.get("include_reasoning", True)) is not False
        if "include_reasoning" not in fields or not reasoning:
            raws["include_reasoning"] = TRUE
    upstream_stream, usage = _ask_usage(fields, raws, body.stream, buffered=backend.routed_experts == "buffer")
    _set_flag(fields, raws, "return_token_ids")
    served = backend.served_model or backend.model
    raws["model"] = _spelled(served)
    return Prepared(
        endpoint=endpoint,
        body=write(raws),
        asked=Asked(
            stream=body.stream,
            logprobs=logprobs,
            token_ids=bool(lax.boolean(fields.get("return_token_ids"))),
            tokens_as_ids=tokens_as_ids,
            usage=usage,
            reasoning=reasoning,
        ),
        sampling=resolve(
            endpoint,
            fields,
            model.generation_config,
            seed=seed if client_seed is None else client_seed,
            client_seed=client_seed is not None,
            grammar=model.grammar,
        ),
        upstream_stream=upstream_stream,
        prompts=body.prompts,
        n=body.n,
        served_model=served,
        ids_as_tokens=readable,
        media=endpoint == "chat" and has_media(fields),
    )


def _ask_logprobs(endpoint: Endpoint, fields: dict[str, Any], raws: Object) -> int | None:
    """Asks for the top 20 where that keeps the request valid; returns how many the client wants."""
    return (_ask_chat_logprobs if endpoint == "chat" else _ask_completion_logprobs)(fields, raws)


def _ask_chat_logprobs(fields: dict[str, Any], raws: Object) -> int | None:
    flag, top = fields.get("logprobs"), fields.get("top_logprobs")
    wants = False if flag is None else lax.boolean(flag)
    count = 0 if top is None else lax.integer(top) if isinstance(top, int | float) else None
    if wants is None or count is None or count < -1 or (count != 0 and not flag):
        return None
    raws["logprobs"] = TRUE
    if not wants:
        raws["top_logprobs"] = _TOP
        return None
    if 0 <= count < TOP:
        raws["top_logprobs"] = _TOP
    return count


def _ask_completion_logprobs(fields: dict[str, Any], raws: Object) -> int | None:
    value = fields.get("logprobs")
    if value is None:
        raws["logprobs"] = _TOP
        return None
    count = lax.integer(value) if isinstance(value, int | float) else None
    if count is None or count < -1:
        return None
    if 0 <= count < TOP:
        raws["logprobs"] = _TOP
    return count


def _set_flag(fields: dict[str, Any], raws: Object, name: str) -> None:
    if fields.get(name) is None or lax.boolean(fields[name]) is not None:
        raws[name] = TRUE


def _ask_usage(fields: dict[str, Any], raws: Object, stream: bool, *, buffered: bool) -> tuple[bool, bool]:
    """Asks for the usage chunk of a stream; returns (stream upstream, client wants the chunk).

    Without the client's own `include_usage`, vLLM ignores `continuous_usage_stats`; with ours it would not.
    """
    options = fields.get("stream_options")
    if not stream or not (options is None or isinstance(options, dict)):
        return stream, False
    options = options or {}
    if options and any(value is not None and lax.boolean(value) is None for value in _usage_flags(options)):
        return True, False
    usage = bool(options and lax.boolean(options.get("include_usage")))
    if buffered:
        raws["stream"] = FALSE
        raws.pop("stream_options", None)
        return False, usage
    if not options:
        raws["stream_options"] = _USAGE
    elif not usage:
        kept = read_object(raws["stream_options"]) if options else None
        kept = {name: value for name, value in (kept or {}).items() if name != "continuous_usage_stats"}
        raws["stream_options"] = raw({**kept, "include_usage": TRUE})
    return True, usage


def _usage_flags(options: dict[str, Any]) -> tuple[Any, Any]:
    return options.get("include_usage"), options.get("continuous_usage_stats")
