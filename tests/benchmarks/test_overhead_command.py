"""The command: arguments, plan, and one small run against the real proxy and worker."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import countersign
from benchmarks import command as bench
from benchmarks.overhead import command, machine
from benchmarks.overhead.rounds import Load
from benchmarks.overhead.stack import Stack
from policies.errors import CountersignError


def test_registry(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([]) == 2
    assert bench.main(["--help"]) == 0
    assert "overhead" in capsys.readouterr().out
    assert bench.main(["speed"]) == 2
    assert "no benchmark 'speed'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--arms", "direct"], ["--concurrency", "many"], ["--fast"]])
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2


def test_loads_have_short_answers_beside_the_timed_ones() -> None:
    arguments = command._parser().parse_args(["--tokens", "100", "--requests", "20", "--bursts", "4"])
    loads = command._loads(arguments)
    assert loads[:2] == [Load(1, 100, 20, 0.0), Load(1, 4, 10, 0.0)]
    assert [(load.concurrency, load.tokens, load.bursts) for load in loads[2:]] == [(32, 100, 4), (32, 4, 2)]
    assert [load.spread for load in loads[2:]] == pytest.approx([0.255, 0.255])


def test_machine_reads_its_own_process() -> None:
    before = machine.cpu_seconds(os.getpid())
    sum(range(2_000_000))
    assert machine.cpu_seconds(os.getpid()) > before
    assert machine.memory_bytes(os.getpid()) > 2**20
    described = machine.describe()
    assert described["cores"] >= 1
    assert described["packages"]["aiohttp"]
    assert str(Path.home()) not in json.dumps(described)


def test_busy_is_a_load_per_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert not machine.is_busy(1.2)
    assert machine.is_busy(1.3)


def test_a_process_that_does_not_start_is_told_with_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = Stack(upstream="http://127.0.0.1:1/v1", model="m", reference=None, script=[])
    monkeypatch.setattr(stack, "_settings", lambda port: {"port": port, "embedded_dir": "/dev/null/x"})
    with pytest.raises(CountersignError, match=r"(?s)proxy ended with code 3.*embedded_dir"), stack:
        pass
    assert not stack.folder.exists()


def test_an_unreachable_backend_is_told() -> None:
    stack = Stack(upstream="http://127.0.0.1:1", model=None, reference=None, script=[])
    with pytest.raises(CountersignError, match="no model list at http://127"), stack:
        pass
    assert not stack.folder.exists()


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--quick", "--rounds", "2", "--requests", "2", "--concurrency", "1", "3", "--tokens", "8"]
    assert countersign.main(["bench", "overhead", *small, "--output", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"rows.csv", "bursts.csv", "metadata.json", "summary.md"}
    printed = capsys.readouterr().out
    assert "proxied (inline) adds" in printed
    assert "0 errors" in printed
    metadata = json.loads((tmp_path / "metadata.json").read_text())
    assert metadata["arguments"]["tokens"] == 8
    assert "output" not in metadata["arguments"]
