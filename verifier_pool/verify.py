"""`countersign verify FILE…`: judges packed evidence again, offline, with nothing but the files and the settings."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from policies import codec
from policies.errors import CountersignError, EvidenceError
from policies.profile import Profile
from policies.settings import Settings
from policies.verification import Verification, encode, public
from verifier_pool.context import NO_MODEL, open_references, read_profiles
from verifier_pool.judge import judge, replay_choices
from verifier_pool.reference.base import Reference
from verifier_pool.runtime import read_settings


def main(argv: Sequence[str]) -> int:
    """Judge files; returns 0 when none is rejected, withheld or unreadable, else 1. Raises SettingsError."""
    arguments = _parser().parse_args(list(argv))
    settings = _settings(arguments.config)
    references = {} if arguments.no_replay else open_references(settings)
    clean = True
    try:
        profiles = read_profiles(settings)
        for path in arguments.files:
            try:
                verification = verify_file(path, settings, references, profiles)
            except CountersignError as error:
                print(f"{path}: {error}", file=sys.stderr)
                clean = False
                continue
            print(encode(public(verification)).decode() if arguments.json else as_table(path, verification))
            clean = clean and verification["verdict"] not in ("reject", "withheld")
    finally:
        for reference in references.values():
            reference.close()
    return 0 if clean else 1


def verify_file(
    path: Path, settings: Settings, references: Mapping[str, Reference], profiles: Mapping[str, Profile]
) -> Verification:
    """Judge one file of packed evidence, with a replay where its model has a reference.

    Raises:
        EvidenceError: the file cannot be read, or holds no evidence.
    """
    try:
        choices = codec.unpack(path.read_bytes())
    except OSError as error:
        raise EvidenceError(error.strerror or "cannot be read") from error
    if not choices:
        raise EvidenceError("holds no choice")
    name = choices[0].model
    model, reference = settings.models.get(name, NO_MODEL), references.get(name)
    replays = None if reference is None else replay_choices(choices, reference, experts=model.experts is not None)
    return judge(choices, model=model, profile=profiles.get(name), replays=replays)


def as_table(path: Path, verification: Verification) -> str:
    """A few lines for a terminal: the verdict, then one line per check with its metrics."""
    title = f"{path}  {verification['verdict']}  {verification['model']} on {verification['backend']}"
    rows = [
        f"  {check['name']:<10} {check['result']:<13} {_details(check)}".rstrip() for check in verification["checks"]
    ]
    return "\n".join([title, *rows])


def _details(check: Mapping[str, object]) -> str:
    metrics = check["metrics"]
    assert isinstance(metrics, Mapping)
    shown = [f"{name}={value:.4g}" for name, value in metrics.items() if isinstance(value, int | float)]
    return "  ".join(filter(None, [str(check["reason"]), " ".join(shown)]))


def _settings(config: str | None) -> Settings:
    """The settings if there are any; evidence can be judged without."""
    if config is None and "COUNTERSIGN_CONFIG" not in os.environ and not Path("countersign.yaml").exists():
        return Settings.model_validate({})
    return read_settings(config)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="countersign verify", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="packed evidence")
    parser.add_argument("--config", help="settings file (default: $COUNTERSIGN_CONFIG, then ./countersign.yaml)")
    parser.add_argument("--no-replay", action="store_true", help="only the checks that need no reference")
    parser.add_argument("--json", action="store_true", help="one line of JSON per file instead of a table")
    return parser
