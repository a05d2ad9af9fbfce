"""A vLLM server as the reference, asked over HTTP.

Each generation is one request of token ids; vLLM then skips its prefix cache, so a replay is one full prefill. A server
with `--enable-scale-out` on vLLM's V2 runner scores the claimed ids by themselves (`/inference/v1/generate`), in either
form. Any other one is asked for its best by `/v1/completions`, as many as its `--max-logprobs` allows up to 64; every
answer then has form `full`, and a claimed id that is not among them is left out. Which of them a server can do is
learned from what it refuses, once, and logged.

The prompt is rendered by the server's `/render` routes, which exist only with `--enable-scale-out`; without them
`Replay.prompt_ids` is None.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import httpx
import numpy as np

from policies.errors import ReplayError
from policies.evidence import Ids, Logprobs, Replay
from policies.settings import ReferenceSettings
from verifier_pool.reference import wire
from verifier_pool.reference.base import Reference, ReplayRequest
from verifier_pool.reference.experts import Experts, decode_npy, output_part
from verifier_pool.reference.rendering import prompt_fields, prompt_index, same_but_for_the_date
from verifier_pool.reference.rows import TOP_K, Entries
from verifier_pool.reference.scoring import MAX_CANDIDATES, candidates, full_form, ids_form, look_up

logger = logging.getLogger(__name__)

CONCURRENCY = 8
COMPLETIONS = "/v1/completions"
GENERATE = "/inference/v1/generate"
RENDER_PATHS = {"chat": "/v1/chat/completions/render", "completions": "/v1/completions/render"}
REFUSED = (400, 403, 404, 413, 422)

_CEILING = re.compile(r"max allowed: (\d+)")
_VOCABULARY = re.compile(r"Vocabulary size: (\d+)")


class VllmHttp(Reference):
    """The reference at `settings.url`. The server need not be up yet: it is asked for its name when it is."""

    def __init__(self, model_name: str, settings: ReferenceSettings) -> None:
        headers = {"authorization": f"Bearer {settings.api_key.get_secret_value()}"} if settings.api_key else {}
        self._client = httpx.Client(
            base_url=str(settings.url).rstrip("/").removesuffix("/v1"),
            headers=headers,
            timeout=settings.timeout,
            limits=httpx.Limits(max_connections=CONCURRENCY),
            trust_env=False,
        )
        self._submitted = ThreadPoolExecutor(CONCURRENCY)
        self._pool = ThreadPoolExecutor(CONCURRENCY, thread_name_prefix=f"replay-{model_name}")
        self._served = settings.served_model
        self._max_model_len: int | None = None
        self._known = False
        self._renders = True
        self._scores_ids = True
        self._ceiling = MAX_CANDIDATES
        self._vocab_size: int | None = None
        self.name = f"vllm_http {settings.served_model or model_name}"

    def probe(self) -> None:
        """Ask the server for its version and model, which make up `name`. Raises ReplayError."""
        if self._known:
            return
        version = wire.decode(self._send("GET", "/version"), wire.Version).version
        cards = wire.decode(self._send("GET", "/v1/models"), wire.Cards).data
        card = next((card for card in cards if self._served in (None, card.id)), None)
        if card is None:
            raise ReplayError("wrong_model", "the reference does not serve the configured model")
        self._served, self._max_model_len = card.id, card.max_model_len
        self.name = f"vllm_http vllm-{version} {card.id}"
        self._known = True

    def submit(self, request: ReplayRequest) -> Future[Replay]:
        """Queue one replay."""
        return self._submitted.submit(lambda: self.replay([request])[0])

    def replay(self, requests: Sequence[ReplayRequest]) -> list[Replay]:
        """Replay all, up to eight at once.

        Raises:
            ReplayError: `too_long` and `refused` are final; `unreachable`, `timeout`, `http_5xx`,
                `overloaded`, `bad_replay` and `not_finite` may pass.
        """
        self.probe()
        distinct = {(request.endpoint, request.request) for request in requests}
        rendering = {key: self._pool.submit(self._render, *key) for key in distinct}
        replays = [self._pool.submit(self._replay, request) for request in requests]
        prompts = {key: future.result() for key, future in rendering.items()}
        results = [future.result() for future in replays]
        return [
            replace(
                result, prompt_ids=self._own(prompts[(request.endpoint, request.request)], request), reference=self.name
            )
            for request, result in zip(requests, results, strict=True)
        ]

    def close(self) -> None:
        """Close the connections; the server stays as it is."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._client.close()

    def _replay(self, request: ReplayRequest) -> Replay:
        sequence = np.concatenate([request.prompt_ids, request.output_ids]).tolist()
        if self._max_model_len is not None and len(sequence) + 1 > self._max_model_len:
            raise ReplayError("too_long", f"{len(sequence)} tokens and one more, of {self._max_model_len}")
        wanted = request.candidate_ids is not None or request.form == "ids"
        while wanted and self._scores_ids:
            limits = self._ceiling, self._vocab_size
            ids = candidates(request.output_ids, request.candidate_ids, limits[1])
            # The emitted token also comes with the prompt's logprobs, where a whole row is more than is allowed.
            sent = ids if ids.shape[1] <= limits[0] else ids[:, 1 : limits[0] + 1]
            response = self._send("POST", GENERATE, self._scoring(request, sequence, sent, limits[0]), accept=REFUSED)
            if response.status_code == 200:
                replay = self._scored(response, request, sequence, sent)
                if replay is not None:
                    return replay
                self._cannot_score("it ignores them")
            else:
                self._learn(response)
            if limits == (self._ceiling, self._vocab_size):
                break
        while True:
            limit = self._ceiling
            response = self._send("POST", COMPLETIONS, self._listing(request, sequence, limit), accept=REFUSED)
            if response.status_code == 200:
                return self._listed(response, request, sequence)
            self._learn(response)
            if limit == self._ceiling:
                raise _refusal(COMPLETIONS, response)

    def _scoring(self, request: ReplayRequest, sequence: list[int], ids: Ids, limit: int) -> dict[str, Any]:
        """For the claimed ids alone, and the server's best too where the form is `full`."""
        sampling: dict[str, Any] = {
            "max_tokens": 1,
            "temperature": 0,
            "detokenize": False,
            "prompt_logprob_token_ids": ids.tolist(),
            # A row scores the token after it: the first output token is the last prompt token's prediction.
            "prompt_logprob_start": len(request.prompt_ids) - 1,
        }
        if request.form == "full":
            sampling["prompt_logprobs"] = min(TOP_K, limit)
        elif not _has_emitted(ids, request):
            sampling["prompt_logprobs"] = 0
        if request.experts:
            sampling["routed_experts_prompt_start"] = len(request.prompt_ids)
        return {"model": self._served, "token_ids": sequence, "return_token_ids": True, "sampling_params": sampling}

    def _scored(self, response: httpx.Response, request: ReplayRequest, sequence: list[int], ids: Ids) -> Replay | None:
        """The replay, or None where the server did not heed the ids."""
        answer = wire.decode(response, wire.Generated)
        if len(answer.choices) != 1 or answer.prompt_token_ids not in (None, sequence):
            raise ReplayError("bad_replay", "the reference answered for other ids")
        if answer.prompt_token_id_logprobs is None:
            return None
        logprobs, output = wire.scores(answer.prompt_token_id_logprobs, ids), request.output_ids
        experts = _experts(answer.choices[0].routed_experts, request)
        if request.form == "full":
            own_list = wire.entries(answer.prompt_logprobs, len(sequence), len(output))
            return _full(request, own_list, (ids, logprobs), experts)
        if not _has_emitted(ids, request):
            emitted = look_up(wire.entries(answer.prompt_logprobs, len(sequence), len(output)), output[:, None])
            ids, logprobs = (np.concatenate(pair, axis=1) for pair in zip(emitted, (ids, logprobs), strict=True))
        return Replay(*ids_form(output, ids, logprobs), "ids", routed_experts=experts)

    def _listing(self, request: ReplayRequest, sequence: list[int], limit: int) -> dict[str, Any]:
        """For the server's best at every position, and with them the claimed ids that they include."""
        body: dict[str, Any] = {
            "model": self._served,
            "prompt": sequence,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": limit if request.candidate_ids is not None else min(TOP_K, limit),
            "return_token_ids": True,
        }
        return body | ({"routed_experts_prompt_start": len(request.prompt_ids)} if request.experts else {})

    def _listed(self, response: httpx.Response, request: ReplayRequest, sequence: list[int]) -> Replay:
        choices = wire.decode(response, wire.Completion).choices
        if len(choices) != 1 or choices[0].prompt_token_ids not in (None, sequence):
            raise ReplayError("bad_replay", "the reference answered for other ids")
        own_list = wire.entries(choices[0].prompt_logprobs, len(sequence), len(request.output_ids))
        ids = candidates(request.output_ids, request.candidate_ids, self._vocab_size)
        return _full(request, own_list, look_up(own_list, ids), _experts(choices[0].routed_experts, request))

    def _learn(self, response: httpx.Response) -> None:
        """What a refusal says about the server; where it says nothing new, it is about the request."""
        words = wire.message(response)
        ceiling, vocabulary = _CEILING.search(words), _VOCABULARY.search(words)
        if ceiling is not None and int(ceiling[1]) < self._ceiling:
            self._ceiling = max(int(ceiling[1]), 1)
            logger.info("%s allows %d logprobs per token (--max-logprobs)", self.name, self._ceiling)
        elif vocabulary is not None:
            self._vocab_size = int(vocabulary[1])
        elif response.request.url.path == GENERATE:
            if response.status_code in (403, 404):
                self._cannot_score("it runs without --enable-scale-out")
            elif any(obstacle in words for obstacle in ("V2 model runner", "kv-sharing-fast-prefill")):
                self._cannot_score("that needs vLLM's V2 runner without --kv-sharing-fast-prefill")

    def _cannot_score(self, why: str) -> None:
        if self._scores_ids:
            logger.info("%s cannot score given ids, %s; every replay takes its best instead", self.name, why)
        self._scores_ids = False

    def _render(self, endpoint: str, request: bytes) -> list[Ids] | None:
        """The server's own prompt ids, one array per prompt, or None when it cannot render this request."""
        if not self._renders or not request:
            return None
        body = prompt_fields(request, str(self._served))
        if body is None:
            return None
        response = self._send("POST", RENDER_PATHS[endpoint], body, accept=(400, 403, 404, 422))
        if response.status_code in (403, 404):
            self._renders = False
        if response.status_code != 200:
            return None
        rendered = wire.decode(response, wire.Rendered | list[wire.Rendered])
        prompts = rendered if isinstance(rendered, list) else [rendered]
        return [np.asarray(prompt.token_ids, np.int32) for prompt in prompts]

    def _own(self, prompts: list[Ids] | None, request: ReplayRequest) -> Ids | None:
        """Our rendering of one choice's prompt; the backend's own where a dated template is all that differs."""
        rendered = _pick(prompts, request)
        if rendered is None or request.endpoint != "chat" or np.array_equal(rendered, request.prompt_ids):
            return rendered
        ours, theirs = self._text(rendered), self._text(request.prompt_ids)
        return request.prompt_ids if same_but_for_the_date(ours, theirs, datetime.now(UTC).date()) else rendered

    def _text(self, ids: Ids) -> str:
        body = {"model": self._served, "tokens": ids.tolist()}
        response = self._send("POST", "/detokenize", body, accept=(400, 403, 404, 422))
        return str(wire.decode(response, wire.Text).prompt) if response.status_code == 200 else ""

    def _send(self, method: str, path: str, body: Any = None, accept: tuple[int, ...] = ()) -> httpx.Response:
        try:
            response = self._client.request(method, path, json=body)
        except httpx.TimeoutException as error:
            raise ReplayError("timeout", f"{path} after {self._client.timeout.read} s") from error
        except httpx.HTTPError as error:
            raise ReplayError("unreachable", f"{path}: {type(error).__name__}") from error
        if response.status_code == 200 or response.status_code in accept:
            return response
        raise _refusal(path, response)


def _refusal(path: str, response: httpx.Response) -> ReplayError:
    status = response.status_code
    if status in (400, 413, 422):
        reason = "too_long" if _is_about_length(wire.message(response)) else "refused"
        return ReplayError(reason, f"{path} answered {status}")
    if status == 429:
        return ReplayError("overloaded", path)
    return ReplayError("http_5xx" if status >= 500 else f"http_{status}", f"{path} answered {status}")


def _is_about_length(words: str) -> bool:
    """vLLM's words for a prompt that leaves no room for the one token it must generate."""
    lengths = ("max_tokens must be at least 1", "maximum context length", "max_model_len")
    return any(length in words for length in lengths)


def _has_emitted(ids: Ids, request: ReplayRequest) -> bool:
    return np.array_equal(ids[:, 0], request.output_ids)


def _full(request: ReplayRequest, own_list: Entries, scored: tuple[Ids, Logprobs], experts: Experts | None) -> Replay:
    ids, logprobs, own = full_form(request.output_ids, own_list, scored)
    return Replay(ids, logprobs, "full", own=own, routed_experts=experts)


def _experts(text: str | None, request: ReplayRequest) -> Experts | None:
    if text is None or not request.experts:
        return None
    return output_part(decode_npy(text), len(request.prompt_ids), len(request.output_ids))


def _pick(prompts: list[Ids] | None, request: ReplayRequest) -> Ids | None:
    if prompts is None:
        return None
    index = 0 if request.endpoint == "chat" else prompt_index(request.request, request.choice)
    return prompts[index] if index < len(prompts) else None
