"""Whatever a backend writes into its answers, nothing of ours breaks over it: a verdict comes of it, by the checks.

Answers as vLLM writes them, with anything that JSON, or nearly JSON, can hold in the place of any of their values, go
all the way: past the tap, packed and unpacked, judged with a replay and a profile, into what is kept of a verdict.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import case, codec, coverage
from policies.errors import BundleError
from policies.evidence import Evidence, Replay
from policies.judging import Declared, Grounds
from policies.receipt import facts_of, statement
from policies.settings import BackendSettings, ModelSettings
from policies.unit import declaration_of, of_response
from proxy.relay.body import Body
from proxy.tap import open_tap
from proxy.tap.prepare import prepare
from tests.support import wire
from tests.verifier_pool.audits import profile_of
from verifier_pool.judge import on_grounds
from verifier_pool.replays import can_replay

MODEL = ModelSettings(vocab_size=100, max_model_len=64, eos_token_ids=(2,), experts=4)
BACKEND = BackendSettings(name="b", url="http://b", model="m", runtime="vllm-0.32-v2")
ID = "a" * 32
WORDS = ["unaudited", "pass", "reject", "inconclusive", "withheld", "unverified"]


def _array(values: Any, kind: str = "uint8") -> str:
    data = io.BytesIO()
    np.save(data, np.asarray(values, kind))
    return base64.b64encode(data.getvalue()).decode()


EXPERTS = _array(np.arange(2 * 3 * 6).reshape(6, 3, 2) % 4)
NUMBERS = ["0", "-0.0", "-1", "1", "2.5", "1e400", "-1e400", "1e308", "1e-320", "NaN", "Infinity", "-Infinity"]
NUMBERS += ["2147483647", "2147483648", "-2147483649"]
NUMBERS += ["9" * 20, "-" + "9" * 400, "9" * 5000, "1E-400", "-9999.0", "4294967296", "true", "false", "null"]
TEXTS = [
    "",
    "\\ud800",
    "\\udc00x",
    "\\u0000",
    "a" * 5000,
    "\\u202e",
    "stop",
    "length",
    "tool_calls",
    "abort",
    "NaN",
    "7",
]
TEXTS += [f"token_id:{text}" for text in ("1", "-5", "99999999999", "0x1", "1_0", " 7 ", "\\u0663", "", "1.0")]
TEXTS += [EXPERTS, EXPERTS[:-9], _array([]), _array([[[9]]]), _array([[[-1]]], "int64"), _array([1.5], "float32")]
VALUES = st.sampled_from(
    [
        *NUMBERS,
        *(f'"{text}"' for text in TEXTS),
        *("[]", "{}", "[[]]", "[null]", "[1,2,3]", '["x"]', "[[1],[2,3]]", "[NaN]", "[99999999999999999999]"),
        *(
            '{"a":null}',
            '{"":NaN}',
            '{"token_id:1":-1}',
            '{"token_id:1":1e400}',
            '{"token_id:1":[]}',
            '{"countersign":1}',
        ),
        *("[" * 30 + "]" * 30, '[{"index":0,"delta":{"content":"a"},"token_ids":[1,2,3]}]', '[{"token":"x"}]'),
        *('{"prompt_tokens":-1,"completion_tokens":1e99}', '{"prompt_tokens":true,"completion_tokens":"3"}'),
        *('[{"function":{"name":"f","arguments":"{"}}]', '[{"index":0,"function":{"name":1,"arguments":[]}}]'),
    ]
)
ASKED: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [
        *(
            {},
            {"n": 2},
            {"temperature": 0},
            {"logprobs": True, "top_logprobs": 2},
            {"stop": ["two"]},
            {"min_tokens": 2},
        ),
        *({"logit_bias": {"5": -100}}, {"top_k": 3}, {"top_p": 0.5, "min_p": 0.1}, {"include_reasoning": False}),
        *({"response_format": {"type": "json_object"}}, {"bad_words": ["One"]}, {"repetition_penalty": 1.2}),
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
    ]
)


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if at:
        yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _places(inner, (*at, key))


def _full(top: dict[str, Any]) -> dict[str, Any]:
    """With everything in it that is read anywhere."""
    for choice in top["choices"]:
        choice |= {"stop_reason": choice.get("stop_reason"), "routed_experts": EXPERTS}
        (choice.get("delta") or choice.get("message") or {}).update(
            reasoning="x", tool_calls=[{"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}]
        )
    top.setdefault("usage", {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7})
    return top


FRAMES = [_full(json.loads(frame[6:])) for frame in wire.FRAMES[:-1]]
WHOLE = _full(json.loads(wire.BODY))


@st.composite
def answers(draw: st.DrawFn) -> tuple[dict[str, Any], list[bytes]]:
    """Options of a request, and the answer to it: one body, or the data of the frames of a stream."""
    stream = draw(st.booleans())
    parts: list[bytes] = []
    for top in FRAMES if stream else [WHOLE]:
        value, said = json.loads(json.dumps(top)), {}
        for number in range(draw(st.integers(0, 2 if stream else 4))):
            at = draw(st.sampled_from(list(_places(value))))
            inner = value
            for key in at[:-1]:
                inner = inner[key]
            if draw(st.integers(0, 5)):
                inner[at[-1]] = f"@{number}@"
                said[f'"@{number}@"'] = draw(VALUES)
            elif isinstance(inner, dict):
                del inner[at[-1]]
            else:
                inner.append(inner[at[-1]])
        text = json.dumps(value)
        for mark, hostile in said.items():
            text = text.replace(mark, hostile)
        parts.append(text.encode())
    if stream and draw(st.integers(0, 3)) == 0:
        parts = draw(st.permutations(parts))
    return {"stream": stream} | draw(ASKED), parts


def _evidence(fields: dict[str, Any], parts: list[bytes]) -> list[Evidence]:
    asked = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 8} | fields
    prepared = prepare(Body.read("chat", json.dumps(asked).encode()), MODEL, BACKEND, seed=1)
    kind = "text/event-stream" if prepared.upstream_stream else "application/json"
    tap = open_tap(prepared, "m", content_type=kind)
    for part in parts:
        tap.feed(b"data: " + part + b"\n\n" if prepared.upstream_stream else part)
        tap.settle()
    tap.feed(wire.DONE if prepared.upstream_stream else b"")
    tap.close()
    tap.used()
    meta = {"id": ID, "backend": "b", "model": "m", "owner": "o", "runtime": BACKEND.runtime, "created": 1.0}
    return codec.unpack(codec.pack(tap.evidence(**meta, request=prepared.body)))


def _replay(choice: Evidence) -> Replay | None:
    """What a reference that was asked for the claimed ids, and has some more of its own, would say."""
    if not can_replay(choice):
        return None
    rows = len(choice.output_ids)
    own = np.tile(np.arange(20, dtype=np.int32), (rows, 1))
    claimed = choice.claim_ids[:, 1:] if len(choice.claim_ids) == rows else own[:, :0]
    ids = np.concatenate([choice.output_ids[:, None], claimed, own], axis=1)
    logprobs = -np.sort(np.random.default_rng(1).exponential(3, ids.shape)).astype(np.float32)
    logprobs[ids < 0] = -np.inf
    return Replay(ids, logprobs, own=ids.shape[1], prompt_ids=np.asarray([1, 2, 3, 4], np.int32))


@given(answers(), st.booleans())
def test_a_verdict_comes_of_every_answer(answer: tuple[dict[str, Any], list[bytes]], audited: bool) -> None:
    choices = _evidence(*answer)
    if not choices:
        return
    replays = [_replay(choice) for choice in choices]
    known = [each for each in replays if each is not None]
    profile = profile_of("toy 1") if audited else None
    said = known if audited and len(known) == len(choices) else None
    grounds = Grounds(Declared.of(MODEL), profile=profile, replays=said)
    verification = on_grounds(choices, grounds)
    assert verification["verdict"] in WORDS
    assert coverage.of(verification)[1] in ("", coverage.BACKEND, coverage.OURS, coverage.REQUEST)
    orjson.dumps(verification)
    unit = of_response(choices, verification, b"s" * 32, operator=False)
    assert msgspec.json.decode(msgspec.json.encode(unit), type=type(unit)) == unit
    try:
        assert case.unpack(case.pack(choices, grounds, case.Shared.of(profile, None)))
    except BundleError:
        pytest.fail("what it rests on cannot be kept")
    facts = facts_of(choices, {"owner": "o"}, b"", declared=declaration_of(choices[0]))
    json.dumps(statement(verification | {"trace_id": ""}, facts, 1.0))
