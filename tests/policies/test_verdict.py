"""Verdicts: every combination of results, and what more evidence may and may not do."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.checks import Check, Result, Verdict, VerdictWord
from policies.verdict import combine, over_choices

ORDER = [
    VerdictWord.REJECT,
    VerdictWord.WITHHELD,
    VerdictWord.INCONCLUSIVE,
    VerdictWord.UNVERIFIED,
    VerdictWord.UNAUDITED,
    VerdictWord.PASS,
]
CHECKS = st.builds(
    Check,
    name=st.sampled_from(["structure", "selection", "distance", "margin", "routing"]),
    result=st.sampled_from(Result),
    reason=st.sampled_from(["", "code: words", "other"]),
    by_request=st.booleans(),
)
OUTCOMES: list[tuple[Result, bool] | None] = [
    None,
    (Result.PASS, False),
    (Result.INCONCLUSIVE, True),
    (Result.INCONCLUSIVE, False),
    (Result.WITHHELD, False),
    (Result.REJECT, False),
]


def goodness(verdict: Verdict) -> int:
    return ORDER.index(verdict.word)


def expected(outcomes: dict[str, tuple[Result, bool] | None], audited: bool) -> VerdictWord:
    present = {name: outcome for name, outcome in outcomes.items() if outcome is not None}
    results = [result for result, _ in present.values()]
    if not present:
        return VerdictWord.UNVERIFIED
    if Result.REJECT in results:
        return VerdictWord.REJECT
    if Result.WITHHELD in results:
        return VerdictWord.WITHHELD
    passed = (Result.PASS, False)
    clean = present.get("structure") == passed and present.get("selection") in (passed, (Result.INCONCLUSIVE, True))
    if not clean:
        return VerdictWord.INCONCLUSIVE
    if not audited:
        return VerdictWord.UNAUDITED
    close = present.get("distance") == passed and present.get("margin") in (passed, (Result.INCONCLUSIVE, True))
    return VerdictWord.PASS if close else VerdictWord.INCONCLUSIVE


def test_every_combination_of_one_result_per_check() -> None:
    names = ["structure", "selection", "distance", "margin"]
    for row in itertools.product(OUTCOMES, repeat=len(names)):
        outcomes = dict(zip(names, row, strict=True))
        checks = [
            Check(name, outcome[0], reason=f"{name}_reason", by_request=outcome[1])
            for name, outcome in outcomes.items()
            if outcome is not None
        ]
        for audited in (False, True):
            verdict = combine(checks, audited=audited)
            assert verdict.word is expected(outcomes, audited), (outcomes, audited)
            assert verdict.audited is audited
            assert set(verdict.reasons) == {check.reason for check in checks if check.result is not Result.PASS}


@given(st.lists(CHECKS, max_size=6), st.booleans())
def test_a_reject_or_a_withheld_check_never_improves_a_verdict(checks: list[Check], audited: bool) -> None:
    for result in (Result.REJECT, Result.WITHHELD):
        for name in ("structure", "routing"):
            more = combine([*checks, Check(name, result)], audited=audited)
            if checks:
                assert goodness(more) <= goodness(combine(checks, audited=audited))
            assert more.word in (VerdictWord.REJECT, VerdictWord.WITHHELD)


@given(st.lists(CHECKS, max_size=6), CHECKS)
def test_a_pass_never_hides_what_another_check_found(checks: list[Check], passing: Check) -> None:
    before, after = combine(checks, audited=True), combine([*checks, passing], audited=True)
    if before.word in (VerdictWord.REJECT, VerdictWord.WITHHELD):
        assert goodness(after) <= goodness(before)


@given(st.lists(CHECKS, max_size=6), st.booleans())
def test_pass_needs_an_audit_and_every_check(checks: list[Check], audited: bool) -> None:
    verdict = combine(checks, audited=audited)
    if verdict.word is VerdictWord.PASS:
        assert audited
        passed = {check.name for check in checks if check.result is Result.PASS}
        assert {"structure", "distance"} <= passed
        for name in ("selection", "margin"):
            assert name in passed or any(check.name == name and check.by_request for check in checks)
    assert verdict == combine(iter(checks), audited=audited)


def test_a_check_without_a_reason_is_named() -> None:
    verdict = combine([Check("structure", Result.PASS), Check("selection", Result.REJECT)], audited=False)
    assert verdict.reasons == ("selection: reject",)


@given(st.lists(st.tuples(st.lists(CHECKS, max_size=4), st.booleans()), min_size=1, max_size=5))
def test_choices_take_the_worst_word_and_the_worst_of_each_check(choices: list[tuple[list[Check], bool]]) -> None:
    verdicts = [combine(checks, audited=audited) for checks, audited in choices]
    whole = over_choices(verdicts)
    assert goodness(whole) == min(map(goodness, verdicts))
    assert whole.audited == all(audited for _, audited in choices)
    names = [check.name for check in whole.checks]
    assert len(names) == len(set(names))
    results = [Result.REJECT, Result.WITHHELD, Result.INCONCLUSIVE, Result.PASS]
    for check in whole.checks:
        others = [c.result for checks, _ in choices for c in checks if c.name == check.name]
        assert results.index(check.result) == min(map(results.index, others))
    assert set(whole.reasons) == {reason for verdict in verdicts for reason in verdict.reasons}
    assert over_choices(verdicts[:1]).word == verdicts[0].word


def test_a_responses_level_covers_all_its_choices() -> None:
    levels = (None, 2e-5, 1e-7, None)
    checks = [Check("distance", Result.PASS if level is None else Result.REJECT, level=level) for level in levels]
    (check,) = over_choices([combine([check], audited=True) for check in checks]).checks
    assert check.level == pytest.approx(4e-7)
    certain = Check("structure", Result.REJECT, level=0.0)
    assert over_choices([combine([certain], audited=True)] * 9).checks[0].level == 0.0
    weak = Check("selection", Result.REJECT, level=0.05)
    assert over_choices([combine([weak], audited=True)] * 90).checks[0].level == 1.0


def test_no_choices_are_unverified() -> None:
    assert over_choices([]).word is VerdictWord.UNVERIFIED


def test_a_replay_of_the_claimed_ids_alone_never_passes() -> None:
    checks = [Check(name, Result.PASS) for name in ("structure", "selection", "distance")]
    checks.append(Check("margin", Result.INCONCLUSIVE, "repetition_penalty", by_request=True))
    assert combine(checks, audited=True).word is VerdictWord.PASS
    verdict = combine(checks, audited=True, full=False)
    assert verdict.word is VerdictWord.INCONCLUSIVE
    assert any(reason.startswith("ids_form") for reason in verdict.reasons)
