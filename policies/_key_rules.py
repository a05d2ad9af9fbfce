"""Sections of the settings about clients: their keys, and what each may use."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from policies._sections import Section
from policies._storage import Retain

_MOST = 10**15
"""Numbers in a script of Redis are exact up to here."""

Count = Annotated[int, Field(gt=0, le=_MOST)]


class LimitSettings(Section):
    """What one client key may use; without a number there is no limit.

    Attributes:
        requests_per_minute: requests let in within any 60 seconds.
        tokens_per_minute: tokens within any 60 seconds, prompts and answers together, counted when a request is let in.
        concurrency: requests at once.
        tokens: a budget of tokens, prompts and answers together.
        every: when that budget starts again: each day or month (UTC), or never.
    """

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    concurrency: Count | None = None
    tokens: Count | None = None
    every: Literal["day", "month", "never"] = "month"

    @property
    def unlimited(self) -> bool:
        """Whether there is nothing to count."""
        return not (self.requests_per_minute or self.tokens_per_minute or self.concurrency or self.tokens)


class ClientKey(Section):
    """A client key, stored as the SHA-256 of its text (a random key needs no slow hash).

    Attributes:
        name: what it is called in logs and in standing.
        sha256: SHA-256 of its text, in hex.
        admin: it sees standings and all metrics, and may choose the backend that is asked; without `admin.port` it may
            also change backends and keys.
        operator: the operator's own traffic: nobody could have chosen its prompts to frame a backend, so it speaks
            without a cap in a backend's standing, and alone.
        evidence: whose evidence bundles it may read: those of its `own` answers, of `all`, or `none`. Without one, its
            own; an admin key, all.
        retain: what is kept of its answers' evidence once their verdict is final: `none`, `rejects` or `all`. Without
            one, what `storage.retain` says.
        limits: its own, all of them, instead of the default ones.
    """

    name: str
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    admin: bool = False
    operator: bool = False
    evidence: Literal["own", "all", "none"] | None = None
    retain: Retain | None = None
    limits: LimitSettings | None = None

    @property
    def may_read(self) -> Literal["own", "all", "none"]:
        """Whose evidence bundles it may read."""
        return self.evidence or ("all" if self.admin else "own")


class StoredKey(ClientKey):
    """A client key that is kept in Redis.

    Attributes:
        name: what it is called, by nothing else.
        prefix: how its text begins, so that people can tell keys apart.
        created, expires, revoked: Unix seconds. One that was revoked is kept: its name is not given to another.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@:+-]{0,99}$")]
    prefix: str
    created: float
    expires: float | None = None
    revoked: float | None = None

    def usable(self, now: float) -> bool:
        """Whether it lets its bearer in at that time."""
        return self.revoked is None and (self.expires is None or now < self.expires)
