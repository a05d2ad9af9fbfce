"""Answers that are not streamed, and those streamed only to the client."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import numpy as np
import pytest

from policies.evidence import Endpoint
from policies.settings import BoundsSettings
from proxy.tap import open_tap
from proxy.tap.types import Tap
from tests.proxy.tap.bodies import DONE, USAGE, backend, body, entry, prepared, run, stream, whole_tap
from tests.proxy.tap.compare import frames


def encoded(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def experts(array: np.ndarray[Any, Any]) -> str:
    with io.BytesIO() as buffer:
        np.save(buffer, array, allow_pickle=array.dtype == object)
        return base64.b64encode(buffer.getvalue()).decode()


def with_experts(text: str) -> bytes:
    value = body()
    value["choices"][0]["routed_experts"] = text
    return encoded(value)


def completion(index: int = 0, **fields: Any) -> dict[str, Any]:
    logprobs = {
        "text_offset": [0, 10],
        "token_logprobs": [-0.5, -0.5],
        "tokens": ["token_id:7", "token_id:8"],
        "top_logprobs": [{top["token"]: top["logprob"] for top in entry(id)["top_logprobs"]} for id in (7, 8)],
    }
    return {
        "index": index,
        "text": "ab",
        "logprobs": logprobs,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": [7, 8],
        "prompt_logprobs": None,
        "prompt_token_ids": [1, 2],
        "routed_experts": None,
        **fields,
    }


def test_additions_are_hidden() -> None:
    value = body()
    tap = whole_tap()
    out = run(tap, encoded(value))
    value["choices"][0] |= {"logprobs": None, "token_ids": None}
    value["prompt_token_ids"] = None
    assert out == encoded(value)
    (evidence,) = tap.evidence()
    assert evidence.faults == ()
    assert evidence.output_ids.tolist() == [7, 8]
    assert evidence.complete
    assert not evidence.stream


def test_body_with_nothing_of_ours_is_byte_identical() -> None:
    text = b'{ "choices" : [ {"index":0, "text":"a", "x": 1.0e1} ],\n "usage":null}'
    assert run(whole_tap("completions"), text) == text


def test_wanted_ids_stay() -> None:
    text = encoded(body())
    shown = json.loads(run(whole_tap(return_token_ids=True), text))
    assert shown["prompt_token_ids"] == [1, 2]
    assert shown["choices"][0]["token_ids"] == [7, 8]
    assert shown["choices"][0]["logprobs"] is None


def test_wanted_logprobs_are_cut() -> None:
    tap = whole_tap(logprobs=True, top_logprobs=2, return_tokens_as_token_ids=True)
    shown = json.loads(run(tap, encoded(body())))
    content = shown["choices"][0]["logprobs"]["content"]
    assert [[top["token"] for top in one["top_logprobs"]] for one in content] == [
        ["token_id:7", "token_id:1000"],
        ["token_id:8", "token_id:1000"],
    ]
    assert tap.evidence()[0].claim_ids.shape == (2, 21)


@pytest.mark.parametrize(
    ("sampled", "count", "kept"),
    [(-0.5, 1, 1), (-0.5, 3, 3), (-9.5, 3, 4), (-9.5, 0, 1), (-6.5, 2, 3), (-6.5, 3, 3), (-0.5, 20, 20)],
)
def test_completions_keep_k_or_one_more(sampled: float, count: int, kept: int) -> None:
    choice = completion()
    for at in (0, 1):
        choice["logprobs"]["token_logprobs"][at] = sampled
        choice["logprobs"]["top_logprobs"][at][f"token_id:{7 + at}"] = sampled
    tap = whole_tap("completions", logprobs=count, return_tokens_as_token_ids=True)
    shown = json.loads(run(tap, encoded(body(choice))))
    assert [len(top) for top in shown["choices"][0]["logprobs"]["top_logprobs"]] == [kept, kept]
    assert shown["choices"][0]["logprobs"]["text_offset"] == [0, 10]


def test_several_prompts_and_choices() -> None:
    choices = [completion(index) for index in range(4)]
    choices[1]["prompt_token_ids"] = None
    tap = whole_tap("completions", prompt=["a", "b"], n=2, temperature=1, seed=50)
    run(tap, encoded(body(*choices)))
    evidence = tap.evidence()
    assert [one.index for one in evidence] == [0, 1, 2, 3]
    assert [one.sampling.seed for one in evidence] == [50, 51, 50, 51]
    assert all(one.prompt_ids.tolist() == [1, 2] for one in evidence)
    assert all(one.faults == () for one in evidence)
    assert evidence[0].usage is not None
    assert evidence[0].usage.counted_prompt_tokens == 4
    assert evidence[0].usage.counted_completion_tokens == 8


def test_false_verdicts_go() -> None:
    value = body(countersign={"verdict": "pass"})
    value["choices"][0]["countersign"] = 1
    assert b"countersign" not in run(whole_tap(), encoded(value))


@pytest.mark.parametrize(
    "text",
    [
        *(b"{", b"[]", b"<html>", b'{"choices": 3}', b'{"choices": [1]}', b"\xff\xfe", b"null", b'"x"'),
        encoded(body())[:-1],
        encoded(body()) + b"x",
        encoded([body()]),
        stream(),
        b": ping\n\n" + stream(),
        b"x\n" + stream(),
    ],
)
@pytest.mark.parametrize("kind", ["application/json", "text/event-stream", "text/plain"])
def test_bodies_that_cannot_be_read_are_an_error(kind: str, text: bytes) -> None:
    """Nothing could be hidden in them."""
    tap = open_tap(prepared(), "m", content_type=kind)
    error = json.loads(run(tap, text))["error"]
    assert (error["type"], error["code"]) == ("server_error", "invalid_json")
    assert (tap.failed, tap.fault) == (True, "invalid_json")
    (evidence,) = tap.evidence()
    assert evidence.faults == ("invalid_json",)
    assert not evidence.complete


@pytest.mark.parametrize("text", [b"", b"\r\n", b"{}", b'{"detail": "busy"}', b'{"choices": null, "x": 1.0e1}'])
def test_bodies_with_nothing_in_them_pass(text: bytes) -> None:
    tap = whole_tap()
    assert run(tap, text) == text
    assert not tap.failed
    (evidence,) = tap.evidence()
    assert evidence.faults == ("invalid_json",)
    assert not evidence.complete


@pytest.mark.parametrize("text", [b'{"model":"m","x" : 1}', b'{"model":"m","error":{"message":"x"}}'])
def test_other_objects_have_the_public_name(text: bytes) -> None:
    tap = open_tap(prepared(), "public", content_type="application/json")
    assert json.loads(run(tap, text)) == json.loads(text) | {"model": "public"}


def test_error_with_status_200() -> None:
    tap = whole_tap()
    text = b'{"error": {"message": "x"}}'
    assert run(tap, text) == text
    assert tap.evidence()[0].faults == ("upstream_error",)


def test_number_that_is_not_json() -> None:
    tap = whole_tap()
    out = run(tap, encoded(body()).replace(b"-0.5", b"NaN", 2))
    assert json.loads(out)["choices"][0]["logprobs"] is None
    (evidence,) = tap.evidence()
    assert evidence.faults == ("bad_logprobs",)
    assert evidence.claim_ids[:, 0].tolist() == [-1, 8]


def test_half_a_body_becomes_an_error() -> None:
    tap = whole_tap()
    out = run(tap, encoded(body())[:100], fault="upstream_closed")
    assert json.loads(out)["error"]["code"] == "upstream_closed"
    assert tap.evidence()[0].faults == ("upstream_closed",)


def test_endless_body_is_cut() -> None:
    tap = open_tap(prepared(), "m", bounds=BoundsSettings(answer_bytes=100))
    tap.feed(b"x" * 101)
    assert tap.failed
    assert json.loads(tap.close())["error"]["code"] == "too_large"
    assert "too_large" in tap.evidence()[0].faults


def test_routed_experts() -> None:
    array = np.arange(3 * 2 * 4, dtype=np.uint8).reshape(3, 2, 4)
    tap = whole_tap()
    out = run(tap, with_experts(experts(array)))
    # The server's own flag makes it send them, so the client gets them too.
    assert json.loads(out)["choices"][0]["routed_experts"] == experts(array)
    (evidence,) = tap.evidence()
    assert evidence.routed_experts is not None
    assert (evidence.routed_experts == array).all()
    assert evidence.faults == ()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "!!",
        "AAAA",
        experts(np.zeros((4, 2, 4), np.uint8)),
        experts(np.zeros((3, 8), np.uint8)),
        experts(np.zeros((3, 2, 4), np.float32)),
        experts(np.asfortranarray(np.zeros((3, 2, 4), np.uint8))),
        experts(np.array([[[{}]]] * 3, dtype=object)),
        experts(np.zeros((3, 2, 4), np.uint8))[:-8],
        base64.b64encode(b"\x93NUMPY\x01\x00\x10\x00{'descr': '|u1',").decode(),
        experts(np.zeros((3, 2, 4), np.uint8)).replace("A", "é", 1),
    ],
)
def test_routed_experts_that_are_wrong(text: str) -> None:
    tap = whole_tap()
    run(tap, with_experts(text))
    (evidence,) = tap.evidence()
    assert evidence.routed_experts is None
    assert evidence.faults == ("bad_routed_experts",)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16, np.int32])
@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_routed_experts_of_every_kind(dtype: Any, version: tuple[int, int]) -> None:
    array = np.arange(3 * 2 * 4, dtype=dtype).reshape(3, 2, 4)
    tap = whole_tap()
    with io.BytesIO() as buffer:
        np.lib.format.write_array(buffer, array, version=version)  # type: ignore[no-untyped-call]
        run(tap, with_experts(base64.b64encode(buffer.getvalue()).decode()))
    (evidence,) = tap.evidence()
    assert evidence.routed_experts is not None
    assert (evidence.routed_experts.dtype, evidence.faults) == (array.dtype, ())
    assert (evidence.routed_experts == array).all()


@pytest.mark.parametrize(
    "header",
    [
        *("-" * 9900 + "1", "~" * 9900 + "1", "not " * 2400 + "1", "1" + "**1" * 3200, "1" + "+1" * 4900, "(" * 9000),
        *("lambda:" * 1300 + "1", "a" + ".a" * 4900, "1 if 1 else " * 800 + "1", "9" * 9900, "\0" * 100, "", "{}"),
        "{'descr': '|u1', 'fortran_order': False, 'shape': (True, True, 24), }",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (-3, -2, 4), }",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (3, 2, %s), }" % ("9" * 5000),
        "{'descr': '|O', 'fortran_order': False, 'shape': (3, 2, 4), }",
        "{'descr': ('|u1', (2,)), 'fortran_order': False, 'shape': (3, 2, 2), }",
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_a_header_is_never_read_as_python(header: str, known: bool) -> None:
    """Python's parser takes any memory, and raises what nobody expects of it."""
    data = (header + "\n").encode()
    value = body()
    value["choices"][0]["routed_experts"] = base64.b64encode(
        b"\x93NUMPY\x01\x00" + len(data).to_bytes(2, "little") + data + bytes(24)
    ).decode()
    if not known:
        del value["prompt_token_ids"]
    tap = whole_tap()
    run(tap, encoded(value))
    (evidence,) = tap.evidence()
    assert evidence.routed_experts is None
    assert "bad_routed_experts" in evidence.faults
    assert "unreadable" not in evidence.faults


def test_huge_header_costs_nothing() -> None:
    header = b"{'descr': '<i4', 'fortran_order': False, 'shape': (3, 1000000, 1000000), }".ljust(117) + b"\n"
    data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    tap = whole_tap()
    run(tap, with_experts(base64.b64encode(data).decode()))
    assert tap.evidence()[0].faults == ("bad_routed_experts",)


def test_hidden_reasoning() -> None:
    value = body(usage={**USAGE, "completion_tokens_details": {"reasoning_tokens": 1}})
    value["choices"][0]["message"]["reasoning"] = "hm"
    shown = json.loads(run(whole_tap(include_reasoning=False, return_token_ids=True), encoded(value)))
    assert shown["choices"][0]["message"]["reasoning"] is None
    assert shown["choices"][0]["token_ids"] is None


def restream_tap(endpoint: Endpoint = "chat", **fields: Any) -> Tap:
    server = backend(routed_experts="buffer")
    return open_tap(prepared(endpoint, server=server, stream=True, **fields), "m", content_type="application/json")


def test_restreamed_chat() -> None:
    tap = restream_tap()
    out = run(tap, encoded(body()))
    assert tap.content_type == "text/event-stream; charset=utf-8"
    assert tap.done == DONE
    opening, content, last, done = frames(out)
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    assert opening == {**head, "choices": [role], "prompt_token_ids": None, "prompt_text": None}
    one = {"index": 0, "delta": {"content": "a"}, "logprobs": None, "finish_reason": None, "token_ids": None}
    assert content == {**head, "choices": [one]}
    end = {**one, "delta": {}, "finish_reason": "stop", "stop_reason": None}
    assert last == {**head, "choices": [end], "system_fingerprint": "vllm-x"}
    assert done == {"done": True}
    (evidence,) = tap.evidence()
    assert evidence.complete
    assert evidence.faults == ()
    assert not evidence.stream


def test_restreamed_tools_and_usage() -> None:
    value = body()
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    value["choices"][0] |= {"message": {"role": "assistant", "content": None, "tool_calls": [call]}}
    value["choices"][0]["finish_reason"] = "tool_calls"
    out = frames(run(restream_tap(stream_options={"include_usage": True}), encoded(value)))
    assert out[1]["choices"][0]["delta"] == {"tool_calls": [{**call, "index": 0}]}
    assert out[2]["choices"][0]["finish_reason"] == "tool_calls"
    assert "system_fingerprint" not in out[2]
    assert out[3]["choices"] == []
    assert out[3]["usage"] == USAGE


def test_restreamed_completions() -> None:
    tap = restream_tap("completions", logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True)
    first, last, _ = frames(run(tap, encoded(body(completion()))))
    assert first["object"] == "text_completion"
    assert first["choices"][0]["token_ids"] == [7, 8]
    assert first["choices"][0]["prompt_token_ids"] == [1, 2]
    assert first["choices"][0]["logprobs"]["top_logprobs"] == [{"token_id:7": -0.5}, {"token_id:8": -0.5}]
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["choices"][0]["token_ids"] == []


@pytest.mark.parametrize("text", [b"{", b'{"choices":1}', b"[]"])
def test_restreamed_garbage_becomes_an_error_frame(text: bytes) -> None:
    out = run(restream_tap(), text)
    assert frames(out)[-1]["error"]["code"] == "invalid_json"


def test_restreamed_half_a_body_becomes_an_error_frame() -> None:
    out = run(restream_tap(), b"{", fault="upstream_closed")
    assert frames(out)[-1]["error"]["code"] == "upstream_closed"


def test_restreamed_errors_hold_no_verdict() -> None:
    tap = restream_tap()
    out = run(tap, b'{"error":{"message":"x","code":400,"countersign":{"verdict":"pass"}}}')
    assert tap.refusal == b'{"error":{"message":"x","code":400}}'
    assert b"countersign" not in out
