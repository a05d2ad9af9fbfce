"""The verifier's side: one teacher-forced prefill of prompt and answer, over HTTP or in an engine of our own."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.lmcv.client import RequestFailed, Server
from benchmarks.lmcv.evidence import Sample
from policies.errors import ReplayError
from policies.lmcv import legality
from policies.lmcv.columns import Listing, listing
from policies.lmcv.divergence import Floats
from verifier_pool.reference.base import Reference, ReplayRequest

HTTP_MODE = "vllm_prompt_logprobs_full_prefill"
ENGINE_MODE = "countersign_reference_full_prefill"


@dataclass(frozen=True, slots=True)
class Replayed:
    """What one prefill gave.

    Attributes:
        listing: the verifier's lists, ranks counted as the worker's were.
        k: alternatives per position.
        kth: (G,), logprob of the registered top-k's last member is read from it: all listed, best first, (G, X).
        tokens: decoded served tokens, where the server tells them.
        routes: expert ids as they came, or None.
    """

    listing: Listing
    k: int
    ordered: Floats
    tokens: tuple[str, ...] = ()
    routes: Any = None
    mode: str = field(default=HTTP_MODE)

    def legality(self, registered: int) -> legality.Codes:
        """Codes of the served tokens under a registered top-k."""
        side = self.listing
        if registered <= 0:
            return np.zeros(len(side.ranks), np.int8)
        column = min(registered, self.ordered.shape[1]) - 1
        return legality.codes(side.ranks, side.selected, self.ordered[:, column], registered, self.k)


async def over_http(server: Server, sample: Sample, k: int, *, routes: bool) -> Replayed:
    """Replay on a vLLM server.

    Raises:
        RequestFailed: `too_long`, what the client raises, or `bad_answer` when rows are missing or of other ids.
    """
    prompt = len(sample.prompt_ids)
    sequence = [*sample.prompt_ids.tolist(), *sample.output_ids.tolist()]
    if server.max_model_len is not None and len(sequence) + 1 > server.max_model_len:
        raise RequestFailed("too_long", f"{len(sequence)} tokens and one more, of {server.max_model_len}")
    body = {"prompt": sequence, "max_tokens": 1, "temperature": 0, "prompt_logprobs": k, "return_token_ids": True}
    if routes:
        body["routed_experts_prompt_start"] = prompt
    answer = await server.complete(body)
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise RequestFailed("bad_answer", "one choice was expected")
    choice = choices[0]
    if choice.get("prompt_token_ids") not in (None, sequence):
        raise RequestFailed("bad_answer", "the server replayed other ids")
    rows = choice.get("prompt_logprobs")
    if not isinstance(rows, list) or len(rows) != len(sequence):
        raise RequestFailed("bad_answer", "prompt logprobs are missing")
    found = from_rows(sample, rows[prompt:], k)
    experts = next((choice[name] for name in ("routed_experts", "prompt_routed_experts") if choice.get(name)), None)
    return Replayed(found.listing, k, found.ordered, found.tokens, experts)


def from_rows(sample: Sample, rows: list[Any], k: int) -> Replayed:
    """The lists of `prompt_logprobs` rows. A row that is None, or lacks the served token, is an empty list."""
    width = max([len(row) for row in rows if isinstance(row, dict)] + [1])
    ids, values = np.full((len(rows), width), -1, np.int64), np.full((len(rows), width), -math.inf)
    ranks, tokens = np.full(len(rows), np.nan), [""] * len(rows)
    for at, (row, served) in enumerate(zip(rows, sample.output_ids.tolist(), strict=True)):
        own = row.get(str(served)) if isinstance(row, dict) else None
        if not isinstance(own, dict):
            continue
        others = [(int(id), entry) for id, entry in row.items() if id != str(served)]
        entries = [(served, own), *sorted(others, key=lambda item: item[1].get("rank") or math.inf)]
        ids[at, : len(entries)] = [id for id, _ in entries]
        values[at, : len(entries)] = [_logprob(entry) for _, entry in entries]
        rank = own.get("rank")
        ranks[at], tokens[at] = (rank if isinstance(rank, int) else math.nan), str(own.get("decoded_token") or "")
    counted = listing(sample.output_ids, ids, values)
    if sample.counted_ranks:
        # Within the list ranks are counted alike on both sides, so that ties make no difference; past it the
        # engine's own is exact where counting gives only a bound. A token tied with the last listed is not past it,
        # though the engine counts it behind all its equals.
        ranks = np.where((ranks > k) & (counted.ranks > k), ranks, counted.ranks)
    exact = Listing(counted.ids, counted.logprobs, counted.selected, ranks, np.zeros(len(rows), np.bool_))
    return Replayed(exact, k, _ordered(counted), tuple(tokens))


class Engine:
    """A reference of the verifier pool as the verifier. It reports its own top 20 at every position."""

    K = 20

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._turn = asyncio.Lock()
        self.name = reference.name

    async def replay(self, sample: Sample, *, routes: bool) -> Replayed:
        """Replay one sample. Raises RequestFailed with the reference's reason."""
        request = ReplayRequest(
            sample.prompt_ids.astype(np.int32), sample.output_ids.astype(np.int32), "completions", b"", experts=routes
        )
        async with self._turn:
            try:
                (replay,) = await asyncio.to_thread(self._reference.replay, [request])
            except ReplayError as error:
                raise RequestFailed(error.reason, str(error)) from error
        own = slice(0, replay.own)
        side = listing(sample.output_ids, replay.ids[:, own], replay.logprobs[:, own])
        experts = None if replay.routed_experts is None else replay.routed_experts
        return Replayed(side, self.K, _ordered(side), (), experts, ENGINE_MODE)


def _ordered(side: Listing) -> Floats:
    values = np.where((side.ids >= 0) & ~np.isnan(side.logprobs), side.logprobs, -np.inf)
    return np.asarray(-np.sort(-values, axis=1), np.float64)


def _logprob(entry: Any) -> float:
    value = entry.get("logprob") if isinstance(entry, dict) else None
    return float(value) if isinstance(value, int | float) else -math.inf
