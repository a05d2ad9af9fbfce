from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path

import orjson
import pytest

import countersign
from benchmarks.chaos import command
from benchmarks.chaos.ledger import Ledger
from benchmarks.chaos.monkey import Blow
from benchmarks.chaos.report import command as spelled
from benchmarks.chaos.report import write
from benchmarks.chaos.stage import Outcome, Scene

METADATA = {"started": "2026-01-01 00:00 UTC", "machine": {"cpu": "x", "cores": 2, "commit": "a" * 40}}


def outcome(scene: Scene) -> Outcome:
    ledger = Ledger(asked=3, sent=2, accepted=2, lost=["x: accepted, and there is no verdict"])
    ledger.rows = [{"number": 1, "id": "", "sent": 2.23456, "ended": 3.0, "stream": True, "aborted": False}]
    return Outcome(
        scene,
        ledger,
        [Blow(1.0, "worker", "worker-1")],
        Counter({"worker": 1}),
        {"proxy-1": [3]},
        {"proxy-1": 2},
        0,
        4.2,
        memory={"worker-1.1": [2**20, 3 * 2**20], "worker-2.1": [2**20]},
    )


def test_the_page_names_what_is_lost_and_the_lines_hold_everything(tmp_path: Path) -> None:
    page = write(outcome(Scene(fsync="everysec", power=True)), METADATA, tmp_path / "r")
    assert (tmp_path / "r.md").read_text() == page
    for part in ("**lost** | **1**", "x: accepted, and", "| worker | 1 |", "| worker | 3 |", "simulated", "codes [3]"):
        assert part in page
    head, blow, row = map(orjson.loads, (tmp_path / "r.jsonl").read_bytes().splitlines())
    assert head["metadata"] == METADATA
    assert blow == {"blow": "worker", "at": 0.0, "victim": "worker-1"}
    assert row == {"n": 1, "at": 1.235, "took": 0.765, "stream": True}


def test_what_runs_has_its_name_and_nothing_empty_is_shown(tmp_path: Path) -> None:
    found = outcome(Scene())
    found.kinds, found.memory = Counter({"engine": 7}), {"engine-toy.1": [2**20]}
    page = write(found, METADATA, tmp_path / "r")
    assert "| reference server | 7 |" in page
    assert "| reference server | 1 |" in page
    assert "cheating answers" not in page
    found.scene = Scene(engine="/models/real")
    page = write(found, METADATA, tmp_path / "r")
    assert "| engine | 7 |" in page
    assert "not looked at what verdicts say" in page
    assert "/models" not in page


def test_where_nothing_dies_the_page_shows_what_grows(tmp_path: Path) -> None:
    found = outcome(Scene(kills=0))
    found.kinds, found.memory = Counter(), {"worker-1.1": [2**20, 2 * 2**20, 2 * 2**20, 4 * 2**20]}
    page = write(found, METADATA, tmp_path / "r")
    assert page.startswith("# Soak")
    assert "What was done" not in page
    assert "| worker | 2 | 4 |" in page


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize(
    "path",
    [path for name in ("chaos*", "soak*") for path in sorted(RESULTS.glob(f"{name}.jsonl"))],
    ids=lambda path: path.stem,
)
def test_the_committed_pages_agree_with_their_lines(path: Path) -> None:
    page = path.with_suffix(".md").read_text()
    head, *lines = map(orjson.loads, path.read_bytes().splitlines())
    blows, rows = [line for line in lines if "blow" in line], [line for line in lines if "n" in line]
    assert len(blows) + len(rows) == len(lines)
    assert str(head["metadata"]["machine"]["commit"])[:10] in page
    assert f"| asked by clients | {len(rows)} |" in page
    if kinds := sum("kind" in row for row in rows):
        assert f"| sent: in the backend's own log | {kinds} |" in page
    told = [row for row in rows if row.get("unrecorded")]
    assert f"| served with the mark `store_unavailable` | {len(told)} |" in page
    assert f"| … of these recorded when Redis was back | {sum('word' in row for row in told)} |" in page
    for word, count in Counter(row["outcome"] for row in rows).items():
        assert f"| {word} | {count} |" in page
    verdicts = Counter(row["word"] for row in rows if "word" in row)
    for word, count in verdicts.items():
        assert f"| {word} | {count} |" in page
    for reason, count in Counter(row["reason"] for row in rows if "reason" in row).items():
        assert f"| {reason} | {count} |" in page
    if blows:
        assert f"| **all** | **{len(blows)}** |" in page
    if "| **lost** | **0** |" in page:
        assert f"| with a verdict | {verdicts.total()} |" in page


@pytest.mark.parametrize("scene", [Scene(), Scene(models=("toy", "toy-1"), fsync="everysec", power=True, seconds=7)])
def test_the_command_on_the_page_makes_the_scene_again(scene: Scene) -> None:
    _, _, _, *arguments = shlex.split(spelled(scene))
    assert command.scene_of(command.parser().parse_args(arguments)) == scene


NUMBERS = (
    "--seconds",
    "--minutes",
    "--settle",
    "--kills",
    "--proxies",
    "--workers",
    "--references",
    "--clients",
    "--seed",
)


@pytest.mark.parametrize("option", [*NUMBERS, "--models", "--engine"])
@pytest.mark.parametrize("value", ["-1", "nan", "a", "inf"])
def test_bad_values_are_refused_in_plain_words(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main([f"{option}={value}"])
    assert ended.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {option}: expected " in said
    assert said.endswith(f"not {value!r}")


def test_what_cannot_be_written_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "Stage", lambda *_: pytest.fail("it was started"))
    (tmp_path / "r.md").mkdir()
    (tmp_path / "file").write_text("")
    for arguments in (["--output", str(tmp_path / "r")], ["--output", str(tmp_path / "file" / "r")]):
        arguments += ["--keep", str(tmp_path / "kept")]
        assert countersign.main(["bench", "chaos", *arguments]) == 1
        assert str(tmp_path) in capsys.readouterr().err


def test_a_name_with_a_dot_is_kept(tmp_path: Path) -> None:
    write(outcome(Scene()), METADATA, tmp_path / "run.2")
    assert {path.name for path in tmp_path.iterdir()} == {"run.2.md", "run.2.jsonl"}
