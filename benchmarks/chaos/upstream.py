"""The scripted backend: answers as vLLM would with the toy model, and writes down every request it serves.

`python -m benchmarks.chaos.upstream --port PORT --log FILE`. Behind the path `/cheat` it cheats: every second time it
samples hotter than it was told, which the CPU checks see, and else serves another model, which a replay sees.

Its log is the ledger's first column: one JSON line when a request has arrived, on the disk before the first byte of
the answer leaves, and one when the answer is over.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from benchmarks.chaos import server, toy
from benchmarks.chaos.server import Request

MARKER = re.compile(r"marker-(\d+)-")
"""What a client's prompt holds, so that a request is known wherever it turns up: `marker-NUMBER-`."""
CHEAT = "/cheat"
HOTTER = 0.9
OTHER_MODEL = 1_000
"""Added to the model's number."""

_SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


class Log:
    """Lines that are on the disk when `write` returns."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, **fields: Any) -> None:
        """One line."""
        os.write(self._file, orjson.dumps({"at": time.time(), **fields}) + b"\n")
        os.fsync(self._file)


class Upstream:
    """Handles requests for chat completions.

    Args:
        interval: seconds between tokens; a whole answer takes as long as a streamed one.
    """

    def __init__(self, log: Log, interval: float) -> None:
        self._log = log
        self._interval = interval

    async def __call__(self, request: Request, writer: asyncio.StreamWriter) -> None:
        if request.method != "POST":
            writer.write(server.whole({"version": toy.VERSION}))
            return
        fields = orjson.loads(request.body)
        marker = marker_of(request.body)
        cheats = request.path.startswith(CHEAT)
        kind = ("hotter" if marker % 2 else "other_model") if cheats else "honest"
        self._log.write(event="asked", marker=marker, kind=kind, model=fields["model"])
        done = False
        try:
            await self._answer(fields, kind, writer)
            await writer.drain()
            done = True
        finally:
            self._log.write(event="over", marker=marker, complete=done)

    async def _answer(self, fields: dict[str, Any], kind: str, writer: asyncio.StreamWriter) -> None:
        prompt = toy.prompt_ids(orjson.dumps(fields["messages"]).decode())
        drawn = _drawn(fields, kind, prompt)
        if not fields.get("stream"):
            await asyncio.sleep(self._interval * len(drawn.output_ids))
            writer.write(server.whole(_message(fields, prompt, drawn)))
            return
        writer.write(_SSE)
        for data in _frames(fields, prompt, drawn):
            writer.write(b"%x\r\n%b\r\n" % (len(data), data))
            await writer.drain()
            if writer.is_closing():
                raise ConnectionResetError
            await asyncio.sleep(self._interval)
        writer.write(b"0\r\n\r\n")


def marker_of(body: bytes) -> int:
    """The number in a request's body; −1 where there is none."""
    found = MARKER.search(body.decode(errors="replace"))
    return int(found[1]) if found else -1


def model_number(name: str) -> int:
    """Which toy a served model is: `toy` is 0, `toy-N` is N."""
    return int(name.partition("-")[2] or 0)


def _drawn(fields: dict[str, Any], kind: str, prompt: list[int]) -> toy.Drawn:
    number = model_number(fields["model"]) + (OTHER_MODEL if kind == "other_model" else 0)
    temperature = fields["temperature"] + (HOTTER if kind == "hotter" else 0)
    return toy.draw(prompt, fields["max_tokens"], temperature, fields["seed"] or 0, toy.table(number, kernels=1))


def _message(fields: dict[str, Any], prompt: list[int], drawn: toy.Drawn) -> dict[str, Any]:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "".join(map(_word, drawn.output_ids.tolist()))},
        "logprobs": {"content": _entries(drawn)},
        "token_ids": drawn.output_ids.tolist(),
        "finish_reason": "length",
    }
    head = _head(fields, "chat.completion")
    return {**head, "prompt_token_ids": prompt, "choices": [choice], "usage": _usage(prompt, drawn)}


def _frames(fields: dict[str, Any], prompt: list[int], drawn: toy.Drawn) -> Iterator[bytes]:
    head = _head(fields, "chat.completion.chunk")
    role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    yield _frame({**head, "choices": [role], "prompt_token_ids": prompt})
    tokens, last = drawn.output_ids.tolist(), len(drawn.output_ids) - 1
    for place, (token, entry) in enumerate(zip(tokens, _entries(drawn), strict=True)):
        choice = {"index": 0, "delta": {"content": _word(token)}, "logprobs": {"content": [entry]}}
        reason = "length" if place == last else None
        yield _frame({**head, "choices": [choice | {"token_ids": [token], "finish_reason": reason}]})
    yield _frame({**head, "choices": [], "usage": _usage(prompt, drawn)})
    yield b"data: [DONE]\n\n"


def _frame(fields: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(fields) + b"\n\n"


def _head(fields: dict[str, Any], kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "object": kind, "created": 1, "model": fields["model"]}


def _usage(prompt: list[int], drawn: toy.Drawn) -> dict[str, int]:
    counts = len(prompt), len(drawn.output_ids)
    return {"prompt_tokens": counts[0], "completion_tokens": counts[1], "total_tokens": sum(counts)}


def _word(token: int) -> str:
    return f" w{token}"


def _entries(drawn: toy.Drawn) -> list[dict[str, Any]]:
    """As vLLM writes a chat claim: the sampled token, and the twenty best in falling order."""
    entries = []
    for ids, logprobs in zip(drawn.claim_ids.tolist(), drawn.claim_logprobs.tolist(), strict=True):
        pairs = sorted(((id, value) for id, value in zip(ids, logprobs, strict=True) if id >= 0), key=lambda p: -p[1])
        top = [{"token": f"token_id:{id}", "logprob": value, "bytes": None} for id, value in pairs[:20]]
        sampled = {"token": f"token_id:{ids[0]}", "logprob": logprobs[0], "bytes": None}
        entries.append({**sampled, "top_logprobs": top})
    return entries


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos.upstream", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--log", required=True, help="file that gets a line per request")
    parser.add_argument("--interval-ms", type=float, default=10.0, help="time between tokens")
    arguments = parser.parse_args(argv)
    asyncio.run(server.run(Upstream(Log(arguments.log), arguments.interval_ms / 1000), arguments.port))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
