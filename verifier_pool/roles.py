"""Which part of the pool's work a process does, as the arguments of `countersign worker` say it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from policies.errors import SettingsError
from policies.settings import Settings


@dataclass(frozen=True, slots=True)
class Roles:
    """What a process does. `model`: only this one's replays; `which`: only its `first` or its `second` reference."""

    verify: bool = True
    replay: bool = True
    model: str | None = None
    which: str | None = None

    @property
    def name(self) -> str:
        """What such a process is called."""
        return "worker" if self.verify and self.replay else "verify" if self.verify else "replay"

    @property
    def choosy(self) -> bool:
        """Whether replays are asked for in so many words, so that having none to make is a mistake."""
        return self.replay and not (self.verify and self.model is None and self.which is None)


EVERYTHING = Roles()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that say what a process does."""
    parser.add_argument("--config", help="settings file (default: $COUNTERSIGN_CONFIG, then ./countersign.yaml)")
    parser.add_argument("--only", choices=("verify", "replay", "webhooks"), help="do one kind of work")
    parser.add_argument("--model", help="replay this model only")
    parser.add_argument("--reference", choices=("first", "second"), help="run only this reference of a model with two")


def roles_of(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Roles:
    """What these arguments say. One that would do nothing ends the process with a usage error (exit code 2)."""
    for name in ("model", "reference"):
        if getattr(arguments, name) is not None and arguments.only in ("verify", "webhooks"):
            parser.error(f"--{name} is about replays: it does nothing with --only {arguments.only}")
    return Roles(
        arguments.only in (None, "verify"), arguments.only in (None, "replay"), arguments.model, arguments.reference
    )


def check_model(settings: Settings, roles: Roles) -> None:
    """Raises SettingsError when there is no such model."""
    if roles.model is not None and roles.model not in settings.models:
        raise SettingsError("--model", f"one of {', '.join(settings.models) or 'none'}, not {roles.model!r}")


def check_replays(roles: Roles, found: object) -> None:
    """Raises SettingsError when replays are asked for and none of the references is `found`."""
    if roles.choosy and not found:
        which = f"{roles.which} " if roles.which else ""
        whose = "a model" if roles.model is None else f"model {roles.model}"
        raise SettingsError("models", f"{whose} with a {which}reference, where the arguments ask for its replays")
