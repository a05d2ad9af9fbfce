"""Record answers to requests that change the logits before sampling, and test them at once.

    python -m benchmarks.recordings.processors --url http://127.0.0.1:8000 --runtime vllm-0.32-v2 \\
        --tokenizer MODEL_DIR --eos 2 --output FILE.npz

A plain greedy answer comes first; the ids of the later requests (biased, allowed, forbidden) are picked from what it
lists, so the set fits any model. The file holds, per answer, the prompt's ids and the claim (`{i}_{prompt,ids,lp}`,
sampled token first), and in `settings[i]` its sampling parameters, finish reason, and the ids of its bad words.
"""

from __future__ import annotations

import argparse
import dataclasses
import http.client
import json
import sys
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.recordings.asking import AskError, ask
from policies import selection
from policies.evidence import Evidence
from policies.settings import BackendSettings, ModelSettings

PROMPTS = (
    "Write three sentences about a lighthouse keeper who collects clocks.",
    "List the things a traveller should pack for a week in the mountains, and say why.",
)
SAMPLERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("T0", {"temperature": 0}),
    ("T0.7", {"temperature": 0.7}),
    ("T1", {"temperature": 1.0}),
    ("T1-p0.9", {"temperature": 1.0, "top_p": 0.9}),
    ("T1.2-k8", {"temperature": 1.2, "top_k": 8}),
    ("T0.8-k12-p0.9-m0.02", {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.02}),
)
TOKENS = 48


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Ids to write requests with: those a plain answer sampled and listed, most frequent first, and its end."""

    sampled: list[int]
    listed: list[int]
    eos: int
    words: tuple[str, ...]


def processors(known: Vocabulary) -> Iterator[tuple[str, dict[str, Any]]]:
    """The fields of every kind of request, by name."""
    sampled, listed = known.sampled, known.listed
    down = {str(token): -4.0 for token in sampled[:6]}
    up = {str(token): 5.0 for token in listed[-40:]}
    yield "bias-down", {"logit_bias": down}
    yield "bias-up-unlisted", {"logit_bias": up}
    yield "bias-ban-and-clamp", {"logit_bias": {str(sampled[0]): -300, str(sampled[1]): 2.5, str(listed[-1]): -1.5}}
    yield "presence", {"presence_penalty": 1.2}
    yield "frequency", {"frequency_penalty": 0.8}
    yield "presence-negative", {"presence_penalty": -0.8, "frequency_penalty": 0.3}
    yield "frequency-negative", {"frequency_penalty": -0.4}
    yield "bad-words", {"bad_words": list(known.words)}
    yield "min-tokens", {"min_tokens": 24, "logit_bias": {str(known.eos): 12.0}}
    yield "min-tokens-stop-ids", {"min_tokens": 20, "stop_token_ids": sampled[1:4]}
    yield "allowed", {"allowed_token_ids": sorted({*listed[:150], known.eos})}
    yield "allowed-three", {"allowed_token_ids": sorted(sampled[:3])}
    yield (
        "everything",
        {
            "logit_bias": {**down, **up},
            "presence_penalty": 0.6,
            "frequency_penalty": 0.2,
            "bad_words": list(known.words[:2]),
            "min_tokens": 16,
            "allowed_token_ids": sorted({*listed[:400], known.eos}),
        },
    )


def requests(known: Vocabulary) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every request of the set: each kind under each sampler, and a grammar."""
    for kind, fields in processors(known):
        for sampler, parameters in SAMPLERS:
            yield f"{kind}/{sampler}", {**fields, **parameters}
    choice = {"structured_outputs": {"choice": ["yes, by boat", "yes, on foot", "no, never"]}}
    yield "grammar/T1", {**choice, "temperature": 1.0}
    yield "grammar-presence/T1-p0.9", {**choice, "temperature": 1.0, "top_p": 0.9, "presence_penalty": 0.7}


def learn(plain: Evidence, words: Sequence[str], eos: int) -> Vocabulary:
    """The vocabulary from a plain answer."""
    sampled, counts = np.unique(plain.output_ids[plain.output_ids != eos], return_counts=True)
    inside = plain.claim_ids[:, 1:][plain.claim_ids[:, 1:] >= 0]
    listed, often = np.unique(inside[inside != eos], return_counts=True)
    return Vocabulary(
        sampled[np.argsort(-counts, kind="stable")].tolist(),
        listed[np.argsort(-often, kind="stable")].tolist(),
        eos,
        tuple(words),
    )


def frequent_words(text: str) -> list[str]:
    """Words to forbid: the commonest ones, a pair that follows each other, and one that never comes."""
    words = text.replace(".", " ").replace(",", " ").split()
    common = sorted(set(words), key=lambda word: (-words.count(word), word))[:4]
    return [*common, " ".join(words[1:3]), "antidisestablishmentarianism"]


def record(
    backend: BackendSettings, model: ModelSettings, tokenizer: Any, eos: int, seed: int
) -> list[tuple[str, Evidence, list[tuple[int, ...]]]]:
    """Ask everything; returns name, evidence and bad words of each answer."""
    plain = _one(backend, model, PROMPTS[0], {"temperature": 0, "max_tokens": 96}, seed)
    known = learn(plain, frequent_words(plain.text), eos)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    rows = []
    for number, (name, fields) in enumerate(requests(known)):
        # A seed over 2³², then a negative one, then a small one.
        wide = (seed + number) * 2**33 + 17
        chosen = (wide, -(wide + 2**62), seed + number)[number % 3]
        prompt = PROMPTS[number % len(PROMPTS)]
        evidence = _one(backend, model, prompt, {"max_tokens": TOKENS, "seed": chosen, **fields}, seed)
        banned = selection.bad_word_ids(evidence.sampling.bad_words, encode)
        rows.append((name, evidence, banned))
        print(f"{name:<40} {_outcome(evidence, banned, eos)}", flush=True)
    return rows


def _one(backend: BackendSettings, model: ModelSettings, prompt: str, fields: dict[str, Any], seed: int) -> Evidence:
    return ask(backend, model, {"messages": [{"role": "user", "content": prompt}], **fields}, seed=seed)[0]


def _outcome(evidence: Evidence, banned: Sequence[Sequence[int]], eos: int) -> str:
    found = selection.check(evidence, eos_token_ids=(eos,), bad_words=banned)
    shifted = dataclasses.replace(evidence.sampling, seed=(evidence.sampling.seed or 0) + 1)
    other = selection.check(dataclasses.replace(evidence, sampling=shifted), eos_token_ids=(eos,), bad_words=banned)
    numbers = " ".join(str(found.metrics.get(name)) for name in ("tokens", "skipped", "violations"))
    return f"{found.result:<13} {numbers} | seed + 1: {other.metrics.get('violations')} {found.reason}"


def save(path: Path, rows: Sequence[tuple[str, Evidence, list[tuple[int, ...]]]], eos: int) -> None:
    """Write the file."""
    arrays: dict[str, Any] = {}
    described = []
    for index, (name, evidence, banned) in enumerate(rows):
        sampling = {**dataclasses.asdict(evidence.sampling), "client_seed": False}
        described.append(
            json.dumps({"name": name, "sampling": sampling, "finish": evidence.finish_reason, "bad_words": banned})
        )
        arrays[f"{index}_prompt"] = evidence.prompt_ids
        # 65,535 stands for −1.
        arrays[f"{index}_ids"] = evidence.claim_ids.astype(np.uint16 if evidence.claim_ids.max() < 65_535 else np.int32)
        arrays[f"{index}_lp"] = evidence.claim_logprobs
    runtime = rows[0][1].runtime
    np.savez_compressed(path, settings=np.array(described), eos=np.array(eos), runtime=np.array(runtime), **arrays)


def served_model(url: str) -> str:
    """Name of the first model a server offers. Raises AskError."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port or 80, timeout=30)
    try:
        connection.request("GET", "/v1/models")
        return str(json.loads(connection.getresponse().read())["data"][0]["id"])
    except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
        raise AskError(f"{url} lists no model: {error}") from error
    finally:
        connection.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Record into a file; returns 1 when an answer violates."""
    from tokenizers import Tokenizer

    parser = argparse.ArgumentParser(prog="python -m benchmarks.recordings.processors", description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--runtime", required=True, help="name of the server's sampling noise")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with the model's tokenizer.json")
    parser.add_argument("--eos", type=int, required=True)
    parser.add_argument("--seed", type=int, default=20_261)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args(argv)
    name = served_model(arguments.url)
    backend = BackendSettings(name="recorded", url=arguments.url, model=name, runtime=arguments.runtime)
    model = ModelSettings(eos_token_ids=(arguments.eos,))
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer / "tokenizer.json"))
    rows = record(backend, model, tokenizer, arguments.eos, arguments.seed)
    save(arguments.output, rows, arguments.eos)
    checks = [
        selection.check(evidence, eos_token_ids=(arguments.eos,), bad_words=banned) for _, evidence, banned in rows
    ]
    violations = sum(int(check.metrics.get("violations") or 0) for check in checks)
    print(
        f"{len(rows)} answers, {sum(int(check.metrics['tokens'] or 0) for check in checks)} tokens, "
        f"{violations} violations"
    )
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
