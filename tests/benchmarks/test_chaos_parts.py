"""The stage's own parts: if they lie, the ledger does."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.chaos import aof, declared, monkey, toy
from benchmarks.chaos.fleet import REDIS, WORKER, Fleet
from benchmarks.chaos.nursery import Nursery
from benchmarks.chaos.relay import Relay
from benchmarks.chaos.valkey import Valkey
from benchmarks.demo.processes import free_ports
from policies import distance, selection
from policies.checks import Result
from tests.support.waiting import PATIENCE
from tests.verifier_pool.rig import wait_until
from verifier_pool.link.queue import OUTBOX, units_key, verdict_key


def resp(*commands: list[bytes]) -> bytes:
    parts = []
    for command in commands:
        parts.append(b"*%d\r\n" % len(command))
        parts += [b"$%d\r\n%b\r\n" % (len(part), part) for part in command]
    return b"".join(parts)


@given(st.lists(st.lists(st.binary(max_size=20), min_size=1, max_size=4), max_size=5), st.integers(0, 30))
def test_the_append_only_file_is_read_back_and_a_torn_end_left_out(commands: list[list[bytes]], torn: int) -> None:
    data = resp(*commands)
    assert list(aof.commands(b"#TS:1\r\n" + data)) == commands
    read = list(aof.commands(data[: max(len(data) - torn, 0)]))
    assert read == commands[: len(read)]
    assert torn or len(read) == len(commands)


def test_writes_are_counted_by_id(tmp_path: Path) -> None:
    folder = tmp_path / "appendonlydir"
    folder.mkdir()
    first = [[b"SET", verdict_key("a").encode(), b"{}"], [b"RPUSH", units_key("b1").encode(), b'{"id":"a"}']]
    second = [[b"set", verdict_key("a").encode(), b"{}"], [b"ZADD", OUTBOX.encode(), b"1", b"a"], [b"DEL", b"x"]]
    (folder / "appendonly.aof.1.incr.aof").write_bytes(resp(*first))
    (folder / "appendonly.aof.2.incr.aof").write_bytes(resp(*second))
    found = aof.writes(tmp_path)
    assert (found.verdicts, found.units, found.outbox, found.intents) == ({"a": 2}, {"a": 1}, {"a": 1}, {})


def test_a_plan_holds_every_kind_and_exactly_as_many_as_asked_for() -> None:
    kinds = list(monkey.SHARES)
    for seed in range(20):
        plan = monkey.plan(random.Random(seed), 200, 60.0, kinds)
        counts = Counter(kind for _, kind in plan)
        assert len(plan) >= 200
        assert min(counts.values()) >= 10
        assert [at for at, _ in plan] == sorted(at for at, _ in plan)
        assert 0 <= plan[0][0] <= plan[-1][0] <= 60
    assert monkey.plan(random.Random(3), 50, 9.0, kinds) == monkey.plan(random.Random(3), 50, 9.0, kinds)


def test_the_toys_profile_passes_honest_answers_and_no_other_model() -> None:
    profile = declared.measured("toy")
    random_seeds = random.Random(1)
    for kind, wanted in ((0, {Result.PASS}), (1_000, {Result.REJECT})):
        found = set()
        for _ in range(20):
            prompt = [random_seeds.randrange(toy.VOCABULARY) for _ in range(toy.PROMPT_TOKENS)]
            evidence, replay = declared.pair("toy", prompt, 0.8, random_seeds.getrandbits(40), served=kind)
            assert selection.check(evidence, vocab_size=toy.VOCABULARY, eos_token_ids=()).result is Result.PASS
            found.add(distance.check(evidence, replay, profile).result)
        assert found == wanted


def test_the_nursery_starts_kills_and_reports(tmp_path: Path) -> None:
    with Nursery(preloaded=()) as nursery:
        fleet = Fleet(tmp_path, random.Random(1), longest_gap=0.03)
        sleeper = fleet.add("x", "sleeper", lambda log: nursery.start(None, ["/bin/sleep", "60"], log))
        refused = fleet.add("x", "refused", lambda log: nursery.start("countersign", ["serve", "--config", "/no"], log))
        assert fleet.kill(sleeper)
        assert not fleet.kill(sleeper)
        deadline = time.monotonic() + PATIENCE
        while not (len(sleeper.logs) == 2 and refused.exits):
            assert time.monotonic() < deadline
            fleet.tend()
            time.sleep(0.01)
        assert set(refused.exits) == {3}
        assert "--config" in refused.logs[0].read_text()
        assert sleeper.alive
        life = sleeper.life
    assert life is not None
    assert life.poll() == -9


@pytest.mark.parametrize("power", [False, True])
def test_what_a_machine_without_power_forgets(tmp_path: Path, power: bool) -> None:
    (port,) = free_ports(1)
    with Nursery(preloaded=()) as nursery:
        valkey = Valkey(nursery, port, tmp_path / "valkey", "everysec", power=power)
        fleet = Fleet(tmp_path, random.Random(1), longest_gap=0.03)
        member = fleet.add(REDIS, "redis", valkey.start)
        member.killed = valkey.died
        wait_until(valkey.answers)
        with valkey.client() as redis:
            redis.set("early", 1)
        valkey.note()
        time.sleep(1.05)
        with valkey.client() as redis:
            redis.set("late", 1)
        assert fleet.kill(member)
        time.sleep(0.05)
        fleet.tend()
        wait_until(valkey.answers)
        with valkey.client() as redis:
            assert redis.exists("early")
            assert bool(redis.exists("late")) is not power


async def test_a_blow_that_finds_no_victim_becomes_another_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(monkey, "PATIENCE", 0.1)
    monkeypatch.setattr(monkey, "CUT_SECONDS", (0.0, 0.01))
    async with relayed() as relay:
        striker = monkey.Monkey(Fleet(tmp_path, random.Random(1)), {"x": relay}, random.Random(1))
        await striker.run([(0.0, WORKER), (0.0, monkey.CUT), (0.1, monkey.BLACKHOLE)])
        assert striker.counts.total() == 3
        assert set(striker.counts) <= set(monkey.NETWORK)
        assert relay.whole


@contextlib.asynccontextmanager
async def relayed() -> AsyncIterator[Relay]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(100):
                writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    relay = Relay(server.sockets[0].getsockname()[1])
    await relay.start()
    yield relay
    relay.stop()
    server.close()
    await asyncio.sleep(0.02)


async def says(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, word: bytes) -> bytes | None:
    """What comes back; None when nothing does in time."""
    writer.write(word)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.2):
            return await reader.read(100)
    return None


async def test_a_relay_passes_bytes_on_and_a_cut_resets_everything() -> None:
    async with relayed() as relay:
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
        assert await says(reader, writer, b"a") == b"a"
        relay.cut()
        with pytest.raises(ConnectionResetError):
            await reader.read(1)
        late, late_writer = await asyncio.open_connection("127.0.0.1", relay.port)
        with contextlib.suppress(ConnectionResetError):
            assert await late.read(1) == b""
        relay.heal()
        reader, again = await asyncio.open_connection("127.0.0.1", relay.port)
        assert await says(reader, again, b"b") == b"b"
        for each in (writer, late_writer, again):
            each.close()


@pytest.mark.parametrize("reset", [False, True])
async def test_a_black_hole_says_nothing_and_gives_late_what_was_under_way(reset: bool) -> None:
    async with relayed() as relay:
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
        assert await says(reader, writer, b"a") == b"a"
        relay.swallow()
        assert await says(reader, writer, b"b") is None
        new, new_writer = await asyncio.open_connection("127.0.0.1", relay.port)
        assert await says(new, new_writer, b"c") is None
        relay.heal(reset=reset)
        if reset:
            with pytest.raises(ConnectionResetError):
                await reader.read(1)
        else:
            assert (await reader.read(10), await new.read(10)) == (b"b", b"c")
        writer.close()
        new_writer.close()
