"""Packed evidence that nobody signed: judged again, offline, with nothing but the files and the settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from policies import codec
from policies.errors import EvidenceError
from policies.profile import Profile
from policies.settings import Settings
from policies.verification import Verification
from verifier_pool.context import NO_MODEL, open_references, read_profiles
from verifier_pool.judge import judge, replay_choices
from verifier_pool.reference.base import Reference
from verifier_pool.runtime import read_settings
from verifier_pool.terminal import plain


class Judging:
    """What it takes to judge files again; a context.

    Args:
        config: the settings file; None is $COUNTERSIGN_CONFIG, then ./countersign.yaml, then none at all.
        replay: whether models that have a reference are replayed.

    Raises:
        SettingsError: the settings, a profile or a reference is not as it should be.
    """

    def __init__(self, config: str | None, *, replay: bool = True) -> None:
        self._settings = _settings(config)
        self._profiles = read_profiles(self._settings)
        self._references = open_references(self._settings) if replay else {}

    def __enter__(self) -> Judging:
        return self

    def __exit__(self, *_: object) -> None:
        for reference in self._references.values():
            reference.close()

    def judge(self, data: bytes) -> Verification:
        """Judge packed evidence, with a replay where its model has a reference. Raises EvidenceError."""
        return judge_bytes(data, self._settings, self._references, self._profiles)


def judge_bytes(
    data: bytes, settings: Settings, references: Mapping[str, Reference], profiles: Mapping[str, Profile]
) -> Verification:
    """Judge packed evidence, with a replay where its model has a reference. Raises EvidenceError."""
    choices = codec.unpack(data)
    if not choices:
        raise EvidenceError("holds no choice")
    name = choices[0].model
    model, reference = settings.models.get(name, NO_MODEL), references.get(name)
    replays = None if reference is None else replay_choices(choices, reference, experts=model.experts is not None)
    return judge(choices, model=model, profile=profiles.get(name), replays=replays)


def as_lines(name: str, verification: Verification) -> list[str]:
    """A few lines for a terminal: the verdict, then one line per check with its metrics."""
    title = f"{name}  {verification['verdict']}  {verification['model']} on {verification['backend']}"
    rows = [
        f"  {check['name']:<10} {check['result']:<13} {_details(check)}".rstrip() for check in verification["checks"]
    ]
    return [plain(line) for line in (title, *rows)]


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
