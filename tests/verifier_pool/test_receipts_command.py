"""`countersign receipts` at a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from redis import Redis

import countersign
from policies import jws
from policies.head import verify_head
from policies.receipt import KIND
from tests.verifier_pool.link.test_receipts import settle
from verifier_pool.link import signing, trail
from verifier_pool.link.receipts import receipt_of
from verifier_pool.link.sealing import Sealer
from verifier_pool.link.signing import RECEIPT_KEYS, Signer

Run = Callable[..., str]


@pytest.fixture
def run(
    valkey_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    monkeypatch.setenv("COUNTERSIGN_REDIS_URL", valkey_url)
    (tmp_path / "countersign.yaml").write_text("")

    def told(*words: str, code: int = 0) -> str:
        config = [] if words[0] == "keygen" else ["--config", str(tmp_path / "countersign.yaml")]
        assert countersign.main(["receipts", *words, *config]) == code
        said = capsys.readouterr()
        return said.out if code == 0 else said.err

    return told


def test_a_key_that_was_made_signs(redis: Redis, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    secret, public, kid = "", "", ""
    for line in run("keygen").splitlines():
        if line.startswith("COUNTERSIGN_RECEIPTS__SIGNING_KEYS="):
            secret = line.partition("=")[2]
        elif "public key" in line:
            public = line.rpartition(" ")[2]
        elif "kid" in line:
            kid = line.rpartition(" ")[2]
    assert jws.kid_of(jws.key_bytes(public)) == kid
    monkeypatch.setenv("COUNTERSIGN_RECEIPTS__SIGNING_KEYS", secret)
    found = json.loads(run("keys", "--json"))
    assert found == {"from": "the settings", "keys": [{"kid": kid, "signs": True}]}
    assert secret not in run("keys")
    assert "receipts.signing_keys says what signs" in run("rotate", code=1)
    assert redis.dbsize() == 0


def test_keys_in_redis_are_rotated(redis: Redis, run: Run) -> None:
    (first,) = json.loads(run("keys", "--json"))["keys"]
    made = json.loads(run("rotate", "--json"))
    found = json.loads(run("keys", "--json"))
    assert found["from"] == "Redis"
    assert found["keys"] == [{"kid": made["kid"], "signs": False}, {"kid": first["kid"], "signs": True}]
    assert [each["action"] for each in trail.read(redis, limit=5)] == ["receipts.rotate"]
    assert redis.hlen(RECEIPT_KEYS) == 2


def test_lost_keys_are_given_up(redis: Redis, run: Run) -> None:
    lost = jws.kid_of(Signer(redis, sealer=Sealer([bytes(32)])).published()[0])
    assert "storage.encryption_keys" in run("keys", code=1)
    assert "storage.encryption_keys" in run("rotate", code=1)
    made = json.loads(run("rotate", "--forget", "--json"))
    assert made["given_up"] == [lost]
    found = json.loads(run("keys", "--json"))["keys"]
    assert [each for each in found if each["signs"]] == [{"kid": made["kid"], "signs": True}]
    assert {each["kid"] for each in found} == {made["kid"], lost}
    (entry,) = trail.read(redis, limit=5)
    assert entry["after"] == {"given_up": [lost]}


@pytest.mark.parametrize("command", [["worker", "--burst", "--only", "verify"], ["serve", "--port", "0"]])
def test_nothing_starts_that_cannot_sign(
    redis: Redis, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    Signer(redis, sealer=Sealer([bytes(32)])).published()
    assert countersign.main([*command, "--config", str(tmp_path / "countersign.yaml")]) == 3
    assert "storage.encryption_keys" in capsys.readouterr().err


def test_the_log_is_shown(redis: Redis, run: Run) -> None:
    assert "nothing is in the log" in run("log")
    settle(redis, 0)
    settle(redis, 1)
    found = json.loads(run("log", "--json"))
    keys = jws.keys_in(jws.jwk_set(Signer(redis).published()))
    head = verify_head(found["head"], keys)
    assert (head.size, head.root.hex(), head.log) == (2, found["root"], found["log"]) == (2, head.root.hex(), head.log)
    assert found["root"] in run("log")


def test_another_log_begins(redis: Redis, run: Run) -> None:
    assert "nothing is in the log" in run("begin", code=1)
    settle(redis, 0)
    before = json.loads(run("log", "--json"))["log"]
    found = json.loads(run("begin", "--json"))
    assert found["before"] == before
    assert json.loads(run("log", "--json"))["log"] == found["log"] != before
    assert [each["action"] for each in trail.read(redis, limit=5)] == ["receipts.begin"]


def test_a_key_that_was_stolen_is_published_no_more(redis: Redis, run: Run) -> None:
    (first,) = json.loads(run("keys", "--json"))["keys"]
    said = json.loads(run("revoke", first["kid"], "--json"))
    (second,) = json.loads(run("keys", "--json"))["keys"]
    assert said == {"kid": first["kid"], "instead": second["kid"]}
    assert second["signs"]
    assert settle(redis, 1)
    stored = receipt_of(redis, f"{1:032x}")
    assert stored is not None
    assert jws.kid_in(stored.token, KIND) == second["kid"]
    assert trail.read(redis)[0]["target"] == first["kid"]
    assert "there is no key" in run("revoke", first["kid"], code=1)
    # Where another one signs already, none has to be made.
    redis.hset(RECEIPT_KEYS, *signing.record_of(jws.new_key(), 2.0, Sealer()))
    assert json.loads(run("revoke", second["kid"], "--json"))["instead"] is None
    (third,) = json.loads(run("keys", "--json"))["keys"]
    assert third["signs"]


def test_a_key_of_the_settings_is_taken_out_there(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COUNTERSIGN_RECEIPTS__SIGNING_KEYS", jws.key_text(bytes(32)))
    assert "take the key out there" in run("revoke", "x", code=1)
