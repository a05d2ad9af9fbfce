"""Golden cases: evidence, what it was judged by, and the verdict that came of it.

`python -m tests.policies.goldens` writes those that are missing of the rules' number (`policies.case.RULES`). One that
was written stays as it is: if it was judged otherwise now, it would be by other rules.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies import routing
from policies.case import RULES
from policies.errors import ReplayError
from policies.evidence import Evidence, Replay, Sampling, Usage
from policies.judging import Declared, Grounds
from policies.profile import Profile, ProfileKey, fit
from policies.structure import Earlier
from tests.policies.recorded import EOS, GPU, REFERENCE, VOCABULARY, cpu, gpu, processed, replayed, truncated
from tests.policies.test_examination import profile
from tests.policies.test_routing import flipped, pair, routes
from tests.support.bundles import Made, made
from tests.verifier_pool.recorded_options import MODEL, TOKENIZER, answers, named
from verifier_pool.tokenizer import TokenizerSpelling

FOLDER = Path(__file__).parent.parent / "data" / "rules"
DECLARED = Declared(VOCABULARY, 2048, (EOS,))


def cases() -> Iterator[tuple[str, Made]]:
    """By name; small ones."""
    for kind in ("single", "batch", "fp8"):
        yield f"replayed-{kind}", _judged(*replayed(kind)[1])
    honest, replay = replayed("single")[0]
    yield "ids-form", _judged(honest, replace(replay, form="ids"))
    yield "replay-failed", _judged(honest, ReplayError("too_long"))
    yield "not-replayed", _judged(honest)
    yield "expired", _judged(honest, expired=True)
    yield "cached", _judged(honest, earlier=Earlier(9, 9))
    drawn = _short(cpu("bf16")[0])
    yield "drawn", _judged(drawn)
    yield "another-seed", _judged(replace(drawn, sampling=replace(drawn.sampling, seed=1)))
    yield "no-seed", _judged(replace(drawn, sampling=replace(drawn.sampling, seed=None)))
    yield "billed-more", _judged(replace(honest, usage=Usage(9, 99, 9, len(honest.output_ids))))
    none = np.zeros((0, 0))
    claimless = replace(honest, claim_ids=none.astype(np.int32), claim_logprobs=none.astype(np.float32))
    yield "no-logprobs", _judged(replace(claimless, faults=("no_logprobs",)))
    yield "cut-short", _judged(replace(honest, finish_reason="stop"))
    yield "broken-off", _judged(replace(honest, complete=False, finish_reason=None, faults=("client_left",)))
    edited = honest.claim_logprobs.copy()
    edited[3, 0] = -0.5
    yield "edited-claim", _judged(replace(honest, claim_logprobs=edited))
    for at in range(0, len(truncated()), max(1, len(truncated()) // 4)):
        yield f"truncated-{at}", _judged(truncated()[at])
    for name in sorted(processed())[::4]:
        yield f"processed-{name.replace('/', '-')}", _judged(processed()[name][0])
    yield "greedy", _judged(_short(gpu("T0")[0]))
    yield (
        "choices",
        made(
            [replace(honest, id="c" * 32), replace(replayed("fp8")[1][0], id="c" * 32, index=1)],
            Grounds(DECLARED, profile=profile(), replays=[replay, replayed("fp8")[1][1]], earlier=[None, None]),
        ),
    )
    yield from _routed()
    yield from _spelled()


def _routed() -> Iterator[tuple[str, Made]]:
    """A model with experts, made up: a router's choices beside a real answer, whose replay is its own claim."""
    answer = _short(max(gpu("T0"), key=lambda each: len(each.output_ids)), 80)
    prompt, tokens = len(answer.prompt_ids), len(answer.output_ids)
    rows = routes(prompt + tokens)

    def told(experts: NDArray[Any] | None, reference: NDArray[Any] | None = rows[prompt:-1], **more: Any) -> Made:
        replay = Replay(answer.claim_ids, answer.claim_logprobs, reference=REFERENCE, routed_experts=reference)
        changed = replace(answer, routed_experts=experts, **more)
        return made([_whole(changed)], Grounds(replace(DECLARED, experts=8), None, _routing(), [replay]))

    yield "experts", told(flipped(rows, 0.02)[:-1])
    yield "experts-of-another", told(flipped(rows, 0.95)[:-1])
    yield "experts-left-out", told(None)
    yield "experts-of-nobody", told((rows[:-1] + 9).astype(np.uint8))
    yield "experts-twice", told(np.repeat(rows[:-1, :, :1], 2, axis=2))
    yield "experts-pruned", told(np.where(rows[:-1] == 3, 7 - rows[:-1, :, ::-1], rows[:-1]).astype(np.uint8))
    yield "experts-without-a-reference", told(rows[:-1], None)
    yield "experts-of-a-stream", told(None, stream=True)
    yield "experts-of-a-window", told(rows[prompt:-1])


def _routing() -> Profile:
    rows = [row for seed in range(40) for row in routing.calibration_rows(*pair(0.02, seed), arm="one")]
    return fit(rows, ProfileKey("smollm2", GPU, "bf16", REFERENCE), created=1.0)


def _spelled() -> Iterator[tuple[str, Made]]:
    """A model whose tokenizer is at hand: answers of a real server to many options, and lies about some."""
    spelling = TokenizerSpelling.load(TOKENIZER)
    declared = Declared(MODEL.vocab_size, MODEL.max_model_len, MODEL.eos_token_ids)

    def told(choices: Sequence[Evidence]) -> Made:
        request = choices[0].request
        return made([replace(each, request=request) for each in choices], Grounds(declared, spelling))

    for answer in answers()[::9]:
        yield f"spelled-{answer.label}", told(answer.read()[1])
    for name in ("plain", "stop", "tools-auto-call"):
        _, (first, *_) = named(name).read()
        yield f"spelled-other-text-{name}", told([replace(first, text=first.text + " more")])
        cut = max(1, len(first.output_ids) - 3)
        less = replace(
            first,
            output_ids=first.output_ids[:cut],
            claim_ids=first.claim_ids[:cut],
            claim_logprobs=first.claim_logprobs[:cut],
        )
        yield f"spelled-fewer-tokens-{name}", told([less])


def _whole(choice: Evidence) -> Evidence:
    return replace(choice, sampling=replace(choice.sampling, max_tokens=len(choice.output_ids)))


def _short(choice: Evidence, tokens: int = 48) -> Evidence:
    return replace(
        choice,
        output_ids=choice.output_ids[:tokens],
        claim_ids=choice.claim_ids[:tokens],
        claim_logprobs=choice.claim_logprobs[:tokens],
        finish_reason="length",
        sampling=Sampling(temperature=choice.sampling.temperature, seed=choice.sampling.seed, max_tokens=tokens),
        usage=Usage(len(choice.prompt_ids), tokens, len(choice.prompt_ids), tokens),
    )


def _judged(choice: Evidence, replay: object = None, *, expired: bool = False, earlier: Earlier | None = None) -> Made:
    if choice.finish_reason == "length" and choice.sampling.max_tokens:
        choice = replace(choice, sampling=replace(choice.sampling, max_tokens=len(choice.output_ids)))
    replays = None if replay is None else [replay]
    return made(
        [choice],
        Grounds(
            DECLARED,
            profile=profile() if replays else None,
            replays=replays,  # type: ignore[arg-type]
            declaration_expired=expired,
            earlier=[earlier],
        ),
    )


def main() -> None:
    """Write those that are missing; those of other rules go."""
    folder = FOLDER / str(RULES)
    if not folder.exists():
        shutil.rmtree(FOLDER, ignore_errors=True)
        folder.mkdir(parents=True)
    for name, golden in cases():
        path = folder / f"{name}.countersign"
        if not path.exists():
            path.write_bytes(golden.bytes)


if __name__ == "__main__":
    main()
