"""What the client says of a webhook that came in."""

from __future__ import annotations

import base64
import json
import time

import pytest

from countersign.client import WebhookError, verify_webhook
from policies.signature import sign

SECRET = "whsec_" + base64.b64encode(bytes(24)).decode()


def test_webhooks() -> None:
    body = json.dumps({"type": "verification.rejected", "data": {}}).encode()
    now = int(time.time())

    def headers(body: bytes, secret: str = SECRET) -> dict[str, str]:
        return {
            "Webhook-Id": "msg_1",
            "Webhook-Timestamp": str(now),
            "Webhook-Signature": sign(secret, "msg_1", now, body),
        }

    assert verify_webhook(SECRET, headers(body), body)["type"] == "verification.rejected"
    other = "whsec_" + base64.b64encode(bytes([1]) * 24).decode()
    assert verify_webhook(f"{other} {SECRET}", headers(body), body, now + 299)
    for secret, given, at in ((other, body, now), (SECRET, body + b" ", now), (SECRET, body, now + 301)):
        with pytest.raises(WebhookError, match="does not hold"):
            verify_webhook(secret, headers(body), given, at)
    for junk in (b"", b"[]", b"{}", b"\xff", b'{"type": 5}'):
        with pytest.raises(WebhookError, match="no event"):
            verify_webhook(SECRET, headers(junk), junk, now)
    with pytest.raises(ValueError, match="expected whsec_"):
        verify_webhook("secret", headers(body), body)
