"""A vLLM server as the reference, asked over HTTP.

Each generation is one `/v1/completions` request of token ids with `prompt_logprobs`; vLLM then skips its
prefix cache, so a replay is one full prefill. The prompt is rendered by the server's `/render` routes, which
exist only with `--enable-scale-out`; without them `Replay.prompt_ids` is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import httpx
import msgspec
import numpy as np

from policies.errors import ReplayError
from policies.evidence import MASKED, Ids, Replay
from policies.settings import ReferenceSettings
from verifier_pool.reference.base import ReplayRequest
from verifier_pool.reference.rendering import prompt_fields, prompt_index, same_but_for_the_date
from verifier_pool.reference.rows import TOP_K, replay_rows

CONCURRENCY = 8
RENDER_PATHS = {"chat": "/v1/chat/completions/render", "completions": "/v1/completions/render"}


class _Entry(msgspec.Struct):
    logprob: float | None = None
    rank: int | None = None


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[int, _Entry] | None] | None = None
    prompt_token_ids: list[int] | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class _Version(msgspec.Struct):
    version: str = "unknown"


class _Rendered(msgspec.Struct):
    token_ids: list[int]


class _Text(msgspec.Struct):
    prompt: str = ""


_completion = msgspec.json.Decoder(_Completion)


class VllmHttp:
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
        self._pool = ThreadPoolExecutor(CONCURRENCY, thread_name_prefix=f"replay-{model_name}")
        self._served = settings.served_model
        self._max_model_len: int | None = None
        self._known = False
        self._renders = True
        self.name = f"vllm_http {settings.served_model or model_name}"

    def probe(self) -> None:
        """Ask the server for its version and model, which make up `name`. Raises ReplayError."""
        if self._known:
            return
        version = _decode(self._send("GET", "/version"), _Version).version
        cards = _decode(self._send("GET", "/v1/models"), _Cards).data
        card = next((card for card in cards if self._served in (None, card.id)), None)
        if card is None:
            raise ReplayError("wrong_model", "the reference does not serve the configured model")
        self._served, self._max_model_len = card.id, card.max_model_len
        self.name = f"vllm_http vllm-{version} {card.id}"
        self._known = True

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
            Replay(ids, logprobs, "full", self._own(prompts[(request.endpoint, request.request)], request), self.name)
            for request, (ids, logprobs) in zip(requests, results, strict=True)
        ]

    def close(self) -> None:
        """Close the connections; the server stays as it is."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._client.close()

    def _replay(self, request: ReplayRequest) -> tuple[Ids, Any]:
        sequence = np.concatenate([request.prompt_ids, request.output_ids]).tolist()
        if self._max_model_len is not None and len(sequence) + 1 > self._max_model_len:
            raise ReplayError("too_long", f"{len(sequence)} tokens and one more, of {self._max_model_len}")
        body = {
            "model": self._served,
            "prompt": sequence,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": TOP_K,
            "return_token_ids": True,
        }
        choices = _decode(self._send("POST", "/v1/completions", body), _completion).choices
        if len(choices) != 1 or choices[0].prompt_token_ids not in (None, sequence):
            raise ReplayError("bad_replay", "the reference answered for other ids")
        rows = choices[0].prompt_logprobs
        if rows is None or len(rows) != len(sequence):
            raise ReplayError("bad_replay", "the reference left out rows of prompt logprobs")
        return _arrange(request.output_ids, rows[len(request.prompt_ids) :])

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
        rendered = _decode(response, _Rendered | list[_Rendered])
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
        return str(_decode(response, _Text).prompt) if response.status_code == 200 else ""

    def _send(self, method: str, path: str, body: Any = None, accept: tuple[int, ...] = ()) -> httpx.Response:
        try:
            response = self._client.request(method, path, json=body)
        except httpx.TimeoutException as error:
            raise ReplayError("timeout", f"{path} after {self._client.timeout.read} s") from error
        except httpx.HTTPError as error:
            raise ReplayError("unreachable", f"{path}: {type(error).__name__}") from error
        status = response.status_code
        if status == 200 or status in accept:
            return response
        if status in (400, 413, 422):
            # vLLM's words for a prompt that leaves no room for the one token it must generate.
            lengths = ("max_tokens must be at least 1", "maximum context length", "max_model_len")
            reason = "too_long" if any(words in response.text for words in lengths) else "refused"
            raise ReplayError(reason, f"{path} answered {status}")
        if status == 429:
            raise ReplayError("overloaded", path)
        raise ReplayError("http_5xx" if status >= 500 else f"http_{status}", f"{path} answered {status}")


def _decode(response: httpx.Response, shape: Any) -> Any:
    decoder = shape if isinstance(shape, msgspec.json.Decoder) else msgspec.json.Decoder(shape)
    try:
        return decoder.decode(response.content)
    except (msgspec.DecodeError, ValueError) as error:
        raise ReplayError("bad_replay", f"{response.request.url.path}: {error}") from error


def _arrange(output_ids: Ids, rows: Sequence[dict[int, _Entry] | None]) -> tuple[Ids, Any]:
    if any(row is None for row in rows):
        raise ReplayError("bad_replay", "the reference left out rows of prompt logprobs")
    filled: list[dict[int, _Entry]] = [row for row in rows if row is not None]
    row = np.repeat(np.arange(len(filled)), [len(entries) for entries in filled])
    ids = np.array([id for entries in filled for id in entries], np.int64)
    values = [value for entries in filled for value in entries.values()]
    logprobs = np.array([MASKED if value.logprob is None else value.logprob for value in values], np.float64)
    ranks = np.array([np.iinfo(np.int64).max if value.rank is None else value.rank for value in values], np.int64)
    return replay_rows(output_ids, row, ids, logprobs, ranks)


def _pick(prompts: list[Ids] | None, request: ReplayRequest) -> Ids | None:
    if prompts is None:
        return None
    index = 0 if request.endpoint == "chat" else prompt_index(request.request, request.choice)
    return prompts[index] if index < len(prompts) else None
