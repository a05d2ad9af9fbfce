"""What differs between settings, and how much of it a running process takes over."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from policies import reload
from policies.errors import SettingsError
from policies.reload import FIXED, FIXED_IN_PROXY, FIXED_IN_REFERENCE, FIXED_IN_WORKER, applied, changed, reread
from policies.settings import Settings, hash_key, parse_settings

FIXES = (FIXED, FIXED_IN_PROXY, FIXED_IN_WORKER, FIXED_IN_REFERENCE)
KEYS = [{"name": "ops", "sha256": hash_key("ops")}]

TREES: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"models": st.just({"m": {}, "gpt-4.1": {}})},
    optional={
        "host": st.sampled_from(["127.0.0.1", "0.0.0.0"]),
        "port": st.integers(0, 9),
        "redis_url": st.sampled_from([None, "redis://r"]),
        "durability": st.fixed_dictionaries({"aof": st.booleans()}),
        "audit": st.fixed_dictionaries({}, optional={"secret": st.sampled_from(["x", "y"]), "floor": st.just(0.5)}),
        "admin": st.fixed_dictionaries(
            {}, optional={"host": st.sampled_from(["::1", "::"]), "port": st.integers(1, 2), "keys": st.just(KEYS)}
        ),
        "timeouts": st.fixed_dictionaries({}, optional={"connect": st.just(1), "idle": st.just(2)}),
        "bounds": st.fixed_dictionaries({}, optional={"head_bytes": st.integers(4096, 4098)}),
        "relay": st.fixed_dictionaries({}, optional={"retries": st.integers(0, 2), "passthrough": st.just(["/x"])}),
        "webhook": st.sampled_from([None, {"url": "https://h", "secret": "whsec_a"}]),
        "verification": st.fixed_dictionaries({}, optional={"job_timeout": st.just(7), "mode": st.just("inline")}),
        "standing": st.fixed_dictionaries({}, optional={"alpha": st.sampled_from([0.01, 0.02])}),
        "backends": st.lists(
            st.fixed_dictionaries(
                {"name": st.sampled_from("ab"), "url": st.sampled_from(["http://x", "http://y"]), "model": st.just("m")}
            ),
            unique_by=lambda each: each["name"],
        ),
    },
)


def made(tree: dict[str, Any]) -> Settings | None:
    try:
        return Settings.model_validate(tree)
    except ValueError:
        return None


SETTINGS = TREES.map(made).filter(lambda found: found is not None)


def test_changes_are_named_by_what_they_are() -> None:
    one = {"name": "a", "url": "http://x", "model": "m"}
    other = {"name": "b", "url": "http://x", "model": "m"}
    tree: dict[str, Any] = {"models": {"m": {}, "gpt-4.1": {}}, "backends": [one, other]}
    before = Settings.model_validate(tree)
    after = Settings.model_validate(
        tree
        | {
            "models": {"m": {"vocab_size": 9}, "new": {}},
            "backends": [other | {"url": "http://y"}],
            "standing": {"alpha": 0.01},
            "webhook": {"url": "https://h", "secret": "whsec_a"},
        }
    )
    assert changed(before, after) == (
        "backends.a",
        "backends.b.url",
        "models.gpt-4.1",
        "models.m.vocab_size",
        "models.new",
        "standing.alpha",
        "webhook",
    )


def test_the_order_of_backends_is_no_change() -> None:
    tree = [{"name": name, "url": "http://x", "model": "m"} for name in "ab"]
    first, second = (Settings.model_validate({"models": {"m": {}}, "backends": each}) for each in (tree, tree[::-1]))
    assert changed(first, second) == ()


@given(SETTINGS, SETTINGS, st.sampled_from(FIXES))
def test_what_is_fixed_stays_and_the_rest_holds(running: Settings, wanted: Settings, fixed: Any) -> None:
    refused: SettingsError | None = None
    try:
        found = applied(running, wanted, fixed)
    except SettingsError as error:
        refused = error
    if refused is not None:
        # New keys that do not go together with the host that stays: never a looser door.
        assert (refused.key, wanted.admin.keys) == ("admin", ())
        return
    assert changed(running, found.settings) == found.changed
    assert set(found.changed).isdisjoint(found.restart)
    # Everything that was wanted either holds or is named.
    assert set(changed(found.settings, wanted)) <= set(found.restart)
    for pattern in fixed:
        for path in reload._matching(pattern, running, wanted):
            assert reload._get(found.settings, path) == reload._get(running, path)
    assert (found.settings.webhook is None) == (running.webhook is None)
    again = applied(found.settings, wanted, fixed)
    assert (again.changed, again.restart) == ((), found.restart)


@given(SETTINGS)
def test_the_same_settings_change_nothing(settings: Settings) -> None:
    found = applied(settings, settings, FIXED_IN_PROXY)
    assert (found.settings, found.changed, found.restart) == (settings, (), ())


FULL = f"models: {{m: {{}}}}\nbackends: [{{name: a, url: 'http://x', model: m}}]\nkeys: [{KEYS[0]}]\n"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("", "countersign.yaml"),
        ("\n# soon\n---\n", "countersign.yaml"),
        ("{}", "countersign.yaml"),
        ("[]", "countersign.yaml"),
        ("port: 8700", "models"),
        ("models: {m: {}}", "backends"),
        ("models: {m: {}}\nbackends: [{name: b, url: 'http://y', model: m}]", "keys"),
        (FULL + "admin: {host: 127.0.0.1}", "admin.keys"),
    ],
)
def test_a_file_that_takes_everything_away_is_asked_for_by_hand(text: str, key: str) -> None:
    running = Settings.model_validate(yaml.safe_load(FULL) | {"admin": {"keys": [KEYS[0] | {"sha256": "0" * 64}]}})
    with pytest.raises(SettingsError, match=r"countersign reload.*SIGHUP") as raised:
        reread(running, text, {}, FIXED_IN_PROXY, by_hand=False)
    assert raised.value.key == key
    found = reread(running, text, {}, FIXED_IN_PROXY, by_hand=True)
    assert found.settings.admin.keys == ()


def test_no_beginning_of_a_file_takes_everything_away() -> None:
    """Whatever there is of a file that is being written, some of each kind is left, or it is refused."""
    running = parse_settings(FULL, {})
    for end in range(len(FULL)):
        try:
            found = reread(running, FULL[:end], {}, FIXED_IN_PROXY, by_hand=False).settings
        except SettingsError:
            continue
        assert (len(found.models), len(found.backends), len(found.keys)) == (1, 1, 1)


def test_what_was_never_there_is_not_missed() -> None:
    assert reread(Settings(), "port: 1", {}, FIXED_IN_WORKER, by_hand=False, given={"host": "::1"}).restart == (
        "host",
        "port",
    )


def test_a_door_that_stays_open_keeps_its_keys() -> None:
    running = Settings.model_validate({"admin": {"host": "0.0.0.0", "port": 1, "keys": KEYS}})
    wanted = Settings.model_validate({"admin": {"port": 1}})
    with pytest.raises(SettingsError, match="at least one key") as raised:
        applied(running, wanted, FIXED_IN_PROXY)
    assert "admin.host" in str(raised.value)


def test_a_reference_is_what_its_process_was_started_with() -> None:
    def with_url(url: str) -> Settings:
        return Settings.model_validate({"models": {"m": {"reference": {"kind": "vllm_http", "url": url}}}})

    found = applied(with_url("http://x"), with_url("http://y"), FIXED_IN_REFERENCE)
    assert (found.restart, found.settings) == (("models.m.reference.url",), with_url("http://x"))
    assert applied(with_url("http://x"), with_url("http://y"), FIXED_IN_WORKER).restart == ()


def test_no_secret_is_told() -> None:
    def with_secret(secret: str) -> Settings:
        return Settings.model_validate({"audit": {"secret": secret}, "metrics": {"token": secret * 3}})

    found = applied(with_secret("tell-nobody"), with_secret("nor-this"), FIXED)
    assert "nobody" not in str(found.restart) + str(found.changed)
    assert "audit.secret" in found.restart
