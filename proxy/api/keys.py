"""Client keys over HTTP, for admin keys only: make one, list them, see what one uses, revoke it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import ValidationError

from policies.errors import Conflict, InvalidRequest, NotFound, StoreUnavailable
from policies.settings import ClientKey, LimitSettings, Retain, StoredKey
from proxy.api.asking import body_of, unsure
from proxy.api.auth import Client
from proxy.api.routes import TheServices
from proxy.api.standing import Admin
from proxy.services import Services
from verifier_pool.link import keys, trail
from verifier_pool.link.durable import NotDurable
from verifier_pool.link.keys import Use, counted_keys, described, id_of
from verifier_pool.link.limit_scripts import SHOW

logger = logging.getLogger(__name__)

_FIELDS = (
    '{"name": text, "admin", "operator": true or false, "evidence": "own", "all", "none" or null, '
    '"limits": {…} or null, "expires": Unix seconds or null}'
)

router = APIRouter()


class _Wanted(msgspec.Struct, forbid_unknown_fields=True):
    """A key to be made; without limits it has those of the settings."""

    name: str
    admin: bool = False
    operator: bool = False
    evidence: Literal["own", "all", "none"] | None = None
    retain: Retain | None = None
    limits: dict[str, Any] | None = None
    expires: float | None = None


class _Other(msgspec.Struct, forbid_unknown_fields=True):
    """What is to be changed of a key; null is what the settings say."""

    limits: dict[str, Any] | msgspec.UnsetType | None = msgspec.UNSET
    retain: Retain | msgspec.UnsetType | None = msgspec.UNSET


_OTHER = '{"limits": {…} or null, "retain": "none", "rejects", "all" or null}, or one of them'


@router.get("")
async def listed(services: TheServices, admin: Admin) -> dict[str, Any]:
    """Every key, of the settings and of Redis; nothing that would let anybody in."""
    found, _ = keys.read(await services.store.all_keys())
    return {"object": "list", "data": [_shown(key) for key in (*services.settings.keys, *found)]}


@router.post("", status_code=201)
async def create(request: Request, services: TheServices, admin: Admin, response: Response) -> dict[str, Any]:
    """Make a key. Its text is in this answer and in no other."""
    wanted = await body_of(request, _Wanted, _FIELDS)
    if wanted.expires is not None and not time.time() < wanted.expires < 1e11:
        raise InvalidRequest("`expires` is a Unix second in the future", param="expires")
    limits = _limits(wanted.limits)
    try:
        text, key = keys.issue(
            wanted.name,
            time.time(),
            admin=wanted.admin,
            operator=wanted.operator,
            evidence=wanted.evidence,
            retain=wanted.retain,
            limits=limits,
            expires=wanted.expires,
        )
    except ValidationError as error:
        raise InvalidRequest(_first(error), param="name") from error
    taken = key.name in [each.name for each in services.settings.keys]
    done = None if taken else await _change(services, admin, response, "key.create", None, b"", key)
    if done is None:
        raise Conflict("there is a key of that name", param="name")
    logger.warning("a key was made", extra={"key": key.name, "admin": key.admin, "by": admin.name})
    return {**_shown(key), "key": text, **done}


@router.get("/{name}")
async def one(name: str, services: TheServices, admin: Admin) -> dict[str, Any]:
    """One key, and what is counted of it."""
    key = await _known(services, name)
    limits = key.limits if key.limits is not None else services.settings.limits
    said = await services.store.call(services.store.script(SHOW), counted_keys(id_of(key.sha256)), [limits.every])
    return {**_shown(key), "applies": limits.model_dump(exclude_none=True), "use": _use(Use(*map(int, said)))}


@router.patch("/{name}")
async def change(
    request: Request, name: str, services: TheServices, admin: Admin, response: Response
) -> dict[str, Any]:
    """Give a key other limits, all of them (null is those of the settings, {} is none), or have other evidence kept."""
    wanted, other = await body_of(request, _Other, _OTHER), dict[str, Any]()
    if wanted.limits is not msgspec.UNSET:
        other["limits"] = _limits(wanted.limits)
    if wanted.retain is not msgspec.UNSET:
        other["retain"] = wanted.retain
    if not other:
        raise InvalidRequest(f"the body is {_OTHER}")
    key = await _known(services, name)
    if not isinstance(key, StoredKey):
        raise Conflict("this key is in the settings, and can only be changed there")
    before = await services.store.key(name)
    changed, action = key.model_copy(update=other), "key.limit" if "limits" in other else "key.retain"
    done = None if before is None else await _change(services, admin, response, action, key, before, changed)
    if done is None:
        raise Conflict("the key was changed just now; nothing was done, try again")
    return _shown(changed) | done


@router.delete("/{name}")
async def revoke(name: str, services: TheServices, admin: Admin, response: Response) -> dict[str, Any]:
    """Let nobody in by this key any more; every proxy knows within two seconds, this one at once."""
    key = await _known(services, name)
    if not isinstance(key, StoredKey):
        raise Conflict("this key is in the settings, and can only be taken out there")
    if key.revoked is not None:
        return _shown(key)
    before = await services.store.key(name)
    revoked = key.model_copy(update={"revoked": time.time()})
    done = None if before is None else await _change(services, admin, response, "key.revoke", key, before, revoked)
    if done is None:
        raise Conflict("the key was changed just now; nothing was done, try again")
    logger.warning("a key was revoked", extra={"key": key.name, "by": admin.name})
    return _shown(revoked) | done


async def _known(services: Services, name: str) -> ClientKey:
    for each in services.settings.keys:
        if each.name == name:
            return each
    stored = await services.store.key(name)
    found, _ = keys.read([stored] if stored is not None else [])
    if not found:
        raise NotFound("there is no such key", code="key_not_found")
    return found[0]


async def _change(
    services: Services,
    admin: Client,
    response: Response,
    action: str,
    before: StoredKey | None,
    stored: bytes,
    after: StoredKey,
) -> dict[str, Any] | None:
    """See `trail.CHANGE`; this proxy then knows. Returns what more there is to say, None where nothing was done.

    202 where it was done and may be lost in a crash: whoever asked must hear of it, and of a key's text.
    """
    said = trail.entry(admin.actor, action, after.name, before=keys.told(before), after=keys.told(after))
    most = services.settings.admin.audit_entries
    names, arguments = keys.change_arguments(after.name, stored.decode(), after, said, most)
    more: dict[str, Any] = {}
    try:
        if not await services.store.change(trail.CHANGE, names, arguments):
            return None
    except NotDurable:
        more = unsure(response)
    try:
        await services.registry.look()
    except StoreUnavailable:
        logger.warning("redis went away after a key was changed; this proxy learns of it later")
    return more


def _limits(given: dict[str, Any] | None) -> LimitSettings | None:
    try:
        return None if given is None else LimitSettings.model_validate(given)
    except ValidationError as error:
        raise InvalidRequest(_first(error), param="limits") from error


def _first(error: ValidationError) -> str:
    """What is wrong, without the value."""
    first = error.errors()[0]
    return f"{_path(first['loc'])}: {first['msg']}"


def _path(parts: Sequence[str | int]) -> str:
    return ".".join(map(str, parts)) or "limits"


def _shown(key: ClientKey) -> dict[str, Any]:
    return {"object": "key", **described(key, time.time())}


def _use(use: Use) -> dict[str, Any]:
    ends = None if use.ends < 0 else round(time.time() + use.ends / 1000)
    return {**use._asdict(), "ends": ends}
