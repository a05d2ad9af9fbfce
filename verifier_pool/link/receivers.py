"""Webhooks as their owners and admins see and change them: registered, tried, switched on again, sent anew, removed.

Nothing here sends anything: what there is to send goes to the sender's queue, and the sender alone may reach receivers.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec
from pydantic import ValidationError
from redis import Redis

from policies.errors import Conflict, InvalidRequest, NotFound, PermissionDenied
from policies.settings import Settings
from policies.subscription import TEST, Subscription, check_url
from verifier_pool.link import allowance, deliveries, delivery_log, endpoints, trail
from verifier_pool.link.endpoints import SETTINGS, Endpoint
from verifier_pool.link.queue import OUTBOX
from verifier_pool.link.sealing import Sealer

POLL = 0.1
"""Seconds between two looks at what became of an event."""
UNDECIDED = ("waiting", "sending")
LONGEST_OVERLAP = 30 * 86_400
MOST_AGAIN = 1000
"""Deliveries that one request sends again."""
TESTS, TEST_SECONDS = 30, 60
"""How often a client key may have a webhook tried, or register one, which tries it: nobody had to agree to be one."""
AGAIN_SECONDS = 600
"""Seconds in which a client key may have `MOST_AGAIN` deliveries sent again."""


@dataclass(frozen=True, slots=True)
class Asker:
    """Who asks.

    Attributes:
        actor: in the audit log (`trail.entry`).
        owner: SHA-256 of the client key; '' is the operator. `key`: its name.
        admin: it sees and changes every webhook.
    """

    actor: str
    owner: str = ""
    key: str = ""
    admin: bool = True


@dataclass(frozen=True, slots=True)
class House:
    """Where webhooks are kept, and by which rules."""

    redis: Redis
    settings: Settings
    sealer: Sealer


def described(house: House, endpoint: Endpoint, asker: Asker) -> dict[str, Any]:
    """A webhook as JSON, with how it is doing and without its secrets. Only its owner sees more of its URL than where
    it leads: the rest may be what lets events in."""
    mine = endpoint.owner == asker.owner and endpoint.id != SETTINGS
    found: dict[str, Any] = {
        "object": "webhook",
        "id": endpoint.id,
        "url": endpoint.url if mine else _origin(endpoint.url),
        "key": endpoint.key or None,
        "created": endpoint.created or None,
        **endpoint.subscription.model_dump(mode="json"),
        **delivery_log.state(house.redis, endpoint),
    }
    if endpoint.id == SETTINGS and (webhook := house.settings.webhook) is not None:
        found |= {"allow_private": webhook.allow_private, "retries": list(webhook.retries)}
    if not endpoint.owner:
        found |= {"everyone": True, "outbox": house.redis.zcard(OUTBOX)}
    found["secrets"] = max(1, len([each for each in endpoint.secrets if (each.until or time.time() + 1) > time.time()]))
    return found


def listed(house: House, asker: Asker) -> list[dict[str, Any]]:
    """Every webhook that the asker may see."""
    found = endpoints.every(house.redis, house.settings, None if asker.admin else asker.owner)
    return [described(house, each, asker) for each in found if _may_see(asker, each)]


def shown(house: House, asker: Asker, id: str) -> dict[str, Any]:
    """One webhook. Raises NotFound, whether there is none or it is another key's."""
    return described(house, _known(house, asker, id)[0], asker)


def register(house: House, asker: Asker, url: str, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Register a webhook, and send it an event to try it; returns it with its secret, which nobody is told again.

    Raises InvalidRequest for a URL or filters that cannot be, PermissionDenied for what is for admins, Conflict where
    the key has as many as it may have, RateLimited where it tries too many.
    """
    subscription, now = _wanted(asker, wanted), time.time()
    _check_url(house, url)
    _spend(house, asker, "tests", 1, TESTS, TEST_SECONDS)
    _check_room(house, asker)
    id, secret = endpoints.new_id(), endpoints.new_secret()
    endpoint = Endpoint(
        id=id,
        url=url,
        owner=asker.owner,
        key=asker.key,
        wanted=subscription.model_dump(mode="json", exclude_defaults=True),
        secrets=(endpoints.sealed(house.sealer, id, secret),),
        created=now,
    )
    said = _entry(asker, "webhook.add", endpoint, after=_told(endpoint))
    endpoints.change(house.redis, house.settings, id, "", endpoint, said)
    if _too_many(house, asker, id):
        # Somebody registered another one in the same moment.
        endpoints.change(house.redis, house.settings, id, msgspec.json.encode(endpoint).decode(), None, "")
        raise Conflict(_most(house))
    return {**described(house, endpoint, asker), "secret": secret, "test": send(house, endpoint, asker)}


def changed(house: House, asker: Asker, id: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Give a webhook another `url`, or other filters: those that are named. Another URL is another receiver, so it is
    no longer switched off. Raises what `register` does, and NotFound."""
    endpoint, stored = _own(house, asker, id)
    rest = dict(fields)
    url = rest.pop("url", endpoint.url)
    if not isinstance(url, str):
        raise InvalidRequest("`url` is text", param="url")
    subscription = _wanted(asker, {**endpoint.wanted, **rest})
    _check_url(house, url)
    after = msgspec.structs.replace(
        endpoint, url=url, wanted=subscription.model_dump(mode="json", exclude_defaults=True)
    )
    _change(house, asker, "webhook.change", endpoint, stored, after)
    return described(house, after, asker)


def rotated(house: House, asker: Asker, id: str, overlap: float = endpoints.OVERLAP) -> dict[str, Any]:
    """Give a webhook another secret; the present one signs beside it for `overlap` seconds. Returns the new one, which
    nobody is told again."""
    if not 0 <= overlap <= LONGEST_OVERLAP:
        raise InvalidRequest(f"`overlap` is seconds, {LONGEST_OVERLAP} at most", param="overlap")
    endpoint, stored = _own(house, asker, id)
    secret = endpoints.new_secret()
    after = endpoints.rotated(endpoint, house.sealer, secret, time.time(), overlap)
    _change(house, asker, "webhook.rotate", endpoint, stored, after)
    return {**described(house, after, asker), "secret": secret}


def removed(house: House, asker: Asker, id: str) -> None:
    """Drop a webhook, with everything that waits for it and its log."""
    endpoint, stored = _own(house, asker, id)
    _change(house, asker, "webhook.remove", endpoint, stored, None)
    delivery_log.forget(house.redis, id)


def forget_of(redis: Redis, settings: Settings, owner: str) -> None:
    """Drop the webhooks of a client key that is gone."""
    for each in endpoints.every(redis, settings, owner):
        _, stored = endpoints.one(redis, settings, each.id)
        endpoints.change(redis, settings, each.id, stored, None, "")
        delivery_log.forget(redis, each.id)


def tried(house: House, asker: Asker, id: str) -> dict[str, Any]:
    """Send a webhook an event that says nothing; returns it. Raises Conflict while it is switched off, and
    RateLimited."""
    endpoint, _ = _known(house, asker, id)
    if delivery_log.state(house.redis, endpoint)["disabled"]:
        raise Conflict("the webhook is switched off; resume it first")
    _spend(house, asker, "tests", 1, TESTS, TEST_SECONDS)
    _note(house, asker, TEST, endpoint)
    return send(house, endpoint, asker)


def attempt(house: House, asker: Asker, id: str, seconds: float) -> dict[str, Any]:
    """As `tried`, but returns what became of it within `seconds`."""
    deadline, found = time.monotonic() + seconds, tried(house, asker, id)
    while found["status"] in UNDECIDED and time.monotonic() < deadline:
        time.sleep(POLL)
        found["status"] = status(house.redis, found["delivery"])
    return found


def send(house: House, endpoint: Endpoint, asker: Asker) -> dict[str, Any]:
    """The event that tries a webhook, on its way. Raises Conflict where too much waits before it."""
    id, rules = secrets.token_hex(16), house.settings.deliveries
    found = deliveries.test(house.redis, rules, rules.retries, endpoint, id, asker.key or "operator")
    if not found:
        raise Conflict("too much waits for this webhook")
    return {"object": "event", "id": id, "type": TEST, "delivery": found, "status": "waiting"}


def status(redis: Redis, delivery: str) -> str:
    """What became of a delivery: `delivered`, `failed`, `retrying`, `sending`, or `waiting` for a sender."""
    found = deliveries.find(redis, delivery)
    return "failed" if found is None else found.status


def resumed(house: House, asker: Asker, id: str) -> dict[str, Any]:
    """Send to a webhook again that was switched off. Raises Conflict where it was not."""
    endpoint, _ = _known(house, asker, id)
    if not delivery_log.resume(house.redis, endpoint.id):
        raise Conflict("the webhook is not switched off")
    _note(house, asker, "webhook.resume", endpoint)
    return described(house, endpoint, asker)


def log(house: House, asker: Asker, id: str, **which: Any) -> list[dict[str, Any]]:
    """A webhook's deliveries, the latest first; `which` is that of `delivery_log.log`."""
    endpoint, _ = _known(house, asker, id)
    return [each.shown() for each in delivery_log.log(house.redis, endpoint.id, **which)]


def replayed(house: House, asker: Asker, id: str, wanted: Sequence[str] | None) -> list[dict[str, Any]]:
    """Send deliveries again that are over, byte for byte, or all that failed (None), a thousand at most; returns what
    became of each. Raises Conflict while it is switched off, and RateLimited."""
    endpoint, _ = _known(house, asker, id)
    if delivery_log.state(house.redis, endpoint)["disabled"]:
        raise Conflict("the webhook is switched off; resume it first")
    rules = house.settings.deliveries
    if wanted is None:
        failed = delivery_log.log(house.redis, endpoint.id, limit=MOST_AGAIN, status="failed")
        wanted = [each.id for each in reversed(failed)]
    wanted = list(wanted)[:MOST_AGAIN]
    _spend(house, asker, "replays", len(wanted), MOST_AGAIN, AGAIN_SECONDS)
    found = []
    for each in wanted:
        mine = each.rpartition("-")[0] == endpoint.id
        why = deliveries.again(house.redis, rules, rules.retries, each) if mine else "there is no such delivery"
        found.append({"id": each, "done": why is None, "why": why})
    _note(house, asker, "webhook.replay", endpoint, after={"done": sum(each["done"] for each in found)})
    return found


def _spend(house: House, asker: Asker, what: str, count: int, most: int, seconds: int) -> None:
    """What is sent because somebody says so goes to any address: where it is not an admin, only so often."""
    if not asker.admin:
        allowance.spend(house.redis, f"webhook-{what}", asker.owner, count, most, seconds)


def _may_see(asker: Asker, endpoint: Endpoint) -> bool:
    return asker.admin or (endpoint.owner == asker.owner and endpoint.id != SETTINGS)


def _known(house: House, asker: Asker, id: str) -> tuple[Endpoint, str]:
    endpoint, stored = endpoints.one(house.redis, house.settings, id)
    if endpoint is None or not _may_see(asker, endpoint):
        if id == SETTINGS and asker.admin:
            raise Conflict("the settings name no webhook")
        raise NotFound("there is no such webhook", code="webhook_not_found")
    return endpoint, stored


def _own(house: House, asker: Asker, id: str) -> tuple[Endpoint, str]:
    endpoint, stored = _known(house, asker, id)
    if endpoint.id == SETTINGS:
        raise Conflict("this webhook is in the settings, and can only be changed there")
    return endpoint, stored


def _wanted(asker: Asker, fields: Mapping[str, Any]) -> Subscription:
    try:
        found = Subscription.model_validate(dict(fields))
    except ValidationError as error:
        first = error.errors()[0]
        param = str(first["loc"][0]) if first["loc"] else "events"
        raise InvalidRequest(f"{'.'.join(map(str, first['loc']))}: {first['msg']}", param=param) from error
    if not asker.admin and (found.everyone or found.about_backends):
        raise PermissionDenied("events of backends, and of everyone's answers, are for admin keys")
    return found


def _check_url(house: House, url: str) -> None:
    try:
        check_url(url, house.settings.deliveries)
    except ValueError as error:
        raise InvalidRequest(f"`url`: {error}", param="url") from error


def _check_room(house: House, asker: Asker) -> None:
    if not asker.admin and not house.settings.deliveries.endpoints:
        raise PermissionDenied("webhooks are registered by admins here")
    if endpoints.count(house.redis) >= endpoints.MOST or (not asker.admin and _full(house, asker)):
        raise Conflict(_most(house))


def _full(house: House, asker: Asker) -> bool:
    return len(endpoints.every(house.redis, house.settings, asker.owner)) >= house.settings.deliveries.endpoints


def _too_many(house: House, asker: Asker, id: str) -> bool:
    if asker.admin:
        return False
    mine = endpoints.every(house.redis, house.settings, asker.owner)
    return id not in [each.id for each in mine[: house.settings.deliveries.endpoints]]


def _most(house: House) -> str:
    return f"there are as many webhooks as there may be, {house.settings.deliveries.endpoints} for a client key"


def _change(house: House, asker: Asker, action: str, before: Endpoint, stored: str, after: Endpoint | None) -> None:
    said = _entry(asker, action, before, before=_told(before), after=None if after is None else _told(after))
    if not endpoints.change(house.redis, house.settings, before.id, stored, after, said):
        raise Conflict("the webhook was changed just now; nothing was done, try again")


def _note(
    house: House, asker: Asker, action: str, endpoint: Endpoint, *, after: Mapping[str, Any] | None = None
) -> None:
    if said := _entry(asker, action, endpoint, after=after):
        trail.append(house.redis, house.settings.admin.audit_entries, said)


def _entry(asker: Asker, action: str, endpoint: Endpoint, **more: Any) -> str:
    """What the audit log has of it. It is of what admins do; clients could fill it with nothing else."""
    return trail.entry(asker.actor, action, f"{endpoint.id} {_host(endpoint.url)}", **more) if asker.admin else ""


def _told(endpoint: Endpoint) -> dict[str, Any]:
    return {"host": _host(endpoint.url), "of": endpoint.key or "operator", **endpoint.wanted}


def _host(url: str) -> str:
    """All of a receiver's URL that anybody may read."""
    return urlsplit(url).hostname or ""


def _origin(url: str) -> str:
    """As `_host`, with how it is reached."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
