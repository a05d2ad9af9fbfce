"""Records a server's answers to requests with every option (`benchmarks.recordings.cases`).

    python -m benchmarks.recordings.options --url http://127.0.0.1:8000 [--reasoning] --output FILE.msgpack.zst

The recorded file is a compressed list of the requests as a client would send them, each with the seed the proxy gave
it and the body that came back: what the proxy asked for in addition included.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import zstandard

from benchmarks.recordings.asking import PATHS, post
from benchmarks.recordings.cases import Case, cases
from policies.settings import BackendSettings, ModelSettings
from proxy.relay.body import Body
from proxy.tap.prepare import prepare

TAGS = {3: "<think>", 4: "</think>", 5: "<tool_call>", 6: "</tool_call>"}
"""Ids of SmolLM2 that stand for nothing a chat uses, and what `with_tags` calls them. None is special."""
AT_ONCE = 6


def with_tags(model: Path, folder: Path) -> Path:
    """A copy of SmolLM2's folder whose tokenizer has tags for reasoning and tool calls, as Qwen's has; weights are
    linked."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        (folder / file.name).unlink(missing_ok=True)
        (folder / file.name).symlink_to(file.resolve())
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        if token["id"] in TAGS:
            del tokenizer["model"]["vocab"][token["content"]]
            token |= {"content": TAGS[token["id"]], "special": False}
    tokenizer["model"]["vocab"] |= {text: id for id, text in TAGS.items()}
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    return folder


def recorded(url: str, model: str, *, reasoning: bool) -> Iterator[dict[str, Any]]:
    """Every case in one form, streamed and greedy in turn, as an entry of the file."""
    forms = [(False, 0.0), (True, 1.0), (True, 0.0), (False, 1.0)]
    settings, backend = ModelSettings(), BackendSettings(name="b", url=url, model=model)

    def ask(at: int, case: Case) -> dict[str, Any]:
        stream, temperature = forms[at % 4]
        form = case.request(stream=stream, temperature=temperature, limit=16)
        request = json.dumps({"model": model, **form.fields}, ensure_ascii=False)
        seed = 7919 * at + 1
        prepared = prepare(Body.read(form.endpoint, request.encode()), settings, backend, seed=seed)
        status, kind, body = post(url, PATHS[form.endpoint], prepared.body, {"content-type": "application/json"}, 300)
        if status != 200:
            raise RuntimeError(f"{case.endpoint} {case.name}: status {status}, {body[:200]!r}")
        return {
            "endpoint": case.endpoint,
            "name": case.name,
            "stream": stream,
            "request": request,
            "seed": seed,
            "kind": kind,
            "body": body,
        }

    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from pool.map(ask, *zip(*enumerate(cases(reasoning=reasoning)), strict=True))


def main(argv: Sequence[str]) -> int:
    """Write the file."""
    parser = argparse.ArgumentParser(description="Record answers to requests with every option.")
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--reasoning", action="store_true")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args(argv)
    answers = list(recorded(arguments.url, arguments.model, reasoning=arguments.reasoning))
    arguments.output.write_bytes(zstandard.compress(msgspec.msgpack.encode(answers), 19))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
