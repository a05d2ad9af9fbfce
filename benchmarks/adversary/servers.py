"""The real servers behind a cheat, asked as their own operator would."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aiohttp import ClientResponseError, ClientSession

Body = dict[str, Any]
Row = dict[int, float]
"""One position's logprobs by token id, the emitted token first, then the model's own order."""

PROMPT_FIELDS = (
    "messages",
    "prompt",
    "tools",
    "tool_choice",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template_kwargs",
    "documents",
)
"""What decides the prompt's ids."""
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "seed")


@dataclass(frozen=True, slots=True)
class Site:
    """Where a real vLLM server is; `model` and `key` replace the request's where they are given."""

    url: str
    model: str | None = None
    key: str | None = None


class Server:
    """One real server. Every call raises aiohttp.ClientError when it does not answer with 200."""

    def __init__(self, site: Site, session: ClientSession) -> None:
        self.url = site.url.rstrip("/").removesuffix("/v1")
        self.model = site.model
        self._headers = {"authorization": f"Bearer {site.key}"} if site.key else {}
        self._session = session
        self._spare = True

    async def post(self, path: str, body: Body) -> Body:
        """POST JSON and read the JSON answer."""
        if self.model is not None:
            body = body | {"model": self.model}
        async with self._session.post(self.url + path, json=body, headers=self._headers) as response:
            response.raise_for_status()
            answer: Body = await response.json()
            return answer

    async def render(self, asked: Body) -> list[int]:
        """Prompt ids of a request."""
        path = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
        probe = {name: asked[name] for name in (*PROMPT_FIELDS, "model") if name in asked}
        answer = await self.post(path, probe | {"max_tokens": 1, "return_token_ids": True})
        return list(answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"])

    async def score(self, model: str, prompt: list[int], output: list[int], width: int, spare: int = 0) -> list[Row]:
        """One prefill: a row per output token, of the `width + spare` most probable tokens and the emitted one.

        `spare` entries are left out where the server caps logprobs at `width`.
        """
        if not output:
            return []
        body = {"model": model, "prompt": prompt + output, "max_tokens": 1, "temperature": 0}
        asked = width + (spare if self._spare else 0)
        try:
            answer = await self.post("/v1/completions", body | {"prompt_logprobs": asked})
        except ClientResponseError as error:
            if error.status != 400 or asked == width:
                raise
            self._spare = False
            answer = await self.post("/v1/completions", body | {"prompt_logprobs": width})
        scored = answer["choices"][0]["prompt_logprobs"][len(prompt) :]
        return [_row(token, entries) for token, entries in zip(output, scored, strict=True)]

    async def draft(self, asked: Body, prompt: list[int], seed: int | None, count: int) -> tuple[list[int], str | None]:
        """Up to `count` tokens after `prompt`, sampled as `asked`; ids and finish reason."""
        body = {name: asked[name] for name in (*SAMPLING_FIELDS, "model") if name in asked}
        body |= {"prompt": prompt, "max_tokens": count, "seed": seed, "return_token_ids": True}
        choice = (await self.post("/v1/completions", body))["choices"][0]
        return list(choice["token_ids"]), choice["finish_reason"]

    async def next_row(self, model: str, prompt: list[int], width: int) -> Row:
        """Logprobs of the next token after `prompt`, most probable first."""
        body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        body |= {"logprobs": width, "return_tokens_as_token_ids": True}
        top = (await self.post("/v1/completions", body))["choices"][0]["logprobs"]["top_logprobs"][0]
        return {int(token.removeprefix("token_id:")): logprob for token, logprob in top.items()}

    async def tokenize(self, model: str, text: str) -> list[int]:
        """Ids of a text, without special tokens."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        return list((await self.post("/tokenize", body))["tokens"])

    async def detokenize(self, model: str, ids: list[int]) -> str:
        """Text of ids, special tokens included."""
        return str((await self.post("/detokenize", {"model": model, "tokens": ids}))["prompt"])


def _row(token: int, entries: dict[str, Body]) -> Row:
    others = sorted((int(id) for id in entries), key=lambda id: entries[str(id)]["rank"])
    return {id: entries[str(id)]["logprob"] for id in dict.fromkeys([token, *others])}
