"""Strings that must turn up nowhere, in whatever form, and the search for them."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from collections.abc import Iterator
from urllib.parse import quote

NAMES = (
    "prompt",
    "system",
    "tool",
    "answer",
    "reasoning",
    "called",
    "finish",
    "backend_error",
    "backend_header",
    "garbage",
    "client_key",
    "wrong_key",
    "backend_key",
    "model",
    "header",
    "path",
    "broken",
    "receiver",
)


class Canaries:
    """One for each name. Beside letters and digits each has what is escaped somewhere.

    Attributes:
        ids: token ids of the answer, peculiar ones.
        secret: of the webhook.
    """

    def __init__(self) -> None:
        self._by_name = {name: f"canary-{name}-{secrets.token_hex(6)}/é+ü" for name in NAMES}
        self.ids = [40_000 + secrets.randbelow(9_000) for _ in range(6)]
        self.secret = "whsec_" + base64.b64encode(b"canary-webhook" + secrets.token_bytes(16)).decode()

    def __getitem__(self, name: str) -> str:
        return self._by_name[name]

    def key(self, name: str) -> str:
        """One that can stand in a header."""
        return "sk-" + self[name].rpartition("/")[0]

    def found(self, data: bytes) -> list[str]:
        """Which of them, in which form, are in there."""
        forms = [form for name in NAMES for form in _forms(name, self.key(name).removeprefix("sk-"))]
        forms += [("webhook secret", self.secret.removeprefix("whsec_")[4:-4].encode())]
        forms += list(_forms("webhook secret", base64.b64decode(self.secret.removeprefix("whsec_"))[:14].decode()))
        forms += [("key's digest", hashlib.sha256(self.key("client_key").encode()).hexdigest().encode())]
        for gap in (", ", ",", " ", "\\n"):
            forms.append(("ids", gap.join(map(str, self.ids[1:4])).encode()))
            forms.append(("ids", gap.join(f'"token_id:{id}"' for id in self.ids[1:4]).encode()))
        packed = b"".join(id.to_bytes(4, "little") for id in self.ids[1:4])
        forms += [("ids", packed), ("ids", packed.hex().encode()), *_aligned("ids", packed)]
        lowered = data.lower()
        return [f"{name}: {form!r}" for name, form in forms if form in data or form.lower() in lowered]


def _forms(name: str, text: str) -> Iterator[tuple[str, bytes]]:
    raw = text.encode()
    yield name, raw
    yield name, raw[::-1]
    yield name, raw.hex().encode()
    yield name, quote(text, safe="").encode()
    yield name, quote(quote(text, safe=""), safe="").encode()
    yield name, json.dumps(text)[1:-1].encode()
    yield name, "".join(f"\\u{ord(character):04x}" for character in text).encode()
    yield name, text.encode("utf-16-le")
    yield name, text.encode("utf-16-be")
    yield name, ", ".join(map(str, raw)).encode()
    yield name, hashlib.sha256(raw).hexdigest().encode()
    yield from _aligned(name, raw)


def _aligned(name: str, raw: bytes) -> Iterator[tuple[str, bytes]]:
    """Base64 of it, wherever in a longer text it begins."""
    for before in range(3):
        coded = base64.b64encode(bytes(before) + raw)[4 : -4 if (before + len(raw)) % 3 else None]
        yield name, coded
        yield name, coded.replace(b"+", b"-").replace(b"/", b"_")
