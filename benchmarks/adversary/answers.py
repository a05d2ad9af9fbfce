"""A finished vLLM answer taken apart into choices and put together again, streamed or whole, chat or completions."""

from __future__ import annotations

import base64
import copy
import io
import itertools
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.adversary.servers import Body, Row

TOKEN = "token_id:"


@dataclass
class Choice:
    """One choice. `rows` is the claim, one row per id, or None when no logprobs came."""

    index: int
    prompt: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    rows: list[Row] | None = None
    text: str = ""
    finish: str | None = None
    stop: int | str | None = None


def width_asked(asked: Body) -> int:
    """Alternatives per token that a request asks for."""
    return int(asked.get("top_logprobs") or 0) if "messages" in asked else int(asked.get("logprobs") or 0)


def longest(asked: Body) -> int | None:
    """Most tokens that a request allows."""
    value = asked.get("max_completion_tokens") or asked.get("max_tokens")
    return None if value is None else int(value)


def read_sse(raw: bytes) -> list[Body]:
    """The JSON frames of a finished stream, without its `[DONE]`."""
    lines = (line[6:] for line in raw.decode().splitlines() if line.startswith("data: "))
    return [json.loads(line) for line in lines if line != "[DONE]"]


def write_sse(frames: list[Body]) -> bytes:
    """Frames as a finished stream."""
    return b"".join(sse_frame(frame) for frame in frames) + b"data: [DONE]\n\n"


def sse_frame(frame: Body) -> bytes:
    """One frame of a stream."""
    return f"data: {json.dumps(frame, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def parts_of(frames: list[Body]) -> dict[int, list[Body]]:
    """Each choice's parts in order, by index."""
    parts: dict[int, list[Body]] = {}
    for frame in frames:
        for choice in frame.get("choices") or ():
            parts.setdefault(choice["index"], []).append(choice)
    return parts


def read(frames: list[Body]) -> list[Choice]:
    """The choices of a finished answer."""
    shared = next((list(frame["prompt_token_ids"]) for frame in frames if frame.get("prompt_token_ids")), [])
    found = []
    for index, parts in sorted(parts_of(frames).items()):
        choice = Choice(index, prompt=shared)
        for part in parts:
            choice.prompt = list(part.get("prompt_token_ids") or choice.prompt)
            choice.ids += part.get("token_ids") or ()
            if part.get("logprobs"):
                choice.rows = (choice.rows or []) + _rows(part["logprobs"])
            choice.text += _text(part)
            choice.finish = part.get("finish_reason") or choice.finish
            choice.stop = part.get("stop_reason") if part.get("stop_reason") is not None else choice.stop
        found.append(choice)
    return found


def write(frames: list[Body], choices: list[Choice], asked: Body) -> list[Body]:
    """The same answer with these choices: ids, claim, text, ends, usage and the number of frames follow."""
    if asked.get("stream"):
        built = _stream(frames, choices, asked)
    else:
        built = [copy.deepcopy(frames[0])]
        by_index = {choice.index: choice for choice in choices}
        for part in built[0]["choices"]:
            _fill_whole(part, by_index[part["index"]], asked)
    for frame in built:
        if frame.get("usage"):
            bill(frame["usage"], completion=sum(len(choice.ids) for choice in choices))
    return built


def bill(usage: Body, *, prompt: int | None = None, completion: int | None = None) -> None:
    """Set billed counts and keep their sum right."""
    if prompt is not None:
        usage["prompt_tokens"] = prompt
    if completion is not None:
        usage["completion_tokens"] = completion
    usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]


def show_prompt(frames: list[Body], ids: list[int]) -> None:
    """Report these prompt ids and their number instead of the real ones."""
    parts = [part for own in parts_of(frames).values() for part in own]
    for holder in [*frames, *parts]:
        if holder.get("prompt_token_ids"):
            holder["prompt_token_ids"] = ids
        if holder.get("usage"):
            bill(holder["usage"], prompt=len(ids))


def claim_body(ids: list[int], rows: list[Row], asked: Body, offset: int = 0) -> Body:
    """Rows as vLLM's `logprobs` object; `offset` is where a completion's first token string begins."""
    width = width_asked(asked)
    if "messages" not in asked:
        tokens = [f"{TOKEN}{id}" for id in ids]
        return {
            "text_offset": list(itertools.accumulate(map(len, tokens), initial=offset))[:-1],
            "token_logprobs": [row[id] for id, row in zip(ids, rows, strict=True)],
            "tokens": tokens,
            "top_logprobs": [{f"{TOKEN}{other}": value for other, value in row.items()} for row in rows],
        }
    # vLLM's chat answers stop after `width` entries, the sampled token among them.
    content = [
        _entry(id, row[id]) | {"top_logprobs": [_entry(*pair) for pair in list(row.items())[:width]]}
        for id, row in zip(ids, rows, strict=True)
    ]
    return {"content": content}


def _entry(id: int, logprob: float) -> Body:
    text = f"{TOKEN}{id}"
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _rows(claim: Body) -> list[Row]:
    if "content" in claim:
        return [
            {_id(entry["token"]): entry["logprob"]}
            | {_id(top["token"]): top["logprob"] for top in entry["top_logprobs"] or ()}
            for entry in claim["content"] or ()
        ]
    tops = claim.get("top_logprobs") or [{}] * len(claim["tokens"])
    return [
        {_id(token): logprob} | {_id(other): value for other, value in (top or {}).items()}
        for token, logprob, top in zip(claim["tokens"], claim["token_logprobs"], tops, strict=True)
    ]


def _id(token: str) -> int:
    return int(token.removeprefix(TOKEN)) if token.startswith(TOKEN) else -1


def _text(part: Body) -> str:
    if "text" in part:
        return part["text"] or ""
    return (part.get("message") or part.get("delta") or {}).get("content") or ""


def _fill_whole(part: Body, choice: Choice, asked: Body) -> None:
    if "message" in part:
        part["message"]["content"] = choice.text or part["message"].get("content")
    else:
        part["text"] = choice.text
    part |= {"finish_reason": choice.finish, "stop_reason": choice.stop}
    if part.get("token_ids") is not None:
        part["token_ids"] = choice.ids
    if part.get("logprobs") and choice.rows is not None:
        part["logprobs"] = claim_body(choice.ids, choice.rows, asked)
    if part.get("routed_experts"):
        part["routed_experts"] = _fit_experts(part["routed_experts"], len(choice.prompt) + len(choice.ids) - 1)


def _stream(frames: list[Body], choices: list[Choice], asked: Body) -> list[Body]:
    """vLLM's shape: roles first (chat), then a frame per token and choice, then what has no choices."""
    chat = "messages" in asked
    head: Body = {name: frames[0][name] for name in ("id", "object", "created", "model") if name in frames[0]}
    built = [frame for frame in frames if chat and any("role" in part["delta"] for part in frame.get("choices") or ())]
    pieces = {choice.index: spread(choice.text, len(choice.ids)) for choice in choices}
    for at in range(max((len(choice.ids) for choice in choices), default=0)):
        built += [
            {**head, "choices": [_part(choice, at, pieces[choice.index][at], asked)]}
            for choice in choices
            if at < len(choice.ids)
        ]
    return built + [copy.deepcopy(frame) for frame in frames if not frame.get("choices")]


def _part(choice: Choice, at: int, text: str, asked: Body) -> Body:
    last = at == len(choice.ids) - 1
    part: Body = {"index": choice.index}
    part |= {"delta": {"content": text}} if "messages" in asked else {"text": text}
    offset = sum(len(f"{TOKEN}{id}") for id in choice.ids[:at])
    claim = None if choice.rows is None else claim_body([choice.ids[at]], [choice.rows[at]], asked, offset)
    part |= {"logprobs": claim, "finish_reason": choice.finish if last else None, "token_ids": [choice.ids[at]]}
    if last or "messages" not in asked:
        part["stop_reason"] = choice.stop if last else None
    if "messages" not in asked:
        part["prompt_token_ids"] = None if at else choice.prompt
    return part


def spread(text: str, count: int) -> list[str]:
    """A text in `count` pieces of about one length."""
    cuts = [len(text) * at // count for at in range(count + 1)] if count else []
    return [text[start:end] for start, end in itertools.pairwise(cuts)]


def _fit_experts(encoded: str, rows: int) -> str:
    experts: Any = np.load(io.BytesIO(base64.b64decode(encoded)))
    missing = rows - len(experts)
    fitted = experts[:rows] if missing <= 0 else np.concatenate([experts, np.repeat(experts[-1:], missing, axis=0)])
    buffer = io.BytesIO()
    np.save(buffer, fitted)
    return base64.b64encode(buffer.getvalue()).decode()
