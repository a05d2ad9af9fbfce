"""What the worst answer leaves in Redis: no more than its bound, however little of it packs."""

from __future__ import annotations

import json
import random
from base64 import b64encode
from collections.abc import Callable
from io import BytesIO
from typing import Any, cast

import numpy as np
import pytest

from policies.evidence import Evidence
from proxy.tap.trim import TRIMMED
from tests.proxy.conftest import Rig
from tests.support import wire

BOUND = 200_000
OTHERWISE = 64 * 1024
"""Everything else that is kept of a response: intent, job, its places in sets and hashes, and what Redis adds."""
CHOICES, TOKENS, PROMPT = 2, 600, 2000

_chance = random.Random(1)


def _ids(count: int) -> list[int]:
    return [_chance.randrange(2**31) for _ in range(count)]


def _entry(id: int) -> dict[str, Any]:
    top = [{"token": f"token_id:{n}", "logprob": -_chance.random() * 9, "bytes": None} for n in [id, *_ids(20)]]
    return top[0] | {"top_logprobs": top}


def _noise(count: int) -> str:
    return "".join(chr(_chance.randrange(0x4E00, 0x9FFF)) for _ in range(count))


def _experts() -> str:
    file = BytesIO()
    np.save(file, np.random.default_rng(1).integers(0, 256, (PROMPT + TOKENS - 1, 8, 8)).astype(np.uint8))
    return b64encode(file.getvalue()).decode()


def _choice(index: int, said: str) -> dict[str, Any]:
    ids = _ids(TOKENS)
    calls = [{"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": _noise(3000)}}]
    return {
        "index": index,
        said: {"role": "assistant", "content": _noise(6000), "reasoning": _noise(3000), "tool_calls": calls},
        "logprobs": {"content": [_entry(id) for id in ids]},
        "token_ids": ids,
        "routed_experts": _experts(),
        "finish_reason": _noise(4000),
        "stop_reason": _noise(4000),
    }


def _held(rig: Rig) -> int:
    """Bytes of all keys."""
    return sum(cast(int, rig.redis.memory_usage(key, samples=0)) for key in rig.redis.scan_iter(count=1000))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("most", [BOUND, 10**8])
def test_the_worst_answer(make_rig: Callable[..., Rig], streamed: bool, most: int) -> None:
    rig = make_rig(bounds={"evidence_bytes": most, "answer_characters": 40_000}, models={"m": {}})
    said = "delta" if streamed else "message"
    top = {"id": "c", "model": "served", "prompt_token_ids": _ids(PROMPT), "usage": {"x": _noise(9000)}}
    top["choices"] = [_choice(index, said) for index in range(CHOICES)]
    body = json.dumps(top).encode()
    if streamed:
        rig.backend.script = [wire.whole(b"data: " + body + b"\n\n" + wire.DONE, 200, "text/event-stream")]
    else:
        rig.backend.script = [wire.whole(body)]
    before = _held(rig)
    id = rig.chat(stream=streamed, n=CHOICES).headers["x-countersign-id"]
    found = cast("list[Evidence]", rig.recorded(id))
    held = _held(rig) - before
    assert len(found) == CHOICES
    assert all(len(one.output_ids) == TOKENS for one in found)
    cut = [TRIMMED in one.faults for one in found]
    if most == BOUND:
        assert all(cut)
        assert held <= BOUND + OTHERWISE
    else:
        assert not any(cut)
        assert held > 2 * BOUND
