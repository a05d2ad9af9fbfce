"""What differs between two `Settings`, and how much of it a running process can take over.

Pure. A setting is named by its path: `standing.alpha`, `backends.cheap.url`, `models.m.profile`; members of lists that
have a name go by it. Names of settings, never their values: those may be secrets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from policies.errors import SettingsError
from policies.settings import Settings, parse_settings, says_nothing

Path = tuple[str, ...]

FIXED: tuple[Path, ...] = (
    ("host",),
    ("port",),
    ("redis_url",),
    ("embedded_dir",),
    ("durability",),
    ("metrics",),
    ("telemetry",),
    ("admin", "host"),
    ("admin", "port"),
    ("audit", "secret"),
    ("storage", "encryption_keys"),
    ("storage", "encryption_keys_file"),
    ("receipts", "signing_keys"),
    ("receipts", "signing_keys_file"),
)
"""Settings that hold for a process from its start to its end."""
FIXED_IN_PROXY: tuple[Path, ...] = (
    *FIXED,
    ("bounds",),
    ("timeouts", "connect"),
    ("timeouts", "client"),
    ("timeouts", "total"),
    ("relay", "passthrough"),
)
FIXED_IN_WORKER: tuple[Path, ...] = (*FIXED, ("verification", "job_timeout"))
FIXED_IN_REFERENCE: tuple[Path, ...] = (
    *FIXED_IN_WORKER,
    ("models", "*", "reference"),
    ("models", "*", "second_reference"),
    ("verification",),
)
"""Of a process that replays: its engine is what it was started with."""


@dataclass(frozen=True, slots=True)
class Applied:
    """What a running process makes of new settings.

    Attributes:
        settings: as they hold now.
        changed: names of those that are others than before.
        restart: names of those that would be, and are not before the process is started again.
    """

    settings: Settings
    changed: tuple[str, ...]
    restart: tuple[str, ...]


KEPT: tuple[Path, ...] = (("models",), ("backends",), ("keys",), ("admin", "keys"))
"""What a file that is cut off, or not there yet, would take away."""
_BY_HAND = "if that is meant, ask for it: `countersign reload`, or SIGHUP"


def reread(
    running: Settings,
    text: str,
    environ: Mapping[str, str],
    fixed: Sequence[Path],
    *,
    by_hand: bool,
    given: Mapping[str, Any] | None = None,
) -> Applied:
    """What a running process makes of its settings file's text.

    Unless it is told to `by_hand`, it takes no file for meant that says nothing, or that takes away all of what is
    `KEPT`: such a file is one that is being written.

    Args:
        given: settings that lie over everything else.

    Raises SettingsError, which says so, or what else is wrong.
    """
    if not by_hand and says_nothing(text):
        raise SettingsError("countersign.yaml", f"the file says nothing; {_BY_HAND}")
    wanted = parse_settings(text, environ).model_copy(update=dict(given or {}))
    for path in () if by_hand else KEPT:
        if _get(running, path) and not _get(wanted, path):
            raise SettingsError(".".join(path), f"the file takes away every one; {_BY_HAND}")
    return applied(running, wanted, fixed)


def applied(running: Settings, wanted: Settings, fixed: Sequence[Path]) -> Applied:
    """New settings, except what is `fixed` in a running process. Whether there is a webhook at all is always so.

    Raises SettingsError where what is new does not go together with what stays.
    """
    restart: set[str] = set()
    made = wanted
    for pattern in fixed:
        for path in _matching(pattern, running, wanted):
            old, new = _get(running, path), _get(wanted, path)
            names = [".".join((*path, *more)) for more in _differences(_tree(old), _tree(new))]
            if names:
                restart.update(names)
                made = _put(made, path, old)
    if (running.webhook is None) != (wanted.webhook is None):
        restart.add("webhook")
        made = made.model_copy(update={"webhook": running.webhook})
    if restart:
        made = _checked(made, sorted(restart))
    return Applied(made, changed(running, made), tuple(sorted(restart)))


def changed(before: Settings, after: Settings) -> tuple[str, ...]:
    """Names of the settings that differ, in order."""
    return tuple(sorted(".".join(path) for path in _differences(_tree(before), _tree(after))))


def _checked(settings: Settings, restart: Sequence[str]) -> Settings:
    try:
        return Settings.model_validate(settings.model_dump(exclude_unset=True))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "countersign.yaml"
        raise SettingsError(key, f"{first['msg']} (as long as {', '.join(restart)} stays until a restart)") from error


def _matching(pattern: Path, *settings: Settings) -> list[Path]:
    """The paths that a pattern means; `*` is every name of a mapping."""
    if "*" not in pattern:
        return [pattern] if pattern[0] in Settings.model_fields else []
    at = pattern.index("*")
    mappings = [_get(each, pattern[:at]) for each in settings]
    names = dict.fromkeys(name for mapping in mappings for name in mapping)
    return [(*pattern[:at], name, *pattern[at + 1 :]) for name in names if name in mappings[-1]]


def _get(value: Any, path: Path) -> Any:
    """What is at a path, None where there is nothing."""
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
    return value


def _put(value: Any, path: Path, new: Any) -> Any:
    """A copy with something else at a path."""
    name, *rest = path
    if isinstance(value, Mapping):
        return {**value, name: _put(value[name], tuple(rest), new) if rest else new}
    inner = _put(getattr(value, name), tuple(rest), new) if rest else new
    return value.model_copy(update={name: inner})


def _tree(value: Any) -> Any:
    """Sections as mappings by name, down to what has no parts."""
    if isinstance(value, BaseModel):
        return {name: _tree(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        return {str(name): _tree(each) for name, each in value.items()}
    if (
        isinstance(value, tuple)
        and value
        and all(isinstance(each, BaseModel) and hasattr(each, "name") for each in value)
    ):
        return {each.name: _tree(each) for each in value}
    return value


def _differences(before: Any, after: Any) -> list[Path]:
    """Paths at which two trees differ, as deep as both have parts."""
    if before == after:
        return []
    if not (isinstance(before, Mapping) and isinstance(after, Mapping)):
        return [()]
    found: list[Path] = []
    for name in dict.fromkeys((*before, *after)):
        if name not in before or name not in after:
            found.append((name,))
        else:
            found += [(name, *path) for path in _differences(before[name], after[name])]
    return found
