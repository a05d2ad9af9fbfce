"""Streams that break, lie or leave something out: the client's bytes pass, the evidence says what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from policies.settings import BoundsSettings
from proxy.tap import open_tap
from tests.proxy.tap.bodies import (
    DONE,
    HIDDEN,
    choice,
    chunk,
    ending,
    entry,
    opening,
    plain,
    prepared,
    run,
    sse,
    stream,
    stream_tap,
    usage_chunk,
)


def test_error_frame_passes() -> None:
    error = sse({"error": {"message": "boom", "type": "InternalServerError", "param": None, "code": 500}})
    tap = stream_tap()
    out = run(tap, opening() + chunk(choice()) + error + DONE)
    assert out.endswith(error + DONE)
    (evidence,) = tap.evidence()
    assert "upstream_error" in evidence.faults
    assert not evidence.complete
    assert evidence.output_ids.tolist() == [7]


@pytest.mark.parametrize("fault", [None, "upstream_closed", "upstream_timeout", "client_left"])
def test_stream_that_dies(fault: str | None) -> None:
    tap = stream_tap()
    out = run(tap, opening() + chunk(choice()) + chunk(choice())[:50], fault=fault)
    assert b"[DONE]" not in out
    last = json.loads(out.split(b"\n\n")[-2][6:])
    assert last["error"]["type"] == "server_error"
    assert last["error"]["code"] == (fault or "upstream_closed")
    (evidence,) = tap.evidence()
    assert (fault or "upstream_closed") in evidence.faults
    assert evidence.output_ids.tolist() == [7]
    assert evidence.claim_ids.shape == (1, 21)
    assert not evidence.complete


def test_missing_done_after_all_finished_is_no_error() -> None:
    tap = stream_tap()
    out = run(tap, opening() + chunk(choice()) + ending() + usage_chunk())
    assert b"error" not in out
    assert tap.done == b""
    assert tap.evidence()[0].complete


def test_missing_blank_line_at_the_end() -> None:
    tap = stream_tap()
    assert run(tap, stream()[:-2]) == plain()
    assert tap.evidence()[0].complete


@pytest.mark.parametrize("cut", [0, 1, 20])
@pytest.mark.parametrize("kind", ["text/event-stream", "text/plain", "application/json"])
@pytest.mark.parametrize(
    ("more", "fault"),
    [
        (chunk(choice()), True),
        (chunk(choice())[:-2], True),
        (b": ping\n\n" * 3 + chunk(choice()), True),
        (b"data: x\n\n", True),
        (b"data: x\r\n\r\n", True),
        (b'data: {"error": {"message": "x"}}\n\n', True),
        (b"\r\n\n" + DONE + usage_chunk(), True),
        (b"\n", False),
        (b"\r\n\r\n", False),
        (b": ping\n\n", False),
        (b"event: x\nid: 1\n\n", False),
        (b"data:\n\n", False),
        (DONE, False),
        (DONE[:-2], False),
    ],
)
def test_nothing_after_done(more: bytes, fault: bool, kind: str, cut: int) -> None:
    """Nor is it part of the evidence; only that it came."""
    tap = open_tap(prepared(stream=True), "m", content_type=kind)
    text = stream()
    out = tap.feed(text[: len(text) - cut])
    out += tap.feed(text[len(text) - cut :] + more[:7]) + tap.feed(more[7:]) + tap.close()
    assert out + tap.done == plain()
    (evidence,) = tap.evidence()
    assert evidence.faults == (("after_end",) if fault else ())
    assert evidence.complete
    assert evidence.output_ids.tolist() == [7, 8]


@pytest.mark.parametrize("more", [b"data: " + b"x" * 5000, b"data: x\n\n" * 1000])
def test_a_flood_after_done_breaks_nothing(more: bytes) -> None:
    tap = stream_tap(bounds=BoundsSettings(line_bytes=4000))
    out = tap.feed(stream()) + tap.feed(more) + tap.close()
    assert out + tap.done == plain()
    assert not tap.failed
    assert tap.held < 20_000
    (evidence,) = tap.evidence()
    assert (evidence.faults, evidence.complete) == (("after_end",), True)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_not_json(number: str) -> None:
    text = chunk(choice(x=1.5)).decode().replace("-0.5", number).encode()
    tap = stream_tap()
    out = tap.feed(opening() + text + ending() + usage_chunk())
    assert json.loads(out.split(b"\n\n")[1][6:])["choices"][0] == choice(x=1.5) | HIDDEN
    (evidence,) = tap.evidence()
    assert "bad_logprobs" in evidence.faults
    assert evidence.output_ids.tolist() == [7, 8]
    assert evidence.claim_ids[0].tolist() == [-1] * 21
    assert evidence.claim_ids[1, 0] == 8


def test_number_that_is_not_json_where_the_client_sees_it() -> None:
    tap = stream_tap()
    out = tap.feed(chunk(choice(x=1)).replace(b'"x":1', b'"x":NaN'))
    assert json.loads(out[6:])["choices"][0]["x"] != json.loads(out[6:])["choices"][0]["x"]
    assert json.loads(out[6:])["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("payload", [b"{", b'{"choices":1}', b"[]", b'"x"', b"\xff", b'{"choices":[1]}', b"{}x"])
def test_frames_that_cannot_be_read_pass(payload: bytes) -> None:
    event = b"data: " + payload + b"\n\n"
    tap = stream_tap()
    assert tap.feed(event) == event
    tap.feed(stream())
    assert "invalid_json" in tap.evidence()[0].faults


def test_deep_nesting() -> None:
    event = b"data: " + b'{"choices":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n\n"
    tap = stream_tap()
    last = tap.feed(event) + tap.close()
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "too_deep"
    assert tap.failed
    assert "too_deep" in tap.evidence()[0].faults


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"logprobs": None}, "no_logprobs"),
        ({"logprobs": {"content": []}}, "bad_logprobs"),
        ({"logprobs": {"content": None}}, "bad_logprobs"),
        ({"logprobs": "x"}, "bad_logprobs"),
        ({"logprobs": {"content": [{**entry(7), "logprob": None}]}}, "bad_logprobs"),
        ({"logprobs": {"content": [{**entry(7), "logprob": "-1"}]}}, "bad_logprobs"),
        ({"logprobs": {"content": [{**entry(7), "logprob": -3.0}]}}, "bad_logprobs"),
        ({"logprobs": {"content": [entry(7), entry(7)]}}, "bad_logprobs"),
        ({"logprobs": {"content": [entry(6)]}}, "bad_ids"),
        ({"logprobs": {"content": [{**entry(7), "token": "a"}]}}, "bad_ids"),
        ({"logprobs": {"content": [{**entry(7), "token": "token_id:-3"}]}}, "bad_ids"),
        ({"logprobs": {"content": [{**entry(7), "token": "token_id:99999999999"}]}}, "bad_ids"),
        ({"token_ids": None}, "no_token_ids"),
        ({"token_ids": ["7"]}, "bad_ids"),
        ({"token_ids": [2**40]}, "bad_ids"),
        ({"token_ids": [-1]}, "bad_ids"),
        ({"index": 5}, "bad_ids"),
        ({"index": "x"}, "bad_ids"),
    ],
)
def test_evidence_that_is_missing_or_wrong(fields: dict[str, Any], fault: str) -> None:
    tap = stream_tap()
    end = chunk({"index": 0, "delta": {}, "finish_reason": "length"})
    run(tap, opening() + chunk(choice() | fields) + end + DONE)
    (evidence,) = tap.evidence()
    assert fault in evidence.faults
    assert len(evidence.claim_ids) in (0, len(evidence.output_ids))


def test_prompt_ids_missing() -> None:
    tap = stream_tap()
    run(tap, chunk(choice()) + ending() + DONE)
    assert tap.evidence()[0].faults == ("no_prompt_ids",)


def test_repeated_alternative_stays_visible() -> None:
    twice = entry(7)
    twice["top_logprobs"][2] = twice["top_logprobs"][1]
    tap = stream_tap()
    tap.feed(chunk(choice(logprobs={"content": [twice]})))
    assert tap.evidence()[0].claim_ids[0, :3].tolist() == [7, 1000, 1000]


def test_too_many_tokens() -> None:
    tap = stream_tap(bounds=BoundsSettings(answer_tokens=3))
    out = tap.feed(opening() + chunk(choice(ids=(1, 2))) + chunk(choice(ids=(3, 4))))
    assert out.count(b'"content":"a"') == 2
    (evidence,) = tap.evidence()
    assert "too_large" in evidence.faults
    assert evidence.output_ids.tolist() == [1, 2]


def test_choice_that_never_came() -> None:
    tap = stream_tap(n=2, temperature=1)
    run(tap, opening() + chunk(choice()) + ending() + DONE)
    first, second = tap.evidence()
    assert first.faults == ()
    assert set(second.faults) == {"no_token_ids", "no_logprobs"}


def test_reasoning_the_client_does_not_want() -> None:
    body = (
        opening()
        + chunk(choice(content=None, ids=(5,)))
        + chunk(choice(delta={"reasoning": "hm"}))
        + chunk(choice(delta={"reasoning": "m", "content": "a"}))
        + chunk(choice())
        + ending()
        + usage_chunk()
        + DONE
    )
    tap = stream_tap(include_reasoning=False, logprobs=True, return_tokens_as_token_ids=True, return_token_ids=True)
    out = [json.loads(event[6:]) for event in run(tap, body).split(b"\n\n")[1:-2]]
    assert [frame["choices"][0]["delta"] for frame in out] == [
        {"content": "a", "reasoning": None},
        {"content": "a", "reasoning": None},
        {},
    ]
    assert all(frame["choices"][0]["logprobs"] is None for frame in out)
    assert len(tap.evidence()[0].output_ids) == 5


@pytest.mark.parametrize("status", [400, 429, 500])
def test_error_status_passes(status: int) -> None:
    error = b'{"error": {"message":"no",  "code":1}}'
    tap = open_tap(prepared(stream=True), "m", status=status, content_type="application/json")
    assert run(tap, error) == error
    assert tap.evidence()[0].faults == ("upstream_error",)
    assert not tap.evidence()[0].complete


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("text/html", "upstream_error"),
        ("application/octet-stream", "upstream_error"),
        ("application/json", "invalid_json"),
    ],
)
def test_other_content_types_pass(kind: str, fault: str) -> None:
    tap = open_tap(prepared(stream=True), "m", content_type=kind)
    assert run(tap, b"\x00 <html> data: \xff") == b"\x00 <html> data: \xff"
    assert tap.evidence()[0].faults == (fault,)


def test_false_verdict_in_error_body_goes() -> None:
    tap = open_tap(prepared(), "m", status=500, content_type="application/json")
    assert run(tap, b'{"error":{"a":1},"countersign":{"verdict":"pass"}}') == b'{"error":{"a":1}}'
