"""A worker whose settings change while it runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from redis import Redis

from policies.reload import FIXED_IN_REFERENCE, FIXED_IN_WORKER
from policies.settings import Settings, parse_settings
from tests.support.waiting import wait_until
from verifier_pool import context, worker
from verifier_pool.following import Following
from verifier_pool.link import overlays, running
from verifier_pool.link.running import Said
from verifier_pool.link.sealing import Sealer
from verifier_pool.roles import Roles

BACKEND = {"name": "honest", "url": "http://127.0.0.1:1", "model": "toy"}


class File:
    """A settings file, and a worker's `Following` of it."""

    def __init__(self, path: Path, url: str, **sections: Any) -> None:
        self.path = path
        self.tree: dict[str, Any] = {
            "redis_url": url,
            "models": {"toy": {}},
            "backends": [BACKEND],
            "admin": {"watch_seconds": 0.01},
        }
        self.write(**sections)
        self.following = self.follow()

    def follow(self, fixed: Any = FIXED_IN_WORKER) -> Following:
        """As a worker does that starts now."""
        return Following(self.settings, self.path, "verify", fixed)

    @property
    def settings(self) -> Settings:
        """As they are read now."""
        return parse_settings(self.path.read_text(), {})

    def write(self, **sections: Any) -> None:
        """Other sections in it."""
        self.tree |= sections
        new = self.path.with_name("new.yaml")
        new.write_text(yaml.safe_dump(self.tree))
        new.replace(self.path)


@pytest.fixture
def file(tmp_path: Path, valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> File:
    monkeypatch.setattr("verifier_pool.following.EVERY", 0.0)
    return File(tmp_path / "countersign.yaml", valkey_url)


@contextmanager
def working(file: File) -> Iterator[None]:
    """A CPU worker in a thread."""
    stop = threading.Event()
    roles = Roles(replay=False)
    arguments = {"following": file.following}
    thread = threading.Thread(target=worker.run, args=(file.settings, stop, roles), kwargs=arguments)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("verifier_pool.worker.stop_on_signals", lambda _: None)
        thread.start()
        try:
            wait_until(lambda: context._current)
            yield
        finally:
            stop.set()
            thread.join()


def said(redis: Redis) -> Said:
    found = running.processes(redis)
    assert len(found) == 1
    return found[0]


def look(following: Following, redis: Redis) -> None:
    """Two looks at the file."""
    for _ in range(2):
        time.sleep(0.02)
        following.look(redis)


def test_a_worker_follows_its_file_and_redis(file: File, redis: Redis) -> None:
    with working(file):
        file.write(standing={"alpha": 0.01})
        wait_until(lambda: context.current().settings.standing.alpha == 0.01)
        overlays.Desk(redis, file.settings, "key:boss", Sealer()).change("honest", {"alpha": 0.02})
        wait_until(lambda: context.current().settings.standing_of("honest").alpha == 0.02)
        file.write(models={"toy": {}, "new": {"vocab_size": 7}})
        wait_until(lambda: "new" in context.current().settings.models)
        assert context.current().settings.standing_of("honest").alpha == 0.02
        wait_until(lambda: said(redis).backends)
        assert (said(redis).kind, said(redis).does, said(redis).error) == ("worker", "verify", None)
    assert running.processes(redis) == []


def test_a_file_that_cannot_be_used_changes_nothing(file: File, redis: Redis, caplog: pytest.LogCaptureFixture) -> None:
    with working(file):
        before = context.current()
        file.write(models={"toy": {"profile": "/nowhere.json"}})
        wait_until(lambda: said(redis).error)
        assert context.current() is before
        error = said(redis).error
        assert error is not None
        assert error["key"] == "models.toy.profile"
        assert "models.toy.profile" in caplog.text
        file.write(models={"toy": {}})
        wait_until(lambda: said(redis).error is None)


def test_what_needs_a_restart_is_said(file: File, redis: Redis) -> None:
    following = file.follow(FIXED_IN_REFERENCE)
    following.look(redis)
    reference = {"kind": "vllm_http", "url": "http://127.0.0.1:2"}
    file.write(models={"toy": {"reference": reference}}, redis_url="redis://elsewhere", standing={"alpha": 0.01})
    look(following, redis)
    assert following.settings.standing.alpha == 0.01
    assert following.settings.models["toy"].reference is None
    assert said(redis).restart == ("models.toy.reference", "redis_url")


def test_whoever_asks_is_followed(file: File, redis: Redis) -> None:
    file.write(admin={"watch_seconds": 0})
    following = file.follow()
    running.ask(redis, "cli:ann@desk")
    following.look(redis)
    file.write(standing={"alpha": 0.01})
    following.look(redis)
    assert following.settings.standing.alpha == 1e-6
    asked = running.ask(redis, "cli:ann@desk")
    following.look(redis)
    assert (following.settings.standing.alpha, said(redis).asked) == (0.01, asked.id)
    file.write(standing={"alpha": 0.02})
    following.wake()
    following.look(redis)
    assert following.settings.standing.alpha == 0.02


def test_what_cannot_be_taken_leaves_the_old_ones(file: File, redis: Redis) -> None:
    def refuse(_: Settings) -> dict[str, Any]:
        raise ValueError("a bug")

    following = file.following
    following.look(redis)
    following.take, take = refuse, following.take
    file.write(standing={"alpha": 0.01})
    look(following, redis)
    assert following.settings.standing.alpha == 1e-6
    assert said(redis).error == {"key": "countersign.yaml", "expected": "cannot be read (ValueError)"}
    following.take = take
    file.write(standing={"alpha": 0.02})
    look(following, redis)
    assert (following.settings.standing.alpha, said(redis).error) == (0.02, None)


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "{}", "null", "[]", "models: {toy: {}}\nadmin: {watch_seconds: 0.01}"]
)
def test_a_file_that_takes_everything_away_is_none_unless_it_is_asked_for(file: File, redis: Redis, text: str) -> None:
    following = file.following
    following.look(redis)
    before = following.settings
    file.path.write_text(text)
    look(following, redis)
    assert following.settings is before
    error = said(redis).error
    assert error is not None
    assert "countersign reload" in error["expected"]
    file.write(standing={"alpha": 0.01})
    look(following, redis)
    assert (following.settings.standing.alpha, said(redis).error) == (0.01, None)
    file.path.write_text(text)
    running.ask(redis, "cli:ann@desk")
    following.look(redis)
    assert (following.settings.backends, said(redis).error) == ((), None)


@pytest.mark.parametrize("text", ["x: &A [*A]", "models: &m {toy: *m}", "standing: {alpha: 7}", "models: ["])
def test_what_redis_says_holds_whatever_the_file_says(file: File, redis: Redis, text: str) -> None:
    following = file.following
    following.look(redis)
    file.path.write_text(text)
    time.sleep(0.02)
    following.look(redis)
    overlays.Desk(redis, following.declared, "key:boss", Sealer()).drain("honest")
    look(following, redis)
    assert said(redis).error is not None
    assert following.settings.backend("honest").drained


def test_who_is_silent_is_gone(redis: Redis) -> None:
    first, second = running.begun("proxy"), running.begun("worker", "verify")
    redis.hset(running.RUNNING, "rubbish", "{")
    for each in (first, second):
        running.tell(redis, each)
    assert [each.kind for each in running.processes(redis)] == ["proxy", "worker"]
    assert running.alive(redis.hgetall(running.RUNNING), first.at + 31) == []  # type: ignore[arg-type]
    assert all(redis.ttl(key) > 0 for key in running.KEYS)
    redis.zadd(running.KEYS[1], {second.id: 1.0})
    running.tell(redis, first)
    assert [each.kind for each in running.processes(redis)] == ["proxy"]
    running.leave(redis, first)
    assert (running.processes(redis), redis.zcard(running.KEYS[1])) == ([], 0)
