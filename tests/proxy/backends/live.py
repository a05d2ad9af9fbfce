"""What live tests of backends have in common."""

from __future__ import annotations

from collections.abc import Callable

from policies.settings import hash_key
from tests.proxy.conftest import Rig
from tests.support import wire
from tests.support.fake_backend import FakeBackend

QUICK = {"failures": 3, "open_seconds": 0.3, "longest": 0.6}
ERROR = wire.whole(b'{"error": {"message": "broken"}}', 500)
BUSY = b"HTTP/1.1 429 X\r\ncontent-type: application/json\r\nretry-after: %s\r\ncontent-length: 2\r\n\r\n{}"
KEYS = [
    {"name": "ann", "sha256": hash_key("sk-ann")},
    {"name": "root", "sha256": hash_key("sk-root"), "admin": True},
]
ANN, ROOT = ({"authorization": f"Bearer sk-{name}"} for name in ("ann", "root"))

Trio = Callable[..., tuple[Rig, list[FakeBackend]]]
"""Makes a rig with three backends that answer."""


def took(servers: list[FakeBackend]) -> list[int]:
    """How many requests each of them had."""
    return [len(server.requests) for server in servers]


def reset(servers: list[FakeBackend]) -> None:
    """Forget what they had."""
    for server in servers:
        server.requests.clear()


def breaker_of(rig: Rig, at: int = 0) -> str:
    """The state of the breaker of the first, or another one."""
    return rig.proxy.services.backends.all[at].breaker.state
