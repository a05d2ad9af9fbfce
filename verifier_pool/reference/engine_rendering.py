"""The prompt of a request as a vLLM engine in this process renders it, with its model folder's chat template."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import numpy as np

from policies.evidence import Endpoint, Ids
from verifier_pool.reference.base import ReplayRequest
from verifier_pool.reference.rendering import prompt_fields, prompt_index

logger = logging.getLogger(__name__)


REMEMBERED = 256
"""Renderings kept: the choices of a request share their prompt, and so do two replays of one answer."""


class Prompts:
    """Renders for one llm. Not for several threads at once: tokenizers are not made for that."""

    def __init__(self, llm: Any, chat_template: str | None = None) -> None:
        """
        Args:
            llm: a `vllm.LLM` or `AsyncLLM`.
            chat_template: text or file of a template instead of the model folder's.
        """
        self._llm = llm
        self._template = _load(chat_template)
        self._remembered = lru_cache(REMEMBERED)(self._render)

    def of(self, request: ReplayRequest) -> Ids | None:
        """The engine's own rendering of the request, or None when this vLLM cannot render it.

        Raises:
            ReplayError: `bad_request` when the recorded request is no JSON object.
        """
        if not request.request:
            return None
        index = 0 if request.endpoint == "chat" else prompt_index(request.request, request.choice)
        return self._remembered(request.endpoint, request.request, index)

    def _render(self, endpoint: Endpoint, request: bytes, index: int) -> Ids | None:
        body = prompt_fields(request, "reference")
        if body is None:
            return None
        try:
            if endpoint == "chat":
                return _render_chat(self._llm, self._template, body)
            return _render_completion(self._llm, body, index)
        except Exception as error:
            # A request this vLLM refuses is no evidence against the backend, only one comparison less.
            logger.warning("the reference cannot render a %s request: %s", endpoint, type(error).__name__)
            return None


def _load(chat_template: str | None) -> str | None:
    from vllm.renderers.chat_utils import load_chat_template

    loaded: str | None = load_chat_template(chat_template)
    return loaded


def _render_chat(llm: Any, chat_template: str | None, body: dict[str, Any]) -> Ids | None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    tokenizer = llm.get_tokenizer()
    template = body.get("chat_template") or chat_template or getattr(tokenizer, "chat_template", None)
    # Such a template prints today's date, which may not be the day the backend rendered.
    if llm.model_config.hf_config.model_type == "gpt_oss" or "strftime_now" in str(template):
        return None
    request = ChatCompletionRequest.model_validate(body)
    tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
    mistral = type(tokenizer).__name__ == "MistralTokenizer"
    chat = request.build_chat_params(chat_template, "auto").with_defaults({"tools": tools, "tokenize": mistral})
    _, prompts = llm.renderer.render_chat([request.messages], chat, request.build_tok_params(llm.model_config))
    return np.asarray(prompts[0]["prompt_token_ids"], np.int32)


def _render_completion(llm: Any, body: dict[str, Any], index: int) -> Ids | None:
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.renderers.inputs.preprocess import parse_model_prompt, prompt_to_seq

    request = CompletionRequest.model_validate(body)
    if request.prompt is None or request.prompt_embeds is not None or request.suffix is not None:
        return None
    prompts = prompt_to_seq(request.prompt)
    if index >= len(prompts):
        return None
    parsed = parse_model_prompt(llm.model_config, prompts[index])
    rendered = llm.renderer.render_cmpl([parsed], request.build_tok_params(llm.model_config))
    return np.asarray(rendered[0]["prompt_token_ids"], np.int32)
