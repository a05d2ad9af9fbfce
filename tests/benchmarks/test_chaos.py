"""The chaos test: real processes die 200 times at random, and the ledger balances."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.chaos.monkey import SHARES
from benchmarks.chaos.stage import Scene, Stage

pytestmark = pytest.mark.alone
KILLS = 200
BOUND = 240.0
"""Seconds after the last request within which every generation has its verdict; usually it takes less than 60."""


async def test_nothing_is_lost_and_nothing_counted_twice_when_everything_dies(tmp_path: Path) -> None:
    scene = Scene(kills=KILLS, seconds=45.0, settle=BOUND)
    outcome = await Stage(scene, tmp_path, print).run()
    ledger = outcome.ledger
    assert (ledger.lost, ledger.duplicates, ledger.wrong) == ([], [], [])
    assert outcome.settled_after is not None
    assert outcome.kinds.total() >= KILLS
    assert set(outcome.kinds) == set(SHARES)
    # Nothing gave up by itself: every process that ended was killed.
    assert outcome.exits == {}
    # It was no empty ledger.
    assert ledger.sent >= 100
    assert ledger.accepted == ledger.verdicts.total()
    assert {"pass", "reject", "unaudited", "unverified"} <= set(ledger.verdicts)
    reasons = {reason.partition(":")[0] for reason in ledger.reasons}
    assert reasons <= {"proxy_lost", "store_unavailable", "client_left", "no_answer", "job_failed"}
    assert len(ledger.matched) >= 2
