"""One POST to a receiver on the open internet, and nowhere else unless the operator says so.

The guard works at connect time: the name is resolved here, every address is checked, and the connection goes
to the checked address under the original name (Host and SNI), so a name cannot change its mind in between.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

import httpx

TIMEOUT_SECONDS = 15.0
MAX_RESPONSE_BYTES = 64 * 1024

_CARRIERS = tuple(
    ipaddress.ip_network(text) for text in ("2001::/32", "2002::/16", "3fff::/20", "192.0.0.0/24", "192.88.99.0/24")
)
"""Ranges that carry an IPv4 address inside (Teredo, 6to4), and some that Python 3.11 still calls global."""
_UNICAST = ipaddress.ip_network("2000::/3")
"""All of IPv6 that is routed on the open internet; NAT64, IPv4-compatible and translated addresses lie outside."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one attempt: the status, or a fixed error code when there was none.

    `retry_after` is what the receiver asked for, in seconds.
    """

    status: int | None = None
    error: str = ""
    retry_after: float | None = None

    @property
    def delivered(self) -> bool:
        """Only 2xx counts; a redirect is a failure."""
        return self.status is not None and 200 <= self.status < 300


class BlockedAddress(Exception):
    """The receiver's name leads to an address that is not on the open internet."""


def is_public(address: str) -> bool:
    """Whether an IP address is on the open internet, whatever way it is written."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if isinstance(ip, ipaddress.IPv6Address) and ip not in _UNICAST:
        return False
    if any(ip in network for network in _CARRIERS if network.version == ip.version):
        return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)


def post(url: str, headers: Mapping[str, str], body: bytes, *, allow_private: bool, now: float) -> Outcome:
    """POST once; name, connection and answer together take at most fifteen seconds. Never raises.

    `now` in Unix seconds turns a dated `retry-after` into seconds.
    """
    try:
        return asyncio.run(asyncio.wait_for(_post(httpx.URL(url), headers, body, allow_private, now), TIMEOUT_SECONDS))
    except BlockedAddress:
        return Outcome(error="blocked_address")
    except TimeoutError:
        return Outcome(error="timeout")
    except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError):
        # A host no codec can turn into a name ends up here too.
        return Outcome(error="unreachable")


async def _post(url: httpx.URL, headers: Mapping[str, str], body: bytes, allow_private: bool, now: float) -> Outcome:
    address = await _resolve(url, allow_private)
    sent = dict(headers) | {"host": url.netloc.decode("ascii")}
    async with httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_SECONDS, follow_redirects=False) as client:
        request = client.build_request(
            "POST", url.copy_with(host=address), headers=sent, content=body, extensions={"sni_hostname": url.host}
        )
        response = await client.send(request, stream=True)
        try:
            read = 0
            async for piece in response.aiter_raw():
                read += len(piece)
                if read > MAX_RESPONSE_BYTES:
                    break
        finally:
            await response.aclose()
    return Outcome(response.status_code, retry_after=_seconds(response.headers.get("retry-after"), now))


async def _resolve(url: httpx.URL, allow_private: bool) -> str:
    port = url.port or (443 if url.scheme == "https" else 80)
    found = await asyncio.get_running_loop().getaddrinfo(url.host, port, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in found]
    if not addresses:
        raise OSError("no address")
    # One bad address among good ones is how a rebinding name looks; refuse them all.
    if not allow_private and not all(is_public(address) for address in addresses):
        raise BlockedAddress
    return addresses[0]


def _seconds(value: str | None, now: float) -> float | None:
    if value is None:
        return None
    if value.strip().isascii() and value.strip().isdigit():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - now)
    except (ValueError, TypeError, OverflowError):
        return None
