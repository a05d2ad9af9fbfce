"""What a webhook wants to hear, what it is told, and which addresses it may have. Pure.

One event is one message for a webhook, at most. A verdict is told as `verification.rejected` where it is `reject` and
the webhook takes that event, and else as `verification.completed` where it takes that: so whoever takes
`verification.completed` alone hears of every verdict.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import SplitResult, urlsplit

from pydantic import Field

from policies._deliveries import DeliverySettings
from policies._sections import Section
from policies.checks import VerdictWord

COMPLETED = "verification.completed"
REJECTED = "verification.rejected"
TEST = "webhook.test"
"""Tries a webhook, and is sent whatever it takes."""
VERDICTS = (COMPLETED, REJECTED)
BACKENDS = (
    "backend.suspect",
    "backend.quarantined",
    "backend.recovered",
    "backend.trusted",
    "backend.redeclared",
    "backend.runtime_changed",
)
"""Events for admins: whoever knows a backend's standing knows how often it is audited."""

EventName = Literal[
    "verification.completed",
    "verification.rejected",
    "backend.suspect",
    "backend.quarantined",
    "backend.recovered",
    "backend.trusted",
    "backend.redeclared",
    "backend.runtime_changed",
]
Word = Literal["pass", "reject", "inconclusive", "withheld", "unaudited", "unverified"]
Name = Annotated[str, Field(min_length=1, max_length=512)]
LONGEST_URL = 2048
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"(?=.{{1,254}}\Z){_LABEL}(?:\.{_LABEL})*\.?")
_PORTS = {"https": 443, "http": 80}


class Subscription(Section):
    """What a webhook takes. An empty list is everything.

    Attributes:
        events: names of events. models: of models that are verified, or that a backend serves. verdicts: words; they
            say nothing about events of backends.
        everyone: it hears of the answers to all client keys, not only of those to its own; for admins.
        description: whatever its owner wants to remember.
    """

    events: Annotated[tuple[EventName, ...], Field(max_length=16)] = ()
    models: Annotated[tuple[Name, ...], Field(max_length=100)] = ()
    verdicts: Annotated[tuple[Word, ...], Field(max_length=16)] = ()
    everyone: bool = False
    description: Annotated[str, Field(max_length=200)] = ""

    def wants_verdict(self, verification: Mapping[str, Any]) -> str | None:
        """The event as which it is told of a verdict; None where it is not."""
        word = verification.get("verdict")
        if (self.models and verification.get("model") not in self.models) or (
            self.verdicts and word not in self.verdicts
        ):
            return None
        if word == VerdictWord.REJECT and (not self.events or REJECTED in self.events):
            return REJECTED
        return COMPLETED if not self.events or COMPLETED in self.events else None

    def wants_backend(self, type: str, model: str) -> bool:
        """Whether it is told of an event of a backend that serves this model."""
        return (not self.events or type in self.events) and (not self.models or model in self.models)

    @property
    def about_backends(self) -> bool:
        """Whether it names events of backends."""
        return any(event in BACKENDS for event in self.events)


def check_url(url: str, rules: DeliverySettings) -> None:
    """Raises ValueError, which says why no webhook may be at a URL. What its name leads to is looked at when an event
    is sent: that may change until then."""
    if len(url) > LONGEST_URL or not url.isascii() or any(letter <= " " or letter == "\x7f" for letter in url):
        raise ValueError(f"a URL of at most {LONGEST_URL} printable ASCII characters without spaces")
    try:
        parts, port = urlsplit(url), urlsplit(url).port
    except ValueError as error:
        raise ValueError("not a URL") from error
    if parts.scheme != "https" and not (parts.scheme == "http" and rules.networks):
        raise ValueError("expected https://")
    if "@" in parts.netloc or "\\" in url or parts.fragment or "#" in url:
        raise ValueError("a URL without a user, a password, a backslash or a fragment")
    _check_host(parts, rules)
    if port == 0 or (rules.ports and (port or _PORTS[parts.scheme]) not in rules.ports):
        raise ValueError(f"its port is one of {', '.join(map(str, rules.ports)) or '1 to 65535'}")


def _check_host(parts: SplitResult, rules: DeliverySettings) -> None:
    host = parts.hostname or ""
    if ":" in host or parts.netloc.startswith("["):
        literal = host
    elif not _HOST.fullmatch(host):
        raise ValueError("a URL with a host")
    elif _is_number(host):
        literal = host
    else:
        return
    try:
        address = ipaddress.ip_address(literal)
    except ValueError:
        # 0x7f.1, 0177.0.0.1 and 2130706433 are addresses to some programs and names to others.
        raise ValueError("a host is a name, or an address in its usual form") from None
    if not may_reach(str(address), rules.networks):
        raise ValueError("an address on the open internet")


def _is_number(host: str) -> bool:
    """Whether a host ends in a number, which makes it an address to whoever follows WHATWG's URL standard."""
    return _NUMBER.fullmatch(host.rstrip(".").rpartition(".")[2]) is not None


_CARRIERS = tuple(
    ipaddress.ip_network(text) for text in ("2001::/32", "2002::/16", "3fff::/20", "192.0.0.0/24", "192.88.99.0/24")
)
"""Ranges that carry an IPv4 address inside (Teredo, 6to4), and some that Python 3.11 still calls global."""
_METADATA = (ipaddress.ip_address("168.63.129.16"),)
"""Services of a cloud for its own machines (Azure's) at addresses that are global."""
_UNICAST = ipaddress.ip_network("2000::/3")
"""All of IPv6 that is routed on the open internet; NAT64, IPv4-compatible and translated addresses lie outside."""


def is_public(address: str) -> bool:
    """Whether an IP address is on the open internet, whatever way it is written. Raises ValueError for no address."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if isinstance(ip, ipaddress.IPv6Address) and ip not in _UNICAST:
        return False
    if any(ip in network for network in _CARRIERS if network.version == ip.version):
        return False
    return ip.is_global and ip not in _METADATA and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)


def may_reach(address: str, networks: tuple[str, ...] = ()) -> bool:
    """Whether an event may be sent to an address: on the open internet, or in one of these networks."""
    if is_public(address):
        return True
    ip = ipaddress.ip_address(address.partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return any((mapped or ip) in ipaddress.ip_network(network) for network in networks)
