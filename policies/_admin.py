"""Section of the settings about the admin API, and about what is kept of what admins do."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from pydantic import Field, model_validator

from policies._sections import Section


class AdminKey(Section):
    """A key of the admin API, stored as the SHA-256 of its text (a random key needs no slow hash); no client's.

    Attributes:
        name: what it is called in the audit log.
        sha256: SHA-256 of its text, in hex.
        read_only: it may look at everything and change nothing.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@:+-]{0,99}$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    read_only: bool = False


class AdminSettings(Section):
    """The admin API: a port of its own with keys of its own.

    Attributes:
        host: address that it listens at; `0.0.0.0` is every one of the machine, which needs a key.
        port: where it listens; without one there is none, and the public port serves `/v1/backends` and `/v1/keys` to
            admins among the client keys. With one, the public port serves neither.
        keys: who may use it. Without any only this machine may, so `host` must then be one of its own addresses.
        audit_entries: entries of the audit log that are kept, the latest.
        watch_seconds: how often `countersign.yaml` is looked at for changes; 0 is never, SIGHUP and `countersign
            reload` excepted.
    """

    host: str = "127.0.0.1"
    port: int | None = Field(None, ge=0, lt=65536)
    keys: tuple[AdminKey, ...] = ()
    audit_entries: int = Field(100_000, gt=0, le=10_000_000)
    watch_seconds: float = Field(2.0, ge=0, le=3600)

    @model_validator(mode="after")
    def _closed(self) -> AdminSettings:
        if len({key.name for key in self.keys}) != len(self.keys):
            raise ValueError("keys: two keys share one name")
        if len({key.sha256 for key in self.keys}) != len(self.keys):
            raise ValueError("keys: two keys have the same text")
        if self.port is not None and not self.keys and not _is_loopback(self.host):
            raise ValueError(f"keys: at least one key is needed, because {self.host!r} is open to other machines")
        return self


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host.lower().rstrip(".") == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
