"""Several processes that keep one file of pins: none forgets what another one saw."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import httpx
import pytest

from countersign.client import ForkedLog, TwoReceipts
from countersign.pins import Pins
from policies import head, jws, merkle
from tests.countersign.test_client import LOG, Proxy


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Proxy:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    return Proxy()


def size(path: Path) -> int:
    head = Pins(path).head
    assert head is not None
    return head.size


def test_an_older_head_takes_nothing_away(proxy: Proxy, tmp_path: Path) -> None:
    pins = tmp_path / "pins"
    first = proxy.client(pins=pins)
    seen = [proxy.add(number) for number in range(3)]
    first.receipt(seen[0])
    second = proxy.client(pins=pins)
    seen += [proxy.add(number) for number in range(3, 8)]
    second.receipt(seen[5])
    assert size(pins) == 8
    # From a cache, or somebody who replays it: a head that is older than both, to one that had not seen so much.
    older = head.encode(LOG, 4, merkle.root(proxy.leaves[:4]), 1000.5)
    stale = httpx.Response(200, json={"head": jws.sign(older, proxy.key, head.KIND)})
    proxy.fails["/v1/log/head"] = stale
    first.watch()
    assert size(pins) == 8
    assert set(Pins(pins).leaves) == {seen[0], seen[5]}
    del proxy.fails["/v1/log/head"]
    proxy.leaves = [*proxy.leaves[:5], *map(merkle.leaf, (b"a", b"b", b"c", b"d", b"e"))]
    for client in (first, proxy.client(pins=pins)):
        with pytest.raises(ForkedLog):
            client.watch()


def test_another_process_knows_of_two_receipts(proxy: Proxy, tmp_path: Path) -> None:
    pins = tmp_path / "pins"
    first, second = proxy.client(pins=pins), proxy.client(pins=pins)
    id = proxy.add(0)
    first.receipt(id)
    proxy.add(0, reason="another")
    with pytest.raises(TwoReceipts):
        second.receipt(id)
    with pytest.raises(TwoReceipts):
        first.receipt(id)


def test_processes_that_pin_at_once_lose_nothing(proxy: Proxy, tmp_path: Path) -> None:
    ids = [proxy.add(number) for number in range(24)]
    threads = [
        threading.Thread(
            target=lambda part: [proxy.client(pins=tmp_path / "pins").receipt(id) for id in part], args=[part]
        )
        for part in (ids[::3], ids[1::3], ids[2::3])
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert set(Pins(tmp_path / "pins").leaves) == set(ids)
