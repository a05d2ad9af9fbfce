"""A Redis URL taken apart, without a connection.

    redis://[USER:PASSWORD@]HOST[:6379][/DB]                rediss:// over TLS, unix://PATH over a Unix socket
    redis+sentinel://[USER:PASSWORD@]HOST[:26379],…/NAME[/DB]        rediss+sentinel:// over TLS, to the Sentinels too
    redis+cluster://[USER:PASSWORD@]HOST[:6379],…                    rediss+cluster:// over TLS

A query adds what redis-py takes (`ssl_ca_certs`, `ssl_certfile`, `health_check_interval`, …), and for Sentinels that
ask for a password `sentinel_username` and `sentinel_password`. `max_connections` bounds nothing: a process has some
dozens at most, and needs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from redis.connection import parse_url

from policies.errors import SettingsError

EXPECTED = (
    "redis://…, rediss://… or unix://…, redis+sentinel://HOST,…/NAME or redis+cluster://HOST,… (or rediss+…), "
    "with options redis-py knows"
)
PORTS = {"sentinel": 26379, "cluster": 6379}

_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
# These would change what replies look like, or belong to no connection.
_NOT_TAKEN = {"decode_responses", "encoding", "encoding_errors", "connection_class", "connection_pool", "retry"}


@dataclass(frozen=True, slots=True)
class Where:
    """A URL taken apart; `kind` is empty for one server, `name` Sentinel's for the master.

    `options` and `asking` are keyword arguments of connections: to the server, and to Sentinels.
    """

    url: str
    kind: str
    tls: bool
    hosts: tuple[tuple[str, int], ...]
    name: str
    options: dict[str, Any]
    asking: dict[str, Any]

    def pool(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments of a pool that finds its server, on top of those given."""
        return {**given, **self.options, "ssl": self.tls}

    def client(self, timeout: float) -> dict[str, Any]:
        """Keyword arguments of a client that asks where the server is, `timeout` seconds at most."""
        secret = self.options if self.kind == "cluster" else self.asking
        login = {key: secret[key] for key in ("username", "password") if secret.get(key)}
        tls = {key: value for key, value in self.options.items() if key.startswith("ssl_")}
        return {**login, **tls, "ssl": self.tls, "socket_timeout": timeout, "socket_connect_timeout": timeout}


def parse(url: str) -> Where:
    """Raises SettingsError; a URL may hold a password, so it is not repeated."""
    try:
        scheme, netloc, path, asked = _split(url)
        scheme, _, kind = scheme.partition("+")
        if kind not in ("", *PORTS) or scheme not in ("redis", "rediss", "unix") or (kind and scheme == "unix"):
            raise ValueError
        user, at, hosts = netloc.rpartition("@")
        names = [unquote(part) for part in path.split("/") if part]
        name = names.pop(0) if kind == "sentinel" and names else ""
        query = f"?{asked}" if asked else ""
        whole = url if not kind else f"{scheme}://{user}{at}host/{'/'.join(names)}{query}"
        options = parse_url(whole)  # type: ignore[no-untyped-call]
        asking = {key: options.pop(f"sentinel_{key}", None) for key in ("username", "password")}
        if not kind:
            return Where(url, "", scheme == "rediss", (), "", _checked(options), {})
        if (kind == "sentinel") != bool(name) or len(names) > 1 or (names and not names[0].isdigit()):
            raise ValueError
        if kind == "cluster" and options.get("db"):
            raise ValueError
        options.pop("host")
        addresses = tuple(_address(host, PORTS[kind]) for host in hosts.split(","))
        return Where(url, kind, scheme == "rediss", addresses, name, _checked(options), asking)
    except (ValueError, KeyError):
        raise SettingsError("redis_url", EXPECTED) from None


def _split(url: str) -> tuple[str, str, str, str]:
    """Scheme, what names the hosts, path and query; `urlsplit` itself refuses brackets within a list of hosts."""
    scheme, found, rest = url.strip().partition("://")
    end = min((rest.index(mark) for mark in "/?#" if mark in rest), default=len(rest))
    tail = urlsplit(f"//host{rest[end:]}")
    if not found or tail.fragment:
        raise ValueError
    return scheme.lower(), rest[:end], tail.path, tail.query


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    """Options of the query that can do no harm. Raises ValueError, and SettingsError for a file that cannot be read."""
    taken = {key: value for key, value in options.items() if key != "connection_class" or isinstance(value, str)}
    if {*taken} & _NOT_TAKEN:
        raise ValueError
    for key in _FILES:
        if key in taken and not Path(taken[key]).is_file():
            raise SettingsError("redis_url", f"a readable file as {key}, not {taken[key]!r}")
    return taken


def _address(text: str, port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname or parts.path or "@" in text:
        raise ValueError
    return parts.hostname, parts.port or port
