"""Who is asking: client keys by their SHA-256, from the settings and from Redis; without any, this machine only."""

from __future__ import annotations

import hmac
import ipaddress
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from policies.errors import AuthenticationFailed, KeysUnavailable, StoreUnavailable
from policies.settings import ClientKey, LimitSettings, Retain, hash_key
from proxy.limits.registry import Registry
from verifier_pool.link.keys import LONGEST, id_of

_REFUSED = "no valid API key came with the request"
_NO_KEY = "this machine (no keys are set)"
THIS_MACHINE = "local"
"""Under which this machine is counted where there are no keys."""
_FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-real-ip")
_HOST = re.compile(r"(?:\[([0-9a-f:.]{2,45})\]|([0-9a-z_.-]{1,254}))(?::([0-9]{0,5}))?")
_LONGEST_HOST = 254 + len(":65535")
_LABEL = re.compile(r"[0-9a-z_](?:[0-9a-z_-]{0,61}[0-9a-z_])?")
_WEB = re.compile(rb"https?://", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Client:
    """An authenticated client.

    Attributes:
        owner: SHA-256 (hex) of its key. `id`: what its use is counted under.
        name: its key's.
        operator: it is the operator.
        limits: what it may use; None where there is no limit.
        evidence: whose evidence bundles it may read: `own`, `all` or `none`.
        retain: what is kept of its answers' evidence; None is what the settings say.
        known_as: its name in the audit log, where that is not its key's.
    """

    owner: str
    name: str
    admin: bool
    operator: bool
    id: str = ""
    limits: LimitSettings | None = None
    evidence: str = "own"
    retain: Retain | None = None
    known_as: str = ""

    @property
    def actor(self) -> str:
        """Who this is in the audit log."""
        return self.known_as or f"key:{self.name}"


class Keys:
    """Looks keys up by hash. The text of every refusal is the same, whether a key is unknown, revoked or expired.

    Args:
        keys: those of the settings.
        limits: of keys without their own, and of this machine where there are no keys.
        registry: those in Redis.
    """

    def __init__(
        self, keys: Sequence[ClientKey], limits: LimitSettings | None = None, registry: Registry | None = None
    ) -> None:
        self._keys = {key.sha256: key for key in keys}
        self._limits = limits or LimitSettings()
        self._registry = registry

    async def authenticate(self, headers: Mapping[bytes, bytes], peer: tuple[str, int] | None) -> Client:
        """The client behind a request; Redis is asked where nothing is known of its key.

        Raises AuthenticationFailed; KeysUnavailable where Redis would have to be asked and does not answer.
        """
        try:
            return self.client(headers, peer)
        except AuthenticationFailed:
            if self._registry is None or not bearer(headers):
                raise
        except KeysUnavailable:
            pass
        assert self._registry is not None
        try:
            await self._registry.look()
        except StoreUnavailable:
            raise KeysUnavailable("keys cannot be checked right now; try again soon") from None
        return self.client(headers, peer)

    def client(self, headers: Mapping[bytes, bytes], peer: tuple[str, int] | None) -> Client:
        """The client behind a request, by what is known here. Raises AuthenticationFailed and KeysUnavailable.

        Without any keys only direct peers on this machine are served: what a proxy in front forwards may come from
        anywhere. And only by a name of this machine, from a page of this machine if from a page at all: a web page
        whose name is made to lead here speaks through a browser that runs here. Where Redis never said whether there
        are keys, nobody is: those there are would have closed this door.
        """
        digest = hash_key(bearer(headers))
        key = self._keys.get(digest) or self._stored(digest)
        if hmac.compare_digest(key.sha256 if key else "0" * 64, digest) and key is not None:
            own = self._of(key.limits)
            return Client(digest, key.name, key.admin, key.operator, id_of(digest), own, key.may_read, key.retain)
        if self._keys or (self._registry is not None and self._registry.any):
            raise AuthenticationFailed(_REFUSED)
        if not is_this_machine(headers, peer):
            raise AuthenticationFailed(_REFUSED)
        if self._registry is not None and not self._registry.heard:
            raise KeysUnavailable("redis has not said yet whether there are keys; try again soon")
        return Client(
            digest, _NO_KEY, admin=True, operator=True, id=THIS_MACHINE, limits=self._of(None), evidence="all"
        )

    def _stored(self, digest: str) -> ClientKey | None:
        key = None if self._registry is None else self._registry.known.get(digest)
        return key if key is not None and key.usable(time.time()) else None

    def _of(self, own: LimitSettings | None) -> LimitSettings | None:
        limits = own if own is not None else self._limits
        return None if limits.unlimited else limits


@lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    """Whether an address literal is this machine's own."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def names_this_machine(authority: bytes) -> bool:
    """Whether the value of a Host header, `host` or `host:port`, can only mean this machine.

    That is a loopback address (IPv6 in brackets), `localhost` or a name below it, which no resolver may send
    elsewhere (RFC 6761 6.3).
    """
    plain = authority.strip(b" \t")
    return len(plain) <= _LONGEST_HOST and _names_this_machine(plain)


@lru_cache(maxsize=256)
def _names_this_machine(authority: bytes) -> bool:
    found = _HOST.fullmatch(authority.decode("latin-1").lower())
    if found is None or int(found[3] or 0) > 65535:
        return False
    if found[1] is not None:
        return ":" in found[1] and is_loopback(found[1])
    name = found[2].removesuffix(".")
    *labels, last = name.split(".")
    return is_loopback(name) or (last == "localhost" and all(_LABEL.fullmatch(label) for label in labels))


def is_this_machine(headers: Mapping[bytes, bytes], peer: tuple[str, int] | None) -> bool:
    """Whether a request is this machine's own: nobody's behind another proxy, and no web page's from elsewhere."""
    direct = is_loopback(peer[0] if peer else "") and not any(name in headers for name in _FORWARDED)
    return direct and names_this_machine(headers.get(b"host", b"")) and _from_here(headers)


def _from_here(headers: Mapping[bytes, bytes]) -> bool:
    """Whether no web page sends this, or one of this machine. The origin `null` may be anybody's."""
    origin = headers.get(b"origin")
    if origin is None:
        return True
    scheme = _WEB.match(origin.strip(b" \t"))
    return scheme is not None and names_this_machine(origin.strip(b" \t")[scheme.end() :])


def bearer(headers: Mapping[bytes, bytes]) -> bytes:
    """The key: as OpenAI's clients send it, or as those of the Messages API do. Raises AuthenticationFailed for one
    that is too long to be any."""
    authorization = headers.get(b"authorization")
    if authorization is None:
        scheme, key = b"bearer", headers.get(b"x-api-key", b"").strip()
    else:
        scheme, _, key = authorization.partition(b" ")
        key = key.strip()
    if len(key) > LONGEST:
        raise AuthenticationFailed(_REFUSED)
    return key if scheme.lower() == b"bearer" else b""
