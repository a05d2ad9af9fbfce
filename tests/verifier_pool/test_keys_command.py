"""`countersign keys` against a real Valkey, and the commands that docs/keys.md shows."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

import countersign
from policies.settings import Settings, hash_key, parse_settings
from tests.support.valkey import Valkey
from verifier_pool.link.keys import KEYS, VERSION, KeyStore, counted_keys, id_of
from verifier_pool.link.trail import TRAIL

Run = Callable[..., tuple[int, str, str]]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "keys.md"
OPS = {"name": "ops", "sha256": hash_key("sk-ops"), "admin": True}


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    with Valkey() as server:
        yield server


@pytest.fixture
def store(valkey: Valkey) -> Iterator[KeyStore]:
    with valkey.client() as client:
        client.flushall()
        yield KeyStore(client)


@pytest.fixture
def run(
    valkey: Valkey, store: KeyStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Run the command; returns its exit code and what it printed."""
    settings: dict[str, Any] = {"redis_url": valkey.url, "keys": [OPS], "limits": {"requests_per_minute": 9}}
    config = tmp_path / "countersign.yaml"
    config.write_text(yaml.safe_dump(settings))
    monkeypatch.setenv("COUNTERSIGN_CONFIG", str(config))

    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = countersign.main(["keys", *arguments])
        except SystemExit as error:
            code = cast(int, error.code)
        return code, *capsys.readouterr()

    return call


def test_a_key_is_told_once_and_kept_as_a_hash(run: Run, store: KeyStore, valkey: Valkey) -> None:
    limits = ("--requests-per-minute", "5", "--tokens-per-minute", "600", "--concurrency", "2", "--tokens", "7000")
    code, out, err = run("create", "app", *limits, "--every", "day", "--expires", "30d", "--operator")
    assert (code, err) == (0, "")
    assert re.fullmatch(r"sk-[a-z2-7]{8}_[A-Za-z0-9_-]{43}\n", out)
    key, stored = store.get("app")
    assert key is not None
    assert (key.sha256, key.prefix) == (hash_key(out.strip()), out.partition("_")[0])
    assert (key.admin, key.operator) == (False, True)
    assert key.expires == pytest.approx(time.time() + 30 * 86_400, abs=60)
    assert key.limits is not None
    assert key.limits.model_dump() == {
        "requests_per_minute": 5,
        "tokens_per_minute": 600,
        "concurrency": 2,
        "tokens": 7000,
        "every": "day",
    }
    assert out.strip().partition("_")[2] not in stored
    with valkey.client() as client:
        assert set(cast("list[bytes]", client.keys())) == {each.encode() for each in (KEYS, VERSION, TRAIL)}
    for arguments in (("list",), ("show", "app"), ("list", "--json"), ("show", "app", "--json")):
        code, shown, _ = run(*arguments)
        assert code == 0
        assert key.prefix in shown
        assert out.strip() not in shown
        assert key.sha256 not in shown


def test_names_are_unique_and_plain(run: Run, store: KeyStore) -> None:
    assert run("create", "app")[0] == 0
    for name in ("app", "ops", "a b", "", "x" * 101, "-x", "a\x1b[31m"):
        code, out, err = run("create", "--", name)
        assert (code, out) == (1, "")
        assert "\x1b" not in err
    assert len(store.all()[0]) == 1


def test_its_life(run: Run, store: KeyStore) -> None:
    run("create", "app", "--tokens", "100")
    assert run("forget", "app")[0] == 1
    assert run("limit", "app", "--concurrency", "3") == (0, "app: 3 at once\n", "")
    assert run("limit", "app", "--unlimited") == (0, "app: none\n", "")
    assert run("limit", "app") == (0, "app: default\n", "")
    assert run("retain", "app", "--keep", "rejects") == (0, "app: rejects\n", "")
    assert run("retain", "app") == (0, "app: all (default)\n", "")
    assert run("revoke", "app") == (0, "app: revoked\n", "")
    assert run("revoke", "app")[0] == 1
    assert run("create", "app")[0] == 1
    assert "revoked" in run("list")[1]
    leases = counted_keys(id_of(store.all()[0][0].sha256))[1]
    store.redis.zadd(leases, {"a request": time.time() * 1000 + 60_000})
    code, _, err = run("forget", "app")
    assert code == 1
    assert "1 requests of it are under way" in err
    store.redis.delete(leases)
    assert run("forget", "app") == (0, "app: forgotten\n", "")
    assert run("show", "app")[0] == 1
    assert store.all() == ([], 0)


def test_what_is_in_the_settings_is_shown_and_not_changed(run: Run) -> None:
    code, out, _ = run("list", "--json")
    assert code == 0
    assert json.loads(out) == {
        "name": "ops",
        "admin": True,
        "operator": False,
        "evidence": "all",
        "retain": None,
        "limits": None,
        "from": "settings",
        "state": "active",
    }
    assert "9 requests a minute (default)" in run("show", "ops")[1]
    for action in ("revoke", "forget", "limit"):
        code, _, err = run(action, "ops")
        assert code == 1
        assert "in the settings" in err


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("create",),
        ("create", "x", "--tokens", "0"),
        ("create", "x", "--tokens", "1e6"),
        ("create", "x", "--tokens", str(10**16)),
        ("create", "x", "--every", "day"),
        ("create", "x", "--tokens", "5", "--every", "year"),
        ("create", "x", "--tokens", "5", "--unlimited"),
        ("create", "x", "--expires", "soon"),
        ("list", "x"),
    ],
)
def test_wrong_usage(run: Run, store: KeyStore, arguments: tuple[str, ...]) -> None:
    assert run(*arguments)[0] == 2
    assert store.all() == ([], 0)


def test_dates(run: Run, store: KeyStore) -> None:
    assert run("create", "x", "--expires", "2001-01-01")[0] == 1
    assert run("create", "x", "--expires", "2100-01-01T12:00")[0] == 0
    key, _ = store.get("x")
    assert key is not None
    assert key.expires == 4_102_488_000
    assert "2100-01-01 12:00" in run("show", "x")[1]


def test_records_that_cannot_be_read(run: Run, valkey: Valkey) -> None:
    with valkey.client() as client:
        client.hset(KEYS, "odd", '{"name": "odd"}')
    code, _, err = run("list")
    assert code == 0
    assert "1 in Redis cannot be read" in err
    assert "another version" in run("show", "odd")[2]


def test_redis_away(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COUNTERSIGN_REDIS_URL", "redis://127.0.0.1:1")
    code, out, err = run("create", "app")
    assert (code, out) == (1, "")
    assert "Redis does not answer" in err


def test_the_page(run: Run, store: KeyStore) -> None:
    """Its commands work, in their order; its settings are settings."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for kind, text in blocks if kind == "sh" for line in text.splitlines()]
    assert len(lines) > 5
    for line in lines:
        name, command, *arguments = shlex.split(line)
        assert (name, command) == ("countersign", "keys")
        assert run(*arguments)[0] == 0, line
    assert [key.name for key in store.all()[0]] == ["batch", "boss"]
    (text,) = (text for kind, text in blocks if kind == "yaml")
    settings = parse_settings(text, {})
    assert isinstance(settings, Settings)
    assert settings.keys[0].limits is not None
    assert settings.keys[0].limits.unlimited
    assert settings.limits.tokens == 1_000_000


def test_use_is_shown(run: Run) -> None:
    run("create", "app", "--tokens", "100", "--requests-per-minute", "5")
    text = run("show", "app")[1]
    assert "0 of 100 tokens in 0 requests, 0 held, until" in text
    assert "last minute  0 requests" in text
