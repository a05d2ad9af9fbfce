"""For whoever gets answers through the proxy: awaits verdicts, checks receipts, watches the log, checks webhooks.

    client = Client("https://countersign.example.com", "sk-…", pins=Path("~/.countersign-pins").expanduser())
    receipt = client.receipt(answer.headers["x-countersign-id"], request=answer.request.content, served=answer.content)
    print(receipt.verdict)

Nothing here trusts what the proxy says but for its keys, and those only where none are given. docs/receipts.md has the
same in other languages' reach: plain Python and curl.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from countersign.pins import Pins
from policies import jws
from policies.errors import CountersignError, ForkedLog, ReceiptError
from policies.head import Head, follow, verify_head, verify_inclusion
from policies.receipt import Receipt, compare_verification, verify_receipt
from policies.served import compare_served
from policies.signature import verify_signature

__all__ = [
    "ApiFailed",
    "Client",
    "ForkedLog",
    "Head",
    "Pins",
    "Receipt",
    "ReceiptError",
    "TwoReceipts",
    "WebhookError",
    "compare_served",
    "keys_in",
    "verify_receipt",
    "verify_webhook",
]

LONGEST_WAIT = 120.0
"""Seconds that the proxy waits in one call."""
_PAUSE = 1.0
_TRIES = 5
_MOST = 64 * 1024 * 1024
MOST_LEAVES = 4096
"""Receipts that a client remembers; beyond them it forgets those that it saw first."""
keys_in = jws.keys_in


class ApiFailed(CountersignError):
    """The proxy answered with an error. `status` is HTTP's, `code` the error's."""

    def __init__(self, status: int, code: str | None, message: str) -> None:
        super().__init__(f"{status} {code}: {message}")
        self.status = status
        self.code = code


class TwoReceipts(ReceiptError):
    """One log has two receipts of one response, which no honest operator makes.

    `leaf` is the hash of the one that was seen before (hex, `Receipt.leaf`), `token` the one that is shown now, empty
    where two processes pinned one each: together with the token of the first they convict whoever signed both.
    """

    def __init__(self, message: str, leaf: str, token: str) -> None:
        super().__init__(message)
        self.leaf = leaf
        self.token = token


class WebhookError(CountersignError):
    """What came is no webhook of this secret's, is old, or cannot be read."""


class Client:
    """One proxy, as one API key sees it. A context manager. Safe in one thread.

    Args:
        url: of the proxy, without `/v1`.
        keys: that receipts must be signed with, by `kid` (`keys_in` reads a JWK set). Without any they are those that
            the proxy publishes, which is as good as the connection to it.
        pins: a file that remembers the log, and the receipts that were seen, from one process to the next.
        http: a client to ask with, which stays open.
    """

    def __init__(
        self,
        url: str,
        api_key: str = "",
        *,
        keys: jws.Keys | None = None,
        pins: Path | None = None,
        http: httpx.Client | None = None,
        timeout: float = 30.0,
    ) -> None:
        self._url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._given = None if keys is None else dict(keys)
        self._known: dict[str, bytes] = {}
        self._pins = None if pins is None else Pins(pins)
        self._head = self._pins.head if self._pins else None
        self._leaves = dict(self._pins.leaves) if self._pins else {}
        self._http, self._own = http or httpx.Client(), http is None
        self._timeout = timeout

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, unless it was given."""
        if self._own:
            self._http.close()

    @property
    def head(self) -> Head | None:
        """The head that is pinned."""
        return self._head

    def verification(self, id: str, wait: float = LONGEST_WAIT) -> dict[str, Any]:
        """The verification of a response, once it has its verdict.

        Raises:
            TimeoutError: there is none after `wait` seconds.
            ApiFailed: there is no such verification of this key's.
            httpx.HTTPError: the proxy does not answer.
        """
        until = time.monotonic() + wait
        while True:
            began = time.monotonic()
            asked = min(max(0.0, until - began), LONGEST_WAIT)
            found = self._get(f"/v1/verifications/{id}", {"wait": asked}, asked)
            if found.get("status") == "done":
                return found
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no verdict on {id} in {wait:g} s")
            # A proxy that is about to stop does not wait.
            time.sleep(min(left, max(0.0, began + _PAUSE - time.monotonic())))

    def receipt(
        self, id: str, *, request: bytes | None = None, served: bytes | None = None, wait: float = LONGEST_WAIT
    ) -> Receipt:
        """The receipt of a response, once its signature holds, it is about this response and says what its verification
        does, it is shown to be in the log, the log continues the one that was seen before, and no other receipt of this
        response was.

        Args:
            request: body of the request, as it was sent. served: body of the answer, as it came.

        Raises:
            ReceiptError: something does not hold; ForkedLog where it is the log, with the two heads that prove it, and
                TwoReceipts where there was another one.
            TimeoutError, ApiFailed, httpx.HTTPError: as `verification`.
        """
        verification = self.verification(id, wait)
        found = self._proven(id)
        token, log = found.get("receipt"), found.get("log")
        if not isinstance(token, str) or not isinstance(log, dict) or not isinstance(log.get("head"), str):
            raise ReceiptError("the proxy shows no receipt, or none that is proven to be in the log")
        receipt = verify_receipt(token, self._keys_for(token, "countersign-receipt"), id=id, request=request)
        if served is not None:
            compare_served(receipt, served)
        compare_verification(receipt, verification)
        head = verify_head(log["head"], self._keys_for(log["head"], "countersign-head"))
        verify_inclusion(head, receipt.leaf, _index(log.get("index")), _path(log.get("proof")))
        with self._pinning():
            self._follow(head)
            self._remember(receipt)
        return receipt

    def watch(self) -> Head | None:
        """The log as it is now, once it is shown to continue what was seen before, which it is pinned as; None as long
        as nothing is in it and nothing was. Raises what `receipt` does.

        Call it now and then, from more than one place: a log that shows you another past than others shows when two who
        pinned it compare their heads.
        """
        try:
            found = self._get("/v1/log/head")
        except ApiFailed as error:
            if error.code != "empty_log":
                raise
            if self._head is not None:
                what = f"the log is empty, and had {self._head.size} receipts"
                raise ForkedLog(what, self._head.token, "") from None
            return None
        token = found.get("head")
        if not isinstance(token, str):
            raise ReceiptError("the proxy shows no head of the log")
        with self._pinning():
            self._follow(verify_head(token, self._keys_for(token, "countersign-head")))
        return self._head

    def keys(self) -> dict[str, bytes]:
        """The public keys that are trusted here, by `kid`."""
        if self._given is not None:
            return self._given
        self._known = jws.keys_in(self._get("/.well-known/countersign-keys.json"))
        return self._known

    def _proven(self, id: str) -> dict[str, Any]:
        """The answer to a request for a receipt; again, where the proxy cannot promise yet that it stays in the log."""
        for _ in range(_TRIES):
            found = self._get(f"/v1/verifications/{id}/receipt")
            log = found.get("log")
            if not isinstance(log, dict) or log.get("head") is not None:
                break
            time.sleep(_PAUSE)
        return found

    def _keys_for(self, token: str, kind: str) -> dict[str, bytes]:
        """Keys that a token may be signed with: asked for again where its own is new."""
        known = self._given if self._given is not None else self._known
        return known if jws.kid_in(token, kind) in known else self.keys()

    def _follow(self, head: Head) -> None:
        before, path = self._head, list[bytes]()
        if before is not None and before.log == head.log and 0 < before.size != head.size:
            first, second = sorted((before.size, head.size))
            path = self._consistency(first, second)
        self._head = follow(before, head, path)

    def _remember(self, receipt: Receipt) -> None:
        """Hold a receipt that is in the log against the one that was seen of its response."""
        leaf = receipt.leaf.hex()
        before = self._leaves.setdefault(receipt.id, leaf)
        if before != leaf:
            what = (
                f"the log has two receipts of {receipt.id}: {before}, and now {leaf} with the verdict {receipt.verdict}"
            )
            raise TwoReceipts(what, before, receipt.token)
        self._forget()

    def _forget(self) -> None:
        while len(self._leaves) > MOST_LEAVES:
            del self._leaves[next(iter(self._leaves))]

    @contextmanager
    def _pinning(self) -> Iterator[None]:
        """Around what changes the pins: what other processes pinned meanwhile is known, and stays."""
        pins = self._pins
        if pins is None:
            yield
            return
        with pins.alone():
            pins.read()
            if pins.head is not None and pins.head != self._head:
                self._follow(pins.head)
            for id, leaf in pins.leaves.items():
                if self._leaves.setdefault(id, leaf) != leaf:
                    what = f"the log has two receipts of {id}: {self._leaves[id]}, and {leaf} in the pins"
                    raise TwoReceipts(what, self._leaves[id], "")
            self._forget()
            yield
            self._pin(pins)

    def _pin(self, pins: Pins) -> None:
        if (pins.head, pins.leaves) != (self._head, self._leaves):
            keys = self._given if self._given is not None else self._known
            kept = {key: pins.keys[key] for key in pins.keys if key not in keys}
            pins.pin(self._head, keys | kept, self._leaves)

    def _consistency(self, first: int, second: int) -> list[bytes]:
        try:
            found = self._get("/v1/log/consistency", {"first": first, "second": second})
        except ApiFailed as error:
            if error.status != 404:
                raise
            return []  # which proves nothing: that is a log that does not continue
        return _path(found.get("proof"))

    def _get(self, path: str, query: Mapping[str, Any] | None = None, waits: float = 0.0) -> dict[str, Any]:
        answer = self._http.get(
            self._url + path, params=query, headers=self._headers, timeout=self._timeout + waits, follow_redirects=False
        )
        try:
            found = json.loads(answer.content) if len(answer.content) <= _MOST else None
        except (ValueError, RecursionError):
            found = None
        if answer.status_code != 200 or not isinstance(found, dict):
            error = found.get("error") if isinstance(found, dict) else None
            said = error if isinstance(error, dict) else {}
            code = said.get("code")
            text = str(said.get("message", "the proxy's answer cannot be read"))
            raise ApiFailed(answer.status_code, code if isinstance(code, str) else None, text)
        return found


def verify_webhook(secret: str, headers: Mapping[str, str], body: bytes, now: float | None = None) -> dict[str, Any]:
    """The event in a webhook's body, once its signature under the secret holds and it is at most five minutes old.

    Deliveries may come twice: act once on each `webhook-id`.

    Args:
        secret: `whsec_…`; several, with spaces between, while one replaces the other.
        headers: the request's, in any case. body: its raw body.
        now: Unix seconds.

    Raises:
        WebhookError: the signature does not hold, or there is no event.
        ValueError: the secret is none.
    """
    if not verify_signature(secret, headers, body, time.time() if now is None else now):
        raise WebhookError("the signature does not hold, or is too old")
    try:
        event = json.loads(body)
    except (ValueError, RecursionError):
        event = None
    if not isinstance(event, dict) or not isinstance(event.get("type"), str):
        raise WebhookError("there is no event in the body")
    return event


def _index(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ReceiptError("the proxy does not say where in the log the receipt is")
    return value


def _path(value: Any) -> list[bytes]:
    try:
        return [bytes.fromhex(each) for each in value]
    except (TypeError, ValueError):
        raise ReceiptError("the proxy shows no proof") from None
