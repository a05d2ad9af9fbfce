"""What vLLM takes for more than text, and what we do."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.media import has_media
from tests.policies.test_media import MEDIA, MEDIA_KINDS, NO_MEDIA, TEXT_KINDS

pytestmark = pytest.mark.e2e

VALUES = st.none() | st.text(max_size=3) | st.integers() | st.dictionaries(st.just("url"), st.text(max_size=3))
KINDS = st.sampled_from([*MEDIA_KINDS, *TEXT_KINDS, "file", "new"])
PARTS = st.dictionaries(KINDS | st.sampled_from(["uuid", "x"]), VALUES, max_size=3)
TYPED = st.builds(lambda kind, part: {"type": kind, **part}, KINDS | VALUES, PARTS)
CONTENTS = st.lists(PARTS | TYPED | VALUES, max_size=3) | VALUES | PARTS


@pytest.fixture(scope="module")
def theirs() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.renderers import chat_utils
    return chat_utils


def test_every_kind_of_part_is_known(theirs: Any) -> None:
    assert set(theirs.MM_PARSER_MAP) == {*MEDIA_KINDS, *TEXT_KINDS}


@pytest.mark.parametrize("content", [*MEDIA, *NO_MEDIA], ids=str)
def test_listed_contents_mean_the_same(theirs: Any, content: Any) -> None:
    messages = [{"role": "user", "content": content}]
    assert has_media({"messages": messages}) == theirs.has_non_text_content(messages)


@given(st.lists(st.builds(lambda content: {"role": "user", "content": content}, CONTENTS) | VALUES, max_size=2))
@settings(max_examples=300, deadline=None)
def test_any_contents_mean_the_same(theirs: Any, messages: list[Any]) -> None:
    assert has_media({"messages": messages}) == theirs.has_non_text_content(messages)
