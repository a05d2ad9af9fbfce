"""The prompt of a request as a vLLM engine in this process renders it, with its model folder's chat template."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from policies.evidence import Ids
from verifier_pool.reference.base import ReplayRequest
from verifier_pool.reference.rendering import prompt_fields, prompt_index

logger = logging.getLogger(__name__)


def render(engine: Any, model: str, request: ReplayRequest) -> Ids | None:
    """The engine's own rendering of the request, or None when this vLLM cannot render it.

    Args:
        engine: a `vllm.LLM`.
        model: a name for the request to address.

    Raises:
        ReplayError: `bad_request` when the recorded request is no JSON object.
    """
    if not request.request:
        return None
    body = prompt_fields(request.request, model)
    if body is None:
        return None
    try:
        if request.endpoint == "chat":
            return _render_chat(engine, body)
        return _render_completion(engine, body, prompt_index(request.request, request.choice))
    except Exception as error:
        # A request this vLLM refuses is no evidence against the backend, only one comparison less.
        logger.warning("the reference cannot render a %s request: %s", request.endpoint, type(error).__name__)
        return None


def _render_chat(engine: Any, body: dict[str, Any]) -> Ids | None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    tokenizer = engine.get_tokenizer()
    template = body.get("chat_template") or engine.chat_template or getattr(tokenizer, "chat_template", None)
    # Such a template prints today's date, which may not be the day the backend rendered.
    if engine.model_config.hf_config.model_type == "gpt_oss" or "strftime_now" in str(template):
        return None
    request = ChatCompletionRequest.model_validate(body)
    tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
    mistral = type(tokenizer).__name__ == "MistralTokenizer"
    chat = request.build_chat_params(engine.chat_template, "auto").with_defaults({"tools": tools, "tokenize": mistral})
    _, prompts = engine.renderer.render_chat([request.messages], chat, request.build_tok_params(engine.model_config))
    return np.asarray(prompts[0]["prompt_token_ids"], np.int32)


def _render_completion(engine: Any, body: dict[str, Any], index: int) -> Ids | None:
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.renderers.inputs.preprocess import parse_model_prompt, prompt_to_seq

    request = CompletionRequest.model_validate(body)
    if request.prompt is None or request.prompt_embeds is not None or request.suffix is not None:
        return None
    prompts = prompt_to_seq(request.prompt)
    if index >= len(prompts):
        return None
    parsed = parse_model_prompt(engine.model_config, prompts[index])
    rendered = engine.renderer.render_cmpl([parsed], request.build_tok_params(engine.model_config))
    return np.asarray(rendered[0]["prompt_token_ids"], np.int32)
