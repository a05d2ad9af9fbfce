"""Whether the backends to measure are trusted, of one kind, and what they are declared to be."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import msgspec

from policies.errors import SettingsError
from policies.settings import BackendSettings, ModelSettings, Settings

VERSION_SECONDS = 10.0
_NUMBERS = re.compile(r"\d+\.\d+(?:\.\d+)*")
_SAME = ("model", "runtime", "precision", "engine", "speculative")
"""What must be declared alike: a profile has one key."""


@dataclass(frozen=True, slots=True)
class Target:
    """What is measured: backends of one model that are declared alike."""

    backends: tuple[BackendSettings, ...]
    model: ModelSettings

    @property
    def declared(self) -> BackendSettings:
        """Any of them, for what they have in common."""
        return self.backends[0]

    def backend(self, name: str) -> BackendSettings:
        """One by its name."""
        return next(backend for backend in self.backends if backend.name == name)


def choose(settings: Settings, names: Sequence[str]) -> Target:
    """The backends of these names.

    Raises:
        SettingsError: one is unknown, not trusted or declared otherwise than the first, or nothing replays.
    """
    found: list[BackendSettings] = []
    for name in dict.fromkeys(names):
        try:
            backend = settings.backend(name)
        except KeyError:
            known = ", ".join(backend.name for backend in settings.backends)
            raise SettingsError("--backend", f"one of {known or 'the backends, of which there is none'}") from None
        if not backend.trusted:
            raise SettingsError(f"backends.{name}.trusted", "true, for a backend whose answers define honesty")
        for key in _SAME:
            here, first = getattr(backend, key), getattr(found[0] if found else backend, key)
            if here != first:
                raise SettingsError(
                    f"backends.{name}.{key}",
                    f"{first!r} as {found[0].name} has, not {here!r}: one profile is of one declaration",
                )
        found.append(backend)
    model = settings.models[found[0].model]
    if model.reference is None:
        raise SettingsError(f"models.{found[0].model}.reference", "an engine that replays")
    return Target(tuple(found), model)


class _Version(msgspec.Struct):
    version: str


async def version(session: aiohttp.ClientSession, backend: BackendSettings) -> str:
    """What the backend says at `/version`; empty when it says nothing of the kind."""
    url = backend.url.rstrip("/").removesuffix("/v1") + "/version"
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=VERSION_SECONDS)) as response:
            if response.status != 200:
                return ""
            return msgspec.json.decode(await response.content.read(65536), type=_Version).version[:64]
    except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError, UnicodeError):
        return ""


def check_version(backend: BackendSettings, said: str) -> str:
    """Compares what a backend says with what it is declared to run. Returns a warning, or nothing.

    Raises:
        SettingsError: the two contradict each other, so that the profile would be of something else than its key.
    """
    where = f"backends.{backend.name}"
    declared = _NUMBERS.findall(backend.engine)
    if not said:
        return f"{backend.name} does not tell its version, so `engine` {backend.engine!r} is taken on trust"
    if declared and not any(_agree(number, said) for number in declared):
        raise SettingsError(f"{where}.engine", f"naming version {said}, which it says it runs, not {backend.engine!r}")
    promised = re.fullmatch(r"vllm-(\d+\.\d+)-.*", backend.runtime)
    if promised and not _agree(promised[1], said):
        raise SettingsError(f"{where}.runtime", f"one of vLLM {said}, which it says it runs, not {backend.runtime!r}")
    if not declared:
        return (
            f"{where}.engine names no version ({said} now): an upgrade would go unnoticed and be judged by this profile"
        )
    return ""


def _agree(declared: str, said: str) -> bool:
    """Whether one version is the other, or the other cut short: 0.32 agrees with 0.32.0 and 0.32.1+cpu."""
    ours, theirs = declared.split("."), re.split(r"[.+-]", said)
    return theirs[: len(ours)] == ours
