"""The scripted reference server: the few routes of vLLM's server that `vllm_http` asks, about the toy model.

`python -m benchmarks.chaos.engine --port PORT --model NAME`. It answers what it computes, so replays truly agree or
not, after a pause in which it can be killed.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from benchmarks.chaos import server, toy
from benchmarks.chaos.server import Request
from benchmarks.chaos.upstream import model_number

LONGEST = 4096
"""Its `max_model_len`."""


class Engine:
    """Handles one served model; `pause` is how long a replay takes, in seconds."""

    def __init__(self, model: str, pause: float) -> None:
        self._model = model
        self._pause = pause
        self._table = toy.table(model_number(model))

    async def __call__(self, request: Request, writer: asyncio.StreamWriter) -> None:
        if request.method == "GET":
            writer.write(server.whole(self._said(request.path)))
            return
        body = orjson.loads(request.body)
        if request.path.endswith("/render"):
            text = orjson.dumps(body["messages"]).decode()
            writer.write(server.whole({"token_ids": toy.prompt_ids(text)}))
            return
        await asyncio.sleep(self._pause)
        if request.path == "/inference/v1/generate":
            writer.write(server.whole(self._scored(body)))
        elif request.path == "/v1/completions":
            asked = self._listed(body) if "prompt_logprobs" in body else self._answered(body)
            writer.write(server.whole(asked))
        else:
            writer.write(server.whole({"error": {"message": "no such route"}}, 404))

    def _said(self, path: str) -> dict[str, Any]:
        if path == "/version":
            return {"version": toy.VERSION}
        return {"object": "list", "data": [{"id": self._model, "max_model_len": LONGEST, "object": "model"}]}

    def _scored(self, body: dict[str, Any]) -> dict[str, Any]:
        ids, sampling = body["token_ids"], body["sampling_params"]
        top, wanted = sampling.get("prompt_logprobs"), sampling.get("prompt_logprob_token_ids")
        answer = {
            "choices": [{"index": 0, "token_ids": [1]}],
            "prompt_logprobs": None if top is None else self._rows(ids, top),
            "prompt_token_ids": ids,
        }
        if wanted is not None:
            given, start = np.asarray(wanted, np.int64), sampling.get("prompt_logprob_start", 0)
            rows = self._table[np.asarray(ids[start:-1])]
            scored = np.where(given < 0, -np.inf, np.take_along_axis(rows, np.maximum(given, 0), axis=1))
            answer["prompt_token_id_logprobs"] = _npy(scored.astype(np.float32))
        return answer

    def _listed(self, body: dict[str, Any]) -> dict[str, Any]:
        rows = self._rows(body["prompt"], body["prompt_logprobs"])
        return {"choices": [{"index": 0, "prompt_logprobs": rows, "prompt_token_ids": body["prompt"]}]}

    def _answered(self, body: dict[str, Any]) -> dict[str, Any]:
        """A greedy answer to a text, with the best of each token."""
        prompt = toy.prompt_ids(body["prompt"])
        drawn = toy.draw(prompt, body["max_tokens"], 0.0, 0, self._table)
        rows = self._rows([prompt[-1], *drawn.output_ids.tolist()], body["logprobs"])[1:]
        listed = [{f"token_id:{id}": entry["logprob"] for id, entry in (row or {}).items()} for row in rows]
        tokens = [f"token_id:{token}" for token in drawn.output_ids.tolist()]
        own = [row[token] for row, token in zip(listed, tokens, strict=True)]
        logprobs = {"tokens": tokens, "token_logprobs": own, "top_logprobs": listed}
        choice = {"index": 0, "logprobs": logprobs, "token_ids": drawn.output_ids.tolist()}
        return {"choices": [{**choice, "prompt_token_ids": prompt}]}

    def _rows(self, ids: Sequence[int], top: int) -> list[dict[str, Any] | None]:
        """vLLM's prompt logprobs: the token itself, and the `top` best."""
        found: list[dict[str, Any] | None] = [None]
        for last, token in itertools.pairwise(ids):
            row = self._table[last]
            order = np.argsort(-row, kind="stable").tolist()
            entries = {str(token): {"rank": order.index(token) + 1, "logprob": float(row[token])}}
            entries |= {str(id): {"rank": rank, "logprob": float(row[id])} for rank, id in enumerate(order[:top], 1)}
            found.append(entries)
        return found


def _npy(array: np.ndarray[Any, Any]) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos.engine", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", default="toy")
    parser.add_argument("--pause-ms", type=float, default=30.0, help="how long a replay takes")
    arguments = parser.parse_args(argv)
    asyncio.run(server.run(Engine(arguments.model, arguments.pause_ms / 1000), arguments.port))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
