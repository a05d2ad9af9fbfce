"""Signed profiles: what holds, what does not, and what a worker refuses to start with."""

from __future__ import annotations

import base64
import contextlib
import json
import stat
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.errors import ProfileError, SettingsError
from policies.settings import Settings, parse_settings
from tests.policies.profiles import profile
from verifier_pool import context
from verifier_pool.profile_command import main, write_atomically
from verifier_pool.profiles import canonical, new_key, open_profile, public_text, read_key, read_profile, sign

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
PROFILE = profile()
SIGNED = sign(PROFILE, KEY)


def changed(**parts: Any) -> str:
    envelope = json.loads(SIGNED)
    envelope["signature"] |= parts
    return json.dumps(envelope)


def test_a_signed_profile_reads_back_and_names_its_signer() -> None:
    opened = open_profile(SIGNED)
    assert opened.profile == PROFILE
    assert opened.signer == public_text(KEY.public_key())
    assert open_profile(PROFILE.to_json()).signer is None


def test_formatting_and_order_do_not_matter() -> None:
    def backwards(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: backwards(value[name]) for name in reversed(value)}
        return [backwards(item) for item in value] if isinstance(value, list) else value

    text = json.dumps(backwards(json.loads(SIGNED)), separators=(",", ":"))
    assert open_profile(text).profile == PROFILE


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_no_changed_byte_of_the_profile_survives(data: st.DataObject) -> None:
    body = bytearray(canonical(json.loads(SIGNED)["profile"]))
    position = data.draw(st.integers(0, len(body) - 1))
    replacement = data.draw(st.integers(0x20, 0x7E).filter(lambda byte: byte != body[position]))
    body[position] = replacement
    text = b'{"profile":' + bytes(body) + b',"signature":' + json.dumps(json.loads(SIGNED)["signature"]).encode() + b"}"
    try:
        assert open_profile(text).profile == PROFILE
        assert bytes(canonical(json.loads(text)["profile"])) == bytes(canonical(json.loads(SIGNED)["profile"]))
    except ProfileError:
        pass


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (changed(value=base64.b64encode(bytes(64)).decode()), "does not hold"),
        (changed(value="AAAA"), "does not hold|not what Ed25519 uses"),
        (changed(value="not base64!"), "not what Ed25519 uses"),
        (changed(value=None), "not what Ed25519 uses"),
        (changed(key=public_text(OTHER.public_key())), "does not hold"),
        (changed(key="AAAA"), "not what Ed25519 uses"),
        (changed(alg="none"), "'none'"),
        (changed(extra=1), "holds `alg`"),
        (json.dumps({"profile": json.loads(PROFILE.to_json()), "signature": None}), "holds `alg`"),
        (json.dumps({"profile": json.loads(PROFILE.to_json())}), "and nothing else"),
        (json.dumps({**json.loads(SIGNED), "more": 1}), "and nothing else"),
        (SIGNED.replace('"alg"', '"alg": "EdDSA", "alg"'), "twice"),
        (SIGNED.replace('"created": 1', '"created": NaN, "was": 1', 1), "finite"),
        ("[]", "no JSON object"),
        ("", "not a profile"),
        ("[" * 100_000, "not a profile"),
        (b"\xff\xfe", "not a profile"),
    ],
)
def test_what_does_not_hold_is_refused(text: str | bytes, words: str) -> None:
    with pytest.raises(ProfileError, match=words):
        open_profile(text)


def test_a_signature_for_another_purpose_does_not_count() -> None:
    body = canonical(json.loads(PROFILE.to_json()))
    with pytest.raises(ProfileError, match="does not hold"):
        open_profile(changed(value=base64.b64encode(KEY.sign(body)).decode()))


NAMES = st.sampled_from(["profile", "signature", "key", "alg", "value"])
LEAVES = st.none() | st.booleans() | st.floats() | st.text(max_size=5)
TREES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner))


@given(st.binary(max_size=200) | st.text(max_size=200) | TREES.map(json.dumps))
def test_nothing_but_a_profile_error_comes_of_any_file(content: bytes | str) -> None:
    with contextlib.suppress(ProfileError):
        open_profile(content)


def rules(path: Path, *keys: str) -> Settings:
    tree = {"models": {"m": {"profile": str(path)}}, "profile_keys": list(keys)}
    return parse_settings(json.dumps(tree), {})


@pytest.mark.parametrize(
    ("text", "trusted", "words"),
    [
        (PROFILE.to_json(), [KEY], "not signed"),
        (SIGNED, [OTHER], "not among profile_keys"),
        (changed(value=base64.b64encode(bytes(64)).decode()), [], "does not hold"),
        (changed(value=base64.b64encode(bytes(64)).decode()), [KEY], "does not hold"),
    ],
)
def test_a_worker_does_not_start_on_it(tmp_path: Path, text: str, trusted: list[Ed25519PrivateKey], words: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(SettingsError, match=words) as refused:
        context.read_profiles(rules(path, *(public_text(key.public_key()) for key in trusted)))
    assert refused.value.key == "models.m.profile"


def test_a_worker_starts_on_what_its_keys_signed(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(SIGNED)
    for trusted in ([], [OTHER, KEY]):
        keys = [public_text(key.public_key()) for key in trusted]
        assert context.read_profiles(rules(path, *keys)) == {"m": PROFILE}
    path.write_text(PROFILE.to_json())
    assert context.read_profiles(rules(path)) == {"m": PROFILE}


@pytest.mark.parametrize("key", ["", "short", "A" * 44, "A" * 43 + "=="])
def test_a_key_that_is_none_stops_the_start(key: str) -> None:
    with pytest.raises(SettingsError, match="profile_keys"):
        parse_settings(json.dumps({"profile_keys": [key]}), {})


def test_the_command_makes_keys_signs_shows_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret, file = tmp_path / "key.pem", tmp_path / "profile.json"
    write_atomically(file, PROFILE.to_json())
    assert main(["keygen", str(secret)]) == 0
    public = public_text(read_key(secret).public_key())
    assert f"profile_keys: [{public}]" in capsys.readouterr().out
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    with pytest.raises(ProfileError, match="File exists"):
        main(["keygen", str(secret)])
    with pytest.raises(ProfileError, match="not signed"):
        main(["verify", str(file)])
    assert main(["sign", str(file), "--key", str(secret)]) == 0
    assert main(["verify", str(file), "--key", public]) == 0
    with pytest.raises(ProfileError, match="not among"):
        main(["verify", str(file), "--key", public_text(OTHER.public_key())])
    capsys.readouterr()
    assert main(["show", str(file)]) == 0
    shown = capsys.readouterr().out
    assert public in shown
    assert PROFILE.key.model in shown
    assert "1, of 12 answers or more" in shown
    assert read_profile(file, [public]) == PROFILE
    with pytest.raises(ProfileError, match="No such file"):
        main(["show", str(tmp_path / "missing")])


def test_only_an_ed25519_key_signs(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    kinds = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    path.write_bytes(ec.generate_private_key(ec.SECP256R1()).private_bytes(*kinds, serialization.NoEncryption()))
    with pytest.raises(ProfileError, match="not an Ed25519 key"):
        read_key(path)
    path.write_bytes(KEY.private_bytes(*kinds, serialization.BestAvailableEncryption(b"password")))
    with pytest.raises(ProfileError, match="unencrypted"):
        read_key(path)
    path.write_text("nothing of the kind")
    with pytest.raises(ProfileError, match="unencrypted"):
        read_key(path)
    path.unlink()
    assert new_key(path) == public_text(read_key(path).public_key())


def test_a_profile_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "profile.json"
    write_atomically(target, "one")
    write_atomically(target, "two")
    assert target.read_text() == "two"
    with pytest.raises(TypeError):
        write_atomically(target, None)  # type: ignore[arg-type]
    assert target.read_text() == "two"
    assert [path.name for path in target.parent.iterdir()] == ["profile.json"]
