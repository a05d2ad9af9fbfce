"""Shell blocks: which commands run against the trial stack, which are only held against what they name, and why."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import countersign
from tests.docs.pages import ROOT, Block
from tests.docs.trial import Trial, is_ready

NOT_RUN: dict[tuple[str, ...], str] = {
    ("countersign", "calibrate"): "needs hundreds of answers; tests/benchmarks/test_calibration.py runs it",
    ("countersign", "lmcv"): "needs real vLLM servers; tests/e2e/test_lmcv.py runs it",
    ("python", "-m", "pytest"): "is what runs this; its paths are looked up",
    ("make",): "installs; its targets are looked up in the Makefile",
    ("pip",): "needs a network; its extras are looked up in pyproject.toml",
    ("docker",): "needs a container engine; its targets and files are looked up",
    ("helm",): "needs a cluster; tests/helm renders it; its files are looked up",
    ("kubectl",): "needs a cluster",
}
"""Commands that are not run, by how they begin, and why. Everything else is."""
LONG_RUNNING = {"serve", "worker"}
"""Sub-commands that are started, awaited until they take work, and ended by SIGTERM."""
_SYNTAX = {"for", "done", "if", "fi", "while"}
_READY = ("listening", "ready: ")
_SECONDS = 600.0


def commands(text: str) -> list[list[str]]:
    """Words of each command, without assignments before it. Loops and pipes count as one command per line."""
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    found = [shlex.split(line.lstrip("$ "), comments=True) for line in lines]
    return [words for line in found if (words := _program(line)) and words[0] not in _SYNTAX]


def _program(words: list[str]) -> list[str]:
    while words and re.fullmatch(r"[A-Za-z_]\w*=.*|\$|do|then", words[0]):
        words = words[1:]
    return words


def why_not_run(words: list[str]) -> str:
    """The reason, where the table has one; else empty."""
    return next((why for head, why in NOT_RUN.items() if tuple(words[: len(head)]) == head), "")


def is_usage(block: Block) -> bool:
    """Whether a block only shows how commands are called, with places to fill in."""
    lines = [line for line in block.text.splitlines() if line.strip()]
    return bool(lines) and all(line.startswith("countersign ") for line in lines)


def check(words: list[str]) -> None:
    """What a command names exists: sub-commands, flags, files, targets, extras."""
    if words[0] == "countersign":
        _check_countersign(words[1:])
    elif words[0] == "make":
        targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert {word for word in words[1:] if "=" not in word} <= targets, words
    elif words[0] == "pip":
        extras = set(re.findall(r"\[([\w,-]+)\]", " ".join(words)))
        declared = (ROOT / "pyproject.toml").read_text()
        for extra in (name for each in extras for name in each.split(",")):
            assert re.search(rf"^{extra} = \[", declared, re.MULTILINE), words
    for word in words[1:]:
        path = word.removeprefix("./").partition("::")[0]
        if re.fullmatch(r"(helm|docs|tests|benchmarks)(/[\w./-]+)?", path):
            assert (ROOT / path).exists(), words
    for stage in re.findall(r"--target (\w+)", " ".join(words)):
        assert re.search(rf"AS {stage}\b", (ROOT / "Dockerfile").read_text()), words


def _check_countersign(words: list[str]) -> None:
    assert words[0] in countersign.COMMANDS, words
    path: tuple[str, ...] = (words[0],)
    shown = help_of(path)
    for word in words[1:]:
        deeper = help_of((*path, word)) if re.fullmatch(r"[a-z-]+", word) else ""
        if not deeper:
            break
        path, shown = (*path, word), deeper
    for flag in re.findall(r"(?<![\w-])--?[a-z][\w-]*", " ".join(words)):
        assert re.search(rf"(?<![\w-]){flag}(?![\w-])", shown), f"{' '.join(path)} has no {flag}"


@cache
def help_of(path: tuple[str, ...]) -> str:
    """What `countersign PATH --help` prints; empty where there is no such command."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        try:
            code = countersign.main([*path, "--help"])
        except SystemExit as error:
            code = int(error.code or 0)
    return out.getvalue() if code == 0 else ""


def steps(text: str) -> Iterator[str]:
    """A block's logical lines."""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            yield line


def run(block: Block, trial: Trial) -> None:
    """Run a block: as one script, or line by line where some of it is not run or goes on by itself."""
    known = [(words, why_not_run(words)) for words in commands(block.text)]
    if not any(why or _long(words) for words, why in known):
        for words, _ in known:
            check(words)
        execute(trial.replaced(block.text), trial)
        return
    for line in steps(block.text):
        words = (commands(line) or [[]])[0]
        if not words:
            continue
        check(words)
        if why_not_run(words):
            continue
        (start if _long(words) else execute)(trial.replaced(line), trial)


def _long(words: list[str]) -> bool:
    return words[0] == "countersign" and words[1] in LONG_RUNNING and "--help" not in words


def execute(script: str, trial: Trial) -> str:
    """Run by bash in the trial's folder; a command that fails ends it. Returns its output."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=trial.folder,
        env=trial.environ,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _await_ready(log: Path) -> None:
    """A proxy says where it listens a little before it minds signals."""
    (url,) = re.findall(r'"(http://[^"]+)"', log.read_text())
    deadline = time.monotonic() + _SECONDS
    while not is_ready(url):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def start(line: str, trial: Trial) -> None:
    """Start what goes on by itself, on a port of its own, and end it."""
    serves = re.search(r"countersign serve", line) is not None
    # A second proxy shares the first one's Valkey and must not take its port.
    given = {"COUNTERSIGN_PORT": "0", "COUNTERSIGN_REDIS_URL": trial.redis_url} if serves else {}
    script = f"cd {shlex.quote(str(trial.folder))} && exec env {line}"
    child = trial.children.start("started", ["bash", "-c", script], trial.environ | given)
    try:
        deadline = time.monotonic() + _SECONDS
        while not any(word in child.log.read_text(errors="replace") for word in _READY):
            assert child.process.poll() is None, f"{line}\n{child.last_lines()}"
            assert time.monotonic() < deadline, f"{line}\n{child.last_lines()}"
            time.sleep(0.05)
        if serves:
            _await_ready(child.log)
        child.process.send_signal(signal.SIGTERM)
        assert child.process.wait(_SECONDS) == 0, f"{line}\n{child.last_lines()}"
    finally:
        trial.children.stop(child)
