"""Replay recorded answers with the in-process reference in both forms, on a machine with a GPU.

    python -m benchmarks.recordings.references --bodies tests/data/vllm-0.32-h200 --dense FOLDER [--moe FOLDER]

What only vLLM's V2 runner can do (scoring given ids, capturing expert ids) is held against what every runner does: the
form `ids` must say of each claimed id what the form `full` says, hostile ids must change nothing, and the expert ids
of the recorded answers must be the replay's but for numeric noise. Prints one JSON document; exits with 1 when
something does not hold. Needs the repository and what an engine's machine has: no test tools, no tokenizer files
beside the model's own.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from policies import routing
from policies.evidence import Evidence, Ids, Replay, ReplayForm, Sampling
from policies.settings import ReferenceSettings
from verifier_pool.reference.base import ReplayRequest
from verifier_pool.reference.vllm_engine import VllmEngine

SAME = 0.05
"""Nats by which two prefills of the same ids may differ where batches are cut differently."""
FORMS: tuple[ReplayForm, ...] = ("full", "ids")
HOSTILE = (-7, 2**31 - 1, 10**7, 5, 5, -1)


def recorded(folder: Path, *, moe: bool) -> Iterator[Evidence]:
    """Every choice of every whole answer: its ids, claimed ids and expert ids."""
    for row in json.loads((folder / "index.json").read_text()):
        if row["stream"] or row["status"] != 200 or row["name"].startswith("moe-") != moe:
            continue
        body = json.loads((folder / f"{row['name']}.body").read_text())
        for choice in body["choices"]:
            prompt = choice.get("prompt_token_ids") or body.get("prompt_token_ids")
            if not prompt or not choice.get("token_ids") or not choice.get("logprobs"):
                continue
            output = np.asarray(choice["token_ids"], np.int32)
            experts = choice.get("routed_experts")
            yield Evidence(
                id="0" * 32,
                endpoint=row["endpoint"],
                backend="recorded",
                model=row["model"],
                sampling=Sampling(),
                index=choice["index"],
                prompt_ids=np.asarray(prompt, np.int32),
                output_ids=output,
                claim_ids=_claimed(choice["logprobs"], len(output)),
                routed_experts=None if experts is None else np.load(io.BytesIO(base64.b64decode(experts))),
            )


def _claimed(logprobs: dict[str, Any], output: int) -> Ids:
    if "content" in logprobs:
        rows = [[entry["token"] for entry in token["top_logprobs"]] for token in logprobs["content"]]
    else:
        rows = [list(row or ()) for row in logprobs["top_logprobs"]]
    ids = np.full((output, max((len(row) for row in rows), default=0) or 1), -1, np.int32)
    for place, row in enumerate(rows[:output]):
        ids[place, : len(row)] = [int(token.removeprefix("token_id:")) for token in row]
    return ids


def measure(folder: Path, answers: Sequence[Evidence], *, moe: bool, engine: dict[str, Any]) -> dict[str, Any]:
    """Replays the answers and tells what came of it; `failures` lists what does not hold."""
    arguments = {"enforce_eager": True, "max_model_len": 2048, **engine}
    if moe:
        arguments["enable_return_routed_experts"] = True
    started = time.monotonic()
    reference = VllmEngine(folder.name, ReferenceSettings(kind="vllm_engine", path=str(folder), engine=arguments))
    try:
        found: dict[str, Any] = {
            "reference": reference.name,
            "scores_ids": reference.scores_ids,
            "answers": len(answers),
        }
        found["start_seconds"] = round(time.monotonic() - started, 1)
        replays = {form: _replays(reference, answers, form, moe, found) for form in FORMS}
        hostile = _replays(reference, answers, "ids", moe, found, hostile=True)
    finally:
        reference.close()
    found["failures"] = [
        *_shapes(answers, replays, reference.scores_ids),
        *_agreement(replays["ids"], replays["full"], "forms", found),
        *_agreement(replays["ids"], hostile, "hostile", found),
    ]
    if moe:
        found["routing"] = _routing(answers, replays["ids"], found["failures"])
    return found


def _replays(
    reference: VllmEngine,
    answers: Sequence[Evidence],
    form: ReplayForm,
    moe: bool,
    found: dict[str, Any],
    *,
    hostile: bool = False,
) -> list[Replay]:
    requests = [
        ReplayRequest(answer.prompt_ids, answer.output_ids, answer.endpoint, b"", 0, answer.claim_ids, form, moe)
        for answer in answers
    ]
    if hostile:
        requests = [replace(request, candidate_ids=_with_hostile(request.candidate_ids)) for request in requests]
    started = time.monotonic()
    replays = reference.replay(requests)
    found.setdefault("seconds", {})["hostile" if hostile else form] = round(time.monotonic() - started, 3)
    return replays


def _with_hostile(claimed: Ids | None) -> Ids:
    assert claimed is not None
    return np.concatenate([np.tile(np.array(HOSTILE, np.int32), (len(claimed), 1)), claimed], axis=1)


def _shapes(answers: Sequence[Evidence], replays: dict[ReplayForm, list[Replay]], scores_ids: bool) -> Iterator[str]:
    for form in FORMS:
        wanted = form if scores_ids else "full"
        for place, (answer, replay) in enumerate(zip(answers, replays[form], strict=True)):
            if replay.form != wanted or replay.ids.shape != replay.logprobs.shape:
                yield f"{form} {place}: form {replay.form}, shapes {replay.ids.shape} and {replay.logprobs.shape}"
            if not np.array_equal(replay.ids[:, 0], answer.output_ids):
                yield f"{form} {place}: the emitted tokens do not come first"
            named = (answer.claim_ids[:, :, None] == replay.ids[:, None, :]).any(axis=2) | (answer.claim_ids < 0)
            if scores_ids and not named.all():
                yield f"{form} {place}: {int((~named).sum())} claimed ids are missing"


def _agreement(one: list[Replay], other: list[Replay], what: str, found: dict[str, Any]) -> Iterator[str]:
    """Whatever id both name, both must score alike; `one` names no id that `other` lacks."""
    largest, missing = 0.0, 0
    for ours, theirs in zip(one, other, strict=True):
        same = (ours.ids[:, :, None] == theirs.ids[:, None, :]) & (ours.ids >= 0)[:, :, None]
        missing += int((~same.any(axis=2) & (ours.ids >= 0)).sum())
        apart = np.abs(np.nan_to_num(ours.logprobs)[:, :, None] - np.nan_to_num(theirs.logprobs)[:, None, :])
        largest = max(largest, float(np.where(same, apart, 0.0).max(initial=0.0)))
    found[f"{what}_max_abs"], found[f"{what}_missing"] = largest, missing
    if largest > SAME:
        yield f"{what}: two replays of the same ids differ by {largest:.3f} nats"
    # Hostile ids come first and may push honest ones over the limit, never under it.
    if missing:
        yield f"{what}: {missing} ids are missing"


def _routing(answers: Sequence[Evidence], replays: list[Replay], failures: list[str]) -> dict[str, Any]:
    entries: dict[int, int] = {}
    wrong: dict[int, int] = {}
    for place, (answer, replay) in enumerate(zip(answers, replays, strict=True)):
        try:
            layers = routing.by_layer(routing.align(answer, replay))
        except ValueError as error:
            failures.append(f"experts {place}: {error}")
            continue
        for layer, counts in layers.items():
            entries[layer] = entries.get(layer, 0) + counts.entries
            wrong[layer] = wrong.get(layer, 0) + counts.entry_mismatches
    rates = {layer: round(wrong[layer] / max(entries[layer], 1), 5) for layer in sorted(entries)}
    # A window off by one token would differ in seven slots of eight.
    if not rates or rates[min(rates)] > 0.05:
        failures.append(f"experts: a mismatch of {rates.get(min(rates, default=0))} at the first layer")
    return {"entries_per_layer": min(entries.values(), default=0), "mismatch_by_layer": rates}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the document. Returns 1 when something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bodies", type=Path, required=True, help="folder of recorded bodies with its index.json")
    parser.add_argument("--dense", type=Path, help="folder of the dense model")
    parser.add_argument("--moe", type=Path, help="folder of the mixture-of-experts model")
    parser.add_argument("--engine", type=json.loads, default={}, help="more keyword arguments of the engine, as JSON")
    options = parser.parse_args(arguments)
    found: dict[str, dict[str, Any]] = {}
    for name, folder in (("dense", options.dense), ("moe", options.moe)):
        if folder is not None:
            moe = name == "moe"
            answers = list(recorded(options.bodies, moe=moe))
            found[name] = measure(folder, answers, moe=moe, engine=options.engine)
    print(json.dumps(found, indent=1))
    return int(any(each["failures"] for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
