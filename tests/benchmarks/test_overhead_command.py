"""The command: arguments, plan, and one small run against the real proxy and worker."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import countersign
from benchmarks import command as bench
from benchmarks.calibration import arguments
from benchmarks.harness import config
from benchmarks.overhead import command, steps
from benchmarks.overhead.backend import Backend, chosen
from benchmarks.overhead.layout import FEWEST_TOGETHER, calibration, settings, unplace
from benchmarks.overhead.report import read_rows
from benchmarks.overhead.run import _shown
from benchmarks.overhead.stack import Stack
from policies.errors import CountersignError
from policies.profile import Profile
from policies.settings import parse_settings
from tests.policies.test_margin import PROFILE

SMALL = [
    "--rounds",
    "1",
    "--requests",
    "2",
    "--arrivals",
    "2",
    "--bursts",
    "1",
    "--mix",
    "16/8",
    "16/3",
    "--closed",
    "1",
    "--rate",
    "50",
    "--burst",
    "3",
]


def read(*words: str) -> Any:
    return config.parse(command.parser(), "overhead", words)


def test_registry(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([]) == 2
    assert bench.main(["--help"]) == 0
    assert "overhead" in capsys.readouterr().out
    assert bench.main(["speed"]) == 2
    assert "no benchmark 'speed'" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--rounds", "0"], ["--arms", "direct"], ["--closed", "many"], ["--audit", "2"]])
def test_wrong_arguments_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main(words)
    assert stopped.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no load"),
        (["--closed", "1", "--audit", "0.5"], "needs a --reference"),
        (["--closed", "1", "--backend", "vllm"], "needs --model"),
        (["--burst", "1", "--witness", "2", "--dry-run"], "needs a closed loop"),
        (["--closed", "1", "--reference", "same", "--calibrate", "15"], "needs 16 answers"),
    ],
)
def test_what_cannot_be_measured_is_said(arguments: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(CountersignError, match=words):
        command.main([*arguments, "--busy", "--output", str(tmp_path)])


@pytest.mark.parametrize("name", config.names("overhead"))
def test_configurations_can_be_planned(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert command.main(["--config", name, "--dry-run", "--output", str(tmp_path / "none")]) == 0
    shown = capsys.readouterr().out
    assert "Time: about" in shown
    assert "   1. round 1, audit" in shown
    assert config.about("overhead", name) in shown
    assert not (tmp_path / "none").exists()


def test_the_settings_of_every_arm_can_be_used(tmp_path: Path) -> None:
    options = read("--closed", "1", "--reference", "http://r:1/v1", "--profile", str(tmp_path / "p.json"))
    backend = Backend("url", "http://b:1", "m", "vllm-0.32-v2", declared={"vocab_size": 10})
    urls = {"direct": "http://b:1", "counted": "http://c:1"}
    tree = settings(options, backend, urls, "unix:///v", 8000, 0.05)
    found = parse_settings(json.dumps(tree), {})
    assert found.audit.rate == 0.05
    assert [backend.drained for backend in found.backends] == [False, True]
    assert found.models["m"].reference is not None
    assert found.models["m"].reference.url == "http://r:1"


def test_a_profile_is_made_of_what_is_then_judged(tmp_path: Path) -> None:
    given = ["--mix", "64/32+64/48", "--temperature", "0.8", "--reference", "same", "--calibrate", "16", "--full", "1"]
    files = tmp_path / "c.yaml", tmp_path / "p.json", tmp_path / "kept"
    found = arguments.parser("").parse_args(calibration(read("--closed", "1", "16", *given), *files)[1:])
    assert (found.requests, found.temperatures, found.lengths, found.forms) == (16, (0.8,), (32, 48), ("full",))
    assert (found.concurrency, found.words, found.keep) == ((1, 16), 42, files[2])
    found = arguments.parser("").parse_args(calibration(read("--rate", "2", *given), *files)[1:])
    assert found.concurrency == (1, FEWEST_TOGETHER)
    with pytest.raises(CountersignError, match="--calibrate needs"):
        command.planned_steps(read("--closed", "1", "--calibrate", "16"))


def test_a_calibration_says_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.overhead.stack.LOG_EVERY", 0.0)
    heard, said = tmp_path / "heard", list[str]()

    def say(text: str) -> None:
        said.append(text)
        heard.touch()

    line = "bench, batch 1, T=0.8: asking; 3 of 32 answers, 0 replayed, about 9 s left"
    code = (
        "import os, sys, time\n"
        f"print('INFO something of the engine')\nprint({line!r})\nprint('INFO more of it', flush=True)\n"
        f"while not os.path.exists({str(heard)!r}): time.sleep(0.02)\n"
        "sys.exit(4)"
    )
    options = read("--closed", "1")
    stack = Stack(options, chosen(options), say)
    try:
        assert stack._followed(stack._children.start("calibrate", [sys.executable, "-c", code])) == 4
    finally:
        stack.stop()
    assert said == [f"calibrating: {line}"]


def test_a_calibration_that_stands_still_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.overhead.stack.ENGINE_SECONDS", 0.0)
    options = read("--closed", "1")
    stack = Stack(options, chosen(options))
    try:
        assert stack._followed(stack._children.start("calibrate", ["sleep", "600"])) == -1
    finally:
        stack.stop()


def test_no_address_and_no_folder_goes_into_the_metadata(tmp_path: Path) -> None:
    options = read("--closed", "1", "--url", "http://secret.example:1", "--folder", str(tmp_path))
    shown = json.dumps(_shown(options))
    assert "secret.example" not in shown
    assert str(tmp_path.parent) not in shown


def test_a_process_that_does_not_start_is_told_with_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    options = read("--closed", "1", "--arms", "async")
    stack = Stack(options, chosen(options))
    monkeypatch.setattr("benchmarks.overhead.stack.settings", lambda *given: {"port": "none"})
    with pytest.raises(CountersignError, match=r"(?s)ended with code 3.*port"), stack:
        pass
    assert not stack.folder.exists()


def test_an_unreachable_backend_is_told() -> None:
    with pytest.raises(CountersignError, match="no model list at http://127"):
        chosen(read("--closed", "1", "--url", "http://127.0.0.1:1"))


def test_a_small_run_that_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["bench", "overhead", *SMALL, "--busy", "--output", str(tmp_path)]
    assert countersign.main([*run, "--no-plots"]) == 0
    printed = capsys.readouterr().out
    assert "verified before the end, audit 0% adds" in printed
    assert "0 errors" in printed
    rows = read_rows(tmp_path)
    measured = [row for row in rows if row["what"] == "step"]
    assert {row["arm"] for row in measured} == set(steps.ARMS)
    for row in measured:
        verified = row["arm"] in steps.VERIFIED
        assert {bool(word) for word in row["verdicts"]} == {verified}
        assert (row["cpu_ms"]["plain"] > 0) >= (row["arm"] == "plain")
        assert row["store"]["in"] > 0
    down = {row["arm"]: row["down"] for row in rows if row["what"] == "bytes" and row["mix"] == "16/8"}
    assert down["async"] == down["inline"] > down["plain"] == down["direct"] > 0
    assert json.loads((tmp_path / "metadata.json").read_text())["runs"][0]["arguments"]["mix"] == ["16/8", "16/3"]
    assert countersign.main([*run, "--no-plots"]) == 0
    assert read_rows(tmp_path) == rows
    assert countersign.main(["bench", "report", str(tmp_path), "--no-plots"]) == 0


def test_a_profile_among_results_keeps_its_words_but_no_folders(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    words = {"arguments": f"--config {tmp_path}/calibrate.yaml --requests 32", "versions": "vllm 0"}
    path.write_text(msgspec.structs.replace(PROFILE, made=words).to_json())
    unplace(path)
    found = Profile.from_json(path.read_bytes())
    assert found.made == {"arguments": "--config calibrate.yaml --requests 32", "versions": "vllm 0"}
    assert found.cells == PROFILE.cells
