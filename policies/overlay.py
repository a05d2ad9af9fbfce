"""What was changed of backends since `countersign.yaml` was written: a patch per backend, kept in Redis, laid over it.

Pure. Where both say something of one setting of a backend, the patch says it last; what it does not name is the file's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError

from policies._backend_rules import BackendSettings
from policies._sections import Section
from policies.settings import Settings

Source = Literal["settings", "redis", "both"]

DECLARED = ("model", "runtime", "precision", "engine", "speculative")
"""Settings that make a backend's declaration (`policies.unit.declaration_of`)."""
SECRET = ("api_key",)
_HEADER_TEXT = re.compile(r"[\x21-\x7e]*")
_PARTS = re.compile(r"^(https?://)([^/?#]*@)?([^/?#]*)(.*)$", re.DOTALL)
HIDDEN = "(secret)"
"""Stands for a secret wherever somebody may read."""


class Overlay(Section):
    """What is laid over one backend.

    Attributes:
        fields: its settings that differ from the file's, by name; all that are needed where `added`.
        sealed: of these the secret ones that are encrypted, in base64 (`verifier_pool.link.overlays`).
        key_for: the server that its `api_key`, if it has one, was given for (`server_of`); no other one gets it.
        added: it was made here. Where the file names it, too, its settings lie under these.
        removed: it is gone, whatever the file says.
        at: Unix second of the last change. `by`: whose.
    """

    fields: dict[str, Any] = Field(default_factory=dict)
    sealed: dict[str, str] = Field(default_factory=dict)
    key_for: str = ""
    added: bool = False
    removed: bool = False
    at: float = 0.0
    by: str = ""

    @property
    def covered(self) -> dict[str, Any]:
        """Its settings for whoever needs no secret: what is encrypted is there, and not what it is."""
        return {**self.fields, **dict.fromkeys(self.sealed, HIDDEN)}


@dataclass(frozen=True, slots=True)
class Merged:
    """Settings as they hold.

    Attributes:
        sources: by backend, where it is from.
        left_out: by backend, why what is laid over it cannot be used; the file's own, if there is one, then holds. Of
            one whose file names another server by now it is the key alone that is left out.
    """

    settings: Settings
    sources: Mapping[str, Source] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)


def merged(settings: Settings, overlays: Mapping[str, Overlay]) -> Merged:
    """The settings of the file with what is laid over its backends. Never raises: what cannot be used is left out."""
    backends = {backend.name: backend for backend in settings.backends}
    sources: dict[str, Source] = dict.fromkeys(backends, "settings")
    left_out: dict[str, str] = {}
    for name in sorted(overlays):
        overlay, below = overlays[name], backends.get(name)
        if overlay.removed:
            backends.pop(name, None)
            sources.pop(name, None)
            continue
        if below is None and not overlay.added:
            left_out[name] = "the settings no longer name it"
            continue
        try:
            made, why = laid_over(below, name, overlay)
        except ValueError as error:
            left_out[name] = str(error)
            continue
        if made.model not in settings.models:
            left_out[name] = f"model: {made.model!r} is not among models"
            continue
        if why:
            left_out[name] = why
        backends[name] = made
        sources[name] = "redis" if below is None else "both"
    return Merged(settings.model_copy(update={"backends": tuple(backends.values())}), sources, left_out)


def laid_over(below: BackendSettings | None, name: str, overlay: Overlay) -> tuple[BackendSettings, str]:
    """A backend with what is laid over it, and why without the key among that, where the file has moved it since to a
    server that the key was not given for. Raises ValueError, which names the setting."""
    fields = overlay.covered
    made = patched(below, name, fields)
    if fields.get("api_key") is None or server_of(made.url) == overlay.key_for:
        return made, ""
    del fields["api_key"]
    given = f"given for {overlay.key_for}" if overlay.key_for else "nobody knows what address it was given for"
    return patched(below, name, fields), f"api_key: {given}, and sent to no other; give it anew"


def patched(below: BackendSettings | None, name: str, fields: Mapping[str, Any]) -> BackendSettings:
    """A backend with some settings of its own over those it has; at another address without the key that it has, which
    was not given for that one. Raises ValueError, which names the setting."""
    base = {} if below is None else below.model_dump(exclude_unset=True)
    if below is not None and "url" in fields and not same_host(below.url, fields["url"]):
        base.pop("api_key", None)
    try:
        made = BackendSettings.model_validate({**base, **fields, "name": name})
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'backend'}: {first['msg']}") from error
    if not _has_host(made.url):
        raise ValueError("url: an http:// or https:// address with a host")
    if made.api_key is not None and not _HEADER_TEXT.fullmatch(made.api_key.get_secret_value()):
        raise ValueError("api_key: printable ASCII without spaces")
    return made


def same_host(one: str, other: Any) -> bool:
    """Whether two URLs lead to the same server by the same scheme."""
    return _origin(one) == _origin(other)


def server_of(url: Any) -> str:
    """Where a URL leads, as text, without what it asks for there and who asks; empty where it leads nowhere."""
    scheme, host, port = _origin(url) or ("", "", None)
    if not host:
        return ""
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _origin(url: Any) -> tuple[str, str, int | None] | None:
    try:
        found = urlsplit(str(url))
        port = found.port
    except ValueError:
        return None
    return found.scheme, found.hostname or "", {"http": 80, "https": 443}.get(found.scheme) if port is None else port


def _has_host(url: str) -> bool:
    try:
        found = urlsplit(url)
        return bool(found.hostname) and (found.port is None or found.port > 0)
    except ValueError:
        return False


def shown(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a backend as anybody may see them: of its address, where it is and nothing that may let one in."""
    return {name: _shown(name, value) for name, value in fields.items()}


def _shown(name: str, value: Any) -> Any:
    if name == "url" and isinstance(value, str):
        return _PARTS.sub(_where, value)
    secret = name in SECRET or isinstance(value, SecretStr)
    return HIDDEN if secret and value is not None else value


def _where(found: re.Match[str]) -> str:
    scheme, user, host, path = found.groups()
    return f"{scheme}{HIDDEN + '@' if user else ''}{host}" + (path if path in ("", "/") else f"/{HIDDEN}")
