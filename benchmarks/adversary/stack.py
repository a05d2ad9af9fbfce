"""The running stack that is attacked: its settings, its store, and a proxy of our own on both."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import redis
import yaml
from pydantic import BaseModel, SecretStr

from benchmarks.adversary.base import Cheat
from benchmarks.adversary.servers import Site
from benchmarks.demo.processes import Child, Children, answers, free_ports
from policies.errors import CountersignError, SettingsError
from policies.settings import BackendSettings, Settings, hash_key, parse_settings, store_url
from verifier_pool import standing
from verifier_pool.link.connection import connect

COUNTERSIGN = [sys.executable, "-m", "countersign"]


class StackError(CountersignError):
    """The stack cannot be attacked as it is; the message says why."""


def read(path: str | None) -> Settings:
    """Settings from the file given, `$COUNTERSIGN_CONFIG` or `./countersign.yaml`. Raises SettingsError."""
    chosen = Path(path or os.environ.get("COUNTERSIGN_CONFIG") or "countersign.yaml")
    try:
        text = chosen.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError("--config", f"a readable settings file, not {str(chosen)!r}") from error
    return parse_settings(text, os.environ)


def backend(settings: Settings, name: str) -> BackendSettings:
    """A declared backend. Raises SettingsError, which names those there are."""
    try:
        return settings.backend(name)
    except KeyError as error:
        names = ", ".join(entry.name for entry in settings.backends)
        raise SettingsError("--backend", f"one of the settings' backends ({names}), not {name!r}") from error


def site(settings: Settings, where: str) -> Site:
    """A server behind: a URL, or the name of a declared backend. Raises SettingsError."""
    if where.startswith(("http://", "https://")):
        return Site(where)
    found = backend(settings, where)
    key = found.api_key.get_secret_value() if found.api_key else None
    return Site(found.url, found.served_model or found.model, key)


def derived(
    settings: Settings, template: BackendSettings, attacks: Mapping[str, tuple[type[Cheat], str]], port: int, key: str
) -> dict[str, Any]:
    """Settings of our own proxy as a tree: the stack's store and models, and a backend per attack.

    `attacks` maps a backend's name to its attack and URL. Every backend declares what `template` does. Nothing is
    audited, blocked or delivered otherwise than the stack's workers do.
    """
    tree: dict[str, Any] = _plain(settings.model_dump(exclude_unset=True))
    for name in ("webhook", "keys", "embedded_dir", "verification"):
        tree.pop(name, None)
    verification = settings.verification.model_copy(update={"mode": "async", "on_reject": "annotate"})
    declared = _plain(template.model_dump(exclude_unset=True))
    declared.pop("api_key", None)
    return tree | {
        "host": "127.0.0.1",
        "port": port,
        "redis_url": store_url(settings, os.environ),
        "keys": [{"name": "attack", "sha256": hash_key(key), "admin": True}],
        "verification": _plain(verification.model_dump()),
        "backends": [
            declared
            | {"name": name, "url": url, "trusted": False, "max_concurrency": 0, "speculative": attack.speculative}
            for name, (attack, url) in attacks.items()
        ],
    }


def check_store(settings: Settings) -> None:
    """Raise StackError unless the stack's Redis answers."""
    url = store_url(settings, os.environ)
    try:
        with connect(url, timeout=5) as client:
            client.ping()
    except (redis.RedisError, OSError) as error:
        raise StackError("the stack's Redis does not answer; is `countersign serve` running?") from error


def forget_standings(settings: Settings, names: Iterable[str]) -> None:
    """Leave nothing of these backends among the standings of the operator's own."""
    with connect(store_url(settings, os.environ), timeout=5) as client:
        for name in names:
            standing.forget(client, name)


def start_proxy(
    children: Children,
    settings: Settings,
    template: BackendSettings,
    attacks: Mapping[str, tuple[type[Cheat], str]],
) -> tuple[str, str, Child]:
    """Start a proxy in front of the attacks; its URL, a key for it, and its process. Raises CountersignError."""
    (port,) = free_ports(1)
    key = secrets.token_urlsafe(24)
    path = children.folder / "countersign.yaml"
    # The file holds keys of the backends.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        yaml.safe_dump(derived(settings, template, attacks, port, key), file, sort_keys=False)
    child = children.start("proxy", [*COUNTERSIGN, "serve", "--config", str(path)])
    url = f"http://127.0.0.1:{port}"
    children.wait({"the proxy": answers(url + "/readyz")}, 60, lambda missing: None)
    return url, key, child


def _plain(value: Any) -> Any:
    """Settings as YAML can hold them, secrets in clear."""
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, BaseModel):
        return _plain(value.model_dump())
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
