"""Webhooks that clients and admins registered: their records in Redis, secrets, and who may hear what.

    webhooks          hash: by id a webhook as JSON (`Endpoint`); its secrets are sealed (`link.sealing`)
    webhooks-version  another text after each change of `webhooks`

The webhook of the settings is one of them, called `settings`, and in no hash.
"""

from __future__ import annotations

import base64
import contextlib
import secrets
from typing import Any, cast

import msgspec
from redis import Redis

from policies.errors import SealError
from policies.settings import Settings
from policies.subscription import Subscription
from verifier_pool.link import trail
from verifier_pool.link.queue import ENDPOINTS, PREFIX
from verifier_pool.link.sealing import Sealer

VERSION = PREFIX + "webhooks-version"
SETTINGS = "settings"
"""Id of the webhook that the settings name."""
MOST = 10_000
"""Webhooks in all."""
MOST_SECRETS = 5
OVERLAP = 86_400
"""Seconds for which a secret signs on after it was replaced."""
_SECRET_BYTES = 32


class Secret(msgspec.Struct, frozen=True, omit_defaults=True):
    """One secret: sealed, in base64; it signs until that Unix second, None is for good."""

    sealed: str
    until: float | None = None


class Endpoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One webhook.

    Attributes:
        owner: SHA-256 of the client key whose it is, '' for the operator's, which hears of all; `key`: that key's name.
        wanted: what it takes, `Subscription` as JSON has it.
        secrets: the latest first.
        created: Unix second.
    """

    id: str
    url: str
    owner: str = ""
    key: str = ""
    wanted: dict[str, Any] = {}
    secrets: tuple[Secret, ...] = ()
    created: float = 0.0

    @property
    def subscription(self) -> Subscription:
        """What it takes."""
        return Subscription.model_validate(self.wanted)

    @property
    def tenant(self) -> str:
        """Whose turn its deliveries take, and who is held back when its receivers are slow: all webhooks of a client
        key are one; of the operator's each is one."""
        return self.owner or self.id


_decoder = msgspec.json.Decoder(Endpoint)


def new_id() -> str:
    """An id that nobody can guess."""
    return "we_" + secrets.token_hex(12)


def new_secret() -> str:
    """A secret as Standard Webhooks have it."""
    return "whsec_" + base64.b64encode(secrets.token_bytes(_SECRET_BYTES)).decode()


def sealed(sealer: Sealer, id: str, secret: str, until: float | None = None) -> Secret:
    """A secret as it is stored with the webhook of that id."""
    return Secret(base64.b64encode(sealer.seal(secret.encode(), _about(id))).decode(), until)


def secrets_of(endpoint: Endpoint, sealer: Sealer, settings: Settings, now: float) -> str:
    """The secrets that sign at that time, with spaces between. Earlier ones that cannot be opened are left out, as
    receivers go by any one; raises SealError where the latest cannot."""
    if endpoint.id == SETTINGS:
        return "" if settings.webhook is None else settings.webhook.secret.get_secret_value()
    current = [each for each in endpoint.secrets if each.until is None or each.until > now]
    found = [_opened(endpoint.id, each, sealer) for each in current[:1]]
    for each in current[1:]:
        with contextlib.suppress(SealError, ValueError):
            found.append(_opened(endpoint.id, each, sealer))
    return " ".join(found)


def rotated(endpoint: Endpoint, sealer: Sealer, secret: str, now: float, overlap: float) -> Endpoint:
    """The webhook with another secret; the present ones sign for `overlap` seconds more, or as long as they would."""
    until = now + overlap
    old = [Secret(each.sealed, until if each.until is None else min(each.until, until)) for each in endpoint.secrets]
    kept = [each for each in old if each.until is not None and each.until > now][: MOST_SECRETS - 1]
    return msgspec.structs.replace(endpoint, secrets=(sealed(sealer, endpoint.id, secret), *kept))


def resealed(id: str, stored: bytes, sealer: Sealer) -> bytes | None:
    """A webhook as it is stored, with its secrets sealed as they would be now; None where they are, or it cannot be
    read. Earlier ones that cannot be opened any more stay as they are; raises SealError where the latest cannot."""
    endpoint = read(stored)
    if endpoint is None or endpoint.id != id:
        return None
    try:
        found = [base64.b64decode(each.sealed, validate=True) for each in endpoint.secrets]
    except ValueError as error:
        raise SealError("a sealed value is no base64") from error
    again = list(endpoint.secrets)
    for at, (secret, value) in enumerate(zip(endpoint.secrets, found, strict=True)):
        if not sealer.is_current(value):
            try:
                again[at] = sealed(sealer, id, _opened(id, secret, sealer), secret.until)
            except SealError:
                if at == 0:
                    raise
    if again == list(endpoint.secrets):
        return None
    return msgspec.json.encode(msgspec.structs.replace(endpoint, secrets=tuple(again)))


def of_settings(settings: Settings) -> Endpoint | None:
    """The webhook of the settings: it takes everything."""
    webhook = settings.webhook
    return None if webhook is None else Endpoint(id=SETTINGS, url=webhook.url, wanted={})


def every(redis: Redis, settings: Settings, owner: str | None = None) -> list[Endpoint]:
    """All webhooks, or those of an owner; that of the settings first, the others as they were made."""
    stored = cast("list[bytes]", redis.hvals(ENDPOINTS))
    found = [each for each in (read(each, owner) for each in stored) if each is not None]
    own = of_settings(settings) if not owner else None
    return [*([] if own is None else [own]), *sorted(found, key=lambda each: (each.created, each.id))]


def one(redis: Redis, settings: Settings, id: str) -> tuple[Endpoint | None, str]:
    """A webhook, None where there is none or it cannot be read, and how it is stored."""
    if id == SETTINGS:
        return of_settings(settings), ""
    stored = cast("bytes | None", redis.hget(ENDPOINTS, id))
    return read(stored or b""), (stored or b"").decode(errors="surrogateescape")


def count(redis: Redis) -> int:
    """How many there are beside that of the settings."""
    return redis.hlen(ENDPOINTS)


def any_registered(redis: Redis) -> bool:
    """Whether there is any beside that of the settings."""
    return bool(redis.exists(ENDPOINTS))


def change(redis: Redis, settings: Settings, id: str, before: str, after: Endpoint | None, entry: str) -> bool:
    """Put a webhook in the place of what was stored, durably, with its entry in the audit log; false where that has
    changed. Raises NotDurable where it was done and may be lost."""
    written = "" if after is None else msgspec.json.encode(after).decode()
    names, arguments = trail.change_arguments(
        (ENDPOINTS, VERSION), id, before, written, entry, settings.admin.audit_entries
    )
    return trail.change(redis, settings.durability, names, arguments)


def _opened(id: str, secret: Secret, sealer: Sealer) -> str:
    return sealer.open(base64.b64decode(secret.sealed), _about(id)).decode()


def _about(id: str) -> bytes:
    return f"{ENDPOINTS}:{id}".encode()


def read(stored: bytes, owner: str | None = None) -> Endpoint | None:
    """A webhook as it is stored; None where that cannot be read, or it is another owner's than the one that is asked
    for. Of others' it is not read what they take, which costs most."""
    try:
        found = _decoder.decode(stored)
        if owner is not None and found.owner != owner:
            return None
        _ = found.subscription
    except (msgspec.MsgspecError, ValueError):
        return None
    return found
