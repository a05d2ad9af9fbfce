"""`countersign.yaml` of the processes under test, and the command line of their calibration."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.harness.rows import unplaced
from benchmarks.overhead.asking import COUNTED
from benchmarks.overhead.backend import Backend, key
from benchmarks.overhead.steps import DIRECT
from policies.errors import CountersignError
from policies.profile import FEWEST_RESPONSES, Profile

NAME = "bench"
"""Of the backend in the settings."""
FEWEST_TOGETHER = 4
"""Requests in flight of a calibration's second arm, at least: open loops meet each other, too."""
FEWEST_ANSWERS = 2 * FEWEST_RESPONSES
"""Of a calibration, for its two arms: one request at a time, and several."""


def calibration(options: Namespace, config: Path, profile: Path, kept: Path) -> list[str]:
    """The command line that measures what is then judged: this temperature, these loads, lengths and forms, and no
    more. What it has measured is in `kept`, from which the same command goes on.
    """
    lengths = sorted({lengths.answer for mix in options.mix for _, lengths in mix.parts})
    prompt = max(mix.longest.prompt for mix in options.mix)
    together = {1, max([*options.closed, *options.burst, FEWEST_TOGETHER])}
    words = {
        "--config": str(config),
        "--backend": NAME,
        "--requests": str(options.calibrate),
        "--temperatures": f"{options.temperature:g}",
        "--concurrency": ",".join(map(str, sorted(together))),
        "--lengths": ",".join(map(str, lengths)),
        # Three tokens for two words.
        "--words": str(max(1, prompt * 2 // 3)),
        "--forms": "full" if options.full == 1 else "full,ids",
        "--replays": "1",
        "--keep": str(kept.absolute()),
        "--output": str(profile.absolute()),
    }
    return ["calibrate", *(part for pair in words.items() for part in pair)]


def unplace(profile: Path) -> None:
    """Leave this machine's folders out of what a profile says of its making: it stays among the results."""
    made = Profile.from_json(profile.read_bytes())
    profile.write_text(msgspec.structs.replace(made, made=unplaced(made.made)).to_json(), encoding="utf-8")


def settings(
    options: Namespace, backend: Backend, urls: Mapping[str, str], redis_url: str, port: int, rate: float
) -> dict[str, Any]:
    """`countersign.yaml` of the proxy and the workers."""
    model: dict[str, Any] = dict(backend.declared)
    if options.reference != "none":
        model["reference"] = _reference(options, backend)
    if options.profile is not None:
        model["profile"] = str(options.profile.absolute())
    declared: dict[str, Any] = {"model": backend.model, "runtime": backend.runtime, "precision": "bf16"}
    if key():
        declared["api_key"] = key()
    return {
        "host": "127.0.0.1",
        "port": port,
        "redis_url": redis_url,
        "models": {backend.model: model},
        "backends": [
            {"name": NAME, "url": urls[DIRECT], **declared},
            # Only requests that name it go there.
            {"name": COUNTED, "url": urls[COUNTED], **declared, "drained": True},
        ],
        "audit": {"rate": rate, "full": options.full},
        "health": {"interval": 0},
        # Nothing is shed, so that what is served is what is verified.
        "verification": {"max_backlog": 10**6, "max_backlog_bytes": 2**34},
    }


def _reference(options: Namespace, backend: Backend) -> dict[str, Any]:
    if options.reference == "engine":
        if backend.folder is None:
            raise CountersignError("bench overhead: --reference engine needs the model's folder: --folder")
        engine = dict(options.engine)
        if backend.dummy:
            engine["load_format"] = "dummy"
        return {"kind": "vllm_engine", "path": str(backend.folder), "engine": engine, "timeout": 600}
    url = backend.url if options.reference == "same" else options.reference
    return {"kind": "vllm_http", "url": url.rstrip("/").removesuffix("/v1"), "served_model": backend.model}
