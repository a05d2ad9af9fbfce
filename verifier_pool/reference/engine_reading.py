"""What an in-process vLLM is asked for one replay, and how its answer becomes arrays.

vLLM turns prompt logprobs into Python numbers one by one, even in its flat form: a million objects for 64 replays of
800 tokens. `keep_arrays` puts a processor of ours into one engine that leaves the tensors as they came from the
engine's process. Where a vLLM has no such place, its flat form is read instead, and that is logged.

The ids of a sequence alone go in as a list of Python numbers: vLLM's wire takes nothing else.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.errors import ReplayError
from policies.evidence import Ids, Logprobs, Replay
from verifier_pool.reference.base import ReplayRequest
from verifier_pool.reference.canary import Known
from verifier_pool.reference.experts import Experts, output_part
from verifier_pool.reference.rows import TOP_K, Entries
from verifier_pool.reference.scoring import MAX_CANDIDATES, candidates, full_form, ids_form, look_up

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ability:
    """What an engine can do, as far as it decides what is asked.

    Attributes:
        scores_ids: vLLM's V2 runner, which scores given ids.
        experts: it captures routed experts.
        max_tokens: prompt and output of the longest replay.
        vocab_size: ids below it exist.
    """

    scores_ids: bool
    experts: bool
    max_tokens: int
    vocab_size: int


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """One replay as the engine is asked for it.

    Attributes:
        sequence: prompt and output ids.
        ids: int32 (G, C), what is scored; see `candidates`.
        sampling: vLLM's `SamplingParams`.
    """

    request: ReplayRequest
    sequence: list[int]
    ids: Ids
    sampling: Any


def ask(request: ReplayRequest, ability: Ability) -> Asked:
    """What to ask of the engine for a replay.

    Raises:
        ReplayError: `nothing_to_replay`, `too_long`, `bad_ids`.
    """
    sequence = _sequence(request, ability)
    ids = candidates(request.output_ids, request.candidate_ids, ability.vocab_size)
    return Asked(request, sequence, ids, _sampling(request, ids, ability))


def _sequence(request: ReplayRequest, ability: Ability) -> list[int]:
    if not len(request.prompt_ids) or not len(request.output_ids):
        raise ReplayError("nothing_to_replay", "prompt or output ids are missing")
    if request.tokens > ability.max_tokens:
        raise ReplayError("too_long", f"{request.tokens} tokens and one more, of {ability.max_tokens + 1}")
    sequence = np.concatenate([request.prompt_ids, request.output_ids])
    # An id outside the embedding kills the engine, not the request.
    if sequence.min() < 0 or sequence.max() >= ability.vocab_size:
        raise ReplayError("bad_ids", "a token id is outside the vocabulary")
    ids: list[int] = sequence.tolist()
    return ids


def _sampling(request: ReplayRequest, ids: Ids, ability: Ability) -> Any:
    from vllm import SamplingParams

    arguments = _once()
    if not ability.scores_ids:
        deeper = request.candidate_ids is not None
        return SamplingParams(prompt_logprobs=MAX_CANDIDATES if deeper else TOP_K, **arguments)
    if request.form == "full":
        # vLLM computes these for every row of the prompt: unlike given ids, they have no first row.
        arguments["prompt_logprobs"] = TOP_K
    if ability.experts and request.experts:
        arguments["routed_experts_prompt_start"] = len(request.prompt_ids)
    # A row scores the token after it: the first output token is the last prompt token's prediction.
    start = len(request.prompt_ids) - 1
    return SamplingParams(prompt_logprob_token_ids=ids, prompt_logprob_start=start, **arguments)


def bare_prefill() -> Any:
    """A prefill without logprobs: what no replay can be cheaper than."""
    from vllm import SamplingParams

    return SamplingParams(**_once())


def greedy_answer(length: int) -> Any:
    """A greedy answer of exactly `length` tokens and their 20 best."""
    from vllm import SamplingParams

    return SamplingParams(**_once() | {"max_tokens": length, "ignore_eos": True, "logprobs": TOP_K})


def _once() -> dict[str, Any]:
    from vllm.sampling_params import RequestOutputKind

    return {
        "max_tokens": 1,
        "temperature": 0.0,
        "flat_logprobs": True,
        "detokenize": False,
        # The arguments are this request's own: nothing to protect by a deep copy.
        "skip_clone": True,
        "output_kind": RequestOutputKind.FINAL_ONLY,
    }


def read(result: Any, asked: Asked, ability: Ability) -> Replay:
    """The replay that one engine output holds, without a name and a rendering.

    Raises:
        ReplayError: `bad_replay` or `not_finite`.
    """
    request, experts = asked.request, _experts(result, asked.request, ability)
    output = request.output_ids
    if not ability.scores_ids:
        entries = prompt_entries(result.prompt_logprobs, len(output))
        ids, logprobs, own = full_form(output, entries, look_up(entries, asked.ids))
        return Replay(ids, logprobs, "full", own=own, routed_experts=experts)
    if result.prompt_token_id_logprobs is None:
        raise ReplayError("bad_replay", "the engine scored no given ids")
    scored = ids_form(output, asked.ids, np.asarray(result.prompt_token_id_logprobs, np.float32))
    if request.form == "ids":
        return Replay(*scored, "ids", routed_experts=experts)
    ids, logprobs, own = full_form(output, prompt_entries(result.prompt_logprobs, len(output)), scored)
    return Replay(ids, logprobs, "full", own=own, routed_experts=experts)


def _experts(result: Any, request: ReplayRequest, ability: Ability) -> Experts | None:
    if not ability.experts or not request.experts:
        return None
    captured = result.outputs[0].routed_experts if result.outputs else None
    return output_part(captured, len(request.prompt_ids), len(request.output_ids))


def read_answer(result: Any, prompt_ids: Ids) -> Known:
    """A greedy answer as a known one: its ids, and what the engine said of them while it decoded."""
    answer = result.outputs[0]
    output_ids = np.asarray(answer.token_ids, np.int32)
    entries = flat_entries(answer.logprobs, len(output_ids)).finite()
    ids = candidates(output_ids, entries.table(len(output_ids)), None)
    found: tuple[Ids, Logprobs] = look_up(entries, ids)
    return Known(prompt_ids, output_ids, *found)


def prompt_entries(logprobs: Any, output: int) -> Entries:
    """Entries of the last `output` rows of prompt logprobs in either form.

    Raises:
        ReplayError: `bad_replay` when rows are missing.
    """
    return kept_entries(logprobs, output) if isinstance(logprobs, Kept) else flat_entries(logprobs, output)


def flat_entries(flat: Any, output: int) -> Entries:
    """Entries of the last `output` rows of vLLM's FlatLogprobs."""
    if flat is None or len(flat) < output or not output:
        raise ReplayError("bad_replay", "the engine left out rows of logprobs")
    starts = np.asarray(flat.start_indices[-output:])
    counts = np.asarray(flat.end_indices[-output:]) - starts
    span = slice(int(starts[0]), int(starts[-1] + counts[-1]))
    if not counts.all():
        raise ReplayError("bad_replay", "the engine left out rows of logprobs")
    return Entries(
        np.repeat(np.arange(output), counts),
        np.asarray(flat.token_ids[span], np.int64),
        np.asarray(flat.logprobs[span], np.float64),
        np.asarray(flat.ranks[span], np.int64),
    )


class Kept(list[Any]):
    """Prompt logprobs as vLLM's `LogprobsTensors`, one per message: (rows, 1 + k), the prompt's own token first."""


def kept_entries(kept: Kept, output: int) -> Entries:
    """Entries of the last `output` rows of kept tensors. Column c > 0 is the c-th best; column 0 has its own rank."""
    if sum(len(tensors[0]) for tensors in kept) < output or not output:
        raise ReplayError("bad_replay", "the engine left out rows of logprobs")
    ids, logprobs, own_ranks = (_last_rows([tensors[part] for tensors in kept], output) for part in range(3))
    width = logprobs.shape[1]
    ranks = np.tile(np.arange(width, dtype=np.int64), (output, 1))
    ranks[:, 0] = own_ranks
    return Entries(
        np.repeat(np.arange(output), width),
        ids.astype(np.int64).ravel(),
        logprobs.astype(np.float64).ravel(),
        ranks.ravel(),
    )


def _last_rows(parts: list[Any], rows: int) -> NDArray[Any]:
    """Of tensors that follow each other. Most often all are in the last one."""
    last = np.asarray(parts[-1])
    return last[-rows:] if len(last) >= rows else np.concatenate([np.asarray(part) for part in parts])[-rows:]


def keep_arrays(engine: Any) -> None:
    """Have this engine's prompt logprobs arrive as `Kept` wherever the flat form was asked for.

    Does nothing but log where this vLLM has no place for it.
    """
    try:
        processor, kind = engine.output_processor, _keeper()
        add, states = processor.add_request, processor.request_states
    except (ImportError, AttributeError, TypeError) as error:
        logger.warning("this vLLM keeps no arrays (%s): prompt logprobs are read from its flat form, slower", error)
        return

    def add_request(request: Any, *rest: Any, **more: Any) -> None:
        add(request, *rest, **more)
        state = states.get(request.request_id)
        params = request.sampling_params
        if state is not None and params is not None and params.flat_logprobs and params.prompt_logprobs is not None:
            state.logprobs_processor.__class__ = kind
            state.logprobs_processor.prompt_logprobs = Kept()

    processor.add_request = add_request


def _keeper() -> type[Any]:
    """vLLM's LogprobsProcessor, but for prompt logprobs."""
    from vllm.v1.engine.logprobs import LogprobsProcessor

    class KeepsTensors(LogprobsProcessor):  # type: ignore[misc,unused-ignore]
        def _update_prompt_logprobs(self, prompt_logprobs_tensors: Any) -> None:
            self.prompt_logprobs.append(prompt_logprobs_tensors)

    fields = {field.name for field in dataclasses.fields(LogprobsProcessor)}
    if "prompt_logprobs" not in fields or not callable(getattr(LogprobsProcessor, "_update_prompt_logprobs", None)):
        raise AttributeError("LogprobsProcessor is another")
    return KeepsTensors
