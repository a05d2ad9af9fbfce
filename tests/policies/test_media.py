"""Requests that hold more than text: known for what they are, and never judged by a prompt that nobody can render."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from policies import selection, structure
from policies._request import extras
from policies.checks import Result
from policies.evidence import Evidence, Usage
from policies.media import asked_with_media, has_media
from tests.policies import recorded

TEXT = [{"role": "user", "content": "Hi"}]
URL = {"url": "https://example.com/a.png"}
MEDIA_KINDS = (
    *("image_url", "input_image", "image_embeds", "image_pil", "audio_url", "input_audio", "audio_embeds"),
    *("video_url", "video_embeds", "prompt_embeds"),
)
TEXT_KINDS = ("text", "input_text", "output_text", "refusal", "thinking", "tool_reference")
"""All kinds of parts that vLLM 0.32 has a parser for."""
MEDIA: list[Any] = [
    [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": URL}],
    [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}],
    [{"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}],
    [{"type": "audio_url", "audio_url": URL}],
    [{"type": "video_url", "video_url": URL}],
    [{"type": "file", "file": {"file_id": "f"}}],
    [{"type": "image_embeds", "image_embeds": "AA=="}],
    [{"type": "prompt_embeds", "data": "AA=="}],
    [{"type": "something new", "x": 1}],
    [{"image_url": URL}],
    [{"type": None, "video_url": URL}],
    [{"type": "text", "text": "x", "uuid": "u", "image_url": None}],
    [{"type": 7}],
    [{"type": None}],
    [{"type": None, "text": "x"}],
    *([{"type": kind, kind: "x"}] for kind in MEDIA_KINDS),
    *([{kind: "x"}] for kind in MEDIA_KINDS),
    *([{"type": "text", "text": "x", kind: None}] for kind in MEDIA_KINDS),
]
NO_MEDIA: list[Any] = [
    "Look at https://example.com/a.png: image_url",
    None,
    [],
    ["text", {"type": "text", "text": "image_url"}, {"type": "refusal", "refusal": "no"}, {"text": "x"}],
    [{"type": "thinking", "thinking": "x"}, {"type": "tool_reference", "name": "x"}],
    7,
    *([{"type": kind, kind: "x"}] for kind in TEXT_KINDS),
    *([{kind: "x"}] for kind in TEXT_KINDS),
    [{}],
    {"type": "image_url", "image_url": URL},
]


def asking(content: Any, answer: Evidence | None = None, **changes: Any) -> Evidence:
    body = {"model": "m", "messages": [*TEXT, {"role": "user", "content": content}]}
    return dataclasses.replace(answer or recorded.gpu("T0")[0], request=json.dumps(body).encode(), **changes)


@pytest.mark.parametrize("content", MEDIA, ids=str)
def test_media_are_seen(content: Any) -> None:
    assert asked_with_media(asking(content))
    assert has_media(json.loads(asking(content).request))
    assert not asked_with_media(asking(content, endpoint="completions"))


@pytest.mark.parametrize("content", NO_MEDIA, ids=str)
def test_texts_are_no_media(content: Any) -> None:
    assert not asked_with_media(asking(content))
    assert not has_media(json.loads(asking(content).request))


ODD = ["\ud800", float("inf"), "\ud83d", 10**40, 1e308]
"""What Python and so vLLM take in JSON, and stricter readers do not."""


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_nothing_odd_elsewhere_hides_media(odd: Any) -> None:
    body = {"junk": odd, "messages": [{"content": MEDIA[0]}], "more": [odd], "thinking_token_budget": 5}
    data = json.dumps(body).replace("Infinity", "1e999").encode()
    evidence = dataclasses.replace(recorded.gpu("T0")[0], request=data)
    assert asked_with_media(evidence)
    assert extras(evidence).thinking_token_budget == 5


def test_messages_that_are_none_hide_nothing() -> None:
    body: dict[str, Any] = {"messages": ["x", 7, None, {"content": MEDIA[0]}]}
    assert has_media(body)
    assert asked_with_media(dataclasses.replace(recorded.gpu("T0")[0], request=json.dumps(body).encode()))


@pytest.mark.parametrize("request_", [b"", b"{", b"[]", b'{"messages": 1}', b'{"messages": ["x"]}', b"[" * 100_000])
def test_what_cannot_be_read_holds_nothing(request_: bytes) -> None:
    assert not asked_with_media(dataclasses.replace(recorded.gpu("T0")[0], request=request_))


def check(evidence: Evidence, **more: Any) -> Any:
    return structure.check(evidence, eos_token_ids=[recorded.EOS], vocab_size=recorded.VOCABULARY, **more)


@pytest.mark.parametrize("content", MEDIA[:3], ids=str)
def test_a_prompt_of_media_is_nobodys_fault(content: Any) -> None:
    honest = asking(content)
    prompt = np.array([1, 200_000, 5], np.int32)  # what stands for an image need not be in the vocabulary
    usage = Usage(900, len(honest.output_ids), 3, len(honest.output_ids), cached_tokens=800)
    honest = dataclasses.replace(honest, prompt_ids=prompt, usage=usage)
    found = check(honest, rendered_prompt=np.array([7, 8], np.int32))
    assert (found.result, found.reason[:6]) == (Result.INCONCLUSIVE, "media:")
    assert found.metrics["prompt_compared"] == 0
    text = dataclasses.replace(honest, request=b"{}")
    assert check(text, rendered_prompt=np.array([7, 8], np.int32)).result is Result.REJECT


def test_lies_about_the_answer_are_still_lies() -> None:
    honest = asking(MEDIA[0])
    usage = Usage(900, len(honest.output_ids) + 1, 3, len(honest.output_ids))
    assert "usage_mismatch" in check(dataclasses.replace(honest, usage=usage)).reason
    claim = honest.claim_logprobs.copy()
    claim[0, 0] = 1.0
    assert "positive_logprob" in check(dataclasses.replace(honest, claim_logprobs=claim)).reason
    claim[0, 0] = -9999.0
    assert check(dataclasses.replace(honest, claim_logprobs=claim)).result is Result.WITHHELD


def test_selection_is_checked_where_the_prompts_length_plays_no_part() -> None:
    greedy, sampled, cpu = (
        asking(MEDIA[0], answer) for answer in (recorded.gpu("T0")[0], recorded.gpu("T1")[0], recorded.cpu("bf16")[0])
    )
    assert selection.check(greedy).result is Result.PASS
    assert selection.check(cpu).result is Result.PASS
    found = selection.check(sampled)
    assert (found.result, found.reason[:6]) == (Result.INCONCLUSIVE, "media:")
    shorter = dataclasses.replace(sampled, prompt_ids=sampled.prompt_ids[:-1])
    assert selection.check(shorter).result is Result.INCONCLUSIVE
