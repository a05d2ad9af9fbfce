"""What counts as left over, the page, and a short run of everything."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import orjson
import pytest
from redis import Redis

from benchmarks.leaks import command, report
from benchmarks.leaks.clients import WAYS, Client, Tally
from benchmarks.leaks.keys import kept, why
from benchmarks.leaks.launch import handles
from benchmarks.leaks.upstream import ACTS, act

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "leaks"


def held(**more: Any) -> dict[str, Any]:
    found = {
        "tasks": {"Store._listen": 1},
        "handles": {"file": 5},
        "in_flight": 0,
        "outstanding": 0,
        "rss": 100 * 2**20,
    }
    return found | more


def lines(*, growth: float = 0.0, **first: Any) -> list[dict[str, Any]]:
    """A clean run of ten minutes, whose memory grows by so many MiB a minute after its first quarter."""
    samples = []
    for at in range(0, 600, 10):
        late = max(0, at - 150) / 60
        samples.append({"sample": held(at=float(at), rss=int((120 + growth * late) * 2**20))})
    tally = {"sent": 60_000, "ways": {"reads": 3}, "acts": {"fails": 2}, "outcomes": {"left": 1}, "endless": {}}
    machine = {"cpu": "Abacus", "cores": 2, "commit": "f" * 40, "modified": False}
    metadata = {"command": "countersign bench leaks", "started": "now", "machine": machine}
    scene = {"clients": 48, "seconds": 600.0, "trace": 120.0, "redis_every": 45.0, "seed": 1}
    whole = {"metadata": metadata, "scene": scene, "before": held(), "after": held(), "grown": {}, "counted": 5.0}
    whole |= {"deaths": 9, "seconds": 600.0, "settled": 1.5, "expiring": 12, "tally": tally}
    key = {"name": "k", "kind": "set", "keys": 1, "entries": 2, "why": "two"}
    return [whole | first, {"key": key}, *samples]


def test_nothing_is_left_of_a_clean_run() -> None:
    assert report.leaks(lines()) == []
    page = report.text(lines())
    assert "Nothing is left over." in page
    assert "100 a second" in page
    assert "+0.00 MiB a minute" in page


@pytest.mark.parametrize(
    ("first", "word"),
    [
        ({"after": held(in_flight=1)}, "in flight"),
        ({"after": held(outstanding=2)}, "outstanding"),
        ({"settled": None}, "patience"),
        ({"after": held(tasks={"Store._listen": 1, "Exchange.run": 3})}, "3 tasks `Exchange.run`"),
        ({"after": held(handles={"file": 7})}, "2 handles of kind file"),
        ({"after": held(handles={"file": 5, "client": 1})}, "1 handles of kind client"),
        ({"before": held(handles={"backend": 9}), "after": held(handles={"backend": 5})}, "2 connections to backends"),
        ({"after": held(handles={"dead": 1})}, "1 connections that the other side closed"),
    ],
)
def test_what_is_left_is_told(first: dict[str, Any], word: str) -> None:
    (found,) = report.leaks(lines(**first))
    assert word in found
    assert found in report.text(lines(**first))


def test_requests_without_an_end_and_keys_without_a_life() -> None:
    found = lines()
    found[0]["tally"]["endless"] = {"reads it all: whole": 2}
    found[1]["key"]["why"] = ""
    assert [text.split()[0] for text in report.leaks(found)] == ["2", "keys"]
    assert "**nothing**" in report.text(found)


def test_memory_that_grows() -> None:
    assert report.slope(lines(growth=2.5)) == pytest.approx(2.5, rel=1e-3)
    assert report.leaks(lines(growth=0.9)) == []
    (found,) = report.leaks(lines(growth=2.5))
    assert "2.50 MiB a minute" in found
    assert report.slope(lines()[:6]) is None


@pytest.mark.skipif(not RESULT.with_suffix(".jsonl").exists(), reason="not measured yet")
def test_the_committed_page_is_made_of_the_committed_lines() -> None:
    rows = [orjson.loads(line) for line in RESULT.with_suffix(".jsonl").read_bytes().splitlines()]
    text = report.text(rows)
    assert text == RESULT.with_suffix(".md").read_text()
    assert not re.search(r"/(work|tmp|home|root)/", text)


def test_keys_without_a_time_to_live(valkey: str) -> None:
    with Redis.from_url(valkey) as redis:
        redis.flushall()
        _check_keys(redis)


def _check_keys(redis: Redis) -> None:
    redis.set("{countersign}:intent:" + "ab" * 16, b"x", ex=100)
    redis.set("{countersign}:audit-secret", b"x")
    redis.sadd("leak:" + "0123456789abcdef", "a", "b")
    redis.sadd("leak:" + "fedcba9876543210", "c")
    found, expiring = kept(redis)
    assert expiring == 1
    assert [(each.name, each.keys, each.entries, bool(each.why)) for each in found] == [
        ("leak:*", 2, 3, False),
        ("{countersign}:audit-secret", 1, 1, True),
    ]
    assert why("{countersign}:standing:b")
    assert not why("{countersign}:intent:b")


def test_handles_by_whom_they_lead_to() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as redis:
        own, other = server.getsockname()[1], redis.getsockname()[1]
        before = handles(own, other)
        with socket.create_connection(("127.0.0.1", own)) as client, socket.create_connection(("127.0.0.1", other)):
            accepted, _ = server.accept()
            with accepted:
                more = handles(own, other) - before
            assert client.getsockname()[1] != own
    assert more == {"client": 1, "redis": 1, "backend": 1}
    assert before["listening"] >= 2
    assert before["file"] >= 1


def test_every_request_names_an_act() -> None:
    tally = Tally()
    client = Client(1, ["sk"], 1, tally)
    for _ in range(300):
        head, _, body = client._request().partition(b"\r\n\r\n")
        assert b"content-length: %d" % len(body) in head
        assert any(act(name) in orjson.loads(body)["prompt"] for name in ACTS)
    assert tally.sent == 300
    assert set(tally.acts) <= {*ACTS, "cannot be reached"}
    assert {client._choose(WAYS) for _ in range(3000)} == set(WAYS)


def test_arguments() -> None:
    arguments = command.parser().parse_args(["--minutes", "2", "--redis-every", "0"])
    assert command.command(arguments) == "countersign bench leaks --minutes 2 --redis-every 0"
    for wrong in (["--minutes", "0"], ["--clients", "0"], ["--trace", "-1"]):
        with pytest.raises(SystemExit):
            command.main(wrong)
