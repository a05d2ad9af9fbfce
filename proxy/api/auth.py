"""Who is asking: client keys by their SHA-256; without any configured, this machine only."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from policies.errors import AuthenticationFailed
from policies.settings import ClientKey, hash_key

_LONGEST_KEY = 512
_REFUSED = "no valid API key came with the request"
_NO_KEY = "this machine (no keys are set)"
_FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-real-ip")
_HOST = re.compile(r"(?:\[([0-9a-f:.]{2,45})\]|([0-9a-z_.-]{1,254}))(?::([0-9]{0,5}))?")
_LABEL = re.compile(r"[0-9a-z_](?:[0-9a-z_-]{0,61}[0-9a-z_])?")
_WEB = re.compile(rb"https?://", re.IGNORECASE)


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
        may come from anywhere. And only by a name of this machine, from a page of this machine if from a page at all:
        a web page whose name is made to lead here speaks through a browser that runs here.
        """
        digest = hash_key(_bearer(headers))
        if not self._keys:
            direct = is_loopback(peer[0] if peer else "") and not any(name in headers for name in _FORWARDED)
            if not (direct and names_this_machine(headers.get(b"host", b"")) and _from_here(headers)):
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


def names_this_machine(authority: bytes) -> bool:
    """Whether the value of a Host header, `host` or `host:port`, can only mean this machine.

    That is a loopback address (IPv6 in brackets), `localhost` or a name below it, which no resolver may send
    elsewhere (RFC 6761 6.3).
    """
    found = _HOST.fullmatch(authority.strip(b" \t").decode("latin-1").lower())
    if found is None or int(found[3] or 0) > 65535:
        return False
    if found[1] is not None:
        return ":" in found[1] and is_loopback(found[1])
    name = found[2].removesuffix(".")
    *labels, last = name.split(".")
    return is_loopback(name) or (last == "localhost" and all(_LABEL.fullmatch(label) for label in labels))


def _from_here(headers: Mapping[bytes, bytes]) -> bool:
    """Whether no web page sends this, or one of this machine. The origin `null` may be anybody's."""
    origin = headers.get(b"origin")
    if origin is None:
        return True
    scheme = _WEB.match(origin.strip(b" \t"))
    return scheme is not None and names_this_machine(origin.strip(b" \t")[scheme.end() :])


def _bearer(headers: Mapping[bytes, bytes]) -> bytes:
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    key = key.strip()
    if len(key) > _LONGEST_KEY:
        raise AuthenticationFailed(_REFUSED)
    return key if scheme.lower() == b"bearer" else b""
