"""Settings: overrides, and errors that name the key."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import SettingsError
from policies.settings import embedded_dir, hash_key, parse_settings, store_url

TEXT = """
models: {m: {generation_config: {temperature: 0.5}}}
backends: [{name: a, url: "http://127.0.0.1:1", model: m}]
"""


def test_defaults_need_no_file() -> None:
    settings = parse_settings("", {})
    assert settings.verification.mode == "async"
    assert settings.audit.rate is None


def test_an_override_replaces_or_adds_any_key() -> None:
    environ = {
        "COUNTERSIGN_PORT": "9",
        "COUNTERSIGN_AUDIT__RATE": "0.25",
        "COUNTERSIGN_MODELS__M__GENERATION_CONFIG__TOP_K": "7",
        "COUNTERSIGN_MODELS__M__EOS_TOKEN_IDS": "[2, 3]",
        "COUNTERSIGN_KEYS": f"[{{name: app, sha256: {hash_key('k')}}}]",
        "COUNTERSIGN_CONFIG": "elsewhere.yaml",
    }
    settings = parse_settings(TEXT, environ)
    assert (settings.port, settings.audit.rate) == (9, 0.25)
    assert settings.models["m"].generation_config == {"temperature": 0.5, "top_k": 7}
    assert settings.models["m"].eos_token_ids == (2, 3)
    assert settings.keys[0].sha256 == hash_key("k")


@given(st.from_regex(r"[0-9a-zA-Z_.+-]{1,30}", fullmatch=True))
def test_text_settings_take_an_override_as_it_is(text: str) -> None:
    settings = parse_settings(TEXT, {"COUNTERSIGN_BACKENDS__0__API_KEY": text, "COUNTERSIGN_REDIS_URL": text})
    key = settings.backends[0].api_key
    assert key is not None
    assert key.get_secret_value() == text
    assert settings.redis_url == text


@pytest.mark.parametrize(
    ("environ", "key"),
    [
        ({"COUNTERSIGN_PORT": "x"}, "port"),
        ({"COUNTERSIGN_PORT": "70000"}, "port"),
        ({"COUNTERSIGN_FOO": "1"}, "foo"),
        ({"COUNTERSIGN_AUDIT__RATE": "2"}, "audit.rate"),
        ({"COUNTERSIGN_AUDIT": "3"}, "audit"),
        ({"COUNTERSIGN_WEBHOOK__URL": "http://x"}, "webhook.secret"),
        ({"COUNTERSIGN_PORT": "[1"}, "COUNTERSIGN_PORT"),
        ({"COUNTERSIGN_BACKENDS__7__URL": "http://x"}, "COUNTERSIGN_BACKENDS__7__URL"),
        ({"COUNTERSIGN_MODELS__M__REFERENCE__KIND": "vllm_http"}, "models.m.reference"),
    ],
)
def test_a_wrong_setting_is_named(environ: dict[str, str], key: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_settings(TEXT, environ)
    assert caught.value.key == key


@pytest.mark.parametrize("text", ["- 1", "a: [", "models: {m: {}}\nbackends: [{name: a, url: 'http://x', model: n}]"])
def test_a_wrong_file_is_refused(text: str) -> None:
    with pytest.raises(SettingsError):
        parse_settings(text, {})


@given(st.text(max_size=200))
def test_no_text_breaks_the_parser(text: str) -> None:
    with contextlib.suppress(SettingsError):
        parse_settings(text, {})


def test_secrets_stay_out_of_error_messages() -> None:
    text = TEXT.replace("model: m}", "model: m, api_key: [canary]}")
    with pytest.raises(SettingsError) as caught:
        parse_settings(text, {})
    assert "canary" not in str(caught.value)


def test_secrets_stay_out_of_yaml_errors() -> None:
    with pytest.raises(SettingsError, match="line 2") as caught:
        parse_settings("port: 1\nredis_url: [canary: }", {})
    with pytest.raises(SettingsError, match="COUNTERSIGN_REDIS_URL") as other:
        parse_settings("", {"COUNTERSIGN_REDIS_URL": "[canary: }"})
    assert "canary" not in str(caught.value) + str(other.value)


def test_redis_is_the_operators_or_a_socket_in_the_state_folder() -> None:
    assert store_url(parse_settings("redis_url: redis://r", {}), {}) == "redis://r"
    assert store_url(parse_settings("", {}), {"HOME": "/h"}) == "unix:///h/.local/state/countersign/valkey.sock"
    assert embedded_dir(parse_settings("embedded_dir: /e", {}), {"HOME": "/h"}) == "/e"
    with pytest.raises(SettingsError, match="embedded_dir"):
        store_url(parse_settings(f"embedded_dir: /{'e' * 120}", {}), {})


def test_a_backend_may_have_an_alpha_of_its_own() -> None:
    text = """
models: {m: {}}
standing: {alpha: 0.001, trusted_after: 7}
backends:
  - {name: plain, url: "http://x", model: m}
  - {name: strict, url: "http://y", model: m, alpha: 0.05}
"""
    settings = parse_settings(text, {})
    assert settings.standing_of("plain") == settings.standing_of("gone") == settings.standing
    assert (settings.standing_of("strict").alpha, settings.standing_of("strict").trusted_after) == (0.05, 7)
    with pytest.raises(SettingsError, match=r"backends\.0\.alpha"):
        parse_settings("models: {m: {}}\nbackends: [{name: b, url: 'http://x', model: m, alpha: 0}]", {})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("verification: {evidence_ttl: 600, replay_wait: 600}", "replay_wait"),
        ("verification: {evidence_ttl: 100}", "replay_wait"),
        ("verification: {evidence_ttl: 4000, verdict_ttl: 3999}", "verdict_ttl"),
    ],
)
def test_lifetimes_that_lose_verdicts_are_refused(text: str, named: str) -> None:
    with pytest.raises(SettingsError, match=f"verification.*{named}"):
        parse_settings(text, {})
