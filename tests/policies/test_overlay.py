"""What is laid over the backends of a settings file."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.overlay import DECLARED, HIDDEN, Overlay, merged, patched, server_of, shown
from policies.settings import BackendSettings, Settings
from policies.unit import declaration_of

NAMES = ("a", "b", "c")
FIELDS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "url": st.sampled_from(["http://x", "https://y:1", "ftp://z", "http://"]),
        "model": st.sampled_from(["m", "n", "gone"]),
        "max_concurrency": st.integers(-1, 3),
        "drained": st.booleans(),
        "alpha": st.sampled_from([None, 0.01, 7]),
        "precision": st.sampled_from(["", "fp8"]),
        "api_key": st.sampled_from([None, "sk-a", "two words"]),
        "odd": st.just(1),
    },
)
SERVERS = st.sampled_from(["", "http://a:80", "http://b:80", "http://x:80", "https://y:1"])
OVERLAYS = st.dictionaries(
    st.sampled_from(NAMES),
    st.builds(Overlay, fields=FIELDS, key_for=SERVERS, added=st.booleans(), removed=st.booleans()),
)


def file(*names: str) -> Settings:
    backends = [{"name": name, "url": f"http://{name}", "model": "m", "max_concurrency": 2} for name in names]
    return Settings.model_validate({"models": {"m": {}, "n": {}}, "backends": backends})


def named(settings: Settings, name: str) -> BackendSettings | None:
    return next((each for each in settings.backends if each.name == name), None)


def test_a_patch_says_it_last_and_the_file_the_rest() -> None:
    held = merged(file("a", "b"), {"a": Overlay(fields={"max_concurrency": 9})})
    (a, b) = held.settings.backends
    assert (a.max_concurrency, a.url, b.max_concurrency) == (9, "http://a", 2)
    assert held.sources == {"a": "both", "b": "settings"}


def test_what_is_added_removed_or_has_nothing_below() -> None:
    laid = {
        "a": Overlay(removed=True),
        "b": Overlay(fields={"drained": True}),
        "c": Overlay(fields={"url": "http://c", "model": "n"}, added=True),
    }
    held = merged(file("a"), laid)
    assert [each.name for each in held.settings.backends] == ["c"]
    assert held.sources == {"c": "redis"}
    assert held.left_out == {"b": "the settings no longer name it"}


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"url": "ftp://x"}, "url"),
        ({"url": "http://"}, "url"),
        ({"url": "http://h:99999"}, "url"),
        ({"max_concurrency": -1}, "max_concurrency"),
        ({"nonsense": 1}, "nonsense"),
        ({"api_key": "two words"}, "api_key"),
        ({"api_key": "line\nbreak"}, "api_key"),
        ({"url": "http://h?token=x"}, "url"),
        ({"url": "http://h#x"}, "url"),
        ({"runtime": "x\ny"}, "runtime"),
        ({"engine": "\u202e"}, "engine"),
        ({"precision": "\0"}, "precision"),
        ({"served_model": "\ud800"}, "served_model"),
    ],
)
def test_what_cannot_be_is_named_and_leaves_the_file_alone(fields: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=f"^{key}: "):
        patched(named(file("a"), "a"), "a", fields)
    held = merged(file("a"), {"a": Overlay(fields=fields)})
    assert held.settings == file("a")
    assert held.left_out["a"].startswith(f"{key}: ")


@given(OVERLAYS, st.sets(st.sampled_from(NAMES)))
def test_whatever_is_laid_over_it_holds_together(overlays: dict[str, Overlay], names: set[str]) -> None:
    below = file(*sorted(names))
    held = merged(below, overlays)
    assert Settings.model_validate(held.settings.model_dump(exclude_unset=True)) == held.settings
    assert set(held.sources) == {each.name for each in held.settings.backends}
    assert merged(held.settings, {}).settings == held.settings
    for name in NAMES:
        overlay, before, now = overlays.get(name), named(below, name), named(held.settings, name)
        if now is not None and now.api_key is not None and overlay is not None:
            assert server_of(now.url) == overlay.key_for
        if overlay is not None and overlay.removed:
            assert now is None
        elif overlay is None or "given for" not in held.left_out.get(name, "given for"):
            assert now == before
        else:
            assert now is not None
            fields = dict(overlay.fields)
            if name in held.left_out:
                del fields["api_key"]
            assert now == patched(before, name, fields)


@pytest.mark.parametrize("name", [".", "..", "none", "other"])
def test_names_that_mean_something_else_are_none(name: str) -> None:
    with pytest.raises(ValueError, match=r"^name: "):
        patched(None, name, {"url": "http://x", "model": "m"})


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("http://h/v1", True),
        ("http://user:pass@H:80/other", True),
        ("https://h", False),
        ("http://h:81", False),
        ("http://h.evil.example", False),
        ("http://h@evil.example", False),
    ],
)
def test_a_key_goes_to_no_other_address(url: str, kept: bool) -> None:
    below = patched(None, "a", {"url": "http://h", "model": "m", "api_key": "sk-a"})
    assert (patched(below, "a", {"url": url}).api_key is not None) is kept
    assert patched(below, "a", {"url": url, "api_key": "sk-b"}).api_key is not None
    assert patched(below, "a", {"drained": True}).api_key == below.api_key


def test_a_key_stays_with_the_server_that_it_was_given_for() -> None:
    over = Overlay(fields={"api_key": "sk-a", "drained": True}, key_for="http://a:80")

    def held(url: str, **more: Any) -> tuple[BackendSettings, str | None]:
        entry = {"name": "a", "url": url, "model": "m", **more}
        found = merged(Settings.model_validate({"models": {"m": {}}, "backends": [entry]}), {"a": over})
        return found.settings.backend("a"), found.left_out.get("a")

    backend, why = held("http://a/elsewhere")
    assert (backend.api_key and backend.api_key.get_secret_value(), why) == ("sk-a", None)
    for url in ("http://b", "https://a", "http://a:81"):
        backend, why = held(url)
        assert (backend.api_key, backend.drained) == (None, True)
        assert why == "api_key: given for http://a:80, and sent to no other; give it anew"
        backend, why = held(url, api_key="sk-of-the-file")
        assert backend.api_key is not None
        assert backend.api_key.get_secret_value() == "sk-of-the-file"


@pytest.mark.parametrize(
    ("url", "server"),
    [
        ("http://user:pass@H/v1", "http://h:80"),
        ("https://[::1]:8000//secret", "https://[::1]:8000"),
        ("http://h:x", ""),
        (None, ""),
    ],
)
def test_a_server_is_named_without_what_may_let_one_in(url: Any, server: str) -> None:
    assert server_of(url) == server


def test_secrets_are_named_and_not_shown() -> None:
    backend = patched(None, "a", {"url": "http://user:pass@h/v1", "model": "m", "api_key": "sk-secret"})
    told = shown(backend.model_dump())
    assert (told["api_key"], told["url"]) == (HIDDEN, f"http://{HIDDEN}@h/{HIDDEN}")
    assert shown({"api_key": None, "url": "http://h:80/"}) == {"api_key": None, "url": "http://h:80/"}
    assert shown({"url": "https://h/@secret"}) == {"url": f"https://h/{HIDDEN}"}
    assert shown({"url": "https://[::1]:8000//secret"}) == {"url": f"https://[::1]:8000/{HIDDEN}"}
    assert "secret" not in str(told).replace(HIDDEN, "")


def test_the_declaration_is_what_standing_is_kept_by() -> None:
    backend = patched(None, "a", {"url": "http://h", "model": "m"})
    assert set(declaration_of(backend)) == set(DECLARED)
