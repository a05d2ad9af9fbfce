"""`countersign attack run` on a running stack: cheats are caught and the honest backend is not, in one run."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.demo import layout, servers
from benchmarks.demo.models import DemoModels
from benchmarks.demo.processes import Children, answers, free_ports
from tests.e2e.product import COUNTERSIGN

pytestmark = pytest.mark.e2e

ATTACKS = ("honest", "hot", "hidden-prompt-spoofed", "usage", "no-logprobs", "no-token-ids", "cached", "cut-short")


@pytest.fixture
def config(demo_models: DemoModels, vllm_server: str, valkey: str, tmp_path: Path) -> Iterator[Path]:
    """Settings of a running stack, whose reference is the honest server itself; without a profile only the exact
    checks can reject."""
    (port,) = free_ports(1)
    tree: dict[str, Any] = layout.configuration(
        demo_models, {"honest": vllm_server}, port=port, store=tmp_path / "store", profile=tmp_path / "profile.json"
    )
    del tree["embedded_dir"]
    tree["redis_url"] = valkey
    model = tree["models"][servers.MODEL]
    del model["profile"]
    model["reference"] = {"kind": "vllm_http", "url": vllm_server}
    path = tmp_path / "countersign.yaml"
    path.write_text(yaml.safe_dump(tree))
    with Children(tmp_path) as children:
        worker = children.start("worker", [*COUNTERSIGN, "worker", "--config", str(path)])
        children.start("proxy", [*COUNTERSIGN, "serve", "--config", str(path)])
        ready = {
            "the proxy": answers(f"http://127.0.0.1:{port}/readyz"),
            "the worker": lambda: "ready: taking verifications" in worker.log.read_text(),
        }
        children.wait(ready, 1200, lambda missing: None)
        yield path


def test_cheats_are_caught_and_the_honest_backend_is_not(config: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    counts = ["--responses", "4", "--tokens", "32", "--temperature", "0.8", "--output", str(output)]
    command = [*COUNTERSIGN, "attack", "run", *ATTACKS, "--config", str(config), "--backend", "honest", *counts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
    rows = [json.loads(line) for line in (output / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 4 * len(ATTACKS)
    words = {name: [row["verdict"] for row in rows if row["attack"] == name] for name in ATTACKS}
    assert not {"reject", "withheld", "missing", "unverified"} & set(words["honest"]), words
    # The first of the repeated prompts is answered honestly; it is a repetition, too, where it is judged after another.
    assert words["cached"].count("reject") >= 3, words
    for name in ("hot", "hidden-prompt-spoofed", "usage", "cut-short"):
        assert words[name].count("reject") >= 3, words
    for name in ("no-logprobs", "no-token-ids"):
        assert words[name] == ["withheld"] * 4, words
    assert done.returncode == 0, done.stdout
    # Where the machine is busy, that is said before the table.
    _, table = (output / "summary.md").read_text().split("|---|", 1)
    assert table.splitlines()[1].startswith("| honest |")
    metadata = json.loads((output / "metadata.json").read_text())
    assert metadata["arguments"]["backend"] == "honest"
