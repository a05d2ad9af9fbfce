"""Values at rest: what is sealed opens for what it belongs to, with any of the keys, and for nothing else."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import NoSealingKey, SealError, SettingsError
from policies.settings import StorageSettings, parse_settings
from verifier_pool.link.sealing import OVERHEAD, Sealer, is_sealed, new_key

OLD, NEW = bytes(range(32)), bytes(range(32, 64))
BOTH = Sealer([NEW, OLD])


@given(st.binary(max_size=300), st.binary(max_size=40))
def test_what_is_sealed_opens_again(plain: bytes, about: bytes) -> None:
    for sealer in (Sealer(), BOTH):
        sealed = sealer.seal(plain, about)
        assert sealer.open(sealed, about) == plain
        assert is_sealed(sealed) == sealer.seals
    assert len(BOTH.seal(plain, about)) == len(plain) + OVERHEAD


@given(st.binary(min_size=1, max_size=80), st.data())
def test_no_byte_can_be_changed(plain: bytes, data: st.DataObject) -> None:
    sealed = BOTH.seal(plain, b"evidence:1")
    at = data.draw(st.integers(3, len(sealed) - 1))
    changed = bytearray(sealed)
    changed[at] ^= data.draw(st.integers(1, 255))
    try:
        assert BOTH.open(bytes(changed), b"evidence:1") != plain
        assert changed[3] == 0  # it says that it is plain, and is read as what it then says
    except SealError:
        pass
    with pytest.raises(SealError):
        BOTH.open(sealed[: data.draw(st.integers(4, len(sealed) - 1))], b"evidence:1")


def test_it_opens_for_nothing_else() -> None:
    sealed = BOTH.seal(b"answer", b"evidence:1")
    with pytest.raises(SealError, match="belongs to something else"):
        BOTH.open(sealed, b"evidence:2")
    assert b"answer" not in sealed
    assert sealed != BOTH.seal(b"answer", b"evidence:1")


def test_keys_rotate() -> None:
    before = Sealer([OLD]).seal(b"x", b"a")
    assert BOTH.open(before, b"a") == b"x"
    after = BOTH.seal(b"x", b"a")
    assert Sealer([NEW]).open(after, b"a") == b"x"
    for sealer in (Sealer([OLD]), Sealer()):
        with pytest.raises(NoSealingKey):
            sealer.open(after, b"a")


def test_without_keys_values_stay_as_they_are() -> None:
    assert Sealer().seal(b"\x28\xb5\x2f\xfd", b"a") == b"\x28\xb5\x2f\xfd"
    assert BOTH.open(b"{}", b"a") == b"{}"
    looks = BOTH.seal(b"x", b"a")
    assert Sealer().open(Sealer().seal(looks, b"a"), b"a") == looks


def test_keys_come_from_the_settings_and_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(base64.b64encode(OLD).decode() + "\n")
    text = f"storage: {{encryption_keys: {base64.b64encode(NEW).decode()}, encryption_keys_file: {file}}}"
    sealer = Sealer.of(parse_settings(text, {}).storage)
    assert Sealer([NEW]).open(sealer.seal(b"x", b"a"), b"a") == b"x"
    assert sealer.open(Sealer([OLD]).seal(b"x", b"a"), b"a") == b"x"
    assert not Sealer.of(StorageSettings()).seals
    named = parse_settings("", {"COUNTERSIGN_STORAGE__ENCRYPTION_KEYS": f"{new_key()} {new_key()}"})
    assert Sealer.of(named.storage).seals


@pytest.mark.parametrize("text", ["", "hunter2", "AAAA", "A" * 43 + "==", "A" * 43 + "= x"])
def test_a_key_that_is_none_stops_the_start(text: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"storage\.encryption_keys") as caught:
        Sealer.of(StorageSettings.model_validate({"encryption_keys": text}))
    assert not text or text not in str(caught.value)
    (tmp_path / "keys").write_text(text)
    for path in (tmp_path / "keys", tmp_path / "none", tmp_path):
        with pytest.raises(SettingsError, match="encryption_keys_file"):
            Sealer.of(StorageSettings(encryption_keys_file=str(path)))
