"""A whole stack for the pages' blocks: `countersign serve` with its own Valkey, a worker, a backend and a reference.

Backend and reference are a toy model of 64 tokens, so that honest answers pass and cheats are rejected without an
engine. Everything else is what an operator runs, started by the same commands.
"""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import yaml

from benchmarks.chaos import declared, toy
from benchmarks.demo.processes import Children, free_ports
from policies.profile import ProfileKey
from tests.docs.backend import TOKENS
from tests.docs.pages import ROOT

MODEL = "my-model"
BACKENDS = ("cheap-gpu-farm", "eager", "graphs", "honest")
"""Names that pages use; each is an honest backend of `my-model`."""
CHEAT, CHEATED = "cheat", "cheated-model"
"""A backend that is not honest, and the only one of its model."""
_START_SECONDS = 600.0


@dataclass(frozen=True)
class Trial:
    """A running stack. `folder` holds its `countersign.yaml` and the `docs`; blocks run in it, and it is their home."""

    folder: Path
    url: str
    children: Children

    @property
    def environ(self) -> dict[str, str]:
        """What blocks run in: the environment's programs first, nothing of the user's settings."""
        return environ(self.folder)

    @property
    def redis_url(self) -> str:
        """Of its Valkey."""
        return f"unix://{self.folder}/.local/state/countersign/valkey.sock"

    def replaced(self, text: str) -> str:
        """A block with the addresses of this stack in place of the page's."""
        return text.replace("http://127.0.0.1:8700", self.url).replace("--port 8700", "--port 0")


def environ(folder: Path) -> dict[str, str]:
    """Environment of a process of the trial that lives in this folder."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("COUNTERSIGN_", "OPENAI_", "XDG_"))}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
    python = os.pathsep.join([str(ROOT), kept.get("PYTHONPATH", "")])
    return kept | {
        "HOME": str(folder),
        "PATH": path,
        "PYTHONPATH": python,
        "NO_PROXY": "127.0.0.1",
        "XDG_STATE_HOME": f"{folder}/.local/state",
    }


@contextmanager
def running(folder: Path) -> Iterator[Trial]:
    """A stack in this folder, until the block is left; a watchdog ends it where this process is killed."""
    port, backend, engine = free_ports(3)
    python, own = [sys.executable, "-m"], environ(folder)
    config = ["--config", str(folder / "countersign.yaml")]
    url = f"http://127.0.0.1:{port}"
    for name in (MODEL, CHEATED):
        (folder / f"{name}.json").write_text(profile(name), encoding="utf-8")
    tree = settings(folder, port, backend, engine)
    (folder / "countersign.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    (folder / "docs").symlink_to(ROOT / "docs")
    with Children(folder) as children:
        children.start("backend", [*python, "tests.docs.backend", str(backend)], own)
        asked = ["--port", str(engine), "--model", "toy", "--pause-ms", "1"]
        children.start("engine", [*python, "benchmarks.chaos.engine", *asked], own)
        children.start("proxy", [*python, "countersign", "serve", *config], own)
        children.wait({"the proxy": lambda: is_ready(url)}, _START_SECONDS, _quiet)
        children.start("worker", [*python, "countersign", "worker", *config], own)
        children.wait({"the worker": lambda: _takes_work(folder / "worker.log")}, _START_SECONDS, _quiet)
        yield Trial(folder, url, children)


def settings(folder: Path, port: int, backend: int, engine: int) -> dict[str, Any]:
    """The settings tree, with the ports of proxy, backend and reference."""
    reference = {"kind": "vllm_http", "url": f"http://127.0.0.1:{engine}", "served_model": "toy"}
    model = {"vocab_size": toy.VOCABULARY, "max_model_len": toy.PROMPT_TOKENS + TOKENS, "reference": reference}
    declared_as = {"served_model": "toy", "precision": "bf16", "runtime": toy.RUNTIME, "engine": toy.ENGINE}
    honest = {"url": f"http://127.0.0.1:{backend}", "model": MODEL, **declared_as}
    cheat = {"url": f"http://127.0.0.1:{backend}/cheat", "model": CHEATED, **declared_as}
    measured = {name: model | {"profile": str(folder / f"{name}.json")} for name in (MODEL, CHEATED)}
    return {
        "port": port,
        "models": measured | {"small": model, "large": model},
        "backends": [{"name": name, **honest} for name in BACKENDS] + [{"name": CHEAT, **cheat}],
        "audit": {"rate": 1, "full": 1},
        "health": {"interval": 0},
        # Nobody listens there; deliveries are tried again and dropped.
        "webhook": {"url": "http://127.0.0.1:9/hook", "secret": "whsec_" + "c2VjcmV0" * 5, "allow_private": True},
    }


@cache
def profile(model: str) -> str:
    """A profile of honest answers to the toy model, under the name it has here."""
    key = ProfileKey(
        model=model,
        runtime=toy.RUNTIME,
        precision="bf16",
        engine=toy.ENGINE,
        reference=f"vllm_http vllm-{toy.VERSION} toy",
    )
    return msgspec.structs.replace(declared.measured("toy"), key=key).to_json()


def is_ready(url: str) -> bool:
    """Whether a proxy serves requests."""
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=2):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _takes_work(log: Path) -> bool:
    return log.exists() and b"ready: taking" in log.read_bytes()


def _quiet(missing: str) -> None:
    pass
