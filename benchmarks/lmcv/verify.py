"""`countersign lmcv verify`: replays collected answers on a trusted server or engine and compares, token by token.

Reads evidence of `collect` and of LMCV's own collectors. Writes `worker_vs_verifier_depth_metrics.csv`,
`legality.csv`, `summary.md`, `metadata.json`, with --routes `route_diff_by_sample.csv`, and `errors.jsonl`: a sample
that could not be verified stays in every count.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from benchmarks.lmcv import routes
from benchmarks.lmcv.client import RequestFailed, Server
from benchmarks.lmcv.collect import check_same, server_options, variant
from benchmarks.lmcv.evidence import Sample, read_sample
from benchmarks.lmcv.files import (
    Appender,
    MetricsFile,
    PipelineError,
    Row,
    latest,
    metadata,
    metric_records,
    read_csv,
    read_jsonl,
    write_csv,
    write_json,
)
from benchmarks.lmcv.replay import Engine, Replayed, over_http
from benchmarks.lmcv.report import outliers
from policies.lmcv import legality, rows
from policies.settings import ReferenceSettings
from verifier_pool.reference import open_reference

METRICS = "worker_vs_verifier_depth_metrics.csv"
ERRORS = "errors.jsonl"
FIXED = ("model", "k", "evidence", "missing_logprob", "registered_k", "engine", "engine_options", "routes")
DEFAULT_K = 20

Replayer = Callable[[Sample, int], Awaitable[Replayed]]


def main(argv: Sequence[str]) -> int:
    """Verify; returns 0 when every sample was compared, else 1. Raises PipelineError and SettingsError."""
    return asyncio.run(_verify(_parser().parse_args(list(argv)), argv))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="countersign lmcv verify", description=__doc__)
    parser.add_argument("--evidence", type=Path, default=Path("data/worker_evidence.jsonl"), metavar="FILE")
    parser.add_argument("--output-dir", type=Path, default=Path("results/lmcv"), metavar="DIR")
    server_options(parser)
    parser.add_argument("--engine", metavar="DIR", help="a model folder to replay in this process, instead of --url")
    parser.add_argument("--engine-options", type=_options, default={}, metavar="JSON", help="arguments of that engine")
    parser.add_argument("--variant-id", default="verifier", help="name of this verifier in the metadata")
    parser.add_argument("--quantization", default="", help="precision of this verifier, for the metadata")
    parser.add_argument("--gpu", default="", help="hardware of this verifier, for the metadata")
    parser.add_argument("--k", type=int, default=0, help="logprobs per token; 0 takes each sample's own")
    parser.add_argument("--batch-size", type=int, default=4, metavar="N", help="replays in flight")
    parser.add_argument("--missing-logprob", type=float, default=-100.0, metavar="NATS")
    parser.add_argument("--max-total-tokens", type=int, default=0, metavar="N", help="skip longer samples; 0 is none")
    parser.add_argument(
        "--registered-k",
        type=int,
        metavar="N",
        help="top-k the worker had to keep to (default: 1 if greedy, else its own)",
    )
    parser.add_argument("--routes", action="store_true", help="compare expert ids, too")
    parser.add_argument("--layers", default="0", metavar="N,N,…", help="layers to compare expert ids of")
    return parser


def _options(text: str) -> dict[str, Any]:
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError('an object such as {"max_model_len": 4096}')
    return found


async def _verify(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    if bool(arguments.url) == bool(arguments.engine):
        raise PipelineError("one of --url and --engine is needed")
    evidence = list(latest(read_jsonl(arguments.evidence)).values())[: arguments.limit or None]
    if arguments.engine:
        settings = ReferenceSettings(kind="vllm_engine", path=arguments.engine, engine=arguments.engine_options)
        reference = open_reference(Path(arguments.engine).name, settings)
        try:
            engine = Engine(reference)
            return await _run(
                evidence,
                lambda sample, _: engine.replay(sample, routes=arguments.routes),
                engine.name,
                "",
                arguments,
                argv,
            )
        finally:
            reference.close()
    server = Server(arguments.url, arguments.model, api_key_env=arguments.api_key_env, timeout=arguments.timeout)
    async with server:
        return await _run(
            evidence,
            lambda sample, k: over_http(server, sample, k, routes=arguments.routes),
            server.model,
            server.version,
            arguments,
            argv,
        )


async def _run(
    evidence: Sequence[Row],
    replay: Replayer,
    model: str,
    version: str,
    arguments: argparse.Namespace,
    argv: Sequence[str],
) -> int:
    args = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    args["model"] = model
    folder: Path = arguments.output_dir
    if arguments.resume:
        check_same(folder / "metadata.json", args, FIXED)
    started = time.monotonic()
    run = Run(folder, arguments, model)
    room = asyncio.Semaphore(max(1, arguments.batch_size))

    async def one(row: Row) -> None:
        async with room:
            await run.sample(row, replay)

    about = metadata(argv, args=args, verifier_variant=variant(arguments, model, version))
    write_json(folder / "metadata.json", about)
    try:
        await asyncio.gather(*(one(row) for row in evidence if row["sample_id"] not in run.metrics.done))
    finally:
        run.close()
    records = read_csv(folder / METRICS)
    counts = {
        "evidence_count": len(evidence),
        "skipped_too_long": run.reasons.count("too_long"),
        "failed": len(run.reasons),
        "depth_row_count": len(records),
        "k": sorted(run.k),
        "elapsed_seconds": time.monotonic() - started,
    }
    write_json(folder / "metadata.json", about | counts)
    (folder / "summary.md").write_text(outliers(records, counts), encoding="utf-8")
    print(f"{len(evidence) - len(run.reasons)} of {len(evidence)} samples compared, {len(records)} tokens, in {folder}")
    return 1 if run.reasons else 0


class Run:
    """The files of one run."""

    def __init__(self, folder: Path, arguments: argparse.Namespace, model: str) -> None:
        self._folder, self._arguments, self._model = folder, arguments, model
        self._layers = tuple(int(part) for part in arguments.layers.split(","))
        resume = arguments.resume
        self.metrics = MetricsFile(folder / METRICS, resume=resume)
        self._side = Appender(folder / "samples.jsonl", resume=resume)
        self._errors = Appender(folder / ERRORS, resume=False)
        self.reasons: list[str] = []
        self.k: set[int] = set()

    async def sample(self, row: Row, replay: Replayer) -> None:
        """Replay and compare one sample; what fails becomes a row of `errors.jsonl`."""
        try:
            if "error" in row:
                raise RequestFailed("no_evidence", str(row["error"]))
            await self._sample(row, read_sample(row), replay)
        except RequestFailed as error:
            self.reasons.append(error.reason)
            self._errors.write(
                {"sample_id": row["sample_id"], "error": {"reason": error.reason, "message": str(error)}}
            )
            print(f"{row['sample_id']}: {error}", file=sys.stderr)

    async def _sample(self, row: Row, sample: Sample, replay: Replayer) -> None:
        total = len(sample.prompt_ids) + len(sample.output_ids)
        if 0 < self._arguments.max_total_tokens < total:
            raise RequestFailed("too_long", f"{total} tokens")
        replayed = await replay(sample, self._arguments.k or sample.k or DEFAULT_K)
        self.k.add(replayed.k)
        found = rows(
            sample.output_ids,
            sample.worker,
            replayed.listing,
            input_token_count=len(sample.prompt_ids),
            missing_logprob=self._arguments.missing_logprob,
        )
        tokens = tuple(
            theirs or ours for ours, theirs in zip(sample.tokens, replayed.tokens or sample.tokens, strict=True)
        )
        registered = self._registered(row)
        codes = replayed.legality(registered)
        side: Row = {
            "sample_id": sample.sample_id,
            "faults": list(sample.faults),
            "worker_k": sample.k,
            "verifier_k": replayed.k,
            "registered_k": registered,
            "tokens": len(codes),
            "legal_count": int((codes == legality.LEGAL).sum()),
            "uncertain_count": int((codes == legality.UNCERTAIN).sum()),
            "illegal_count": int((codes == legality.ILLEGAL).sum()),
            "dense": legality.verdict(codes, "dense"),
            "moe": legality.verdict(codes, "moe"),
        }
        if self._arguments.routes:
            side["route"] = routes.compare(
                row,
                replayed.routes.tolist() if isinstance(replayed.routes, np.ndarray) else replayed.routes,
                verifier_model=self._model,
                prompt=len(sample.prompt_ids),
                output=len(sample.output_ids),
                layers=self._layers,
            )
        # The metrics come last: a sample counts as done by them.
        self._side.write(side)
        self.metrics.write(metric_records(sample.sample_id, found, tokens, sample.mode, replayed.mode))

    def close(self) -> None:
        """Close the files and write the tables that are made from them."""
        self.metrics.close()
        self._side.close()
        self._errors.close()
        sides = list(latest(read_jsonl(self._folder / "samples.jsonl")).values())
        self.k |= {side["verifier_k"] for side in sides}
        write_csv(self._folder / "legality.csv", LEGALITY_COLUMNS, sides)
        if self._arguments.routes:
            compared: list[Any] = [side["route"] for side in sides if "route" in side]
            illegal = sum(side["illegal_count"] for side in sides if side["moe"] == "reject")
            uncertain = sum(side["moe"] == "uncertain" for side in sides)
            write_csv(self._folder / "route_diff_by_sample.csv", routes.COLUMNS, compared)
            write_json(
                self._folder / "route_diff_summary.json",
                routes.decisions(compared, illegal=illegal, uncertain=uncertain),
            )

    def _registered(self, row: Row) -> int:
        if self._arguments.registered_k is not None:
            return int(self._arguments.registered_k)
        config = row.get("decode_config")
        config = config if isinstance(config, dict) else {}
        return 1 if not config.get("temperature") else max(0, int(config.get("top_k") or 0))


LEGALITY_COLUMNS = (
    "sample_id",
    "worker_k",
    "verifier_k",
    "registered_k",
    "tokens",
    "legal_count",
    "uncertain_count",
    "illegal_count",
    "dense",
    "moe",
)
