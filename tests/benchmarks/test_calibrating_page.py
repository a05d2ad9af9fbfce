"""docs/calibrating.md: its settings are valid and its commands exist."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path

from benchmarks.calibration.arguments import parser
from benchmarks.calibration.report import rejects
from policies.profile import DELTA
from policies.settings import parse_settings
from verifier_pool.profile_command import _parser

PAGE = (Path(__file__).parents[2] / "docs" / "calibrating.md").read_text()


def blocks(language: str) -> str:
    return "\n".join(re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL))


def test_the_settings_are_valid() -> None:
    settings = parse_settings(blocks("yaml"), {})
    assert all(backend.trusted for backend in settings.backends)
    assert len({backend.engine for backend in settings.backends}) == 1


def test_the_commands_are_understood() -> None:
    lines = blocks("sh").replace("\\\n", " ").replace("…", "--backend eager --output p.json").splitlines()
    words = [words for line in lines if (words := shlex.split(line, comments=True))]
    for command in words:
        known = {"calibrate": parser(None), "profile": _parser()}[command[1]]
        known.parse_args(command[2:])
    assert len(words) == 6


def test_its_numbers_are_right() -> None:
    few, many, most = (rejects(-math.expm1(math.log(DELTA / 24) / n)) for n in (12, 100, 400))
    words = (
        f"with 12 answers in each of 24 cells it takes {few} such answers, with 100 it takes {many}, with 400 {most}."
    )
    assert words in " ".join(PAGE.split())
