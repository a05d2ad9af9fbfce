"""`countersign bench policies`: what the CPU checks cost, in milliseconds per 1,000 tokens on one core, and standing,
in milliseconds per 1,000 answers.

The answers are made up, with the shapes of real ones: 1,000 tokens, a claim of 21 columns, a vocabulary of 49,152. The
best of many repeats is printed: on a busy machine anything more says what else was running.
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from policies import selection, standing, structure
from policies.evidence import Evidence, Sampling, Usage
from policies.settings import StandingSettings
from policies.unit import Unit

TOKENS = 1000
VOCABULARY = 49_152
EOS = (2,)
WORDS = ((17,), (250, 251), (9, 8, 7))
CPU, GPU = "vllm-0.32-v1-cpu", "vllm-0.32-v2"
CUTS: dict[str, Any] = {"top_p": 0.9, "top_k": 40, "min_p": 0.01}
EVERYTHING: dict[str, Any] = {
    "logit_bias": tuple((token, (-1.0) ** token) for token in range(300)),
    "presence_penalty": 0.5,
    "frequency_penalty": 0.2,
    "min_tokens": 500,
    "bad_words": ("one", "two words"),
    "allowed_token_ids": tuple(range(0, VOCABULARY, 48)),
}

Measured = list[tuple[str, float]]


def answer(**changes: Any) -> Evidence:
    """1,000 made-up tokens with a claim whose logprobs fall like real ones."""
    random = np.random.default_rng(7)
    ids = np.stack([random.choice(VOCABULARY, 21, replace=False) for _ in range(TOKENS)]).astype(np.int32)
    logits = -np.sort(random.gamma(1.5, 2.5, (TOKENS, 21)), axis=1)
    logprobs = (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True) * 1.02)).astype(np.float32)
    return Evidence(
        id="0" * 32,
        endpoint="chat",
        backend="bench",
        model="bench",
        runtime=GPU,
        sampling=Sampling(temperature=0.8, seed=2**40 + 3, max_tokens=TOKENS, **changes),
        prompt_ids=np.arange(100, dtype=np.int32),
        output_ids=np.ascontiguousarray(ids[:, 0]),
        claim_ids=ids,
        claim_logprobs=logprobs,
        finish_reason="length",
        usage=Usage(100, TOKENS, 100, TOKENS),
    )


def cases() -> list[tuple[str, Callable[[], object]]]:
    """Every measurement: what it is called, and what to run. The tokens violate, so every other noise is tried too."""

    def select(evidence: Evidence) -> Callable[[], object]:
        return lambda: selection.check(evidence, vocab_size=VOCABULARY, eos_token_ids=EOS, bad_words=WORDS)

    plain, cut, whole = answer(), answer(**CUTS), answer(**CUTS, **EVERYTHING)
    greedy = dataclasses.replace(plain, sampling=dataclasses.replace(plain.sampling, temperature=0.0))
    return [
        ("selection, T = 0", select(greedy)),
        ("selection, T = 0.8", select(plain)),
        ("selection, T = 0.8, CPU noise", select(dataclasses.replace(plain, runtime=CPU))),
        ("selection, top-p, top-k and min-p", select(cut)),
        ("selection, cuts, bias, penalties, bad words, allowed ids, min_tokens", select(whole)),
        (
            "selection, the same under one noise",
            lambda: selection.fit(whole, GPU, vocab_size=VOCABULARY, eos_token_ids=EOS, bad_words=WORDS),
        ),
        ("selection, the same without a seed", select(dataclasses.replace(whole, speculative=True))),
        ("structure", lambda: structure.check(plain, vocab_size=VOCABULARY, max_model_len=4096, eos_token_ids=EOS)),
    ]


def units(failing: str, keys: int) -> list[Unit]:
    """256 made-up units of audited answers by so many client keys; every one fails the process named, if one is."""
    outcomes = {"selection": (0.0, 0.0), "structure": (0.0, 0.0), "withheld": (0.0, 0.0), "forged": (0.0, 0.0)}
    outcomes |= {name: (float(name == failing), 0.05) for name in ("distance", "margin")}
    return [
        Unit(
            id=f"{at:032x}",
            at=1e9 + at,
            backend="bench",
            declaration={"model": "bench"},
            key=f"key{at % keys}",
            unit=f"unit{at}",
            prompt=f"prompt{at}",
            tokens=128,
            audited=True,
            replayed=True,
            outcomes=outcomes,
        )
        for at in range(256)
    ]


def standing_cases() -> list[tuple[str, Callable[[], object]]]:
    """Folding the same 256 units: from an honest backend, and where evidence suffices but is not corroborated."""
    record, rules = standing.new("bench", {"model": "bench"}, 1, 1e9), StandingSettings()
    honest, framed = units("", 8), units("distance", 2)
    at_last = standing.fold(record, units("distance", 2), set(), rules).record
    third = [msgspec.structs.replace(unit, unit=f"{unit.unit}b", prompt=f"{unit.prompt}b") for unit in units("", 3)]
    return [
        ("an honest backend's", lambda: standing.fold(record, honest, set(), rules)),
        ("where two keys accuse and a third does not", lambda: standing.fold(at_last, third, set(), rules)),
        ("where two keys accuse alone", lambda: standing.fold(record, framed, set(), rules)),
    ]


def measure(cases: Sequence[tuple[str, Callable[[], object]]], repeats: int, each: int) -> Measured:
    """Milliseconds per 1,000 tokens, or answers, of each case, which works on `each` of them; best of `repeats`."""
    rows: Measured = []
    for name, run in cases:
        best = np.inf
        for _ in range(repeats):
            began = time.perf_counter()
            run()
            best = min(best, time.perf_counter() - began)
        rows.append((name, 1000 * float(best) * 1000 / each))
    return rows


def report(rows: Measured, standings: Measured, repeats: int) -> str:
    """The results as Markdown."""
    lines, folds = ([f"| {name} | {milliseconds:.1f} |" for name, milliseconds in part] for part in (rows, standings))
    machine = f"{platform.machine()}, Python {platform.python_version()}, NumPy {np.__version__}"
    head = (
        "# CPU checks\n\n"
        f"Milliseconds per 1,000 tokens with a claim of 21 columns on one core, best of {repeats}; {machine}. "
        "Written by `countersign bench policies`. The made-up tokens violate, so selection tries every known noise "
        "(more work than an honest answer) but where a row says otherwise.\n\n"
        "| check | ms |\n|---|---|\n"
    )
    return (
        head + "\n".join(lines) + "\n\n# Standing\n\n"
        "Milliseconds per 1,000 answers folded into a backend's record, without Redis.\n\n"
        "| answers | ms |\n|---|---|\n" + "\n".join(folds) + "\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write the report where asked; returns 0."""
    parser = argparse.ArgumentParser(prog="countersign bench policies", description=__doc__)
    parser.add_argument("--repeats", type=int, default=50, metavar="N")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report here too, as Markdown")
    arguments = parser.parse_args(argv)
    repeats = max(1, arguments.repeats)
    text = report(measure(cases(), repeats, TOKENS), measure(standing_cases(), min(repeats, 10), 256), repeats)
    print(text, end="")
    if arguments.output is not None:
        arguments.output.write_text(text)
    return 0
