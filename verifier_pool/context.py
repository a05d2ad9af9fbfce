"""What jobs need and Redis must not carry: settings, profiles, the audit secret. One per process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from policies.case import sha256
from policies.errors import ProfileError, SettingsError
from policies.profile import Profile
from policies.settings import ModelSettings, Settings
from verifier_pool.link.directory import Directory
from verifier_pool.parts import Parts
from verifier_pool.profiles import name_of, read_profile
from verifier_pool.reference import open_reference
from verifier_pool.reference.base import Reference
from verifier_pool.stages import Stages
from verifier_pool.standing import Standings
from verifier_pool.store import Store
from verifier_pool.vouching import Vouching

NO_MODEL = ModelSettings.model_validate({})
"""Stands in for a model that the settings do not know: then nothing is known about it."""


@dataclass(frozen=True, slots=True)
class Context:
    """Made by the worker before it takes work. `profiles` and `second_profiles` are by model.

    `folded` says by backend when a job last folded its units (seconds of the monotonic clock).
    """

    settings: Settings
    store: Store
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    secret: bytes = b""
    second_profiles: Mapping[str, Profile] = field(default_factory=dict)
    standings: Standings = field(init=False)
    stages: Stages = field(init=False)
    vouching: Vouching = field(init=False)
    profile_names: Mapping[str, str] = field(init=False)
    profile_hashes: Mapping[str, str] = field(init=False)
    second_profile_hashes: Mapping[str, str] = field(init=False)
    parts: Parts = field(init=False)
    directory: Directory = field(init=False)
    folded: dict[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "standings", Standings(self.store.redis, self.settings))
        object.__setattr__(self, "stages", Stages(self.store.redis, self.settings.verification, self.store.sealer))
        object.__setattr__(self, "vouching", Vouching(self.stages))
        ttl = self.settings.verification.evidence_ttl
        object.__setattr__(self, "parts", Parts(self.store.redis, ttl, self.store.sealer))
        object.__setattr__(self, "directory", Directory(self.store.redis))
        names = {model: name_of(profile) for model, profile in self.profiles.items()}
        object.__setattr__(self, "profile_names", names)
        object.__setattr__(self, "profile_hashes", _hashes(self.profiles))
        object.__setattr__(self, "second_profile_hashes", _hashes(self.second_profiles))


def _hashes(profiles: Mapping[str, Profile]) -> dict[str, str]:
    """By model, the hash by which a receipt tells its profile."""
    return {model: sha256(profile.canonical()) for model, profile in profiles.items()}


_current: Context | None = None


def use(context: Context | None) -> None:
    """Make this the process's context."""
    global _current
    _current = context


def current() -> Context:
    """The process's context. Raises RuntimeError outside a worker."""
    if _current is None:
        raise RuntimeError("jobs run inside a worker, which sets their context")
    return _current


def open_references(settings: Settings, *, second: bool = False, model: str | None = None) -> dict[str, Reference]:
    """Start the reference of every model that has one, or the second reference; or of one `model` only.

    Raises:
        SettingsError: one cannot start; those that did are closed.
    """
    references: dict[str, Reference] = {}
    try:
        for name, declared in settings.models.items():
            wanted = declared.second_reference if second else declared.reference
            if wanted is not None and model in (None, name):
                references[name] = open_reference(name, wanted)
    except BaseException:
        for reference in references.values():
            reference.close()
        raise
    return references


def read_profiles(settings: Settings, *, second: bool = False) -> dict[str, Profile]:
    """Read the profile of every model that has one, or that of its second reference.

    Raises:
        SettingsError: names the key of a profile that cannot be read, whose signature does not hold, or that is not
            signed by one of `profile_keys` where the settings name some.
    """
    profiles: dict[str, Profile] = {}
    for name, model in settings.models.items():
        path = model.second_profile if second else model.profile
        if path is None:
            continue
        key = f"models.{name}.{'second_profile' if second else 'profile'}"
        try:
            profiles[name] = read_profile(Path(path), settings.profile_keys)
        except OSError as error:
            raise SettingsError(key, f"a readable file, not {path!r} ({error.strerror})") from error
        except (ProfileError, ValueError) as error:
            raise SettingsError(key, f"a profile written by countersign calibrate ({error})") from error
    return profiles
