"""LMCV's evidence rows: written from a vLLM completion, and read back whoever wrote them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.lmcv.client import RequestFailed
from benchmarks.lmcv.files import Row
from policies.evidence import MASKED
from policies.lmcv.columns import Listing, listing
from policies.lmcv.divergence import Integers

TRACE_MODE = "vllm_openai_completions_decode"
"""Ranks of such rows are counted from the listed logprobs; other modes carry the engine's own."""
_PREFIX = "token_id:"


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer to verify.

    Attributes:
        k: alternatives asked for, 0 where the row does not say.
        counted_ranks: the worker's ranks were counted from its list, so the verifier's must be, too.
        tokens: decoded served tokens, where known.
        faults: what is wrong with the trace, one short line each; the rows concerned count as missing.
    """

    sample_id: str
    prompt_ids: Integers
    output_ids: Integers
    worker: Listing
    mode: str
    k: int
    counted_ranks: bool
    tokens: tuple[str, ...]
    faults: tuple[str, ...]


def trace(choice: Mapping[str, Any]) -> tuple[list[int], list[Row]]:
    """Served ids and `worker_trace` of one choice of `/v1/completions`.

    The first key of each `top_logprobs` is the served token, so places are no ranks: 1 + larger logprobs is. For a
    token outside the top k that gives k + 1, a lower bound.

    Raises:
        RequestFailed: `no_token_ids` or `no_logprobs`; a backend that leaves them out cannot be verified.
    """
    ids = choice.get("token_ids")
    if not isinstance(ids, list) or not all(isinstance(id, int) for id in ids):
        raise RequestFailed("no_token_ids", "the server did not return the ids of its answer")
    logprobs = choice.get("logprobs")
    tops = logprobs.get("top_logprobs") if isinstance(logprobs, dict) else None
    if not isinstance(tops, list):
        raise RequestFailed("no_logprobs", "the server did not return logprobs")
    return ids, [_position(depth, id, tops[depth]) for depth, id in enumerate(ids) if depth < len(tops)]


def _position(depth: int, token: int, top: Any) -> Row:
    listed = {
        int(key.removeprefix(_PREFIX)): float(value)
        for key, value in (top.items() if isinstance(top, dict) else ())
        if key.startswith(_PREFIX) and key.removeprefix(_PREFIX).isdigit() and isinstance(value, int | float)
    }
    own = listed.get(token)
    ordered = sorted(listed.items(), key=lambda item: -item[1])
    values = np.array([value for _, value in ordered])
    ranks = 1 + np.searchsorted(-values, -values, side="left")
    return {
        "depth": depth,
        "target_token_id": token,
        "target_decoded_token": "",
        "selected_logprob": own,
        "selected_rank": None if own is None else int((values > own).sum()) + 1,
        "top_logprobs": [
            {"position": at, "token_id": id, "logprob": value, "rank": int(ranks[at]), "decoded_token": ""}
            for at, (id, value) in enumerate(ordered)
        ],
    }


def read_sample(row: Row) -> Sample:
    """One evidence row, LMCV's or ours.

    Driven by `output_ids`: a served token without a trace row, with two, or whose row names another token has none.

    Raises:
        RequestFailed: `bad_evidence` when prompt or output ids are missing or no ids.
    """
    prompt, output = _ids(row, "input_ids"), _ids(row, "output_ids")
    if not len(prompt) or not len(output):
        raise RequestFailed("bad_evidence", "no prompt ids or no output ids")
    mode = str(row.get("worker_trace_mode", ""))
    positions, faults = _positions(row.get("worker_trace"), output)
    entries = [_entries(positions.get(depth), int(id)) for depth, id in enumerate(output)]
    width = max([len(each) for each in entries] + [1])
    ids, values = np.full((len(output), width), -1, np.int64), np.full((len(output), width), -math.inf)
    for depth, each in enumerate(entries):
        ids[depth, : len(each)] = [id for id, _ in each]
        values[depth, : len(each)] = [value for _, value in each]
    counted = mode == TRACE_MODE
    k = _alternatives(row, entries)
    side = listing(output, ids, values, k=k)
    if not counted:
        ranks = [_number((positions.get(depth) or {}).get("selected_rank")) for depth in range(len(output))]
        side = Listing(side.ids, side.logprobs, side.selected, np.array(ranks), np.zeros(len(output), np.bool_))
    tokens = tuple(str((positions.get(depth) or {}).get("target_decoded_token") or "") for depth in range(len(output)))
    return Sample(row["sample_id"], prompt, output, side, mode, k, counted, tokens, tuple(faults))


def _alternatives(row: Row, entries: Sequence[Sequence[tuple[int, float]]]) -> int:
    """As asked for, where the row says so; else how many most lists hold."""
    asked = row.get("logprobs")
    if isinstance(asked, int) and asked > 0:
        return asked
    lengths = [len(each) for each in entries if each]
    return int(np.median(lengths)) if lengths else 0


def _ids(row: Row, name: str) -> Integers:
    values = row.get(name)
    good = isinstance(values, list) and all(isinstance(v, int) and 0 <= v < 2**31 for v in values)
    if not good:
        raise RequestFailed("bad_evidence", f"{name} is no list of token ids")
    return np.array(values, np.int64)


def _positions(rows: Any, output: Integers) -> tuple[dict[int, Row], list[str]]:
    found: dict[int, Row] = {}
    faults, twice = [], set()
    for row in rows if isinstance(rows, list) else []:
        depth = row.get("depth") if isinstance(row, dict) else None
        if not isinstance(depth, int) or not 0 <= depth < len(output):
            faults.append("a trace row outside the answer")
        elif depth in found:
            twice.add(depth)
        elif row.get("target_token_id") != int(output[depth]):
            faults.append(f"depth {depth}: the trace names another token than the one served")
        else:
            found[depth] = row
    for depth in twice:
        faults.append(f"depth {depth}: two trace rows")
        del found[depth]
    absent = len(output) - len(found)
    return found, faults + ([f"{absent} served tokens without a trace row"] if absent else [])


def _entries(row: Row | None, token: int) -> Sequence[tuple[int, float]]:
    """(id, logprob), the served token first; nothing when it has no logprob."""
    own = _number(row.get("selected_logprob")) if row else math.nan
    if row is None or math.isnan(own):
        return ()
    tops = row.get("top_logprobs")
    others = [
        (entry["token_id"], _number(entry.get("logprob")))
        for entry in (tops if isinstance(tops, list) else [])
        if isinstance(entry, dict) and isinstance(entry.get("token_id"), int) and entry["token_id"] != token
    ]
    return ((token, own), *((id, value) for id, value in others if 0 <= id < 2**31 and not math.isnan(value)))


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return -math.inf if value <= MASKED else float(value)
