"""The committed vectors, made by a second implementation, hold for the sender, for receivers and for the client."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from countersign.client import WebhookError, verify_webhook
from policies.signature import sign, verify_signature
from tests.verifier_pool import webhook_vectors

VECTORS: list[dict[str, Any]] = json.loads(webhook_vectors.FILE.read_text())


def test_the_file_is_what_the_second_implementation_says() -> None:
    assert webhook_vectors.FILE.read_text() == webhook_vectors.text()


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["what"])
def test_both_implementations_agree(vector: dict[str, Any]) -> None:
    headers, body = vector["headers"], base64.b64decode(vector["body_base64"])
    at, joined = int(headers["webhook-timestamp"]), " ".join(vector["secrets"])
    assert sign(joined, headers["webhook-id"], at, body) == headers["webhook-signature"]
    for secret in (*vector["secrets"], joined):
        assert verify_signature(secret, headers, body, at)
    assert not verify_signature(vector["secrets"][0], headers, body + b" ", at)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["what"])
def test_the_client_agrees(vector: dict[str, Any]) -> None:
    headers, body = vector["headers"], base64.b64decode(vector["body_base64"])
    at, secret = float(headers["webhook-timestamp"]), vector["secrets"][-1]
    if b'"type"' in body:
        assert verify_webhook(secret, headers, body, now=at)["type"] in ("verification.rejected", "webhook.test")
    else:
        with pytest.raises(WebhookError, match="no event"):
            verify_webhook(secret, headers, body, now=at)
    with pytest.raises(WebhookError):
        verify_webhook(secret, headers, body + b" ", now=at)
    with pytest.raises(WebhookError):
        verify_webhook(secret, headers, body, now=at + 301)
