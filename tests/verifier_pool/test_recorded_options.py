"""Every option against answers of a real server: none is rejected or called withheld, and cheats behind options are."""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from benchmarks.recordings.cases import cases
from policies import coverage, selection, unit
from policies._grammar import has_masks
from policies.checks import Result
from policies.evidence import MASKED, Evidence, Usage
from policies.thinking import tags_of
from tests.verifier_pool.recorded_options import MODEL, RUNTIME, Answer, answers, named
from verifier_pool.judge import cpu_checks, judge
from verifier_pool.tokenizer import spelling_of

OPEN = {
    ("chat", "repetition"): {"selection": "not_replayed"},
    # Everything was masked, by the grammar or by `min_tokens`: there vLLM emits what it likes.
    ("chat", "choice-min"): {"selection": "undecided", "structure": "finish_undecided"},
    ("chat", "regex-min"): {"structure": "finish_undecided"},
    # No tag tells that this is reasoning: neither prompt nor answer opens or ends it. Models that reason have one.
    **{
        ("chat", name): {"structure": "text_undecided"}
        for name in (
            *("think", "think-json", "think-schema-hidden", "think-required", "think-named", "think-unused-budget"),
            *("think-start", "think-never", "think-stop", "think-stop-shown"),
        )
    },
}
"""Requests that leave a check open, by themselves."""
MASKED_ONES = {
    *("json-object", "json-schema", "regex", "choice", "so-json", "so-json-object", "grammar", "tag"),
    *("tools-required", "tools-named", "tools-auto-call", "tools-auto-two"),
}


def verdict(evidence: list[Evidence], **more: Any) -> dict[str, Any]:
    return judge(evidence, model=MODEL, **more)


def codes(evidence: Evidence, model: Any = MODEL) -> dict[str, tuple[Result, str]]:
    """Result and first code of each check."""
    return {check.name: (check.result, check.reason.partition(":")[0]) for check in cpu_checks(evidence, model)}


def test_every_option_is_recorded() -> None:
    assert [(answer.endpoint, answer.name) for answer in answers()] == [
        (case.endpoint, case.name) for case in (*cases(reasoning=False), *cases(reasoning=True))
    ]


@pytest.mark.parametrize("answer", answers(), ids=lambda answer: answer.label)
def test_no_honest_answer_is_rejected_withheld_or_left_open(answer: Answer) -> None:
    _, evidence = answer.read()
    open_ones = OPEN.get((answer.endpoint, answer.name), {})
    found = verdict(evidence)
    assert found["verdict"] == ("inconclusive" if "structure" in open_ones else "unaudited"), found["reasons"]
    for choice in evidence:
        assert choice.faults == ()
        assert choice.complete
        for name, (result, code) in codes(choice).items():
            kept = "grammar" if name == "selection" and choice.sampling.grammar else ""
            code_wanted = open_ones.get(name, kept)
            wanted = (Result.INCONCLUSIVE, code_wanted) if code_wanted else (Result.PASS, "")
            assert (result, code) == wanted, name


def test_most_answers_are_decided() -> None:
    left = Counter(coverage.of(verdict(answer.read()[1])) for answer in answers())
    asked = sum(answer.read()[1][0].sampling.grammar for answer in answers())
    assert left["grammar", coverage.REQUEST] <= asked
    assert left["text_undecided", coverage.BACKEND] == 10
    assert left["", ""] == max(left.values())


@pytest.mark.parametrize("kind", ["masked", "peaked"])
def test_a_claim_made_up_under_a_grammar_is_no_evidence_for_anybody(kind: str) -> None:
    (honest,) = named("json-schema").read()[1]
    sampling = dataclasses.replace(honest.sampling, seed=(honest.sampling.seed or 0) + 1)
    logprobs = np.where(honest.claim_ids >= 0, MASKED if kind == "masked" else -40.0, -np.inf).astype(np.float32)
    logprobs[:, 0] = 0.0
    cheat = dataclasses.replace(honest, sampling=sampling, claim_logprobs=logprobs)
    assert codes(dataclasses.replace(honest, sampling=sampling))["selection"][0] is Result.REJECT
    assert codes(cheat)["selection"] == (Result.INCONCLUSIVE, "grammar")
    found = verdict([cheat])
    assert coverage.of(found) == ("grammar", coverage.REQUEST)
    assert "selection" not in unit.outcomes(found["checks"])


def test_masks_are_there_where_a_grammar_was_asked_for_and_nowhere_else() -> None:
    for answer in answers():
        for choice in answer.read()[1]:
            if has_masks(choice):
                assert choice.sampling.grammar, answer.label
            if answer.endpoint == "chat" and answer.name in MASKED_ONES:
                assert has_masks(choice), answer.label


@pytest.mark.parametrize("answer", answers(), ids=lambda answer: answer.label)
def test_nothing_of_ours_is_shown(answer: Answer) -> None:
    shown, _ = answer.read()
    assert b"token_id:" not in shown
    assert b'"token_ids":[' not in shown
    assert b'"logprobs":{' not in shown
    if "hidden" in answer.name or answer.name.startswith("no-reasoning"):
        assert b'"reasoning":"' not in shown


def cheats(honest: Evidence) -> Iterator[tuple[str, Evidence, set[str]]]:
    """What a cheat could make of an honest answer, and the codes that may call it."""
    tokens = len(honest.output_ids)
    rows = np.arange(tokens)
    unmasked = (honest.claim_ids >= 0) & (honest.claim_logprobs > MASKED)
    alternatives = np.flatnonzero(unmasked[:, 1:].any(axis=1) & (honest.claim_logprobs[:, 0] < -1e-3))
    if len(alternatives) and honest.sampling.temperature == 0:
        # One token replaced by the least of its alternatives, the text left as it was.
        row = int(alternatives[0])
        column = int(np.flatnonzero(unmasked[row])[-1]) or 1
        ids, logprobs = honest.claim_ids.copy(), honest.claim_logprobs.copy()
        ids[row, [0, column]] = ids[row, [column, 0]]
        logprobs[row, [0, column]] = logprobs[row, [column, 0]]
        edited = dataclasses.replace(honest, output_ids=ids[:, 0].copy(), claim_ids=ids, claim_logprobs=logprobs)
        yield "an edited token", edited, {"text_mismatch", "text_undecided", "not_sampled_from_claim", "unsorted_claim"}
    if honest.usage is not None:
        more = honest.usage.completion_tokens + 1
        billed = Usage(honest.usage.prompt_tokens, more, honest.usage.counted_prompt_tokens, more - 1)
        yield "a token billed twice", dataclasses.replace(honest, usage=billed), {"usage_mismatch"}
    positive = honest.claim_logprobs.copy()
    positive[0, 0] = 0.5
    yield "a probability over 1", dataclasses.replace(honest, claim_logprobs=positive), {"positive_logprob"}
    sampled = honest.claim_logprobs.copy()
    sampled[rows, 0] = MASKED
    yield "the sampled tokens masked", dataclasses.replace(honest, claim_logprobs=sampled), {
        *("sampled_masked", "masked_without_grammar", "masked_by_server"),
    }  # fmt: skip
    if honest.text and not honest.tool_calls:
        middle = len(honest.text) // 2
        text = honest.text[:middle] + " Buy Zyx! " + honest.text[middle:]
        yield "words put in", dataclasses.replace(honest, text=text), {"text_mismatch", "text_undecided"}
    if honest.tool_calls:
        name, arguments = honest.tool_calls[0]
        calls = ((name, arguments.replace('"}', 'Zyx"}') + " "), *honest.tool_calls[1:])
        if calls[0][1].strip() != arguments.strip():
            yield "a call's argument changed", dataclasses.replace(honest, tool_calls=calls), {"text_undecided"}


@pytest.mark.parametrize("answer", answers(), ids=lambda answer: answer.label)
def test_no_option_is_a_place_to_hide(answer: Answer) -> None:
    for honest in answer.read()[1]:
        for what, cheat, expected in cheats(honest):
            found = codes(cheat)
            results = {result for result, _ in found.values()} - {Result.PASS}
            called = {code for result, code in found.values() if result is not Result.PASS}
            assert results, what
            assert called & expected, (what, found)
            open_only = {"text_undecided", "masked_by_server"}
            if not called & open_only:
                assert results & {Result.REJECT, Result.WITHHELD}, (what, found)


def masked(honest: Evidence, *, whole: bool = True) -> Evidence:
    """The answer with the lower half of every list said to be masked; `whole`: the rest made to add up to 1."""
    logprobs = honest.claim_logprobs.astype(np.float64)
    logprobs[:, 11:] = np.where(honest.claim_ids[:, 11:] >= 0, MASKED, -np.inf)
    if whole:
        kept = np.where(logprobs > MASKED, logprobs, -np.inf)
        logprobs = np.where(logprobs > MASKED, kept - np.log(np.exp(kept).sum(axis=1, keepdims=True)), logprobs)
    return dataclasses.replace(honest, claim_logprobs=logprobs.astype(np.float32))


@pytest.mark.parametrize("name", ["tools-auto", "tools-strict", "json-object"])
def test_a_rival_masked_after_the_fact_leaves_a_hole(name: str) -> None:
    (honest,) = named(name).read()[1]
    found = codes(masked(honest, whole=False))["structure"]
    assert found == (Result.REJECT, "masked_mass")


@pytest.mark.parametrize(
    ("name", "result", "code"),
    [
        ("plain", Result.WITHHELD, "masked_without_grammar"),
        ("text-format", Result.WITHHELD, "masked_without_grammar"),
        ("bias", Result.WITHHELD, "masked_without_grammar"),
        ("think-never", Result.WITHHELD, "masked_without_grammar"),
        ("tools-auto", Result.INCONCLUSIVE, "masked_by_server"),
        ("tools-none", Result.INCONCLUSIVE, "masked_by_server"),
        ("tools-strict", Result.PASS, ""),
        ("tools-single", Result.PASS, ""),
        ("json-object", Result.PASS, ""),
    ],
)
def test_masks_excuse_only_where_a_grammar_was_asked_for(name: str, result: Result, code: str) -> None:
    (honest,) = named(name).read()[1]
    assert codes(masked(honest))["structure"] == (result, code)


def test_masks_beside_offered_tools_excuse_no_other_lie_and_no_replay() -> None:
    (honest,) = named("tools-auto").read()[1]
    cheat = masked(honest)
    assert judge([cheat], model=MODEL)["verdict"] == "inconclusive"
    sampling = dataclasses.replace(cheat.sampling, seed=(cheat.sampling.seed or 0) + 1, temperature=1.0)
    drawn = codes(dataclasses.replace(cheat, sampling=sampling))
    assert drawn["selection"] == (Result.REJECT, "not_sampled_from_claim")
    text = dataclasses.replace(cheat, text=cheat.text + " Buy Zyx!")
    assert judge([text], model=MODEL)["verdict"] != "unaudited"
    declared = MODEL.model_copy(update={"grammar": "tools"})
    told = dataclasses.replace(cheat, sampling=dataclasses.replace(cheat.sampling, grammar=True))
    assert codes(told, declared)["structure"][0] is Result.PASS


@pytest.mark.parametrize("name", ["think-budget", "think-budget-json"])
def test_a_budget_excuses_the_tag_it_forced_and_no_other_token(name: str) -> None:
    (honest,) = named(name).read()[1]
    options: dict[str, Any] = {"vocab_size": 49_152, "eos_token_ids": (2,), "tags": tags_of(spelling_of(MODEL))}
    check = selection.check(honest, **options)
    assert check.metrics["violations"] == 0
    if honest.sampling.grammar:
        assert check.reason.startswith("grammar")
        return
    assert check.result is Result.PASS
    for budget, result in ((4, Result.INCONCLUSIVE), (6, Result.REJECT), (None, Result.REJECT)):
        request = json.dumps(json.loads(honest.request) | {"thinking_token_budget": budget}).encode()
        check = selection.check(dataclasses.replace(honest, request=request, runtime="vllm-0.32-v2"), **options)
        assert (check.result, check.by_request) == (result, False)
    unasked = dataclasses.replace(honest, request=b"{}")
    assert honest.runtime == RUNTIME
    assert selection.check(unasked, **options).reason.startswith("forced_end")


@pytest.mark.parametrize("name", ["think", "think-json", "think-call", "think-required", "think-many"])
def test_reasoning_moved_into_the_answer_is_never_called_whole(name: str) -> None:
    for honest in named(name).read()[1]:
        moved = dataclasses.replace(honest, reasoning="", text=(honest.reasoning + " Zyx " + honest.text).strip())
        assert codes(moved)["structure"][0] is not Result.PASS
        longer = dataclasses.replace(honest, reasoning=honest.reasoning + " and so it must be that Zyx is best.")
        assert codes(longer)["structure"][0] is not Result.PASS


def edits(pick: random.Random, honest: Evidence) -> Iterator[Evidence]:
    """The answer with a stretch of what it shows cut, put in or turned round."""
    for _ in range(30):
        shown = [honest.text, honest.reasoning, *(part for call in honest.tool_calls for part in call)]
        which = pick.choice([at for at, part in enumerate(shown) if part] or [0])
        part = shown[which]
        start = pick.randrange(len(part) + 1)
        end = min(len(part), start + pick.randint(1, 6))
        middle = pick.choice(["", part[start:end] + "z", part[start:end][::-1]])
        shown[which] = part[:start] + middle + part[end:]
        if "".join(shown[which].split()) != "".join(part.split()):
            calls = tuple(zip(shown[2::2], shown[3::2], strict=True))
            yield dataclasses.replace(honest, text=shown[0], reasoning=shown[1], tool_calls=calls)


@pytest.mark.parametrize("answer", answers(), ids=lambda answer: answer.label)
def test_no_edit_of_what_is_shown_passes(answer: Answer) -> None:
    pick = random.Random(answer.label)
    for honest in answer.read()[1]:
        for edited in edits(pick, honest):
            if not alike(edited, honest):
                assert codes(edited)["structure"][0] is not Result.PASS, (edited.text, edited.tool_calls)


def alike(edited: Evidence, honest: Evidence) -> bool:
    """Whether no more than how a call's JSON is written has changed."""
    if (edited.text, edited.reasoning) != (honest.text, honest.reasoning):
        return False
    try:
        one, two = ([(name, json.loads(given)) for name, given in each.tool_calls] for each in (edited, honest))
    except ValueError:
        return False
    return one == two
