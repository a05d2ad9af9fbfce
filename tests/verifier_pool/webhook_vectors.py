"""Test vectors of Standard Webhooks, made by another implementation than the product's: it shares no line with it.

python -m tests.verifier_pool.webhook_vectors     writes tests/data/webhooks/vectors.json anew
"""

from __future__ import annotations

import json
from binascii import a2b_base64, b2a_base64
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hmac import HMAC

FILE = Path(__file__).resolve().parents[1] / "data" / "webhooks" / "vectors.json"
EXAMPLE = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
LONG = "whsec_" + b2a_base64(bytes(range(64)), newline=False).decode()
SHORT = "whsec_" + b2a_base64(bytes(range(200, 224)), newline=False).decode()
EVENT = '{"type":"verification.rejected","timestamp":"2026-11-30T10:00:00.000+00:00","sequence":7,"data":{"id":"%s"}}'

CASES: list[tuple[str, list[str], str, int, bytes]] = [
    (
        "the example of the specification",
        [EXAMPLE],
        "msg_p5jXN8AQM9LWM0D4loKWxJek",
        1614265330,
        b'{"test": 2432232314}',
    ),
    ("an event of ours", [LONG], "msg_" + "0f" * 16, 1796032800, (EVENT % ("0f" * 16)).encode()),
    ("the shortest secret", [SHORT], "msg_1", 0, b"{}"),
    ("two secrets, the new one first", [LONG, EXAMPLE], "msg_2", 1796032801, b'{"type":"webhook.test"}'),
    ("bytes that are no text", [EXAMPLE], "msg_3", 1796032802, bytes(range(256))),
    ("an empty body", [EXAMPLE], "msg_4", 1796032803, b""),
    ("text beyond ASCII", [EXAMPLE], "msg_5", 1796032804, '{"backend":"günstig \u2028"}'.encode()),
]


def signature(secrets: list[str], id: str, timestamp: int, body: bytes) -> str:
    """Value of the header, by the words of the specification."""
    parts = []
    for secret in secrets:
        mac = HMAC(a2b_base64(secret[len("whsec_") :]), SHA256())
        for piece in (id.encode("ascii"), b".", b"%d" % timestamp, b".", body):
            mac.update(piece)
        parts.append("v1," + b2a_base64(mac.finalize(), newline=False).decode("ascii"))
    return " ".join(parts)


def vectors() -> list[dict[str, Any]]:
    """All of them, as the file holds them."""
    return [
        {
            "what": what,
            "secrets": secrets,
            "body_base64": b2a_base64(body, newline=False).decode(),
            "headers": {
                "webhook-id": id,
                "webhook-timestamp": str(timestamp),
                "webhook-signature": signature(secrets, id, timestamp, body),
            },
        }
        for what, secrets, id, timestamp, body in CASES
    ]


def text() -> str:
    """The file."""
    return json.dumps(vectors(), indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
