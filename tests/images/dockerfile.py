"""The Dockerfile, read without a container engine."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "Dockerfile"
IGNORED = ROOT / ".dockerignore"


@dataclass
class Stage:
    """One build stage: its base and its instructions in order."""

    base: str
    lines: list[tuple[str, str]] = field(default_factory=list)

    def all(self, word: str) -> list[str]:
        return [rest for name, rest in self.lines if name == word]

    def last(self, word: str) -> str:
        return self.all(word)[-1]


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n", " ", text).splitlines()
    parts = [line.strip().split(None, 1) for line in lines if line.strip()]
    return [(name.upper(), rest) for name, rest in parts]


def stages() -> dict[str, Stage]:
    found: dict[str, Stage] = {}
    for name, rest in instructions():
        if name == "FROM":
            base, _, label = rest.partition(" AS ")
            found[label] = current = Stage(base)
        elif found:
            current.lines.append((name, rest))
    return found


def let_in(path: str) -> bool:
    """Whether .dockerignore lets a file of the repository, by its path, into a build: the last rule that matches."""
    found = True
    for line in IGNORED.read_text().splitlines():
        rule = line.strip()
        if not rule or rule.startswith("#"):
            continue
        pattern = rule.lstrip("!").rstrip("/")
        parents = [path, *(str(parent) for parent in Path(path).parents if str(parent) != ".")]
        spellings = [pattern, pattern.removeprefix("**/")] if pattern.startswith("**/") else [pattern]
        if any(fnmatch(each, spelling.replace("**", "*")) for each in parents for spelling in spellings):
            found = rule.startswith("!")
    return found


def copied_from_context() -> list[str]:
    """What the build takes from the repository."""
    copies = [rest for stage in stages().values() for rest in stage.all("COPY") if not rest.startswith("--from")]
    return [part for rest in copies for part in rest.split()[:-1]]
