"""Expert ids of a backend and a reference, set side by side.

Shapes: P prompt and G output tokens, L layers, M of them with experts, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.evidence import Evidence, Replay
from policies.lmcv import moe

Experts = NDArray[np.integer]


class Misfit(ValueError):
    """Expert ids that do not belong to these tokens, or to this model."""


@dataclass(frozen=True, slots=True, eq=False)
class Aligned:
    """Both sides' expert ids of the same tokens and layers.

    Attributes:
        ours, theirs: backend and reference, integers (T, M, K): T tokens fed after the prompt, M layers with experts;
            −1 where a side has none.
        layers: which of the model's layers those are, (M,).
    """

    ours: Experts
    theirs: Experts
    layers: tuple[int, ...]


def output_rows(experts: Experts, prompt: int, output: int) -> Experts:
    """The rows of the G − 1 tokens fed after the prompt, (G − 1, L, K).

    Args:
        experts: rows of P + G − 1 tokens (a generation), P + G (a prefill of the whole), or of either from position P
            on: G − 1 or G. For P = 1, G rows are read as a generation's.

    Raises:
        Misfit: any other shape, or no integers.
    """
    if experts.ndim != 3 or experts.dtype.kind not in "iu" or 0 in experts.shape[1:] or not output:
        raise Misfit(f"expert ids of shape {experts.shape} and dtype {experts.dtype}")
    starts = {output: 0, output - 1: 0, prompt + output: prompt, prompt + output - 1: prompt}
    if len(experts) not in starts:
        raise Misfit(f"{len(experts)} rows of expert ids for {prompt} + {output} tokens")
    start = starts[len(experts)]
    return experts[start : start + output - 1]


def expert_layers(experts: Experts) -> tuple[int, ...]:
    """The layers of a trusted side that hold experts: those whose ids, where there are any, are not all the same."""
    if not len(experts):
        return ()
    low = np.where(experts == moe.SENTINEL, np.iinfo(np.int64).max, experts.astype(np.int64)).min(axis=(0, 2))
    return tuple(np.flatnonzero(experts.astype(np.int64).max(axis=(0, 2)) > low).tolist())


def align(evidence: Evidence, replay: Replay) -> Aligned:
    """Sets both sides side by side.

    A backend that reports only the layers with experts is matched with those of the reference.

    Raises:
        Misfit: the backend's ids have another shape than the reference's, which serves the declared model.
        ValueError: a side has none, or the reference's fit no tokens.
    """
    if evidence.routed_experts is None or replay.routed_experts is None:
        raise ValueError("one side has no expert ids")
    prompt, output = len(evidence.prompt_ids), len(evidence.output_ids)
    try:
        theirs = output_rows(replay.routed_experts, prompt, output)
    except Misfit as error:
        raise ValueError(str(error)) from error
    ours = output_rows(evidence.routed_experts, prompt, output)
    layers = expert_layers(theirs)
    if ours.shape[2] != theirs.shape[2] or ours.shape[1] not in (theirs.shape[1], len(layers)):
        raise Misfit(f"expert ids of shape {ours.shape}, the reference's are {theirs.shape}")
    chosen = list(layers)
    if ours.shape[1] == theirs.shape[1]:
        ours = ours[:, chosen]
    return Aligned(ours.astype(np.int32), theirs[:, chosen].astype(np.int32), layers)


def by_layer(aligned: Aligned) -> dict[int, moe.RouteCounts]:
    """Slot form and set form of each layer with experts."""
    return {
        layer: moe.compare_routes(aligned.ours[:, place : place + 1], aligned.theirs[:, place : place + 1])
        for place, layer in enumerate(aligned.layers)
    }


def repeats(experts: Experts) -> bool:
    """Whether some token has an expert twice in a layer."""
    ordered = np.sort(experts, axis=2)
    return bool(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != moe.SENTINEL)).any())
