"""Who asks the admin API: keys of its own, by their SHA-256; without any, this machine only. Guessing is slow."""

from __future__ import annotations

import hmac
import ipaddress
import math
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from policies.errors import AuthenticationFailed, RateLimited
from policies.settings import AdminKey, hash_key
from proxy.api.auth import bearer, is_this_machine

_REFUSED = "no valid admin key came with the request"
_MOST_FAILURES = 10
"""Refused requests of one address within `_WINDOW` seconds after which it is told to wait."""
_WINDOW = 60.0
_MOST_ADDRESSES = 10_000


@dataclass(frozen=True, slots=True)
class Admin:
    """Who asks.

    Attributes:
        name: its key's, or this machine's. `actor`: as the audit log has it.
        read_only: it may change nothing.
    """

    name: str
    actor: str
    read_only: bool


class Failures:
    """Refused requests by address, as far back as they count. An IPv6 network of a subscriber (/64) is one address."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: OrderedDict[str, list[float]] = OrderedDict()

    def wait(self, host: str) -> float:
        """Seconds that this address has to wait; 0 where it need not."""
        times = self._recent(host)
        return 0.0 if len(times) < _MOST_FAILURES else max(0.0, times[-_MOST_FAILURES] + _WINDOW - self._clock())

    def note(self, host: str) -> None:
        """One more. The address that was refused longest ago is forgotten where there are too many."""
        self._times[_network(host)] = [*self._recent(host), self._clock()][-_MOST_FAILURES:]
        self._times.move_to_end(_network(host))
        if len(self._times) > _MOST_ADDRESSES:
            self._times.popitem(last=False)

    def _recent(self, host: str) -> list[float]:
        since = self._clock() - _WINDOW
        return [at for at in self._times.get(_network(host), ()) if at > since]


class AdminKeys:
    """Lets admins in. Of keys all are compared, each in constant time; no refusal says what was wrong.

    A right key is always let in, since whoever guesses may share an admin's address: behind one that translates them,
    all come from it. An address that was refused too often is told to wait for its next refusal.
    """

    def __init__(self, failures: Failures | None = None) -> None:
        self._failures = failures or Failures()

    def authenticate(
        self, keys: Sequence[AdminKey], headers: Mapping[bytes, bytes], peer: tuple[str, int] | None
    ) -> Admin:
        """Who asks. Raises AuthenticationFailed, and RateLimited where this address was refused too often."""
        try:
            return _admin(keys, headers, peer)
        except AuthenticationFailed as error:
            host = peer[0] if peer else ""
            if (seconds := self._failures.wait(host)) > 0:
                said = "too many requests without a valid key; try again later"
                raise RateLimited(said, retry_after=math.ceil(seconds)) from error
            self._failures.note(host)
            raise


def _admin(keys: Sequence[AdminKey], headers: Mapping[bytes, bytes], peer: tuple[str, int] | None) -> Admin:
    digest = hash_key(bearer(headers))
    found = [key for key in keys if hmac.compare_digest(key.sha256, digest)]
    if found:
        return Admin(found[0].name, f"key:{found[0].name}", found[0].read_only)
    if keys or not is_this_machine(headers, peer):
        raise AuthenticationFailed(_REFUSED)
    return Admin("this machine", f"local@{socket.gethostname()}", False)


def _network(host: str) -> str:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))
    return str(getattr(address, "ipv4_mapped", None) or address)
