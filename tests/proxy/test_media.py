"""Images in messages are served as they come, and recorded for what they are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from policies.settings import ModelSettings
from tests.proxy.conftest import Rig
from tests.support import wire
from tests.verifier_pool.recorded_options import named
from verifier_pool.judge import judge

PIXEL = "data:image/png;base64," + "iVBORw0KGgo" * 2000
PARTS: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": {"url": PIXEL, "detail": "low"}},
    {"type": "input_image", "image_url": PIXEL},
    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    {"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}},
]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: str(part["type"]))
def test_served_and_inconclusive(rig: Rig, part: dict[str, Any]) -> None:
    # A greedy answer of a real server, whose prompt says nothing of what was asked here.
    answer = named("plain")
    rig.backend.script = [wire.whole(answer.body)]
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}]
    response = rig.chat(messages=messages, temperature=0, max_tokens=16)
    assert response.status_code == 200
    assert json.loads(rig.backend.last.body)["messages"] == messages
    evidence = rig.evidence(response.headers["x-countersign-id"])
    found = judge([evidence], model=ModelSettings(eos_token_ids=(2,)))
    assert found["verdict"] == "inconclusive"
    assert {reason.partition(":")[0] for reason in found["reasons"]} == {"media"}
