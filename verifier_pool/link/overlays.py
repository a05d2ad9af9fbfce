"""Backends that were changed by hand since `countersign.yaml` was written, in Redis, and how they are changed.

    backends          hash: by name an overlay as JSON (policies.overlay.Overlay), with its backend's key if it has one
    backends-version  another text after each change of `backends`

Proxies and workers look at the version each second. A backend's key is encrypted where the settings have
`storage.encryption_keys`, bound to the backend's name and to the server that it was given for, and only proxies open
it; else whoever can read Redis reads it.
"""

from __future__ import annotations

import base64
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

from pydantic import ValidationError
from redis import Redis

from policies.errors import Conflict, InvalidRequest, NotFound, SealError, StoreFailed
from policies.overlay import DECLARED, HIDDEN, SECRET, Merged, Overlay, laid_over, merged, same_host, server_of, shown
from policies.settings import BackendSettings, Settings
from verifier_pool.link import trail
from verifier_pool.link.queue import PREFIX
from verifier_pool.link.sealing import Sealer, is_sealed

BACKENDS = PREFIX + "backends"
VERSION = PREFIX + "backends-version"
_TRIES = 5

Change = Callable[[BackendSettings | None, BackendSettings | None, Overlay | None], Overlay | None]
"""Makes an overlay of: the backend as the file has it, as it is, and what is laid over it now."""


def read(stored: Mapping[bytes, bytes]) -> tuple[dict[str, Overlay], list[str]]:
    """The overlays that can be read, by backend, and names of those that cannot: these hold nothing."""
    found, unreadable = dict[str, Overlay](), list[str]()
    for name, data in sorted(stored.items()):
        try:
            found[name.decode()] = Overlay.model_validate_json(data)
        except (ValidationError, UnicodeDecodeError):
            unreadable.append(name.decode(errors="replace"))
    return found, unreadable


def opened(found: Mapping[str, Overlay], sealer: Sealer) -> tuple[dict[str, Overlay], dict[str, str]]:
    """The same overlays with their secrets, for who asks backends; and by backend, why those of some cannot be had."""
    made, shut = dict[str, Overlay](), dict[str, str]()
    for name, overlay in found.items():
        try:
            secret = {
                field: _open(sealer, _about(name, field, overlay.key_for), text)
                for field, text in overlay.sealed.items()
            }
        except SealError as error:
            shut[name] = f"{', '.join(overlay.sealed)}: {error}"
            continue
        made[name] = overlay.model_copy(update={"fields": {**overlay.fields, **secret}, "sealed": {}})
    return made, shut


def resealed(name: str, stored: bytes, sealer: Sealer) -> bytes | None:
    """An overlay as it is stored, with its secrets sealed as they would be now, also those that were not; None where
    they are, or it cannot be read. Raises SealError."""
    overlay = read({name.encode(): stored})[0].get(name)
    if overlay is None:
        return None
    plain = {field: overlay.fields[field] for field in SECRET if isinstance(overlay.fields.get(field), str)}
    others = {field: text for field, text in overlay.sealed.items() if not _is_current(sealer, text)}
    if not (plain or others):
        return None
    about = {field: _about(name, field, overlay.key_for) for field in (*plain, *others)}
    plain |= {field: _open(sealer, about[field], text) for field, text in others.items()}
    fields = {field: value for field, value in overlay.fields.items() if field not in plain}
    sealed = {**overlay.sealed, **{field: _seal(sealer, about[field], text) for field, text in plain.items()}}
    made = overlay.model_copy(update={"fields": fields, "sealed": sealed})
    return made.model_dump_json(exclude_defaults=True).encode()


def effective(redis: Redis, settings: Settings) -> Merged:
    """Settings as they hold: the file's, and what is laid over them, for who asks no backend."""
    found, _ = read(cast("dict[bytes, bytes]", redis.hgetall(BACKENDS)))
    return merged(settings, found)


class Desk:
    """Changes backends for one admin, each with its entry in the audit log. Redis's own errors pass through.

    Args:
        settings: the file's.
        actor: see `trail.entry`.
        sealer: encrypts backends' keys, where there is a key for that.
        check: whether a backend can be addressed at all; raises SettingsError.

    Attributes:
        written: what was written last, None where that is no backend; also where `NotDurable` was raised.
    """

    def __init__(
        self,
        redis: Redis,
        settings: Settings,
        actor: str,
        sealer: Sealer,
        check: Callable[[BackendSettings], None] | None = None,
    ) -> None:
        self._redis = redis
        self._settings = settings
        self._actor = actor
        self._sealer = sealer
        self._check = check
        self.written: BackendSettings | None = None

    def add(self, name: str, fields: Mapping[str, Any]) -> BackendSettings:
        """A backend that the file does not name. Raises Conflict, InvalidRequest."""

        def change(below: BackendSettings | None, now: BackendSettings | None, _: Overlay | None) -> Overlay:
            if now is not None:
                raise Conflict("there is a backend of that name", param="name")
            return _with(Overlay(added=True), fields, below)

        return _there(self._do("backend.add", name, change, fields))

    def change(self, name: str, fields: Mapping[str, Any], action: str = "backend.change") -> BackendSettings:
        """Other settings for a backend; those that are not named stay, but at another address a key has to be given
        anew: nobody who may change a backend may have its key sent elsewhere. Raises NotFound, InvalidRequest."""

        def change(below: BackendSettings | None, now: BackendSettings | None, over: Overlay | None) -> Overlay:
            if now is None:
                raise NotFound("there is no such backend", code="backend_not_found")
            moves = "url" in fields and not same_host(now.url, fields["url"])
            if moves and now.api_key is not None and "api_key" not in fields:
                raise InvalidRequest("api_key: another address needs it anew, or null for none", param="api_key")
            return _with(over or Overlay(), fields, below)

        return _there(self._do(action, name, change, fields))

    def drain(self, name: str, *, drained: bool = True) -> BackendSettings:
        """Send a backend no new requests, or send it some again. Raises NotFound."""
        return self.change(name, {"drained": drained}, "backend.drain" if drained else "backend.undrain")

    def declare(self, name: str, fields: Mapping[str, Any]) -> BackendSettings:
        """Declare what a backend runs. Under another declaration another record of standing holds: a new one, or the
        one that it had when it last was so declared (docs/standing.md). Raises NotFound, InvalidRequest.
        """
        if other := sorted(set(fields).difference(DECLARED)):
            raise InvalidRequest(f"{other[0]} is no part of a declaration", param=other[0])
        return self.change(name, fields, "backend.declare")

    def remove(self, name: str) -> None:
        """Take a backend away, whatever the file says. What runs there is finished. Raises NotFound."""

        def change(below: BackendSettings | None, now: BackendSettings | None, _: Overlay | None) -> Overlay | None:
            if now is None:
                raise NotFound("there is no such backend", code="backend_not_found")
            return None if below is None else Overlay(removed=True)

        self._do("backend.remove", name, change)

    def reset(self, name: str) -> BackendSettings | None:
        """Let the file alone say what holds. Raises NotFound where nothing is laid over it."""

        def change(_: BackendSettings | None, __: BackendSettings | None, over: Overlay | None) -> None:
            if over is None:
                raise NotFound("nothing is laid over this backend's settings", code="backend_not_found")

        return self._do("backend.reset", name, change)

    def _do(
        self, action: str, name: str, change: Change, given: Mapping[str, Any] | None = None
    ) -> BackendSettings | None:
        for field, value in (given or {}).items():
            if isinstance(value, str) and HIDDEN in value:
                # What shows a backend says this, and whoever changes what he was shown would store it.
                raise InvalidRequest(f"{field}: {HIDDEN} stands for what is not shown; leave it out", param=field)
        below = next((each for each in self._settings.backends if each.name == name), None)
        for _ in range(_TRIES):
            stored = cast("bytes | None", self._redis.hget(BACKENDS, name))
            over = read({name.encode(): stored} if stored else {})[0].get(name)
            now = _present(self._settings, name, over)
            wanted = change(below, now, over)
            after = self.written = self._made(below, name, wanted)
            if wanted is not None:
                kept = self._stored(name, wanted, after, over)
                wanted = kept.model_copy(update={"at": time.time(), "by": self._actor})
            said = trail.entry(self._actor, action, name, **_difference(now, after))
            keys, arguments = trail.change_arguments(
                (BACKENDS, VERSION),
                name,
                (stored or b"").decode(errors="surrogateescape"),
                "" if wanted is None else wanted.model_dump_json(exclude_defaults=True),
                said,
                self._settings.admin.audit_entries,
            )
            if trail.change(self._redis, self._settings.durability, keys, arguments):
                return after
        raise StoreFailed("others keep changing this backend; try again", code="contended")

    def _made(self, below: BackendSettings | None, name: str, over: Overlay | None) -> BackendSettings | None:
        if over is None or over.removed:
            return None if over is not None else below
        try:
            made, _ = laid_over(below, name, over)
        except ValueError as error:
            key, _, said = str(error).partition(": ")
            raise InvalidRequest(f"{key}: {said}", param=key) from error
        if made.model not in self._settings.models:
            raise InvalidRequest("model: the settings have no such model", param="model")
        if self._check is not None:
            self._check(made)
        return made

    def _stored(self, name: str, wanted: Overlay, made: BackendSettings | None, over: Overlay | None) -> Overlay:
        """An overlay as Redis has it: its settings as they were understood, its secrets encrypted where they can be."""
        if made is None:
            return wanted
        plain = made.model_dump(mode="json")
        fields = {field: plain[field] for field in wanted.fields}
        sealed = dict(wanted.sealed)
        for field in SECRET:
            secret = wanted.fields.get(field)
            if secret is None:
                continue
            if self._sealer.seals:
                del fields[field]
                sealed[field] = _seal(self._sealer, _about(name, field, wanted.key_for), secret)
            elif over is not None and field in over.sealed:
                raise InvalidRequest(f"{field}: encrypted so far; storage.encryption_keys is needed", param=field)
            else:
                fields[field] = secret
        return wanted.model_copy(update={"fields": fields, "sealed": sealed})


def _with(over: Overlay, fields: Mapping[str, Any], below: BackendSettings | None) -> Overlay:
    """An overlay that says these, too. A key among them is for the server that the backend is at by then."""
    every = {**over.fields, **fields}
    sealed = {field: text for field, text in over.sealed.items() if field not in fields}
    key_for = over.key_for
    if any(field in fields for field in SECRET):
        key_for = server_of(every.get("url") if below is None or "url" in every else below.url)
    return over.model_copy(update={"fields": every, "sealed": sealed, "key_for": key_for})


def _seal(sealer: Sealer, about: bytes, secret: str) -> str:
    return base64.b64encode(sealer.seal(secret.encode(), about)).decode()


def _open(sealer: Sealer, about: bytes, text: str) -> str:
    """Raises SealError."""
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise SealError("a sealed value is no base64") from error
    if not is_sealed(data):
        raise SealError("a sealed value is cut off")
    return sealer.open(data, about).decode()


def _is_current(sealer: Sealer, text: str) -> bool:
    with contextlib.suppress(ValueError):
        return sealer.is_current(base64.b64decode(text))
    return False


def _about(name: str, field: str, server: str) -> bytes:
    """What a secret belongs to: none opens as another backend's, or for another server than it was given for."""
    return f"{BACKENDS}:{name}:{field}:{server}".encode()


def _there(backend: BackendSettings | None) -> BackendSettings:
    assert backend is not None
    return backend


def _present(settings: Settings, name: str, over: Overlay | None) -> BackendSettings | None:
    """A backend as it is now, if it is."""
    held = merged(settings, {} if over is None else {name: over}).settings
    return next((each for each in held.backends if each.name == name), None)


def _difference(before: BackendSettings | None, after: BackendSettings | None) -> dict[str, Any]:
    """What changed, without secrets, as `trail.entry` takes it."""
    old, new = _fields(before), _fields(after)
    names = [name for name in dict.fromkeys((*old, *new)) if old.get(name) != new.get(name)]
    said = {"before": {name: old.get(name) for name in names}, "after": {name: new.get(name) for name in names}}
    return {
        when: None if backend is None else shown(said[when]) for when, backend in (("before", before), ("after", after))
    }


def _fields(backend: BackendSettings | None) -> dict[str, Any]:
    if backend is None:
        return {}
    return backend.model_dump(exclude_unset=True) | {"drained": backend.drained}


def described(backend: BackendSettings) -> dict[str, Any]:
    """A backend's settings as JSON, its key only as set or not."""
    return shown(backend.model_dump())
