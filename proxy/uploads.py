"""Requests' bodies: how much of them is held, from when they come until their requests are over."""

from __future__ import annotations

from collections import Counter

from policies.errors import BackendUnavailable, RateLimited
from proxy.api.auth import Client
from proxy.limits import answer
from proxy.metrics import Metrics
from proxy.room import Body, Holding

SMALL = 64 * 1024
"""Bytes up to which a body is not counted: the connection it comes on may hold as much before anybody reads it."""


class Uploads:
    """Bodies in the memory of one process, on its event loop. Those of one key have one share of it together."""

    def __init__(self, holding: Holding, metrics: Metrics) -> None:
        self.holding = holding
        self.metrics = metrics
        self.coming: Counter[str] = Counter()
        """Bodies that are not whole yet, by what their key is counted under."""

    def of(self, client: Client) -> Upload:
        """One request's body, as long as its context lasts."""
        return Upload(self, client)


class Upload:
    """What the body of one request holds."""

    __slots__ = ("_client", "_coming", "_share", "_uploads")

    def __init__(self, uploads: Uploads, client: Client) -> None:
        self._uploads = uploads
        self._client = client
        self._share: Body | None = None
        self._coming = False

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()

    def weigh(self, size: int) -> None:
        """`size` bytes of it are here.

        Raises RateLimited where as many bodies of the key are on their way as it may have requests at once;
        BackendUnavailable where the key would hold more than is then left for others.
        """
        if size <= SMALL:
            return
        if self._share is None:
            self._begin()
        assert self._share is not None
        if not self._share.fits(size):
            self._uploads.metrics.refused.add(1, {"reason": "overloaded"})
            raise BackendUnavailable("the proxy holds too much of unfinished requests; try again", code="overloaded")

    def whole(self) -> None:
        """All of it is here."""
        if self._coming:
            self._coming = False
            coming, key = self._uploads.coming, self._client.id
            coming[key] -= 1
            if not coming[key]:
                del coming[key]

    def drop(self) -> None:
        """It is held no more."""
        self.whole()
        if self._share is not None:
            self._share.__exit__()
            self._share = None

    def _begin(self) -> None:
        uploads, client = self._uploads, self._client
        most = client.limits.concurrency if client.limits is not None else None
        if most and uploads.coming[client.id] >= most:
            uploads.metrics.refused.add(1, {"reason": "concurrency"})
            error = RateLimited(f"this key may have {most} requests under way at once", retry_after=1.0)
            error.headers = tuple(answer.again(error))
            raise error
        uploads.coming[client.id] += 1
        self._coming = True
        self._share = uploads.holding.body(client.owner).__enter__()
