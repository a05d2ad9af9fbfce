"""Record raw HTTP bodies of a real vLLM server, each with and without what the proxy adds.

    python -m benchmarks.recordings.record --url http://127.0.0.1:8000 --model smollm2 --output DIR [--moe]

Every case is one plain request. It goes up twice, one after the other on an idle server: as it is, and with
the additions of the proxy. The bodies are kept byte for byte, so that parsers and the client's view can be
tested without an engine. Standard library only: it also runs where nothing can be installed.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
STORY = [{"role": "user", "content": "Write three sentences about a lighthouse keeper who collects clocks."}]
EMOJI = [{"role": "user", "content": "Repeat exactly: 🦙🚀 naïve café — 日本語 ẞ 🇩🇪"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ASK_WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
BIG_SEED = 0x1234_5678_9ABC_DEF1


@dataclass(frozen=True, slots=True)
class Case:
    """One request as a client would send it; streamed and not."""

    name: str
    endpoint: str
    request: dict[str, Any]


def dense_cases() -> Iterator[Case]:
    """Cases for any chat model with a tool parser."""
    greedy = {"temperature": 0, "max_tokens": 24}
    sampled = {"temperature": 0.8, "seed": 7, "max_tokens": 24}
    text = {"prompt": "The lighthouse keeper wound the last clock and"}
    yield Case("chat", "chat", {"messages": STORY, **greedy})
    yield Case(
        "chat-usage", "chat", {"messages": STORY, **greedy, "max_tokens": 4, "stream_options": {"include_usage": True}}
    )
    yield Case(
        "chat-logprobs5", "chat", {"messages": STORY, **greedy, "max_tokens": 8, "logprobs": True, "top_logprobs": 5}
    )
    yield Case("chat-logprobs0", "chat", {"messages": STORY, **greedy, "max_tokens": 4, "logprobs": True})
    yield Case("chat-emoji", "chat", {"messages": EMOJI, **greedy, "max_tokens": 40})
    yield Case("chat-emoji-logprobs2", "chat", {"messages": EMOJI, **greedy, "logprobs": True, "top_logprobs": 2})
    yield Case("chat-short", "chat", {"messages": [{"role": "user", "content": "Say hi."}], "temperature": 0})
    yield Case("chat-stop", "chat", {"messages": STORY, **greedy, "stop": [" the", "clock"]})
    yield Case("chat-sampled", "chat", {"messages": STORY, **sampled, "max_tokens": 48})
    yield Case("chat-big-seed", "chat", {"messages": STORY, **sampled, "seed": BIG_SEED, "temperature": 1.0})
    yield Case("chat-n2", "chat", {"messages": STORY, **sampled, "n": 2, "max_tokens": 16})
    yield Case("chat-top-p", "chat", {"messages": STORY, **sampled, "top_p": 0.9, "max_tokens": 48})
    yield Case("chat-top-k", "chat", {"messages": STORY, **sampled, "top_k": 5, "temperature": 1.2})
    yield Case("chat-min-p", "chat", {"messages": STORY, **sampled, "min_p": 0.05, "temperature": 1.2})
    yield Case("chat-all-limits", "chat", {"messages": STORY, **sampled, "top_k": 12, "top_p": 0.85, "min_p": 0.02})
    yield Case("chat-grammar", "chat", {"messages": STORY, **greedy, "max_tokens": 40, "response_format": FORMAT})
    yield Case(
        "chat-grammar-sampled", "chat", {"messages": STORY, **sampled, "max_tokens": 40, "response_format": FORMAT}
    )
    yield Case("chat-tools-auto", "chat", {"messages": ASK_WEATHER, **greedy, "tools": [WEATHER]})
    required = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 48}
    yield Case("chat-tools-required", "chat", {"messages": ASK_WEATHER, **greedy, **required})
    named = {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
    yield Case("chat-tools-named", "chat", {"messages": ASK_WEATHER, **greedy, **named})
    yield Case("chat-error", "chat", {"messages": STORY, "temperature": 0, "top_logprobs": 3})
    yield Case("completions", "completions", {**text, **greedy})
    yield Case("completions-default", "completions", {**text, "temperature": 0})
    yield Case("completions-logprobs3", "completions", {**text, **greedy, "max_tokens": 8, "logprobs": 3})
    yield Case(
        "completions-two-prompts", "completions", {"prompt": ["One two", "Red green"], **greedy, "max_tokens": 8}
    )
    yield Case("completions-ids", "completions", {"prompt": [504, 6376, 18234], **sampled, "n": 2, "max_tokens": 12})


def moe_cases() -> Iterator[Case]:
    """Cases for a mixture-of-experts model started with `--enable-return-routed-experts`."""
    greedy = {"temperature": 0, "max_tokens": 16}
    yield Case("moe-chat", "chat", {"messages": STORY, **greedy})
    yield Case("moe-chat-sampled", "chat", {"messages": STORY, "temperature": 0.8, "seed": 11, "max_tokens": 16})
    yield Case("moe-chat-n2", "chat", {"messages": STORY, "temperature": 0.8, "seed": 11, "n": 2, "max_tokens": 8})
    yield Case("moe-completions", "completions", {"prompt": "The lighthouse keeper", **greedy})


def with_additions(endpoint: str, request: dict[str, Any], *, stream: bool) -> dict[str, Any]:
    """The request with what the proxy adds to it."""
    full = dict(request)
    if endpoint == "chat":
        full["logprobs"] = True
        full["top_logprobs"] = 20
        full["include_reasoning"] = True
    else:
        full["logprobs"] = 20
    full |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
    defaults = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    full = {**defaults, "presence_penalty": 0.0, "frequency_penalty": 0.0, "seed": 20_231, **full}
    if stream:
        full["stream_options"] = {**request.get("stream_options", {}), "include_usage": True}
    return full


def fetch(url: str, path: str, request: dict[str, Any]) -> tuple[int, str, bytes]:
    """Status, content type and body bytes of one POST."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port or 80, timeout=300)
    try:
        connection.request("POST", path, json.dumps(request).encode(), {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.getheader("content-type", ""), response.read()
    finally:
        connection.close()


def record(url: str, model: str, cases: Iterator[Case], output: Path) -> list[dict[str, Any]]:
    """Record every case, streamed and not; returns the rows of the index."""
    rows = []
    for case in cases:
        for stream in (False, True):
            name = case.name + ("-stream" if stream else "")
            plain = {"model": model, **case.request}
            plain.pop("stream_options", None) if not stream else None
            plain |= {"stream": True} if stream else {}
            full = with_additions(case.endpoint, plain, stream=stream)
            if case.name == "chat-error":
                full = plain
            plain_status, _, plain_body = fetch(url, PATHS[case.endpoint], plain)
            status, content_type, body = fetch(url, PATHS[case.endpoint], full)
            (output / f"{name}.plain.request.json").write_text(json.dumps(plain) + "\n")
            (output / f"{name}.plain.body").write_bytes(plain_body)
            (output / f"{name}.request.json").write_text(json.dumps(full) + "\n")
            (output / f"{name}.body").write_bytes(body)
            row = {"name": name, "endpoint": case.endpoint, "stream": stream, "model": model}
            rows.append({**row, "status": status, "plain_status": plain_status, "content_type": content_type})
            print(name, plain_status, status, len(plain_body), len(body), flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Record into a folder and extend its index."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recordings.record", description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--moe", action="store_true", help="record the mixture-of-experts cases instead")
    arguments = parser.parse_args(argv)
    arguments.output.mkdir(parents=True, exist_ok=True)
    cases = moe_cases() if arguments.moe else dense_cases()
    rows = record(arguments.url, arguments.model, cases, arguments.output)
    index = arguments.output / "index.json"
    earlier = json.loads(index.read_text()) if index.exists() else []
    fresh = {row["name"] for row in rows}
    rows = [row for row in earlier if row["name"] not in fresh] + rows
    index.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
