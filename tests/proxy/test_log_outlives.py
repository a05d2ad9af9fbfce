"""A Redis that is killed takes back what it had not written down, and never what a head of the log has promised."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path

import redis
from redis.exceptions import RedisError

from policies import jws
from policies.head import Head, follow, verify_head
from proxy.embedded import EmbeddedValkey
from tests.support.waiting import wait_until
from tests.verifier_pool.link.test_receipts import audit, settle
from verifier_pool.link.log import Log
from verifier_pool.link.signing import Signer

KILLS = 3
MORE = 30
"""Verdicts at least between two kills."""


def test_no_head_is_taken_back(tmp_path: Path) -> None:
    with EmbeddedValkey(str(tmp_path)) as valkey, redis.Redis(unix_socket_path=str(valkey.socket)) as client:
        over, tried = threading.Event(), [0]

        def work() -> None:
            with redis.Redis(unix_socket_path=str(valkey.socket)) as mine:
                while not over.is_set():
                    with contextlib.suppress(RedisError):
                        settle(mine, tried[0])
                    tried[0] += 1

        thread = threading.Thread(target=work)
        thread.start()
        try:
            pinned: Head | None = None
            for _ in range(KILLS):
                pinned = _grown(client, pinned)
                os.kill(client.info("server")["process_id"], signal.SIGKILL)
                wait_until(lambda: _answers(client))
            pinned = _grown(client, pinned)
        finally:
            over.set()
            thread.join()
        assert pinned.size >= (KILLS + 1) * MORE
        # What it lost it lost whole: verdict, receipt and leaf.
        assert audit(client, tried[0]) >= pinned.size


def _grown(client: redis.Redis, before: Head | None) -> Head:
    """The head of a log that has grown, which continues the one before."""
    log = Log(client, Signer(client))
    least = (before.size if before else 0) + MORE
    wait_until(lambda: log.state().size >= least)
    found = log.head(least)
    assert found is not None
    head = verify_head(found.token, jws.keys_in(jws.jwk_set(log.signer.published())))
    return follow(before, head, log.consistency(before.size, head.size) if before else [])


def _answers(client: redis.Redis) -> bool:
    with contextlib.suppress(RedisError):
        return bool(client.ping())
    return False
