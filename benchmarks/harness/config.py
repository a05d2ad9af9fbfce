"""Options from a YAML file: `--config NAME` or `--config FILE`, each of which the command line overrides.

A file is a mapping from options to values, with the options' own names (`pool-seconds: 20`, or `pool_seconds`). Values
are read as if they stood on the command line, so they are checked in the same way. `about` says what the file is for.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from policies.errors import CountersignError

FOLDER = Path(__file__).parents[1] / "configs"
ABOUT = "about"


def names(bench: str) -> list[str]:
    """Configurations of a benchmark that come with it."""
    return sorted(path.stem for path in (FOLDER / bench).glob("*.yaml"))


def add_arguments(parser: argparse.ArgumentParser, bench: str) -> None:
    """`--config` and `--dry-run`."""
    known = ", ".join(names(bench)) or "none"
    parser.add_argument("--config", metavar="NAME|FILE", help=f"options from a YAML file; with it come {known}")
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would be run and for how long, and run nothing"
    )


def parse(parser: argparse.ArgumentParser, bench: str, argv: Sequence[str]) -> argparse.Namespace:
    """The options: those of `--config`, and over them those of `argv`.

    Raises:
        CountersignError: the file cannot be read, or names an option or a value that there is not.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    given, _ = first.parse_known_args(list(argv))
    words = [] if given.config is None else _words(parser, located(bench, given.config))
    return parser.parse_args([*words, *argv])


def located(bench: str, name: str) -> Path:
    """The file that a name means. Raises CountersignError where there is none."""
    own = FOLDER / bench / f"{name}.yaml"
    path = own if own.is_file() else Path(name)
    if not path.is_file():
        raise CountersignError(f"--config {name}: no such file, and none of {', '.join(names(bench)) or 'ours'}")
    return path


def about(bench: str, name: str | None) -> str:
    """What a configuration says it is for; empty where it says nothing."""
    return "" if name is None else str(_read(located(bench, name)).get(ABOUT, ""))


def _read(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CountersignError(f"{path}: {error}") from error
    if not isinstance(found, dict):
        raise CountersignError(f"{path}: expected a mapping from options to values")
    return found


def _words(parser: argparse.ArgumentParser, path: Path) -> list[str]:
    """The file as a command line that `parser` takes."""
    words: list[str] = []
    for key, value in _read(path).items():
        if key == ABOUT or value is None:
            continue
        words += _option(parser, path, str(key), value)
    _check(parser, path, words)
    return words


def _option(parser: argparse.ArgumentParser, path: Path, key: str, value: Any) -> list[str]:
    flag = "--" + key.replace("_", "-")
    action = parser._option_string_actions.get(flag)
    if action is None or key in ("config", "help"):
        raise CountersignError(f"{path}: {key} is no option of this benchmark")
    if isinstance(action, argparse.BooleanOptionalAction):
        return [flag if value else "--no-" + flag.removeprefix("--")]
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise CountersignError(f"{path}: {key} is true or false, not {value!r}")
        return [flag] if value else []
    several = isinstance(value, list)
    if several and action.nargs in ("*", "+"):
        return [flag, *map(_text, value)]
    if action.nargs == "?" and value is True:
        return [flag]
    # With `=` a value may begin with a dash.
    return [f"{flag}={' '.join(map(_text, value)) if several else _text(value)}"]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _check(parser: argparse.ArgumentParser, path: Path, words: Sequence[str]) -> None:
    """Read them alone, so that a complaint names the file."""
    own = parser.error

    def complain(message: str) -> NoReturn:
        raise CountersignError(f"{path}: {message}")

    parser.error = complain  # type: ignore[method-assign]
    try:
        parser.parse_args(list(words))
    finally:
        parser.error = own  # type: ignore[method-assign]
