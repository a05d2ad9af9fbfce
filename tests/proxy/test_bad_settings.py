"""What `countersign serve` says of settings that it cannot use, and how it ends; one process tries them all."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import yaml

from tests.support.waiting import PATIENCE

BAD: list[tuple[dict[str, Any], str]] = [
    ({"prot": 1}, "prot"),
    ({"backends": [{"name": "b", "url": "ftp://x", "model": "m"}]}, "backends.0.url"),
    ({"host": "0.0.0.0"}, "keys"),
    ({"durability": {"replicas": 1}}, "durability.replicas"),
    ({"host": "::"}, "keys"),
    ({"host": "no such host"}, "host"),
    ({"models": {"m": {"tokenizer": "/nowhere"}}}, "models.m.tokenizer"),
    ({"embedded_dir": "/" + "x" * 120}, "embedded_dir"),
]
SERVE_EACH = """
import sys
import countersign

for path in sys.argv[1:]:
    print("ended", countersign.main(["serve", "--config", path]), file=sys.stderr, flush=True)
"""


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """Exit codes and last lines of `countersign serve` with each of the bad settings."""
    folder = tmp_path_factory.mktemp("bad")
    for at, (settings, _) in enumerate(BAD):
        tree = {"port": 0, "embedded_dir": str(folder / "state")} | settings
        (folder / f"{at}.yaml").write_text(yaml.safe_dump(tree))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("COUNTERSIGN_")}
    command = [sys.executable, "-c", SERVE_EACH, *(str(folder / f"{at}.yaml") for at in range(len(BAD)))]
    said = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=PATIENCE, check=True).stderr
    assert "Traceback" not in said, said
    *parts, rest = said.split("\nended ")
    codes = [part.partition("\n")[0] for part in (*parts[1:], rest)]
    return list(zip(codes, [part.rpartition("\n")[2] for part in parts], strict=True))


@pytest.mark.parametrize(("at", "key"), [(at, key) for at, (_, key) in enumerate(BAD)])
def test_bad_settings_name_the_key(refusals: list[tuple[str, str]], at: int, key: str) -> None:
    code, said = refusals[at]
    assert code == "3"
    assert said.startswith(f"countersign serve: setting {key!r}")
