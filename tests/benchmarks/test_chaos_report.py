from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path

import orjson
import pytest

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


@pytest.mark.parametrize("scene", [Scene(), Scene(models=("toy", "toy-1"), fsync="everysec", power=True, seconds=7)])
def test_the_command_on_the_page_makes_the_scene_again(scene: Scene) -> None:
    _, _, _, *arguments = shlex.split(spelled(scene))
    assert command.scene_of(command.parser().parse_args(arguments)) == scene
