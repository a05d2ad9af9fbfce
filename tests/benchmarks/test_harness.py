"""What every benchmark shares: options from files, plans, rows, metadata, and reports of all folders."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

import countersign
from benchmarks import values
from benchmarks.command import BENCHES
from benchmarks.cost import command as cost
from benchmarks.detection import command as detection
from benchmarks.harness import config, report, rows
from benchmarks.harness.metadata import Metadata, busy, read
from benchmarks.harness.plan import Plan, duration, shuffled
from benchmarks.overhead import command as overhead
from benchmarks.overhead.relay import command as relay
from policies.errors import CountersignError

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
PARSERS = {"overhead": overhead.parser, "cost": cost.parser, "detection": detection.parser, "relay": relay.parser}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="bench")
    config.add_arguments(made, "none")
    made.add_argument("--rounds", type=values.count, default=7)
    made.add_argument("--mix", nargs="+", default=["a"])
    made.add_argument("--lengths", default="")
    made.add_argument("--engine", type=values.arguments, default={})
    made.add_argument("--pool", action="store_true")
    made.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True)
    made.add_argument("--load", nargs="?", const="standard", default="")
    made.add_argument("--time-limit", type=values.seconds, default=0.0)
    return made


def given(tmp_path: Path, text: str, *words: str) -> argparse.Namespace:
    path = tmp_path / "some.yaml"
    path.write_text(text)
    return config.parse(parser(), "none", ["--config", str(path), *words])


def test_a_file_gives_options_and_the_command_line_has_the_last_word(tmp_path: Path) -> None:
    text = """
about: what for
rounds: 3
mix: [b, c]
lengths: [1, 2]
engine: {dtype: float32, deep: [1]}
pool: true
resume: false
load: true
time_limit: 1.5
"""
    found = given(tmp_path, text)
    assert (found.rounds, found.mix, found.lengths) == (3, ["b", "c"], "1 2")
    assert found.engine == {"dtype": "float32", "deep": [1]}
    assert (found.pool, found.resume, found.load, found.time_limit) == (True, False, "standard", 1.5)
    over = given(tmp_path, text, "--rounds", "9", "--mix", "z", "--resume", "--load", "own")
    assert (over.rounds, over.mix, over.resume, over.load, over.pool) == (9, ["z"], True, "own", True)
    assert config.about("none", str(tmp_path / "some.yaml")) == "what for"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("round: 3", "round is no option"),
        ("rounds: none", "expected a whole number"),
        ("rounds: 0", "expected a whole number above 0"),
        ("pool: 3", "pool is true or false"),
        ("config: other", "config is no option"),
        ("[1, 2]", "expected a mapping"),
        ("a: [", "some.yaml"),
    ],
)
def test_what_a_file_may_not_say_is_told_with_its_name(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(CountersignError, match=r"some\.yaml") as told:
        given(tmp_path, text)
    assert words in str(told.value)


def test_a_configuration_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CountersignError, match="--config nowhere: no such file"):
        config.parse(parser(), "none", ["--config", "nowhere"])


@pytest.mark.parametrize(("bench", "name"), [(bench, name) for bench in PARSERS for name in config.names(bench)])
def test_every_committed_configuration_can_be_read(bench: str, name: str) -> None:
    found = config.parse(PARSERS[bench](), bench, ["--config", name])
    assert found.config == name
    assert config.about(bench, name)


@pytest.mark.parametrize("bench", PARSERS)
def test_every_benchmark_has_configurations_and_a_dry_run(bench: str) -> None:
    assert config.names(bench)
    assert bench in BENCHES
    assert "--dry-run" in PARSERS[bench]().format_help()


@pytest.mark.parametrize("name", config.names("cost"))
def test_the_cost_of_cost_is_told(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = ["bench", "cost", "--config", name, "--dry-run", "--output-dir", str(tmp_path / "none")]
    assert countersign.main(run) == 0
    shown = capsys.readouterr().out
    assert "Time: about" in shown
    assert "   1. " in shown
    assert not (tmp_path / "none").exists()


def test_a_plan_in_words() -> None:
    plan = Plan(
        "bench x, to y", ["a", "b"], [["cell", "n"], ["1", "2"]], [f"step {n}" for n in range(30)], 3, 200.0, "so"
    )
    text = plan.text()
    assert "Arms: a, b." in text
    assert "| cell | n |" in text
    assert "30 steps, of which 3 are measured already. Time: about 3.3 min (200 s) (so)." in text
    assert "… and 6 more" in text
    assert duration(12) == "about 12 s"
    assert "Time: unknown." in Plan("t", [], [["c"]], []).text()


def test_an_order_is_its_seed_s() -> None:
    assert shuffled(range(20), 1, 2) == shuffled(range(20), 1, 2) != shuffled(range(20), 1, 3)
    assert sorted(shuffled(range(20), 5)) == list(range(20))


def test_rows_survive_a_kill_and_name_what_is_none(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    kept = rows.Rows(path, {"a"})
    kept.append({"a": 1, "error": "cannot open /home/somebody/secret/file.bin"})
    with path.open("ab") as file:
        file.write(b'{"a": 2')
    again = rows.Rows(path, {"a"})
    assert list(again) == [{"a": 1, "error": "cannot open file.bin"}]
    again.append({"a": 3})
    assert [row["a"] for row in again] == [1, 3]
    with path.open("ab") as file:
        file.write(b'{"b": 2}\n')
    with pytest.raises(CountersignError, match="line 3: no row"):
        rows.read(path, {"a"})
    assert rows.read(tmp_path / "none") == []


def test_rows_as_csv(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    rows.write_csv(path, [{"a": 1, "b": None}, {"a": 0.5, "c": "x"}])
    assert path.read_text() == "a,b,c\n1,,\n0.5,,x\n"
    rows.write_csv(path, [{"a": {"b": {"c": 1}, "d": None}, "e": [1, "x"]}, {"a": None}])
    assert path.read_text() == 'a.b.c,a.d,e,a\n1,,"[1, ""x""]",\n,,,\n'
    rows.write_csv(path, [])
    assert path.read_text() == ""
    assert rows.rounded({"a": [0.12345, None, 3]}) == {"a": [0.123, None, 3]}


def test_metadata_of_several_runs(tmp_path: Path) -> None:
    path = tmp_path / "metadata.json"
    first = Metadata(path, "x", {"model": "m"}, {"path": "/home/somebody/models/m"}, began="now", load=99.0)
    first.note(ready_s=3)
    first.end(12.34)
    Metadata(path, "x", {"model": "m"}, {}, began="later", load=0.0)
    found = read(path)
    assert [run["began"] for run in found["runs"]] == ["now", "later"]
    assert found["runs"][0]["arguments"] == {"path": "m"}
    assert (found["runs"][0]["seconds"], found["runs"][0]["ready_s"]) == (12.3, 3)
    assert "load 99.00 before the start" in busy(found)
    assert busy({"runs": found["runs"][1:]}) == ""
    with pytest.raises(CountersignError, match="another model"):
        Metadata(path, "x", {"model": "other"}, {}, began="now")
    with pytest.raises(CountersignError, match="rows of another benchmark, x"):
        Metadata(path, "y", {"model": "m"}, {}, began="now")
    path.write_text("{}")
    with pytest.raises(CountersignError, match="damaged"):
        Metadata(path, "x", {"model": "m"}, {}, began="now")


def test_every_committed_result_has_a_report_that_makes_it() -> None:
    found = {str(folder.relative_to(RESULTS)): benchmark for folder, benchmark in report.results(RESULTS)}
    assert found["cost"] == "cost"
    assert found["relay"] == "relay"
    assert found["overhead/scripted"] == "overhead"
    assert found["detection/h200"] == "detection"
    assert found["detection/cpu"] == "attack"
    assert found["standing"] == "standing"
    folders = {str(path.parent.relative_to(RESULTS)) for path in RESULTS.rglob("metadata.json")}
    assert folders == found.keys()


def test_reports_of_folders_that_hold_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert countersign.main(["bench", "report", str(tmp_path)]) == 1
    assert "holds no results" in capsys.readouterr().err
    (tmp_path / "metadata.json").write_text(json.dumps({"runs": []}))
    assert countersign.main(["bench", "report", str(tmp_path)]) == 1
    assert "says of no benchmark" in capsys.readouterr().err
    (tmp_path / "metadata.json").write_text(json.dumps({"benchmark": "relay", "runs": [{}]}))
    (tmp_path / "rows.jsonl").write_text("{}\n")
    assert countersign.main(["bench", "report", str(tmp_path)]) == 1
    assert "rows.jsonl, line 1: no row" in capsys.readouterr().err
