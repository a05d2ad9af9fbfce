"""The parts of the adversary kit that need no server: answers, the race, plans, figures, derived settings."""

from __future__ import annotations

import csv
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.adversary import registry, report, stack
from benchmarks.adversary.answers import Choice, read, read_sse, spread, write
from benchmarks.adversary.plan import plan
from benchmarks.adversary.race import Rules, bend, listed, losses, rules, winner
from benchmarks.adversary.registry import ATTACKS
from benchmarks.adversary.score import summarise, until_evidence, wilson
from policies.settings import Settings

RECORDED = Path(__file__).parents[1] / "data/vllm-0.32-cpu"
BODIES = ("chat", "chat-stream", "chat-n2", "chat-n2-stream", "completions-logprobs3", "completions-logprobs3-stream")
ROOT = Path(__file__).parents[2]


def recorded(name: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    raw = (RECORDED / f"{name}.body").read_bytes()
    asked = json.loads((RECORDED / f"{name}.request.json").read_text())
    return (read_sse(raw) if asked.get("stream") else [json.loads(raw)]), asked


@pytest.mark.parametrize("name", BODIES)
def test_an_answer_taken_apart_is_put_together_again(name: str) -> None:
    frames, asked = recorded(name)
    choices = read(frames)
    assert len(choices) == asked.get("n", 1)
    assert all(choice.ids and choice.rows and choice.prompt and choice.finish for choice in choices)
    again = write(frames, choices, asked)
    assert read(again) == choices
    assert [frame.get("usage") for frame in again if frame.get("usage")] == [
        frame["usage"] for frame in frames if frame.get("usage")
    ]


@pytest.mark.parametrize("name", BODIES)
def test_a_shorter_answer_is_billed_as_such_and_keeps_its_shape(name: str) -> None:
    frames, asked = recorded(name)
    choices = read(frames)
    for choice in choices:
        assert choice.rows is not None
        choice.ids, choice.rows, choice.finish = choice.ids[:3], choice.rows[:3], "stop"
    again = write(frames, choices, asked)
    found = read(again)
    assert [(choice.ids, choice.finish, choice.text) for choice in found] == [
        (choice.ids, "stop", choice.text) for choice in choices
    ]
    usage = next(frame["usage"] for frame in again if frame.get("usage"))
    assert usage["completion_tokens"] == 3 * len(choices)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    if asked.get("stream"):
        roles = len(choices) if "messages" in asked else 0
        assert len(again) == roles + 3 * len(choices) + 1
        assert {frame["id"] for frame in again} == {frames[0]["id"]}


@given(st.text(max_size=200), st.integers(1, 50))
def test_spread_keeps_the_text(text: str, count: int) -> None:
    pieces = spread(text, count)
    assert "".join(pieces) == text
    assert len(pieces) == count


_rows = st.dictionaries(st.integers(0, 999), st.floats(-15, -0.05), min_size=2, max_size=21)


@given(_rows, st.data(), st.sampled_from([0.0, 0.5, 1.0]))
def test_bending_makes_the_token_win_and_keeps_the_mass(row: dict[int, float], data: st.DataObject, t: float) -> None:
    total = math.log(sum(map(math.exp, row.values())) + 0.01)
    row = {id: value - max(0.0, total) for id, value in row.items()}
    own = data.draw(st.sampled_from(sorted(row)))
    rule = Rules("vllm-0.32-v2", t, 7)
    bent = bend(row, own, rule.scores(5, [row])[0], t)
    (scores,) = rule.scores(5, [bent])
    assert winner(scores) == own or losses([own], [scores])[0] < 1e-9
    assert sum(map(math.exp, bent.values())) == pytest.approx(sum(map(math.exp, row.values())), abs=1e-6)
    assert max(bent.values()) <= 1e-9


def test_rules_follow_the_choice() -> None:
    asked = {"temperature": 0.005, "seed": 40, "n": 2}
    assert rules(Choice(1), asked, "r") == Rules("r", 0.01, 41)
    # A second prompt's choices begin with the request's seed again.
    assert rules(Choice(2), asked, "r").seed == 40
    assert not rules(Choice(0), asked, "unknown").known
    assert rules(Choice(0), {"temperature": 0}, "unknown").known


def test_scores_know_where_their_rows_stand() -> None:
    rule = Rules("vllm-0.32-v1-cpu", 1.0, 3)
    whole = rule.scores(4, [{1: -1.0, 2: -2.0}, {3: -1.0}, {4: -0.5, 5: -1.0}])
    assert rule.scores(4, [{4: -0.5, 5: -1.0}], start=2)[0] == whole[2]


def test_listed_is_vllms_list() -> None:
    row = {9: -5.0, 1: -1.0, 2: -0.5, 3: -2.0}
    assert list(listed(row, 9, 3)) == [9, 2, 1, 3]
    assert list(listed(row, 1, 3)) == [1, 2, 3]


@pytest.mark.parametrize("name", ATTACKS)
def test_every_attack_has_a_plan(name: str) -> None:
    shots = plan(ATTACKS[name], "m", 20, 64, [0.0, 0.8], 2048)
    assert len(shots) == 20
    assert {shot.stream for shot in shots} == {True, False}
    assert {shot.path for shot in shots} == {"/v1/chat/completions", "/v1/completions"}
    assert all(shot.body["temperature"] > 0 for shot in shots if shot.body.get("n") == 2)
    if ATTACKS[name].shape == "hot":
        assert all(shot.body["temperature"] > 0 for shot in shots)
    if ATTACKS[name].shape == "repeated":
        assert len({json.dumps(shot.body) for shot in shots}) <= 5
    assert shots == plan(ATTACKS[name], "m", 20, 64, [0.0, 0.8], 2048)


def row(*results: tuple[str, str], exceeds: int | None = None, error: str | None = None) -> dict[str, Any]:
    checks = [
        {"name": name, "result": result, "metrics": {"tokens": 100, "exceeds": exceeds, "n_least": 24, "groups": 12}}
        for name, result in results
    ]
    words = {result for _, result in results}
    verdict = "reject" if "reject" in words else "withheld" if "withheld" in words else "pass"
    return {"verdict": verdict, "error": error, "choices": [{"verdict": verdict, "checks": checks}]}


def test_a_cheat_that_is_always_caught_takes_few_responses() -> None:
    rows = [row(("structure", "pass"), ("selection", "reject")) for _ in range(10)]
    found = summarise(ATTACKS["spoofer"], rows)
    assert found.ok
    assert (found.responses, found.tokens) == (3, 300)
    assert found.caught_by == {"selection": 10}
    assert found.first == ("selection",)
    assert found.detected == 10


def test_calibrated_exceedances_count_where_nothing_rejects() -> None:
    rows = [row(("distance", "inconclusive"), exceeds=1) for _ in range(20)]
    found = summarise(ATTACKS["fp8"], rows)
    assert found.detected == 0
    assert found.responses is not None
    assert found.responses < 15


def test_an_honest_variant_must_not_be_detected() -> None:
    assert summarise(ATTACKS["honest"], [row(("distance", "pass"), exceeds=0)] * 20).ok
    found = summarise(ATTACKS["honest"], [row(("distance", "reject"), exceeds=1)] + [row(("distance", "pass"))] * 19)
    assert not found.ok
    assert "held against it" in report.complaints([found])[0]
    assert not summarise(ATTACKS["honest"], [{"verdict": "missing", "error": "ReadError", "choices": []}]).ok


def test_errors_stay_in_the_counts() -> None:
    missing = {"verdict": "missing", "error": "HTTP 502", "choices": []}
    found = summarise(ATTACKS["hot"], [missing, row(("selection", "reject"))])
    assert found.verdicts == {"error": 1, "reject": 1}
    assert (found.sent, found.judged) == (2, 1)
    assert not found.ok
    assert until_evidence([]) == (None, None)


def test_wilson() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(20, 20)[0] == pytest.approx(0.839, abs=1e-3)
    assert wilson(0, 400)[1] == pytest.approx(0.0095, abs=1e-4)


def test_derived_settings_share_the_store_and_name_every_attack(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings.model_validate(
        {
            "redis_url": "redis://store:1",
            "models": {"m": {"vocab_size": 9}},
            "backends": [
                {
                    "name": "b",
                    "url": "http://real:1",
                    "model": "m",
                    "api_key": "upstream-secret",
                    "runtime": "r",
                    "trusted": True,
                }
            ],
            "webhook": {"url": "http://hook:1", "secret": "whsec_c2VjcmV0"},
            "verification": {"mode": "inline", "on_reject": "block", "evidence_ttl": 77, "replay_wait": 7},
            "audit": {"secret": "the-audit-secret"},
        }
    )
    attacks = {"attack-spec": (ATTACKS["honest-speculative"], "http://127.0.0.1:5")}
    tree = stack.derived(settings, settings.backend("b"), attacks, 4, "key")
    again = Settings.model_validate(yaml.safe_load(yaml.safe_dump(tree)))
    assert again.redis_url == "redis://store:1"
    assert again.models == settings.models
    assert again.audit.secret is not None
    assert again.audit.secret.get_secret_value() == "the-audit-secret"
    assert (again.verification.mode, again.verification.on_reject, again.verification.evidence_ttl) == (
        "async",
        "annotate",
        77,
    )
    assert again.webhook is None
    assert again.keys[0].admin
    (backend,) = again.backends
    assert (backend.name, backend.url, backend.runtime) == ("attack-spec", "http://127.0.0.1:5", "r")
    assert backend.speculative
    assert not backend.trusted
    # The cheat itself holds the key of the server behind.
    assert backend.api_key is None


def test_the_documentation_holds_the_registrys_table() -> None:
    text = (ROOT / "docs/attacks.md").read_text()
    assert registry.markdown() in text, (
        "run `countersign attack list --markdown` and put its table into docs/attacks.md"
    )


def test_every_expected_catch_is_a_check_that_exists() -> None:
    known = {"structure", "selection", "distance", "margin", "routing", "withheld"}
    for attack in ATTACKS.values():
        assert set(attack.caught_by) <= known
        assert not (attack.honest and attack.caught_by)
        assert attack.about


def test_every_response_is_a_line_of_csv_also_one_that_failed(tmp_path: Path) -> None:
    check = {"name": "selection", "result": "reject", "reason": "odd", "level": 0.5, "metrics": {"tokens": 3}}
    good = {"id": "a", "error": None, "verdict": "reject", "reasons": ["x"], "seconds": 1.0}
    failed = {"id": None, "error": "HTTP 502", "verdict": "missing", "seconds": 0.1}
    output = report.Output(tmp_path)
    output.rows("fp8", [good | {"choices": [{"verdict": "reject", "checks": [check]}]}, failed])
    output.finish([], {"load_before": 9.0, "busy": True})
    assert report.remake(tmp_path, plots=False).startswith("**Busy machine**: load 9.00 before the start.")
    with (tmp_path / report.CSV).open() as file:
        lines = list(csv.DictReader(file))
    assert [(line["error"], line["selection.result"], line["selection.tokens"]) for line in lines] == [
        ("", "reject", "3"),
        ("HTTP 502", "", ""),
    ]
    assert lines[0]["reasons"] == '["x"]'


@pytest.mark.parametrize("name", ["cpu", "cpu-variants"])
def test_the_committed_lines_are_made_of_the_committed_rows(name: str, tmp_path: Path) -> None:
    folder = Path(report.__file__).parents[1] / "results" / "detection" / name
    for each in (report.ROWS, "metadata.json"):
        shutil.copy(folder / each, tmp_path / each)
    text = report.remake(tmp_path, plots=False)
    assert text == (folder / report.SUMMARY).read_text()
    assert (tmp_path / report.CSV).read_bytes() == (folder / report.CSV).read_bytes()
