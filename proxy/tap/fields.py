"""Request fields a client may not send through a verifying proxy, and why.

Refused fields change what is generated, or what evidence comes back, in a way that cannot be verified; the
client gets a 400 that names the field. Dropped fields never go up and leave the answer as it would be
without them. A refused field that says what its absence says (`null`, and where marked any empty or false
value) is dropped. Everything not listed here or rewritten in `prepare` passes through with its bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from policies.errors import InvalidRequest

REFUSED: dict[str, tuple[str, bool]] = {
    # field: (why, whether every empty or false value means the default)
    "kv_transfer_params": ("it can replace the prompt by other token ids", True),
    "ec_transfer_params": ("it can replace the prompt's media by a foreign cache's", True),
    "prompt_embeds": ("a prompt without token ids cannot be replayed", True),
    "chat_template": ("the operator's template renders the prompt", False),
    "prompt_logprobs": ("a long prompt's logprobs can exhaust the backend's memory", False),
    "logprob_token_ids": ("it replaces the top logprobs that are the evidence, also for other clients", True),
    "use_beam_search": ("beams are not sampled from the distribution the logprobs describe", True),
    "vllm_xargs": ("extra arguments reach custom logits processors that cannot be replayed", True),
    "echo": ("it mixes prompt and answer and makes the backend compute prompt logprobs", True),
    "routed_experts_prompt_start": ("it cuts rows from the expert ids that are the evidence", True),
}

DROPPED: frozenset[str] = frozenset(
    {
        "priority",  # scheduling is the operator's
        "request_id",  # names in the backend's logs and ids are ours to give
        "session_id",  # would route around the operator's balancing
        "best_of",  # vLLM ignores it; engines that do not would return an answer picked after the fact
        "trust_request_chat_template",  # a server flag, meaningless in a request
        "countersign",
    }
)


GONE = DROPPED | REFUSED.keys()
"""What never goes up."""
_LOOKED_AT = REFUSED.keys() | {"chat_template_kwargs"}


def refuse(fields: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for the first refused field."""
    if fields.keys().isdisjoint(_LOOKED_AT):
        return
    for name, (why, empty_is_default) in REFUSED.items():
        value = fields.get(name)
        if value is not None and (value or not empty_is_default):
            raise InvalidRequest(f"`{name}` is not available here: {why}.", param=name, code="unsupported_parameter")
    kwargs = fields.get("chat_template_kwargs")
    if isinstance(kwargs, dict) and kwargs.get("chat_template") is not None:
        why = REFUSED["chat_template"][0]
        raise InvalidRequest(
            f"`chat_template_kwargs.chat_template` is not available here: {why}.",
            param="chat_template_kwargs",
            code="unsupported_parameter",
        )
