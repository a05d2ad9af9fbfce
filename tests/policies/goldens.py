"""Golden cases: evidence, what it was judged by, and the verdict that came of it.

`python -m tests.policies.goldens` writes them, once for each number of the rules (`policies.case.RULES`).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from policies.case import RULES
from policies.errors import ReplayError
from policies.evidence import Evidence, Sampling, Usage
from policies.judging import Declared, Grounds
from policies.structure import Earlier
from tests.policies.recorded import EOS, VOCABULARY, cpu, gpu, processed, replayed, truncated
from tests.policies.test_examination import profile
from tests.support.bundles import Made, made

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
    """Write them for the rules as they are. Raises FileExistsError where these rules have some."""
    folder = FOLDER / str(RULES)
    if folder.exists():
        raise FileExistsError(f"{folder} is there: raise policies.case.RULES first")
    shutil.rmtree(FOLDER, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, golden in cases():
        (folder / f"{name}.countersign").write_bytes(golden.bytes)


if __name__ == "__main__":
    main()
