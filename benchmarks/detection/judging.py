"""Judges every answer of every arm as the product does, and by others' rules, one flat row per answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.detection.attacks import Arm
from benchmarks.detection.evidence import MODEL, PRECISION, REFERENCE, Answer, load, recorded_names
from benchmarks.harness.rows import told, unplaced
from policies import distance, lmcv, margin, rivals, routing, selection, structure
from policies.checks import Check, VerdictWord
from policies.evidence import Evidence, Replay
from policies.profile import Profile, ProfileKey, fit
from policies.verdict import combine

Row = dict[str, Any]

EOS = 2
VOCABULARY = 49_152
DENSE = {"calibration-eager": "eager", "calibration-graphs": "graphs"}
"""Honest variants that the profile is made of, by condition. Every other arm is judged by it unseen."""
EXPERTS = {"moe": "eager", "moe-graphs": "graphs"}
"""The same for the mixture of experts, which is another model with a profile of its own: half of its prompts make it,
the other half is judged."""
PER_PROMPT = 3
"""Answers to each prompt, one per temperature, next to each other."""
EVIDENCE = ("exceeds", "mu0", "n_least", "groups", "forged")
"""Metrics of a check that its evidence is made of."""
LENGTHS = (32, 64, 128)
"""Tokens at which the statistics are compared."""


@dataclasses.dataclass(frozen=True, slots=True)
class Profiles:
    """One profile per model; that of the experts is None where they were not recorded."""

    dense: Profile
    experts: Profile | None

    def of(self, answer: Answer) -> Profile | None:
        """The profile of the model an answer is declared to come from."""
        return self.dense if answer.evidence.routed_experts is None else self.experts


def calibrate(folder: Path, *, runtime: str, engine: str) -> Profiles:
    """Profiles from the calibration recordings. Raises OSError when the dense ones are missing."""
    dense = _fit(folder, DENSE, runtime, engine)
    recorded = set(recorded_names(folder))
    return Profiles(dense, _fit(folder, EXPERTS, runtime, engine) if recorded >= EXPERTS.keys() else None)


def _fit(folder: Path, conditions: dict[str, str], runtime: str, engine: str) -> Profile:
    rows = []
    for name, label in conditions.items():
        answers = load(folder, name, runtime=runtime, engine=engine)
        for answer in [a for n, a in enumerate(answers) if _calibrates(name, n)]:
            assert answer.replay is not None
            rows += distance.calibration_rows(answer.evidence, answer.replay, arm=label)
            rows += margin.calibration_rows(answer.evidence, answer.replay, arm=label, eos_token_ids=(EOS,))
            if answer.evidence.routed_experts is not None:
                rows += routing.calibration_rows(answer.evidence, answer.replay, arm=label)
    return fit(rows, ProfileKey(MODEL, runtime, PRECISION, REFERENCE, engine))


def wanted(arm: Arm) -> dict[int, Answer]:
    """The answers of an arm that are judged, by their number: replayed ones that no profile is made of."""
    return {
        number: answer
        for number, answer in enumerate(arm.answers)
        if answer.replay is not None and not _calibrates(arm.name, number)
    }


def judge(arm: Arm, profiles: Profiles, known: Collection[int] = ()) -> list[Row]:
    """One row per answer that is wanted and not `known`; one that cannot be judged says why in `error`."""
    return [_judged(arm, number, answer, profiles) for number, answer in wanted(arm).items() if number not in known]


def _judged(arm: Arm, number: int, answer: Answer, profiles: Profiles) -> Row:
    try:
        return row(arm, number, answer, profiles.of(answer))
    except Exception as error:
        return _place(arm, number, answer) | {"error": unplaced(told(error))}


def _place(arm: Arm, number: int, answer: Answer) -> Row:
    return {
        "arm": arm.name,
        "kind": arm.kind,
        "answer": number,
        "temperature": round(answer.evidence.sampling.temperature, 3),
        "tokens": len(answer.evidence.output_ids),
    }


def _calibrates(name: str, number: int) -> bool:
    return name in DENSE or (name in EXPERTS and number // PER_PROMPT % 2 == 0)


def row(arm: Arm, number: int, answer: Answer, profile: Profile | None) -> Row:
    """Verdict, checks, and the statistics of others on the same answer."""
    evidence, replay = answer.evidence, answer.replay
    assert replay is not None
    checks = [
        structure.check(evidence, vocab_size=VOCABULARY, eos_token_ids=(EOS,)),
        selection.check(evidence, vocab_size=VOCABULARY, eos_token_ids=(EOS,)),
        distance.check(evidence, replay, profile),
        margin.check(evidence, replay, profile, eos_token_ids=(EOS,), experts=evidence.routed_experts is not None),
    ]
    if evidence.routed_experts is not None:
        checks.append(routing.check(evidence, replay, profile))
    found = _place(arm, number, answer) | {"verdict": combine(checks, audited=True).word.value}
    for check in checks:
        found |= _flat(check)
    metrics = lmcv.summarise(lmcv.compare(evidence, replay))
    width = evidence.claim_ids.shape[1] - 1
    found |= {f"lmcv {name}": lmcv.verdict(metrics, rule, k=width).verdict for name, rule in lmcv.POLICIES.items()}
    for length in LENGTHS:
        if len(evidence.output_ids) >= length:
            found |= {f"{name} @{length}": value for name, value in statistics(evidence, replay, length).items()}
    return found


def statistics(evidence: Evidence, replay: Replay, length: int) -> dict[str, float]:
    """Ours and others' statistics of the first `length` tokens; larger is farther in each."""
    short, cut = _first(evidence, replay, length)
    ours = distance.measure(short, cut)
    theirs = lmcv.summarise(lmcv.compare(short, cut))
    return {
        "distance": float(ours["score"] or 0.0),
        "lmcv mean": theirs["mean_abs_logprob_diff"],
        "lmcv p99": theirs["abs_logprob_diff_p99"],
        "lmcv rank rate": theirs["rank_delta_nonzero_rate"],
        "lmcv 1 - jaccard": 1.0 - theirs["topk_jaccard_mean"],
        "lmcv js p99": theirs["union_js_p99"],
        "gonka": rivals.gonka_distance(short, cut),
        "logic ks": rivals.logic_test(short, cut).distance,
    }


def as_choice(found: Row) -> dict[str, Any]:
    """A row as `benchmarks.adversary.score` reads the choices of a verification."""
    names = ("structure", "selection", "distance", "margin", "routing")
    return {
        "checks": [
            {
                "name": name,
                "result": found[f"{name} result"],
                "metrics": {"tokens": found["tokens"]} | {key: found.get(f"{name} {key}") for key in EVIDENCE},
            }
            for name in names
            if found.get(f"{name} result")
        ]
    }  # fmt: skip


def caught(rows: Sequence[Row]) -> list[Row]:
    """Rows that were rejected."""
    return [found for found in rows if found["verdict"] == VerdictWord.REJECT.value]


def _flat(check: Check) -> Row:
    kept = ("score", "p", "n", "tail", *EVIDENCE, "violations", "checked", "losing_far")
    metrics = {f"{check.name} {name}": check.metrics[name] for name in kept if check.metrics.get(name) is not None}
    return {f"{check.name} result": check.result.value, f"{check.name} reason": check.reason} | metrics


def _first(evidence: Evidence, replay: Replay, length: int) -> tuple[Evidence, Replay]:
    rows = slice(0, length)
    short = dataclasses.replace(
        evidence,
        output_ids=evidence.output_ids[rows],
        claim_ids=evidence.claim_ids[rows],
        claim_logprobs=np.ascontiguousarray(evidence.claim_logprobs[rows]),
        routed_experts=None,
    )
    return short, dataclasses.replace(replay, ids=replay.ids[rows], logprobs=replay.logprobs[rows], routed_experts=None)
