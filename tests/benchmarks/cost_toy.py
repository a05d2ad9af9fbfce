"""`countersign worker` whose reference is the toy; and an engine of the toy's for grids and loads."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.cost.arms import BACKEND, MODEL, Request, Timed
from benchmarks.cost.plan import FLAT, IDS, PLAIN, WORKER
from policies.evidence import Evidence
from tests.verifier_pool.toy import VOCAB, ToyReference, answer
from verifier_pool.reference.base import ReplayRequest

REFERENCE = "toy 1"


class ToyEngine:
    """Answers and replays with the toy; `slow` seconds per output token of a worker. `broken` arms raise."""

    name = REFERENCE
    vocab_size = VOCAB

    def __init__(self, *, broken: Sequence[str] = (), short: bool = False) -> None:
        self.broken = set(broken)
        self.short = short
        self.ran: list[tuple[str, int]] = []

    def run(self, arm: str, requests: Sequence[Request]) -> Timed:
        self.ran.append((arm, len(requests)))
        if arm in self.broken:
            raise RuntimeError("the toy is broken")
        began = time.perf_counter()
        results: list[Any] = []
        for request in requests:
            if arm in (WORKER, PLAIN):
                length = request.output_len - self.short
                results.append(answer([int(each) for each in request.prompt_ids], length))
            else:
                assert request.answer is not None
                assert len(request.answer.output_ids) == request.output_len
                asked = ReplayRequest(request.answer.prompt_ids, request.answer.output_ids, "completions", b"")
                results.append(ToyReference().replay([asked])[0] if arm in (FLAT, IDS) else None)
        each = time.perf_counter() - began
        return Timed(each, (each,) * len(requests), tuple(results))

    def evidence(self, request: Request, result: Any) -> Evidence:
        assert isinstance(result, Evidence)
        return replace(result, id=request.name, backend=BACKEND, model=MODEL, runtime="")


def prompt(length: int) -> list[int]:
    """Token ids of the toy."""
    return [int(each) for each in np.arange(length) % VOCAB]


def main() -> int:
    """A worker process, as the real command line starts it."""
    import countersign
    from verifier_pool import context

    # The command line knows the references of `vllm_engine` and `vllm_http` only.
    context.__dict__["open_reference"] = lambda name, settings: ToyReference(threads=2)
    return countersign.main(["worker", *sys.argv[1:]])


if __name__ == "__main__":
    raise SystemExit(main())
