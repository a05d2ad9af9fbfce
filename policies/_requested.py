"""Whether evidence is of the request that it holds.

A receipt ties both together by the operator's word alone, who could put one answer's evidence beside another's request.
What an answer was sampled by follows from the request as it went to the backend, and that from the request as it came,
less what the proxy writes into it. Both are read by what prepares requests (`policies.sampling`), so that what an
honest proxy wrote always agrees.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from policies import codec, lax
from policies._request import prompt_given, read_leniently
from policies.evidence import Evidence, Sampling
from policies.sampling import COMPLETIONS_MAX_TOKENS, DEFAULTS, resolve, seed_given

WRITTEN = frozenset(
    {
        *("model", "stream", "stream_options", "logprobs", "top_logprobs", "include_reasoning"),
        *("return_token_ids", "return_tokens_as_token_ids"),
    }
)
"""Fields that the proxy writes whatever the client said: what is answered with, and under which name."""
FILLED = frozenset({*DEFAULTS, "seed"})
"""Fields that it fills in where the client left them open."""
NEVER_SENT = frozenset(
    {
        *("kv_transfer_params", "ec_transfer_params", "prompt_embeds", "chat_template", "prompt_logprobs"),
        *("logprob_token_ids", "use_beam_search", "vllm_xargs", "echo", "routed_experts_prompt_start"),
        *("priority", "request_id", "session_id", "best_of", "trust_request_chat_template", "countersign"),
    }
)
"""Fields that it takes out, or refuses."""
_SETTINGS = ("max_tokens", "grammar", "client_seed")
"""What of the sampling does not hang on the request as it was sent alone."""
_OWN = {**DEFAULTS, "max_tokens": COMPLETIONS_MAX_TOKENS}
"""What vLLM itself takes for what is left open, where the model's generation config does not say otherwise."""
_WORDS = {
    "max_tokens": "the limit on tokens",
    "grammar": "whether a grammar bound it",
    "client_seed": "whose seed it is",
}


@dataclass(slots=True)
class Compared:
    """In what two things differ, and what of them could not be compared; each a few words."""

    wrong: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def compare_request(choices: Sequence[Evidence], asked: bytes) -> Compared:
    """Hold evidence against its request.

    Args:
        choices: at least one.
        asked: the request as it came; empty where that is not known.
    """
    found, first = Compared(), choices[0]
    if not first.request:
        found.left.append("sampling parameters and seed with the request as it went to the backend, which is not there")
        return found
    sent = read_leniently(first.request)
    if sent is None:
        found.wrong.append("the request as it was sent on is no JSON object")
        return found
    came = read_leniently(asked) if asked else None
    if asked and came is None:
        found.wrong.append("the request as it came is no JSON object")
    elif came is None:
        found.left.append("the request as it came with the one that went to the backend: the bundle does not hold it")
    else:
        _passed_on(found, came, sent, first)
    for choice, derived in zip(choices, _derived(choices, sent, came), strict=True):
        _sampled(found, choice, derived, came is not None)
    if prompt_given(first) is None:
        found.left.append("the prompt's tokens with the words of the request, other than by the operator's reference")
    found.wrong, found.left = list(dict.fromkeys(found.wrong)), list(dict.fromkeys(found.left))
    return found


def _passed_on(found: Compared, came: Mapping[str, Any], sent: Mapping[str, Any], first: Evidence) -> None:
    """Whether one is the other, as the proxy passes requests on."""
    if isinstance(came.get("model"), str) and came["model"] != first.model:
        found.wrong.append("the model that was asked for")
    filled = FILLED | ({"max_tokens"} if first.endpoint == "completions" else set())
    for name in sorted((came.keys() | sent.keys()) - WRITTEN):
        if name in NEVER_SENT:
            same = name not in sent
        elif name in filled and _is_open(name, came):
            same = True
            if name != "seed" and sent.get(name) != _OWN[name]:
                made = f"{sent.get(name)!r:.40}"
                found.left.append(f"`{name}`, which the request left open, with the settings that made it {made}")
        else:
            same = (name in came) == (name in sent) and _spelled(came.get(name)) == _spelled(sent.get(name))
        if not same:
            found.wrong.append(f"`{name:.40}` of the request, as it came and as it was sent on")


def _is_open(name: str, came: Mapping[str, Any]) -> bool:
    return came.get(name) is None or (name == "seed" and seed_given(came) is None)


def _spelled(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _derived(choices: Sequence[Evidence], sent: Mapping[str, Any], came: Mapping[str, Any] | None) -> list[Sampling]:
    """The sampling of each choice by the request, as evidence keeps it."""
    seed, first = seed_given(sent), choices[0]
    of_client = came is not None and seed_given(came) is not None
    one = resolve(first.endpoint, sent, {}, seed=seed or 0, client_seed=of_client)
    n = max(1, lax.integer(sent.get("n")) or 1)
    each = [replace(one, seed=None if seed is None else seed + choice.index % n) for choice in choices]
    # Numbers beyond 64 bits are not kept as they are.
    plain = [Evidence("0" * 32, first.endpoint, "", "", sampling=sampling) for sampling in each]
    return [choice.sampling for choice in codec.unpack(codec.pack(plain))]


def _sampled(found: Compared, choice: Evidence, derived: Sampling, is_known: bool) -> None:
    said = choice.sampling
    different = [each.name for each in fields(Sampling) if getattr(said, each.name) != getattr(derived, each.name)]
    for name in different:
        if name not in _SETTINGS:
            found.wrong.append(f"`{name}`")
        elif _may_differ(name, said, derived, is_known):
            found.left.append(f"{_WORDS[name]}, with what the operator's settings say")
        else:
            found.wrong.append(_WORDS[name])


def _may_differ(name: str, said: Sampling, derived: Sampling, is_known: bool) -> bool:
    """Whether settings, which are not in the bundle, can have made this of the request."""
    if name == "max_tokens":
        return derived.max_tokens is None
    return said.grammar if name == "grammar" else not is_known
