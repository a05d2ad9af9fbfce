"""Which requests are alike."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.settings import RoutingSettings
from proxy.backends.affinity import key_of

RULES = RoutingSettings()
SYSTEM = {"role": "system", "content": "You are a helpful assistant. " * 8}
ASKED = {"role": "user", "content": "How many moons has Mars?"}
SAID = {"role": "assistant", "content": "Two."}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


def _key(owner: str = "ann", rules: RoutingSettings = RULES, **fields: Any) -> int | None:
    return key_of(fields, owner, rules)


def test_a_conversation_keeps_its_key_while_it_grows() -> None:
    first = _key(messages=[SYSTEM, ASKED])
    more = [SAID, {"role": "user", "content": "And Venus?"}, SAID]
    assert first is not None
    assert all(_key(messages=[SYSTEM, ASKED, *more[:n]]) == first for n in range(4))
    assert _key(messages=[SYSTEM, ASKED], temperature=0.7, stream=True, owner="bob") == first


@pytest.mark.parametrize(
    "other",
    [
        {"messages": [SYSTEM, {"role": "user", "content": "What else?"}]},
        {"messages": [ASKED]},
        {"prompt": SYSTEM["content"]},
        {"system": "x", "messages": [SYSTEM, ASKED]},
        {"input": [SYSTEM, {"role": "user", "content": "x"}]},
    ],
)
def test_another_beginning_is_another_key(other: dict[str, Any]) -> None:
    assert _key(**other) not in (None, _key(messages=[SYSTEM, ASKED]))


def test_only_the_beginning_counts() -> None:
    rules = RoutingSettings(prefix_bytes=100)
    assert _key(rules=rules, prompt="a" * 100 + "b") == _key(rules=rules, prompt="a" * 100 + "c")
    assert _key(rules=rules, prompt="a" * 99 + "b") != _key(rules=rules, prompt="a" * 99 + "c")
    assert _key(rules=rules, prompt="é" * 50 + "b") == _key(rules=rules, prompt="é" * 50 + "c")
    assert _key(prompt=list(range(5000))) == _key(prompt=[*range(4000), 1])
    assert _key(prompt=[1, 2, 3]) != _key(prompt=[12, 3])


def test_parts_count_like_texts() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 9_000_000}}
    asked = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]}]
    assert _key(messages=asked) == _key(messages=json.loads(json.dumps(asked)))
    asked[0]["content"] = [{"type": "text", "text": "What is that?"}, image]
    assert _key(messages=asked) is not None


def test_a_session_goes_before_the_prompt() -> None:
    one = _key(user="u1", prompt="a")
    assert one == _key(user="u1", prompt="b")
    assert one != _key(user="u2", prompt="a")
    assert one != _key(user="u1", prompt="a", owner="bob")
    assert one != _key(user="u1", prompt="a", prompt_cache_key="k")
    assert _key(prompt_cache_key="k", user="u1") == _key(prompt_cache_key="k", user="u2")
    assert _key(prompt_cache_key="x") != _key(user="x")
    assert _key(RULES.model_copy(update={"sticky": ()}).policy, user="u1", prompt="a") is not None
    none = RoutingSettings(sticky=())
    assert _key(rules=none, user="u1", prompt="a") == _key(rules=none, user="u2", prompt="a")


@pytest.mark.parametrize("user", [None, "", 7, ["u"], {"a": "b"}, True])
def test_what_is_no_name_is_no_session(user: Any) -> None:
    assert _key(user=user, prompt="a") == _key(prompt="a")
    assert _key(user=user) is None


@given(st.dictionaries(st.sampled_from(["messages", "prompt", "input", "system", "user"]), JSON))
def test_anything_is_read(fields: dict[str, Any]) -> None:
    key = key_of(fields, "o", RULES)
    assert key is None or 0 <= key < 2**64
    assert key == key_of(json.loads(json.dumps(fields)), "o", RULES)


def test_lone_surrogates_and_much_of_nothing() -> None:
    assert _key(prompt="\ud800") is not None
    assert _key(user="\ud800") is not None
    many: list[Any] = [[] for _ in range(1_000_000)]
    assert _key(messages=many) is None
    assert _key(messages=[]) is None
