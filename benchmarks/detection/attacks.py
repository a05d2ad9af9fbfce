"""Arms of the detection table: recorded answers as they are, and cheats that can be made of them afterwards.

A spoof needs the cheap model's tokens and the true model's prefill of them, both recorded; bending the claim and
leaving out a rival are arithmetic on top. A request for another temperature or seed than the backend used is the same
answer with another request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.adversary.race import bend, listed
from benchmarks.detection.evidence import Answer, load
from benchmarks.detection.variants import VARIANTS
from policies import noise
from policies.evidence import TOP_LOGPROBS, Evidence

CHEAP = ("fp8", "kv-fp8", "fp8-rounded", "int4", "dropped")
"""Variants of which the true model's prefill was recorded."""
SECOND_PASS = "eager-64"
HOTTER = 0.3


@dataclass(frozen=True, slots=True)
class Arm:
    """One row of the table.

    Attributes:
        kind: `honest`, or `cheat`, or `twin` for a second pass of the very model, which harms nobody and is not what
            was declared either.
    """

    name: str
    about: str
    kind: str
    answers: list[Answer]


def arms(folder: Path, names: list[str], *, runtime: str, engine: str) -> Iterator[Arm]:
    """Every arm that the recordings allow, honest ones first."""
    for name in sorted(names, key=lambda name: not VARIANTS[name].honest):
        variant = VARIANTS[name]
        answers = load(folder, name, runtime=runtime, engine=engine)
        yield Arm(name, variant.about, "honest" if variant.honest else "cheat", answers)
    if SECOND_PASS in names:
        answers = load(folder, SECOND_PASS, runtime=runtime, engine=engine)
        yield from _relabelled(answers)
        if answers[0].spoof_ids is not None:
            about = "the true model, with the logprobs of a second pass"
            yield Arm("second-pass", about, "twin", [_with(answer, _spoof) for answer in answers])
    for cheap in CHEAP:
        if cheap not in names:
            continue
        answers = load(folder, cheap, runtime=runtime, engine=engine)
        if answers[0].spoof_ids is None:
            continue
        for suffix, change, about in SPOOFS:
            changed = [_with(answer, change) for answer in answers]
            yield Arm(f"{cheap} {suffix}", f"{VARIANTS[cheap].about}; {about}", "cheat", changed)


def _relabelled(answers: list[Answer]) -> Iterator[Arm]:
    sampled = [answer for answer in answers if answer.evidence.sampling.temperature > 0]
    cooler = [_asked(answer, temperature=answer.evidence.sampling.temperature - HOTTER) for answer in sampled]
    yield Arm("hot", f"the true model, sampled {HOTTER} hotter than asked", "cheat", cooler)
    seeded = [_asked(answer, seed=(answer.evidence.sampling.seed or 0) + 1) for answer in sampled]
    yield Arm("cached", "the true model's answer to an earlier request, under a fresh seed", "cheat", seeded)


def _asked(answer: Answer, **sampling: float | int) -> Answer:
    changed = dataclasses.replace(answer.evidence.sampling, **sampling)  # type: ignore[arg-type]
    return dataclasses.replace(answer, evidence=dataclasses.replace(answer.evidence, sampling=changed))


Change = Callable[[Answer], tuple[NDArray[np.int32], NDArray[np.float32]]]


def _with(answer: Answer, change: Change) -> Answer:
    ids, logprobs = change(answer)
    evidence = dataclasses.replace(answer.evidence, claim_ids=ids, claim_logprobs=logprobs)
    return dataclasses.replace(answer, evidence=evidence)


def _spoof(answer: Answer) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    assert answer.spoof_ids is not None
    assert answer.spoof_logprobs is not None
    width = TOP_LOGPROBS + 1
    return answer.spoof_ids[:, :width], answer.spoof_logprobs[:, :width]


def _bent(answer: Answer) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    ids, logprobs = _spoof(answer)
    ids, logprobs = ids.copy(), logprobs.copy()
    scores = _scores(answer.evidence, ids, logprobs)
    for at in np.flatnonzero(scores.max(axis=1) > scores[:, 0] + 1e-6):
        real = ids[at] >= 0
        row = dict(zip(ids[at, real].tolist(), logprobs[at, real].tolist(), strict=True))
        scored = dict(zip(ids[at, real].tolist(), scores[at, real].tolist(), strict=True))
        own = int(ids[at, 0])
        changed = listed(bend(row, own, scored, answer.evidence.sampling.temperature), own, TOP_LOGPROBS)
        ids[at], logprobs[at] = -1, -np.inf
        ids[at, : len(changed)], logprobs[at, : len(changed)] = list(changed), list(changed.values())
    return ids, logprobs


def _omitted(answer: Answer) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The best rival that beats the emitted token makes room for the true next one; where several do, they stay."""
    assert answer.spoof_ids is not None
    assert answer.spoof_logprobs is not None
    ids, logprobs = answer.spoof_ids.copy(), answer.spoof_logprobs.copy()
    scores = _scores(answer.evidence, ids, logprobs)
    best = scores.argmax(axis=1)
    lost = np.flatnonzero(scores.max(axis=1) > scores[:, 0] + 1e-6)
    order = np.tile(np.arange(ids.shape[1]), (len(ids), 1))
    order[lost] = np.where(order[lost] >= best[lost, None], order[lost] + 1, order[lost])
    order = np.minimum(order, ids.shape[1] - 1)
    width = TOP_LOGPROBS + 1
    return (
        np.take_along_axis(ids, order, axis=1)[:, :width],
        np.take_along_axis(logprobs, order, axis=1)[:, :width],
    )


def _scores(evidence: Evidence, ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> NDArray[np.float64]:
    temperature = evidence.sampling.temperature
    if temperature == 0:
        return np.where(ids >= 0, logprobs, -np.inf).astype(np.float64)
    gumbel = noise.gumbel(evidence.runtime, evidence.sampling.seed or 0, len(evidence.prompt_ids), ids)
    assert gumbel is not None
    return np.where(ids >= 0, logprobs / temperature + gumbel, -np.inf)


SPOOFS: tuple[tuple[str, Change, str], ...] = (
    ("spoofed", _spoof, "reports the true model's logprobs from one prefill"),
    ("spoofed, bent", _bent, "and bends them where a token would lose"),
    ("spoofed, rival omitted", _omitted, "and leaves the rival out that would have won"),
)
