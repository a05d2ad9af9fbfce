"""One POST to a receiver on the open internet, and nowhere else unless the operator says so.

The guard works at connect time: the name is resolved here, every address is checked, and the connection goes
to the checked address under the original name (Host and SNI), so a name cannot change its mind in between.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cache, partial

import httpx

from policies.subscription import is_public, may_reach

TIMEOUT_SECONDS = 15.0
MAX_RESPONSE_BYTES = 64 * 1024

_NAMES = ThreadPoolExecutor(256, "names")
"""More than all senders may have at once: a name that hangs keeps its thread for longer than its delivery has."""
_tls = cache(httpx.create_ssl_context)
"""Made once: it reads every root certificate, which takes longer than most receivers do."""


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


@dataclass(frozen=True, slots=True)
class Reach:
    """Where an event may be sent, beside the open internet over https.

    Attributes:
        anywhere: the operator says so of a receiver of the operator's.
        networks: that may be reached all the same, with http too. ports: none is any.
    """

    anywhere: bool = False
    networks: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()

    def check(self, url: httpx.URL, addresses: Sequence[str]) -> None:
        """Raises BlockedAddress unless every one of the addresses may be connected to for the URL.

        One bad address among good ones is how a name looks that is made to change its mind.
        """
        if self.anywhere:
            return
        if self.ports and _port(url) not in self.ports:
            raise BlockedAddress
        for address in addresses:
            if not may_reach(address, self.networks):
                raise BlockedAddress
            if url.scheme != "https" and is_public(address):
                raise BlockedAddress


OPEN_INTERNET = Reach()


def post(url: str, headers: Mapping[str, str], body: bytes, *, now: float, reach: Reach = OPEN_INTERNET) -> Outcome:
    """POST once; name, connection and answer together take at most fifteen seconds. Never raises.

    `now` in Unix seconds turns a dated `retry-after` into seconds.
    """
    try:
        return asyncio.run(asyncio.wait_for(_post(httpx.URL(url), headers, body, reach, now), TIMEOUT_SECONDS))
    except BlockedAddress:
        return Outcome(error="blocked_address")
    except TimeoutError:
        return Outcome(error="timeout")
    except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError):
        # A host no codec can turn into a name ends up here too.
        return Outcome(error="unreachable")


async def _post(url: httpx.URL, headers: Mapping[str, str], body: bytes, reach: Reach, now: float) -> Outcome:
    address = await _resolve(url, reach)
    sent = dict(headers) | {"host": url.netloc.decode("ascii")}
    async with httpx.AsyncClient(
        verify=_tls(), trust_env=False, timeout=TIMEOUT_SECONDS, follow_redirects=False
    ) as client:
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


async def _resolve(url: httpx.URL, reach: Reach) -> str:
    """The address to connect to. The resolver has threads that nobody waits for: it may hang for longer than all else
    may take."""
    loop = asyncio.get_running_loop()
    found = await loop.run_in_executor(
        _NAMES, partial(socket.getaddrinfo, url.host, _port(url), type=socket.SOCK_STREAM)
    )
    addresses = [str(entry[4][0]) for entry in found]
    if not addresses:
        raise OSError("no address")
    reach.check(url, addresses)
    return addresses[0]


def _port(url: httpx.URL) -> int:
    return url.port or (443 if url.scheme == "https" else 80)


def _seconds(value: str | None, now: float) -> float | None:
    if value is None:
        return None
    if value.strip().isascii() and value.strip().isdigit():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - now)
    except (ValueError, TypeError, OverflowError):
        return None
