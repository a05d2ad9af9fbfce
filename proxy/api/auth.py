"""Who is asking: client keys by their SHA-256; without any configured, this machine only."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from policies.errors import AuthenticationFailed
from policies.settings import ClientKey, hash_key

_LONGEST_KEY = 512
_REFUSED = "no valid API key came with the request"
_NO_KEY = "this machine (no keys are set)"
_FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-real-ip")


@dataclass(frozen=True, slots=True)
class Client:
    """An authenticated client. `owner` is the SHA-256 (hex) of its key, `name` the key's in the settings; `operator`
    says that it is the operator."""

    owner: str
    name: str
    admin: bool
    operator: bool


class Keys:
    """Looks keys up by hash; the text of every refusal is the same."""

    def __init__(self, keys: Sequence[ClientKey]) -> None:
        self._keys = {key.sha256: key for key in keys}

    def client(self, headers: Mapping[bytes, bytes], peer: tuple[str, int] | None) -> Client:
        """The client behind a request. Raises AuthenticationFailed.

        Without configured keys only direct peers on this machine are served: what a proxy in front forwards
        may come from anywhere.
        """
        digest = hash_key(_bearer(headers))
        if not self._keys:
            if not is_loopback(peer[0] if peer else "") or any(name in headers for name in _FORWARDED):
                raise AuthenticationFailed(_REFUSED)
            return Client(digest, _NO_KEY, admin=True, operator=True)
        key = self._keys.get(digest)
        if not hmac.compare_digest(key.sha256 if key else "0" * 64, digest) or key is None:
            raise AuthenticationFailed(_REFUSED)
        return Client(digest, key.name, key.admin, key.operator)


def is_loopback(host: str) -> bool:
    """Whether an address literal is this machine's own."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _bearer(headers: Mapping[bytes, bytes]) -> bytes:
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    key = key.strip()
    if len(key) > _LONGEST_KEY:
        raise AuthenticationFailed(_REFUSED)
    return key if scheme.lower() == b"bearer" else b""
