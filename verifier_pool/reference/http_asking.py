"""What a vLLM server is asked for a replay, and how its answer is read. Bodies hold numpy arrays, as orjson takes them.

Everything here but `Server` may run in any thread.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np

from policies.errors import ReplayError
from policies.evidence import Ids, Logprobs, Replay
from verifier_pool.reference import wire
from verifier_pool.reference.base import ReplayRequest
from verifier_pool.reference.canary import Known
from verifier_pool.reference.experts import Experts, decode_npy, output_part
from verifier_pool.reference.rows import TOP_K, Entries
from verifier_pool.reference.scoring import MAX_CANDIDATES, candidates, full_form, ids_form, look_up

logger = logging.getLogger(__name__)

COMPLETIONS = "/v1/completions"
GENERATE = "/inference/v1/generate"

TEXT = "The three primary colours are red, yellow and blue. A painter mixes them to"
"""What the known answer goes on with."""

ANSWER_TOP = 5

_CEILING = re.compile(r"max allowed: (\d+)")
_VOCABULARY = re.compile(r"Vocabulary size: (\d+)")

Limits = tuple[int, int | None]
"""Logprobs per token that a server allows, and the size of its vocabulary where it said."""


class Server:
    """What is known of a server. Used on one loop.

    Attributes:
        served: the name of its model there.
        max_tokens: prompt and output together; None where it does not say.
        scores_ids: whether it is thought to score given ids.
        renders: whether it is thought to have `/render` routes.
    """

    def __init__(self, served: str | None) -> None:
        self.served = served
        self.max_tokens: int | None = None
        self.scores_ids = self.renders = True
        self.limits: Limits = (MAX_CANDIDATES, None)

    def introduced(self, cards: Sequence[wire.Card], version: str) -> str:
        """Take in what the server says it serves; the reference's name. Raises ReplayError `wrong_model`."""
        card = next((card for card in cards if self.served in (None, card.id)), None)
        if card is None:
            raise ReplayError("wrong_model", "the reference does not serve the configured model")
        self.served = card.id
        self.max_tokens = None if card.max_model_len is None else card.max_model_len - 1
        return f"vllm_http vllm-{version} {card.id}"

    def learn(self, name: str, response: httpx.Response) -> None:
        """What a refusal says about the server; where it says nothing new, it is about the request."""
        words = wire.message(response)
        ceiling, vocabulary = _CEILING.search(words), _VOCABULARY.search(words)
        if ceiling is not None and int(ceiling[1]) < self.limits[0]:
            self.limits = max(int(ceiling[1]), 1), self.limits[1]
            logger.info("%s allows %d logprobs per token (--max-logprobs)", name, self.limits[0])
        elif vocabulary is not None:
            self.limits = self.limits[0], int(vocabulary[1])
        elif response.request.url.path == GENERATE:
            if response.status_code in (403, 404):
                self.cannot_score(name, "it runs without --enable-scale-out")
            elif any(obstacle in words for obstacle in ("V2 model runner", "kv-sharing-fast-prefill")):
                self.cannot_score(name, "that needs vLLM's V2 runner without --kv-sharing-fast-prefill")

    def cannot_score(self, name: str, why: str) -> None:
        """Never ask it for given ids again."""
        if self.scores_ids:
            logger.info("%s cannot score given ids, %s; every replay takes its best instead", name, why)
        self.scores_ids = False


class Scoring:
    """Asks for the claimed ids alone, and for the server's best too where the form is `full`."""

    def __init__(self, request: ReplayRequest, served: str | None, ceiling: int, vocab_size: int | None) -> None:
        self._request, self._served, self._ceiling = request, served, ceiling
        self._vocab_size = vocab_size
        self._ids: Ids = np.zeros((0, 0), np.int32)

    def body(self) -> dict[str, Any]:
        """The request."""
        request = self._request
        ids = candidates(request.output_ids, request.candidate_ids, self._vocab_size)
        # The emitted token also comes with the prompt's logprobs, where a whole row is more than is allowed.
        ids = ids if ids.shape[1] <= self._ceiling else ids[:, 1 : self._ceiling + 1]
        self._ids = np.ascontiguousarray(ids)
        sampling: dict[str, Any] = {
            "max_tokens": 1,
            "temperature": 0,
            "detokenize": False,
            "prompt_logprob_token_ids": self._ids,
            # A row scores the token after it: the first output token is the last prompt token's prediction.
            "prompt_logprob_start": len(request.prompt_ids) - 1,
        }
        if request.form == "full":
            sampling["prompt_logprobs"] = min(TOP_K, self._ceiling)
        elif not self._has_emitted():
            sampling["prompt_logprobs"] = 0
        if request.experts:
            sampling["routed_experts_prompt_start"] = len(request.prompt_ids)
        return {
            "model": self._served,
            "token_ids": _sequence(request),
            "return_token_ids": True,
            "sampling_params": sampling,
        }

    def read(self, response: httpx.Response) -> Replay | None:
        """The replay, or None where the server did not heed the ids. Raises ReplayError."""
        request, output, ids = self._request, self._request.output_ids, self._ids
        answer = wire.decode(response, wire.Generated)
        if len(answer.choices) != 1 or not _same(answer.prompt_token_ids, request):
            raise ReplayError("bad_replay", "the reference answered for other ids")
        if answer.prompt_token_id_logprobs is None:
            return None
        logprobs = wire.scores(answer.prompt_token_id_logprobs, ids)
        experts = _experts(answer.choices[0].routed_experts, request)
        if request.form == "full":
            own_list = wire.entries(answer.prompt_logprobs, request.tokens, len(output))
            return _full(request, own_list, (ids, logprobs), experts)
        if not self._has_emitted():
            emitted = look_up(wire.entries(answer.prompt_logprobs, request.tokens, len(output)), output[:, None])
            ids, logprobs = (np.concatenate(pair, axis=1) for pair in zip(emitted, (ids, logprobs), strict=True))
        return Replay(*ids_form(output, ids, logprobs), "ids", routed_experts=experts)

    def _has_emitted(self) -> bool:
        return np.array_equal(self._ids[:, 0], self._request.output_ids)


class Listing:
    """Asks for the server's best at every position, and finds among them the claimed ids that they include."""

    def __init__(self, request: ReplayRequest, served: str | None, ceiling: int, vocab_size: int | None) -> None:
        self._request, self._served, self._ceiling = request, served, ceiling
        self._vocab_size = vocab_size

    def body(self) -> dict[str, Any]:
        """The request."""
        request = self._request
        body: dict[str, Any] = {
            "model": self._served,
            "prompt": _sequence(request),
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": self._ceiling if request.candidate_ids is not None else min(TOP_K, self._ceiling),
            "return_token_ids": True,
        }
        return body | ({"routed_experts_prompt_start": len(request.prompt_ids)} if request.experts else {})

    def read(self, response: httpx.Response) -> Replay:
        """The replay. Raises ReplayError."""
        request = self._request
        choices = wire.decode(response, wire.Completion).choices
        if len(choices) != 1 or not _same(choices[0].prompt_token_ids, request):
            raise ReplayError("bad_replay", "the reference answered for other ids")
        own_list = wire.entries(choices[0].prompt_logprobs, request.tokens, len(request.output_ids))
        ids = candidates(request.output_ids, request.candidate_ids, self._vocab_size)
        return _full(request, own_list, look_up(own_list, ids), _experts(choices[0].routed_experts, request))


def greedy_answer(server: Server, length: int) -> dict[str, Any]:
    """Asks for a greedy answer of exactly `length` tokens and their best."""
    return {
        "model": server.served,
        "prompt": TEXT,
        "max_tokens": length,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": min(ANSWER_TOP, server.limits[0]),
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def read_answer(response: httpx.Response) -> Known:
    """The greedy answer as a known one. Raises ReplayError `bad_replay`."""
    choices = wire.decode(response, wire.Answer).choices
    if len(choices) != 1 or not choices[0].prompt_token_ids or not choices[0].token_ids:
        raise ReplayError("bad_replay", "the reference answered without token ids")
    choice = choices[0]
    output_ids = np.asarray(choice.token_ids, np.int32)
    entries = wire.answer_entries(choice)
    ids = candidates(output_ids, entries.table(len(output_ids)), None)
    return Known(np.asarray(choice.prompt_token_ids, np.int32), output_ids, *look_up(entries, ids))


def _sequence(request: ReplayRequest) -> Ids:
    return np.concatenate([request.prompt_ids, request.output_ids]).astype(np.int32)


def _same(answered: list[int] | None, request: ReplayRequest) -> bool:
    return answered is None or np.array_equal(answered, _sequence(request))


def _full(request: ReplayRequest, own_list: Entries, scored: tuple[Ids, Logprobs], experts: Experts | None) -> Replay:
    ids, logprobs, own = full_form(request.output_ids, own_list, scored)
    return Replay(ids, logprobs, "full", own=own, routed_experts=experts)


def _experts(text: str | None, request: ReplayRequest) -> Experts | None:
    if text is None or not request.experts:
        return None
    return output_part(decode_npy(text), len(request.prompt_ids), len(request.output_ids))
