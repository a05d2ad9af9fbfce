"""What signs receipts: the settings' keys, or one made in Redis; rotation; and what is refused."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import orjson
import pytest
from redis import Redis

from policies import jws
from policies.errors import NoSealingKey, ReceiptError, SettingsError
from policies.settings import ReceiptSettings, parse_settings
from verifier_pool.link import signing
from verifier_pool.link.resealing import reseal
from verifier_pool.link.sealing import Sealer
from verifier_pool.link.signing import RECEIPT_KEYS, Signer, kept_keys, rotate, signer_of

OLD, NEW = (jws.key_text(bytes([number]) * 32) for number in (1, 2))
GONE = jws.key_text(jws.public_bytes(jws.key_from(bytes([3]) * 32)))


def public(seed: str) -> bytes:
    return jws.public_bytes(jws.key_from(jws.key_bytes(seed)))


def configured(text: str, **more: object) -> ReceiptSettings:
    return ReceiptSettings.model_validate({"signing_keys": text, **more})


def test_the_first_key_of_the_settings_signs_and_all_are_published(redis: Redis) -> None:
    signer = Signer(redis, configured(f"{NEW} {OLD}", public_keys=(GONE,)))
    token, kid = signer.sign(b"{}", "x")
    assert kid == ""
    assert jws.kid_in(token, "x") == jws.kid_of(public(NEW))
    assert signer.published() == [public(NEW), public(OLD), jws.key_bytes(GONE)]
    assert signer.configured
    signer.renew(configured(NEW))
    assert signer.published() == [public(NEW), public(OLD)]
    assert redis.dbsize() == 0  # Redis has no say


def test_keys_come_from_a_file_too(redis: Redis, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{OLD}\n")
    named = parse_settings(f"receipts: {{signing_keys_file: {file}}}", {"COUNTERSIGN_RECEIPTS__SIGNING_KEYS": NEW})
    assert signer_of(redis, named).published() == [public(NEW), public(OLD)]


@pytest.mark.parametrize("text", ["", "x", "AAAA", OLD + "=", OLD[:-1] + "_", f"{OLD} x"])
def test_a_key_that_is_none_stops_the_start(redis: Redis, text: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"receipts\.signing_keys") as caught:
        Signer(redis, configured(text))
    assert not text or text not in str(caught.value)
    (tmp_path / "keys").write_text(text)
    for path in (tmp_path / "keys", tmp_path / "none", tmp_path):
        with pytest.raises(SettingsError, match=r"receipts\.signing_keys_file"):
            Signer(redis, ReceiptSettings(signing_keys_file=str(path)))
    with pytest.raises(SettingsError, match=r"receipts\.public_keys"):
        Signer(redis, ReceiptSettings(public_keys=("A" * 42 + "_",)))


def test_without_keys_one_is_made_for_all(redis: Redis) -> None:
    tokens: list[str] = []

    def sign() -> None:
        tokens.append(Signer(redis).sign(b"{}", "x")[0])

    threads = [threading.Thread(target=sign) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (only,) = kept_keys(redis, Sealer())
    assert tokens == [jws.sign(b"{}", jws.key_from(_seed(redis, only.kid)), "x")] * 8
    assert Signer(redis).published() == [only.public]


def _seed(redis: Redis, kid: str) -> bytes:
    stored = redis.hget(RECEIPT_KEYS, kid)
    return jws.key_bytes(orjson.loads(stored)["seed"])  # type: ignore[arg-type]


def test_its_seed_is_sealed_and_opens_nowhere_else(redis: Redis) -> None:
    sealer = Sealer([bytes(32)])
    signer = Signer(redis, sealer=sealer)
    token, kid = signer.sign(b"{}", "x")
    with pytest.raises(ReceiptError):
        _seed(redis, kid)  # it is longer than a seed
    assert Signer(redis, sealer=sealer).sign(b"{}", "x") == (token, kid)
    # Who seals nothing would make one that whoever reads Redis can sign with.
    for ask in (lambda: Signer(redis).sign(b"{}", "x"), lambda: rotate(redis, Sealer())):
        with pytest.raises(NoSealingKey):
            ask()
    assert redis.hlen(RECEIPT_KEYS) == 1


def test_where_no_seed_can_be_unsealed_another_key_signs(redis: Redis, caplog: pytest.LogCaptureFixture) -> None:
    old, new = Sealer([bytes(32)]), Sealer([bytes([1]) * 32])
    before = Signer(redis, sealer=old)
    _, first = before.sign(b"{}", "x")
    token, second = Signer(redis, sealer=new).sign(b"{}", "x")
    assert second != first
    assert "no key that signs receipts can be unsealed" in caplog.text
    # Everybody goes on with what can be opened, all keys are published, and no more are made.
    before.forget()
    assert before.sign(b"{}", "x")[1] == first
    assert Signer(redis, sealer=new).sign(b"{}", "x") == (token, second)
    assert {jws.kid_of(each) for each in before.published()} == {first, second}
    third, _ = rotate(redis, new)
    assert {kept.kid: kept.seed for kept in kept_keys(redis, new)} == {first: True, second: True, third: True}


def test_many_make_one_key_where_none_can_be_unsealed(redis: Redis) -> None:
    Signer(redis, sealer=Sealer([bytes(32)])).sign(b"{}", "x")
    signers = [Signer(redis, sealer=Sealer([bytes([1]) * 32])) for _ in range(3)]
    for signer in signers:
        signer._held = signer._read()
    assert len({kept.kid for signer in signers for kept in signer._instead()}) == 2


def test_what_was_unsealed_once_signs_on(redis: Redis) -> None:
    """Others may have sealed it anew with a key that this process is yet to be restarted with."""
    old, new = bytes(32), bytes([1]) * 32
    signer = Signer(redis, sealer=Sealer([old]))
    signed = signer.sign(b"{}", "x")
    assert reseal(redis, Sealer([new, old])) == 1
    signer.forget()
    assert signer.sign(b"{}", "x") == signed == Signer(redis, sealer=Sealer([new])).sign(b"{}", "x")
    assert redis.hlen(RECEIPT_KEYS) == 1


@pytest.mark.parametrize("seed", ["", "x", "AAAA", "AGNzAQ" + "A" * 80, "ÿ", "A" * 43])
def test_a_damaged_key_keeps_no_other_from_signing(redis: Redis, seed: str) -> None:
    sealer = Sealer([bytes(32)])
    signed = Signer(redis, sealer=sealer).sign(b"{}", "x")
    damaged = {"public": GONE, "since": time.time() - 1, "seed": seed}
    redis.hset(RECEIPT_KEYS, jws.kid_of(jws.key_bytes(GONE)), orjson.dumps(damaged))
    assert Signer(redis, sealer=sealer).sign(b"{}", "x") == signed
    assert rotate(redis, sealer)


def test_rotation_publishes_before_it_signs(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    signer = Signer(redis)
    _, first = signer.sign(b"{}", "x")
    second, _ = rotate(redis, Sealer())
    signer.forget()
    assert signer.sign(b"{}", "x")[1] == first
    assert [jws.kid_of(each) for each in signer.published()] == [second, first]
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + signing.OVERLAP_SECONDS)
    assert signer.sign(b"{}", "x")[1] == second
    third, _ = rotate(redis, Sealer())
    kept = {each.kid: each.key is not None for each in kept_keys(redis, Sealer())}
    # The first can sign no more; its receipts can still be checked.
    assert kept == {first: False, second: True, third: True}
    signer.forget()
    assert {jws.kid_of(each) for each in signer.published()} == {first, second, third}


def test_a_key_that_redis_makes_up_signs_nothing(redis: Redis) -> None:
    _, kid = Signer(redis).sign(b"{}", "x")
    stored = redis.hget(RECEIPT_KEYS, kid)
    for junk in (b"", b"[]", b"{}", b'{"public": 5}', orjson.dumps({"public": OLD, "since": 1.0}), stored):
        redis.hset(RECEIPT_KEYS, "another", junk)
        assert [each.kid for each in kept_keys(redis, Sealer())] == [kid]
    redis.hdel(RECEIPT_KEYS, kid)  # and it keeps nobody from making one
    assert Signer(redis).sign(b"{}", "x")[1] != kid
    redis.delete(RECEIPT_KEYS)
    redis.hset(RECEIPT_KEYS, kid, stored)
    seed = orjson.loads(stored)["seed"]  # type: ignore[arg-type]
    swapped = {"public": jws.key_text(public(OLD)), "since": 1.0, "seed": seed}
    redis.hset(RECEIPT_KEYS, jws.kid_of(public(OLD)), orjson.dumps(swapped))
    assert [each.kid for each in kept_keys(redis, Sealer())] == [kid]


def test_where_every_seed_is_gone_nothing_is_signed(redis: Redis) -> None:
    _, kid = Signer(redis).sign(b"{}", "x")
    (kept,) = kept_keys(redis, Sealer())
    redis.hset(RECEIPT_KEYS, kid, orjson.dumps({"public": jws.key_text(kept.public), "since": 1.0}))
    with pytest.raises(ReceiptError, match="no key in Redis signs"):
        Signer(redis).sign(b"{}", "x")


def test_without_any_encryption_key_the_start_says_so_and_lost_keys_can_be_given_up(redis: Redis) -> None:
    sealed, bare = Sealer([bytes(32)]), Sealer()
    Signer(redis, sealer=bare).check()
    redis.flushall()
    before = Signer(redis, sealer=sealed).published()
    Signer(redis, sealer=sealed).check()
    with pytest.raises(SettingsError, match=r"storage\.encryption_keys.*rotate --forget"):
        Signer(redis, sealer=bare).check()
    Signer(redis, configured(NEW), bare).check()
    Signer(redis, sealer=Sealer([bytes([1]) * 32])).check()  # which makes one of its own
    kid, lost = signing.replace_lost(redis, bare)
    assert jws.kid_of(before[0]) in lost
    signer = Signer(redis, sealer=bare)
    signer.check()
    token, said = signer.sign(b"{}", "x")
    assert jws.kid_in(token, "x") == said == kid
    assert set(before) < set(signer.published())
    assert Signer(redis, sealer=sealed).sign(b"{}", "x")[1] == kid
    assert [kept.seed for kept in kept_keys(redis, bare)].count(True) == 1
