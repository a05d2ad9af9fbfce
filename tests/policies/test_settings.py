"""Settings: overrides, and errors that name the key."""

from __future__ import annotations

import contextlib
import re
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, SecretStr

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


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        ("{port: 8700, admin: {port: 8700}}", True),
        ("{host: 10.0.0.1, port: 8700, admin: {port: 8700, host: localhost}}", True),
        ("{host: 0.0.0.0, port: 8700, admin: {port: 8700}}", True),
        ("{admin: {port: 8700}}", True),
        ("{host: 10.0.0.1, port: 8700, admin: {port: 8700}}", False),
        ("{port: 0, admin: {port: 0}}", False),
        ("{port: 8700, admin: {port: 8701}}", False),
    ],
)
def test_the_admin_api_is_not_where_the_proxy_is(said: str, refused: bool) -> None:
    with pytest.raises(SettingsError, match=r"admin\.port") if refused else contextlib.nullcontext():
        parse_settings(said, {})


FULL = f"""
keys: [{{name: k, sha256: {hash_key("k")}}}]
models:
  m:
    reference: {{kind: vllm_http, url: "http://r"}}
    second_reference: {{kind: vllm_http, url: "http://r"}}
    second_profile: p
    routing: {{policy: prefix_hash, sticky: [user, session]}}
backends: [{{name: a, url: "http://127.0.0.1:1", model: m}}]
routing: {{policy: prefix_hash, sticky: [user, session]}}
webhook: {{url: "http://w", secret: s}}
relay: {{passthrough: [/a]}}
admin: {{keys: [{{name: k, sha256: {hash_key("a")}}}]}}
"""
"""Settings in which every section is there."""


class Text(NamedTuple):
    """A setting that is text: what overrides it, what it says, and whether not any text will do."""

    variable: str
    value: Any
    ruled: bool


def texts_of(value: Any, path: str = "") -> dict[str, Text]:
    """Every setting that is text, by path."""
    found: dict[str, Text] = {}
    if isinstance(value, BaseModel):
        for name, field in type(value).model_fields.items():
            kind, here = str(field.annotation), f"{path}.{name}".lstrip(".")
            if ("str" in kind or "SecretStr" in kind) and not re.search("tuple|dict|Literal", kind):
                variable = "COUNTERSIGN_" + here.upper().replace(".", "__")
                found[here] = Text(variable, getattr(value, name), bool(field.metadata) or "Annotated" in kind)
            elif field.annotation == tuple[str, ...]:
                found |= texts_of(list(getattr(value, name)), here)
            else:
                found |= texts_of(getattr(value, name), here)
    elif isinstance(value, list):
        for at, item in enumerate(value):
            found[f"{path}.{at}"] = Text(f"COUNTERSIGN_{path}__{at}".upper().replace(".", "__"), item, False)
    elif isinstance(value, dict | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            found |= texts_of(item, f"{path}.{key}")
    return found


TEXTS = texts_of(parse_settings(FULL, {}))
SOME = {"host", "redis_url", "audit.secret", "backends.0.api_key", "models.m.reference.api_key", "routing.sticky.1"}
ODD = ("[abc", "@x", "0123", "null", "a: b", "2026-13-45", "{", "*x", "", " ", "\n", "!!python/none")


def test_all_kinds_of_texts_are_found() -> None:
    assert set(TEXTS) >= SOME
    assert not any(TEXTS[path].ruled for path in SOME)
    assert TEXTS["backends.0.url"].ruled


def refusal(path: str, text: str) -> SettingsError | None:
    """How an override is refused; None where it is taken, as it is."""
    try:
        found = texts_of(parse_settings(FULL, {TEXTS[path].variable: text}))[path].value
    except SettingsError as error:
        return error
    assert (found.get_secret_value() if isinstance(found, SecretStr) else found) == text
    return None


@pytest.mark.parametrize("path", sorted(set(TEXTS) - {"backends.0.model"}))
@given(text=st.sampled_from(ODD) | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
@settings(max_examples=25, deadline=None)
def test_text_settings_take_an_override_as_it_is(path: str, text: str) -> None:
    refused = refusal(path, text)
    if refused is not None:
        # By a rule of the setting's own, or because it is needed; what YAML makes of it plays no part.
        assert TEXTS[path].ruled or not text
        assert path.startswith(refused.key)
        assert "YAML" not in str(refused)


@pytest.mark.parametrize("text", ODD)
def test_what_another_setting_must_name_is_taken_as_it_is(text: str) -> None:
    refused = refusal("backends.0.model", text)
    assert refused is not None
    assert repr(text) in str(refused)


@pytest.mark.parametrize(
    "variable", ["COUNTERSIGN_PORT", "COUNTERSIGN_MODELS__M__EOS_TOKEN_IDS", "COUNTERSIGN_BACKENDS"]
)
@pytest.mark.parametrize("text", ["[abc", "@x", "2026-13-45", "{", "0x_", "[" * 5000, "a: b: c"])
def test_what_is_no_text_is_yaml_and_the_variable_is_named(variable: str, text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_settings(FULL, {variable: text})
    assert caught.value.key == variable


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("port: 1\nhost: x\nport: 2", "port"),
        ("port: 1\n'port': 2", "port"),
        ("backends: []\nmodels: {m: {}}\nbackends: []", "backends"),
        ("models: {m: {vocab_size: 1, vocab_size: 2}}", "models.m.vocab_size"),
        ("backends: [{name: a, url: 'http://x', model: m, api_key: sk-one, api_key: sk-two}]", "backends.0.api_key"),
        ("x: &x [*x]", "x.0"),
        ("models: &m {m: *m}", "models.m"),
        ("&a [[*a]]", "0.0"),
    ],
)
def test_what_is_there_twice_or_holds_itself_is_refused_by_name(text: str, key: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_settings(text, {})
    assert caught.value.key == key
    assert "sk-" not in str(caught.value)
    with pytest.raises(SettingsError) as caught:
        parse_settings("", {"COUNTERSIGN_MODELS": text})
    assert caught.value.key == f"COUNTERSIGN_MODELS.{key}"


def test_what_is_only_said_twice_is_no_fault() -> None:
    text = "models: {a: &a {vocab_size: 7}, b: *a, c: {<<: *a, vocab_size: 9}}"
    assert [model.vocab_size for model in parse_settings(text, {}).models.values()] == [7, 7, 9]


@pytest.mark.parametrize("text", ["port: 2026-13-45", "port: 0x_", "[" * 5000])
def test_a_file_that_yaml_chokes_on_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=r"countersign\.yaml"):
        parse_settings(text, {})


def test_choices_are_texts_too() -> None:
    with pytest.raises(SettingsError, match="'annotate', 'block' or 'retry'"):
        parse_settings("", {"COUNTERSIGN_VERIFICATION__ON_REJECT": "@x"})


def test_an_override_reaches_into_another() -> None:
    environ = {
        "COUNTERSIGN_BACKENDS": "[{name: a, url: 'http://x', model: m}]",
        "COUNTERSIGN_BACKENDS__0__API_KEY": "[abc",
        "COUNTERSIGN_MODELS__M": "{vocab_size: 7}",
        "COUNTERSIGN_MODELS__M__TOKENIZER": "0123",
    }
    found = parse_settings("", environ)
    assert (found.models["m"].vocab_size, found.models["m"].tokenizer) == (7, "0123")
    key = found.backends[0].api_key
    assert key is not None
    assert key.get_secret_value() == "[abc"


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
    with pytest.raises(SettingsError, match="COUNTERSIGN_KEYS") as other:
        parse_settings("", {"COUNTERSIGN_KEYS": "[canary: }"})
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
