"""`countersign backends`, `profiles`, `webhooks`, `reload` and `audit`: what they show and what they do."""

from __future__ import annotations

import base64
import io
import json
import threading
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import yaml
from redis import Redis

import countersign
from policies.settings import Settings, parse_settings
from policies.unit import declaration_name, declaration_of
from tests.verifier_pool.receiver import Receiver, listening, status
from tests.verifier_pool.test_webhooks import SECRET
from verifier_pool import worker
from verifier_pool.link import overlays, running, trail
from verifier_pool.link.queue import standing_key
from verifier_pool.link.sealing import Sealer, new_key

COMMANDS = ("backends", "profiles", "webhooks", "reload", "audit", "queues")


class Console:
    """Runs the console script with settings from a file."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str], url: str) -> None:
        self.config, self._capsys, self._url = folder / "countersign.yaml", capsys, url
        self.configure()

    def configure(self, **more: Any) -> Settings:
        """Other settings."""
        backend = {"name": "b1", "url": "http://127.0.0.1:1", "model": "toy"}
        tree = {"redis_url": self._url, "models": {"toy": {}}, "backends": [backend]} | more
        self.config.write_text(yaml.safe_dump(tree))
        return parse_settings(self.config.read_text(), {})

    def __call__(self, *arguments: str, code: int = 0) -> str:
        assert countersign.main([*arguments, "--config", str(self.config)]) == code
        found = self._capsys.readouterr()
        assert "Traceback" not in found.out + found.err
        return found.out or found.err

    def json(self, *arguments: str, code: int = 0) -> list[Any]:
        """What is said, line by line."""
        return [json.loads(line) for line in self(*arguments, "--json", code=code).splitlines()]


@pytest.fixture
def console(tmp_path: Path, capsys: pytest.CaptureFixture[str], valkey_url: str, redis: Redis) -> Console:
    return Console(tmp_path, capsys, valkey_url)


def test_backends_come_change_and_go(console: Console, redis: Redis) -> None:
    assert console("backends", "add", "new", "--set", "url=http://h", "--set", "model=toy") == "new: added\n"
    assert console("backends", "drain", "b1") == "b1: drained; what runs there is finished\n"
    (added,) = console.json("backends", "change", "new", "--set", "max_concurrency=3", "--set", "alpha=0.01")
    assert (added["from"], added["settings"]["max_concurrency"], added["settings"]["alpha"]) == ("redis", 3, 0.01)
    first, second = console.json("backends", "list")
    assert (first["name"], first["from"], first["settings"]["drained"]) == ("b1", "both", True)
    assert (second["name"], second["state"]) == ("new", "trial")
    lines = console("backends", "list").splitlines()
    assert lines[0].split() == ["name", "model", "from", "state", "since", "(UTC)", "takes", "url"]
    assert "nothing new" in lines[1]
    assert "max_concurrency" in console("backends", "show", "new")
    (declared,) = console.json("backends", "declare", "new", "--set", "precision=fp8")
    assert declared["settings"]["precision"] == "fp8"
    (plain,) = console.json("backends", "change", "new", "--unset", "alpha")
    assert plain["settings"]["alpha"] is None
    assert console("backends", "undrain", "b1") == "b1: takes requests again\n"
    assert console("backends", "reset", "b1") == "b1: as countersign.yaml has it\n"
    assert console("backends", "remove", "new") == "new: removed\n"
    assert console("backends", "remove", "b1") == "b1: removed\n"
    assert console("backends", "list") == "no backends: the settings name none, and none was added\n"
    assert redis.hlen(overlays.BACKENDS) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("backends", "drain", "none"), 1, "no such backend"),
        (("backends", "show", "none"), 1, "no such backend"),
        (("backends", "reset", "b1"), 1, "nothing is laid over"),
        (("backends", "add", "b1", "--set", "url=http://h", "--set", "model=toy"), 1, "of that name"),
        (("backends", "add", "x", "--set", "url=http://h", "--set", "model=none"), 1, "no such model"),
        (("backends", "add", "x", "--set", "model=toy"), 1, "url"),
        (("backends", "add", "x", "--set", "url=http://", "--set", "model=toy"), 1, "with a host"),
        (("backends", "change", "b1"), 1, "needs --set or --unset"),
        (("backends", "change", "b1", "--set", "max_concurrency=-1"), 1, "max_concurrency"),
        (("backends", "declare", "b1", "--set", "url=http://h"), 1, "no part of a declaration"),
    ],
)
def test_what_makes_no_sense_is_said(console: Console, arguments: tuple[str, ...], code: int, said: str) -> None:
    assert said in console(*arguments, code=code)
    assert console("audit") == "nothing\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("backends",),
        ("backends", "change", "b1", "--set", "colour=red"),
        ("backends", "change", "b1", "--set", "name=x"),
        ("backends", "change", "b1", "--unset", "url"),
        ("backends", "change", "b1", "--api-key-file", "/nowhere"),
        ("backends", "quarantine", "b1"),
        ("audit", "--before", "x"),
        ("audit", "--limit", "0"),
        ("webhooks",),
        ("profiles", "show"),
    ],
)
def test_what_is_misspelt_is_usage(console: Console, arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit, match="2"):
        console(*arguments)


def test_a_key_is_neither_shown_nor_in_a_list_of_processes(
    console: Console, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("sk-very-secret\n"))
    console("backends", "change", "b1", "--api-key-file", "-")
    shown = console("backends", "list", "--json") + console("backends", "show", "b1") + console("audit", "--json")
    assert "very-secret" not in shown
    assert "(secret)" in shown
    held = overlays.effective(redis, console.configure()).settings.backend("b1").api_key
    assert held is not None
    assert held.get_secret_value() == "sk-very-secret"
    # The file moves its backend, and says nothing of a key.
    moved = console.configure(backends=[{"name": "b1", "url": "http://127.0.0.1:2", "model": "toy"}])
    assert overlays.effective(redis, moved).settings.backend("b1").api_key is None
    assert "api_key: given for http://127.0.0.1:1, and sent to no other" in console("backends", "show", "b1")


def test_a_key_is_encrypted_where_there_is_a_key_for_that(
    console: Console, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = new_key()
    monkeypatch.setenv("COUNTERSIGN_STORAGE__ENCRYPTION_KEYS", key)
    monkeypatch.setattr("sys.stdin", io.StringIO("sk-very-secret\n"))
    console("backends", "change", "b1", "--api-key-file", "-")
    found, _ = overlays.read(cast("dict[bytes, bytes]", redis.hgetall(overlays.BACKENDS)))
    assert "very-secret" not in str(found)
    made, shut = overlays.opened(found, Sealer([base64.b64decode(key)]))
    assert (made["b1"].fields["api_key"], shut) == ("sk-very-secret", {})
    # Who has no key sees that there is one, and changes what it is not about.
    monkeypatch.delenv("COUNTERSIGN_STORAGE__ENCRYPTION_KEYS")
    assert "(secret)" in console("backends", "show", "b1")
    (drained,) = console.json("backends", "drain", "b1")
    assert (drained["settings"]["drained"], drained["settings"]["api_key"]) == (True, "(secret)")
    monkeypatch.setattr("sys.stdin", io.StringIO("sk-plain\n"))
    assert "storage.encryption_keys is needed" in console("backends", "change", "b1", "--api-key-file", "-", code=1)


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ("trusted=yes", "trusted", True),
        ("trusted=false", "trusted", False),
        ("max_concurrency=08", "max_concurrency", 8),
        ("alpha=1e-4", "alpha", 1e-4),
        ("engine=8", "engine", "8"),
        ("precision=null", "precision", "null"),
        ("engine=a: b, [c]", "engine", "a: b, [c]"),
        ("routed_experts=buffer", "routed_experts", "buffer"),
    ],
)
def test_each_setting_says_what_its_text_means(console: Console, given: str, name: str, value: object) -> None:
    (changed,) = console.json("backends", "change", "b1", "--set", given)
    assert changed["settings"][name] == value
    assert type(changed["settings"][name]) is type(value)


@pytest.mark.parametrize("given", ["trusted=perhaps", "max_concurrency=many", "alpha=[1]", "alpha=null"])
def test_text_that_a_setting_cannot_mean_is_refused_by_its_name(console: Console, given: str) -> None:
    assert given.partition("=")[0] in console("backends", "change", "b1", "--set", given, code=1)


def test_decisions_are_those_of_standing(console: Console, redis: Redis) -> None:
    console("backends", "add", "new", "--set", "url=http://h", "--set", "model=toy")
    said = console("backends", "quarantine", "new", "--why", "its provider changed", "--by", "ann")
    assert said == "new: quarantined by hand. It is quarantined now (by hand: its provider changed)\n"
    assert "quarantined" in console("standing", "new", code=1)
    assert console.json("backends", "list")[1]["state"] == "quarantined"
    name = declaration_name(declaration_of(overlays.effective(redis, console.configure()).settings.backend("new")))
    assert redis.hexists(standing_key("new"), name)
    console("backends", "quarantine", "new", "--why", "again", code=1)
    entries = console.json("audit", "--action", "standing.")
    assert entries[-1]["why"] == "its provider changed"
    assert entries[-1]["actor"].startswith("cli:")
    assert entries[0]["result"] != "done"


def test_everything_that_is_changed_is_in_the_log(console: Console) -> None:
    console("keys", "create", "app", "--concurrency", "2")
    console("keys", "limit", "app", "--concurrency", "3")
    console("keys", "revoke", "app")
    console("keys", "forget", "app")
    console("queues", "drop", "x", code=1)
    console("backends", "drain", "b1")
    entries = console.json("audit")
    assert [each["action"] for each in entries] == [
        "backend.drain",
        "queue.drop",
        "key.forget",
        "key.revoke",
        "key.limit",
        "key.create",
    ]
    assert entries[0]["before"] == {"drained": False}
    assert entries[0]["after"] == {"drained": True}
    assert entries[4]["before"]["limits"]["concurrency"] == 2
    assert entries[4]["after"]["limits"]["concurrency"] == 3
    assert "drained: false to true" in console("audit", "--limit", "1")
    assert [each["action"] for each in console.json("audit", "--before", entries[4]["id"])] == ["key.create"]
    assert console.json("audit", "--action", "key.", "--target", "app", "--limit", "2")[1]["action"] == "key.revoke"


def test_the_log_survives_rubbish_and_shows_no_tricks(console: Console, redis: Redis) -> None:
    redis.xadd(trail.TRAIL, {"entry": "{"})
    redis.xadd(trail.TRAIL, {"other": "x"})
    trail.append(redis, 10, trail.entry("cli:a\x1b[31m@b", "key.create", "\u202egnp", after={"sha256": "ab"}))
    shown = console("audit")
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert shown.count("unreadable") == 2


def test_who_runs_by_which_settings(console: Console, redis: Redis) -> None:
    assert console("reload") == "no proxy and no worker runs\n"
    one = msgspec.structs.replace(running.begun("proxy"), restart=("port",))
    other = msgspec.structs.replace(running.begun("worker", "verify"), error={"key": "a.b", "expected": "a number"})
    for each in (one, other):
        running.tell(redis, each)
    shown = console("reload", "--status", code=1)
    assert "current; hold only after a restart: port" in shown
    assert "invalid, the old ones hold: setting 'a.b': a number" in shown
    assert "did not follow in time" in console("reload", "--wait", "0.1", code=1)
    states = {each["kind"]: (each["state"], each["followed"]) for each in console.json("reload", "--wait", "0", code=1)}
    assert states == {"proxy": ("restart needed", False), "worker": ("invalid", False)}
    asked = running.asked_for(redis.get(running.RELOAD))  # type: ignore[arg-type]
    assert asked is not None
    assert asked.by.startswith("cli:")


def test_profiles_say_what_they_lack(console: Console, redis: Redis) -> None:
    assert "a profile" in console("profiles", "list")
    console.configure(models={"toy": {"profile": "toy.json"}})
    assert "a worker that has read it" in console("profiles", "list")
    arms = {"c=1": {"cells": 4, "answers_least": 30, "temperatures": ["0", "0.5 to 1"], "longest_from": 64}}
    key = {"model": "toy", "runtime": "", "precision": "bf16", "engine": "", "reference": "r", "top_k": 20}
    facts = {"name": "ab" * 8, "key": key, "created": 1e9, "answers": 1200, "mu0": 0.05, "arms": arms, "lacks": []}
    running.tell(redis, msgspec.structs.replace(running.begun("worker", "verify"), profiles={"toy": facts}))
    shown = console("profiles", "show", "toy")
    assert "does not speak for b1: precision is '', the profile was measured with 'bf16'" in shown
    assert "up to 127" in shown
    assert "1,200" in console("profiles", "list")
    assert console.json("profiles", "show", "toy")[0]["profile"]["name"] == "ab" * 8
    assert "no such model" in console("profiles", "show", "none", code=1)
    assert "did not follow" in console("profiles", "reload", code=1)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verifier_pool.reload_command.PATIENCE", 0.1)


@pytest.mark.parametrize(
    ("code", "said", "retries"),
    [(200, "delivered", [1]), (500, "it failed for good", []), (500, "the first try failed", [60])],
)
def test_an_event_is_sent_to_try(console: Console, redis: Redis, code: int, said: str, retries: list[int]) -> None:
    assert console("webhooks", "list") == "no webhook: the settings name none, and none is registered\n"
    assert "no webhook" in console("webhooks", "test", code=1)
    with listening(Receiver(status(code))) as receiver:
        hook = {"url": receiver.url, "secret": SECRET, "allow_private": True, "retries": retries}
        rules = console.configure(webhook=hook)
        stop, shown = threading.Event(), list[str]()

        def ask() -> None:
            try:
                shown.append(console("webhooks", "test", code=int(code != 200)))
            finally:
                stop.set()

        # Jobs want the main thread.
        thread = threading.Thread(target=ask)
        thread.start()
        worker.run_webhooks(rules, stop)
        thread.join()
    assert said in shown[0]
    ((headers, body),) = receiver.requests
    assert json.loads(body)["type"] == "webhook.test"
    assert headers["webhook-id"].startswith("msg_")
    (listed,) = console.json("webhooks", "list")
    assert (listed["waiting"], listed["failures"]) == (int("first try" in said), int(code != 200))
    failures = console.json("webhooks", "failures")
    assert [each["reason"] for each in failures] == (["DeliveryFailed"] if "for good" in said else [])


def test_a_receiver_that_said_gone_is_resumed(console: Console, redis: Redis) -> None:
    with listening(Receiver(status(410))) as receiver:
        rules = console.configure(webhook={"url": receiver.url, "secret": SECRET, "allow_private": True})
        assert "waiting" in str(console.json("webhooks", "test", "--wait", "0", code=1))
        worker.run_webhooks(rules, threading.Event(), burst=True)
        assert "switched off (410)" in console("webhooks", "list")
        assert "resume it first" in console("webhooks", "test", code=1)
        assert console("webhooks", "resume") == "events are sent again\n"
        assert "is not switched off" in console("webhooks", "resume", code=1)


@pytest.mark.parametrize("command", COMMANDS)
def test_without_redis_they_say_so(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(tmp_path, capsys, f"unix://{tmp_path}/none.sock")
    console.configure(webhook={"url": "https://example.com", "secret": SECRET})
    said = console(command, *([] if command in ("reload", "audit") else ["list"]), code=1)
    assert f"countersign {command.rstrip('s') if command == 'queues' else command}: Redis does not answer" in said
