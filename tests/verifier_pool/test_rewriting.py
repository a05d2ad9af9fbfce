"""What was deleted is in no file of Redis any more."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from redis import Redis
from redis.exceptions import ResponseError

from policies.settings import Settings
from proxy.embedded import EmbeddedValkey
from tests.support.waiting import wait_until
from verifier_pool.link.queue import evidence_key
from verifier_pool.rewriting import AGAIN_SECONDS, REWRITING, rewrite_in_turn

CANARY = b"what-nobody-may-find"


@pytest.fixture
def kept() -> Iterator[tuple[Redis, Path]]:
    """The embedded Valkey, which keeps a file."""
    with TemporaryDirectory(prefix="cs-") as name, EmbeddedValkey(name) as valkey:
        folder = Path(name)
        redis = Redis(unix_socket_path=str(valkey.socket))
        yield redis, folder
        redis.close()


def _held(folder: Path) -> bool:
    for file in folder.glob("appendonlydir/*"):
        with contextlib.suppress(FileNotFoundError):
            if CANARY in file.read_bytes():
                return True
    return False


def test_what_was_deleted_leaves_the_file(kept: tuple[Redis, Path]) -> None:
    redis, folder = kept
    redis.set(evidence_key("a" * 32), CANARY, ex=600)
    wait_until(lambda: _held(folder), what="the file of Redis")
    redis.unlink(evidence_key("a" * 32))
    redis.set("other", "stays")
    assert rewrite_in_turn(redis, 3600)
    wait_until(lambda: not _held(folder), what="the file of Redis")
    assert redis.get("other") == b"stays"
    # In turn: one that asks for it soon after is not heard.
    assert not rewrite_in_turn(redis, 3600)
    assert 0 < redis.ttl(REWRITING) <= 3600


def test_one_that_began_before_is_followed_by_another(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis, "info", lambda section: {"aof_enabled": 1})
    _refuse(redis, monkeypatch, "Background append only file rewriting already in progress")
    assert not rewrite_in_turn(redis, 3600)
    assert 0 < redis.ttl(REWRITING) <= AGAIN_SECONDS


def test_where_we_may_not_ask_it_is_said(
    redis: Redis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(redis, "info", lambda section: {"aof_enabled": 1})
    _refuse(redis, monkeypatch, "NOPERM User somebody has no permissions")
    with caplog.at_level(logging.WARNING, "countersign"):
        assert not rewrite_in_turn(redis, 3600)
    assert "BGREWRITEAOF" in caplog.text
    assert redis.ttl(REWRITING) > AGAIN_SECONDS


def test_nobody_asks_where_there_is_no_file_or_it_is_left_to_redis(redis: Redis) -> None:
    assert not rewrite_in_turn(redis, 0)
    assert not redis.exists(REWRITING)
    assert not rewrite_in_turn(redis, 3600)
    assert Settings().storage.rewrite_seconds == 3600


def _refuse(redis: Redis, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    def refuse() -> None:
        raise ResponseError(text)

    monkeypatch.setattr(redis, "bgrewriteaof", refuse)
