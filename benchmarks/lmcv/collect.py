"""`countersign lmcv collect`: has a vLLM server answer prompts and keeps its evidence, one JSONL row per answer.

Ids are the engine's own, from the response. A request that came to nothing stays as a row with an `error`;
`--resume` tries those again, and what has not been asked.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from benchmarks.lmcv import routes
from benchmarks.lmcv.client import RequestFailed, Server
from benchmarks.lmcv.evidence import TRACE_MODE, trace
from benchmarks.lmcv.files import Appender, PipelineError, Row, latest, metadata, read_jsonl, write_json

FIXED = (
    "model",
    "k",
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "routes",
    "variant_id",
    "prompts_sha256",
)
"""What a run that is resumed must share with the one it continues."""


def main(argv: Sequence[str]) -> int:
    """Collect; returns 0 when every prompt has evidence, else 1. Raises PipelineError."""
    arguments = parser().parse_args(list(argv))
    return asyncio.run(_collect(arguments, argv))


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    found = argparse.ArgumentParser(prog="countersign lmcv collect", description=__doc__)
    found.add_argument("--input", type=Path, default=Path("data/prompts.jsonl"), metavar="FILE", help="prompts")
    found.add_argument("--output", type=Path, default=Path("data/worker_evidence.jsonl"), metavar="FILE")
    server_options(found)
    found.add_argument("--variant-id", default="worker", help="name of this backend in the evidence")
    found.add_argument("--quantization", default="", help="declared precision, kept in the evidence")
    found.add_argument("--gpu", default="", help="declared hardware, kept in the evidence")
    found.add_argument("--k", type=int, default=20, help="logprobs per token; at most the server's --max-logprobs")
    found.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    found.add_argument("--temperature", type=float, default=0.0)
    found.add_argument("--top-p", type=float, default=1.0)
    found.add_argument("--top-k", type=int, default=0, help="0 is off")
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--batch-size", type=int, default=8, metavar="N", help="requests in flight")
    found.add_argument("--routes", action="store_true", help="keep expert ids where the server returns them")
    return found


def server_options(found: argparse.ArgumentParser) -> None:
    """Options shared with `verify`."""
    found.add_argument("--url", help="a vLLM server, such as http://127.0.0.1:8000")
    found.add_argument("--model", metavar="NAME", help="name the server knows the model by (default: its first)")
    found.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the server's key")
    found.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS")
    found.add_argument("--limit", type=int, default=0, metavar="N", help="only the first N rows; 0 is all")
    found.add_argument("--resume", action="store_true", help="continue a run of the same options")


async def _collect(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    if not arguments.url:
        raise PipelineError("--url is needed")
    prompts = list(latest(read_jsonl(arguments.input)).values())[: arguments.limit or None]
    server = Server(arguments.url, arguments.model, api_key_env=arguments.api_key_env, timeout=arguments.timeout)
    async with server:
        about = _about(arguments, server, argv)
        beside = Path(f"{arguments.output}.metadata.json")
        if arguments.resume:
            check_same(beside, about["args"], FIXED)
        write_json(beside, about)
        done = _done(arguments.output) if arguments.resume else frozenset()
        output = Appender(arguments.output, resume=arguments.resume)
        try:
            failed = await _ask_all(
                [row for row in prompts if row["sample_id"] not in done], arguments, server, about, output
            )
        finally:
            output.close()
    print(f"{len(prompts) - failed} of {len(prompts)} prompts have evidence in {arguments.output}")
    return 1 if failed else 0


async def _ask_all(
    prompts: Sequence[Row], arguments: argparse.Namespace, server: Server, about: Row, output: Appender
) -> int:
    room = asyncio.Semaphore(max(1, arguments.batch_size))

    async def one(row: Row) -> bool:
        async with room:
            try:
                found = evidence_row(row, await server.complete(body(row, arguments)), arguments, about)
            except RequestFailed as error:
                output.write({"sample_id": row["sample_id"], "error": {"reason": error.reason, "message": str(error)}})
                print(f"{row['sample_id']}: {error}", file=sys.stderr)
                return False
            output.write(found)
            return True

    return (await asyncio.gather(*map(one, prompts))).count(False)


def body(row: Row, arguments: argparse.Namespace) -> dict[str, Any]:
    """The request of one prompt row."""
    if not isinstance(row.get("input_text"), str):
        raise RequestFailed("bad_prompt", "no input_text")
    return {
        "prompt": row["input_text"],
        "max_tokens": arguments.max_new_tokens,
        "temperature": arguments.temperature,
        "top_p": arguments.top_p,
        "top_k": arguments.top_k,
        "seed": arguments.seed,
        "n": 1,
        "logprobs": arguments.k,
        "skip_special_tokens": False,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def evidence_row(row: Row, answer: Row, arguments: argparse.Namespace, about: Row) -> Row:
    """LMCV's evidence row of one answer. Raises RequestFailed for one that lacks ids or logprobs."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise RequestFailed("bad_answer", "one choice was expected")
    choice = choices[0]
    prompt = choice.get("prompt_token_ids", answer.get("prompt_token_ids"))
    if not isinstance(prompt, list):
        raise RequestFailed("no_prompt_ids", "the server did not return the prompt's ids")
    ids, positions = trace(choice)
    found = {
        "sample_id": row["sample_id"],
        "input_text": row["input_text"],
        "input_ids": prompt,
        "output_text": choice.get("text", ""),
        "output_ids": ids,
        "category": row.get("category"),
        "target_input_tokens": row.get("target_input_tokens"),
        "worker_variant": about["worker_variant"],
        "decode_config": {
            "max_new_tokens": arguments.max_new_tokens,
            "temperature": arguments.temperature,
            "top_p": arguments.top_p,
            "top_k": arguments.top_k,
            "seed": arguments.seed,
            "do_sample": arguments.temperature > 0,
        },
        "logprobs": arguments.k,
        "worker_trace_mode": TRACE_MODE,
        "worker_trace": positions,
        "finish_reason": choice.get("finish_reason"),
        "usage": answer.get("usage"),
    }
    return found | (routes.kept(choice, answer) if arguments.routes else {})


def check_same(path: Path, args: Row, names: Sequence[str]) -> None:
    """Raises PipelineError when the run that wrote `path` had other options; a file that is not there is fine."""
    try:
        before = orjson.loads(path.read_bytes())["args"]
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PipelineError(f"{path} cannot be read; without --resume the run starts anew") from error
    differ = [name for name in names if before.get(name) != args.get(name)]
    if differ:
        raise PipelineError(f"--resume: {', '.join(differ)} differ from the run in {path}")


def _done(path: Path) -> frozenset[str]:
    if not path.exists():
        return frozenset()
    return frozenset(name for name, row in latest(read_jsonl(path)).items() if "error" not in row)


def _about(arguments: argparse.Namespace, server: Server, argv: Sequence[str]) -> Row:
    args = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    args["model"] = server.model
    args["prompts_sha256"] = hashlib.sha256(arguments.input.read_bytes()).hexdigest()
    return metadata(argv, args=args, worker_variant=variant(arguments, server.model, server.version))


def variant(arguments: argparse.Namespace, model: str, version: str) -> Row:
    """`worker_variant` or `verifier_variant`. What no server tells is empty, not guessed."""
    return {
        "variant_id": arguments.variant_id,
        "model": model,
        "tokenizer_hash": None,
        "tokenizer_name": None,
        "quantization": arguments.quantization,
        "gpu": arguments.gpu,
        "backend": "vllm",
        "backend_version": version,
        "dtype": None,
        "extra": {},
    }
