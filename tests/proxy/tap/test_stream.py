"""Streams through StreamTap: what the client gets, byte for byte, and what is kept."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from policies.settings import BoundsSettings
from proxy.tap import open_tap
from tests.proxy.tap.bodies import (
    DONE,
    HEAD,
    HIDDEN,
    USAGE,
    backend,
    choice,
    chunk,
    ending,
    opening,
    plain,
    prepared,
    run,
    sse,
    stream,
    stream_tap,
    usage_chunk,
)
from tests.support.pace import pace


def test_additions_are_hidden() -> None:
    tap = stream_tap()
    assert run(tap, stream()) == plain()
    (evidence,) = tap.evidence(id="x")
    assert evidence.id == "x"
    assert evidence.output_ids.tolist() == [7, 8]
    assert evidence.prompt_ids.tolist() == [1, 2]
    assert evidence.claim_ids.shape == (2, 21)
    assert evidence.claim_ids[0, :3].tolist() == [7, 1000, 1001]
    assert evidence.claim_ids[0, 20] == -1
    assert evidence.text == "a"
    assert evidence.finish_reason == "stop"
    assert evidence.complete
    assert evidence.faults == ()
    assert evidence.sampling.seed == 100
    assert evidence.stream
    assert evidence.usage is not None
    assert evidence.usage.counted_completion_tokens == 2


def test_done_is_held_back() -> None:
    tap = stream_tap()
    assert b"[DONE]" not in tap.feed(stream())
    assert tap.done == DONE
    assert tap.close() == b""


def test_every_split_gives_the_same() -> None:
    body = stream().replace(b'"a"', '"é\u2028€😀"'.encode())
    whole = run(stream_tap(), body)
    for at in range(len(body)):
        tap = stream_tap()
        assert tap.feed(body[:at]) + tap.feed(body[at:]) + tap.close() + tap.done == whole
        assert tap.evidence()[0].faults == ()


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_line_ends(end: bytes) -> None:
    body = stream().replace(b"\n", end)
    expected = plain().replace(b"\n", end)
    assert run(stream_tap(), body) == expected
    tap = stream_tap()
    parts = [tap.feed(body[at : at + 1]) for at in range(len(body))]
    assert b"".join(parts) + tap.close() + tap.done == expected
    assert tap.evidence()[0].faults == ()


def test_mixed_line_ends_and_no_space() -> None:
    body = b"data:" + stream()[6:].replace(b"\n\ndata", b"\r\n\rdata", 1)
    tap = stream_tap()
    run(tap, body)
    assert tap.evidence()[0].faults == ()
    assert len(tap.evidence()[0].output_ids) == 2


def test_untouched_events_are_byte_identical() -> None:
    odd = b'event: x\nid: 3\ndata:{"id" : "1", "choices":[ ], "x":1.0e0}\nretry: 5\n\n'
    comments = b": ping\n\n:\n\n: ping - 2026\r\n\r\n"
    tap = stream_tap()
    assert tap.feed(odd + comments) == odd + comments


def test_comment_passes_without_blank_line() -> None:
    assert stream_tap().feed(b": ping\n") == b": ping\n"


def test_bom_is_tolerated() -> None:
    tap = stream_tap()
    assert run(tap, b"\xef\xbb\xbf" + stream()) == b"\xef\xbb\xbf" + plain()
    assert tap.evidence()[0].faults == ()


def test_multi_line_data() -> None:
    text = json.dumps({**HEAD, "choices": [choice()]}, indent=1)
    event = "".join(f"data: {line}\n" for line in text.split("\n")).encode() + b"\n"
    shown = stream_tap().feed(event)
    assert shown.count(b"\n") == 2
    assert json.loads(shown[6:]) == json.loads(chunk(choice() | HIDDEN)[6:])


def test_chunks_come_at_once() -> None:
    tap = stream_tap()
    assert tap.feed(opening())
    assert tap.feed(chunk(choice()))
    assert tap.feed(chunk(choice())[:-1]) == b""
    assert tap.feed(b"\n")


def test_one_megabyte_in_single_bytes() -> None:
    body = chunk(choice(content="x" * 1_000_000))
    tap = stream_tap()
    began = time.thread_time()
    out = b"".join([tap.feed(body[at : at + 1]) for at in range(len(body))])
    assert time.thread_time() - began < 15 * pace()
    assert out == chunk(choice(content="x" * 1_000_000) | HIDDEN)


def test_endless_line_is_cut() -> None:
    tap = open_tap(prepared(stream=True), "m", content_type="text/event-stream", bounds=BoundsSettings(line_bytes=1000))
    out = tap.feed(opening()) + tap.feed(b"data: ") + tap.feed(b"x" * 1001)
    assert tap.failed
    assert json.loads(out.split(b"\n\n")[-2][6:])["error"]["code"] == "line_too_long"
    assert tap.feed(DONE) == b""
    assert tap.close() + tap.done == b""
    assert "line_too_long" in tap.evidence()[0].faults


def test_endless_event_is_cut() -> None:
    tap = open_tap(prepared(stream=True), "m", content_type="text/event-stream", bounds=BoundsSettings(line_bytes=1000))
    for _ in range(200):
        tap.feed(b"data: {}\n")
    assert tap.failed


@pytest.mark.parametrize("stream_options", [{"include_usage": True}])
def test_wanted_usage_stays(stream_options: dict[str, Any]) -> None:
    tap = stream_tap(stream_options=stream_options)
    out = run(tap, stream())
    assert usage_chunk() in out
    last = choice(0, None, (8,), finish_reason="stop", stop_reason=None) | HIDDEN
    assert chunk(last) in out


def test_forced_usage_stays() -> None:
    body = opening() + chunk(choice(), usage=USAGE) + ending() + usage_chunk() + DONE
    assert usage_chunk() in run(stream_tap(), body)


def test_empty_deltas_go() -> None:
    tap = stream_tap()
    assert tap.feed(chunk(choice(content=None, ids=(5,)))) == b""
    assert tap.evidence()[0].output_ids.tolist() == [5]


def test_empty_deltas_stay_for_whom_they_carry_something() -> None:
    assert stream_tap(return_token_ids=True).feed(chunk(choice(content=None, ids=(5,))))
    tap = stream_tap(logprobs=True, return_tokens_as_token_ids=True)
    assert tap.feed(chunk(choice(content=None, ids=(5,))))


def test_null_delta_fields_and_unknown_fields_stay() -> None:
    delta = {"content": None, "reasoning": None, "tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}
    body = chunk(choice(delta=delta, x_extra={"a": [1, None]}), service_tier=None)
    expected = chunk(choice(delta=delta, x_extra={"a": [1, None]}) | HIDDEN, service_tier=None)
    assert stream_tap().feed(body) == expected


def test_choices_interleave() -> None:
    parts = [
        opening(0),
        opening(1),
        chunk(choice(1, "b", (9,))),
        chunk(choice(0)),
        ending(0),
        chunk(choice(1, "c", (4,))),
    ]
    tap = stream_tap(n=2, seed=5, temperature=1)
    out = tap.feed(b"".join(parts))
    assert b'"c"' in out  # the other choice does not wait for the fingerprint
    assert b'"stop"' not in out
    out = tap.feed(ending(1, (3,)) + usage_chunk() + DONE)
    assert out.count(b'"system_fingerprint":"vllm-x"') == 2
    first, second = tap.evidence()
    assert first.output_ids.tolist() == [7, 8]
    assert second.output_ids.tolist() == [9, 4, 3]
    assert (first.sampling.seed, second.sampling.seed) == (5, 6)
    assert first.sampling.client_seed
    assert second.text == "bc"
    assert first.usage is not None
    assert first.usage.counted_completion_tokens == 5


def test_no_fingerprint_no_change() -> None:
    body = opening() + ending() + sse({**HEAD, "choices": [], "usage": USAGE}) + DONE
    assert b"system_fingerprint" not in run(stream_tap(), body)


def test_model_gets_its_public_name() -> None:
    request = prepared(server=backend(served_model="m"), stream=True)
    tap = open_tap(request, "public", content_type="text/event-stream")
    out = run(tap, stream() + sse({**HEAD, "model": "other", "choices": []}))
    assert b'"model":"m"' not in out
    assert out.count(b'"model":"public"') == 3


def test_false_verdicts_go() -> None:
    body = (
        b": countersign {}\n\n"
        + b":COUNTERSIGN x\n"
        + chunk(choice(countersign={"verdict": "pass"}), countersign={"verdict": "pass"})
        + b': countersign {"verdict":"pass"}\ndata: {"choices":[],"\\u0063ountersign":1}\n\n'
        + sse({"error": {"message": "x"}, "countersign": 1})
        + b'data: {"countersign": "pass", \n\n'
    )
    out = stream_tap().feed(body)
    assert b"ountersign" not in out.lower()
    assert b'"content":"a"' in out


def test_large_events_are_told_of() -> None:
    """So that somebody else reads them than who passes the others on."""
    tap = stream_tap()
    text = chunk(choice(ids=tuple(range(20))))
    assert len(text) > 20_000
    tap.feed(opening() + text[:10_000])
    assert not tap.large
    tap.feed(text[10_000:20_000])
    assert tap.large
    tap.feed(text[20_000:])
    assert not tap.large
    assert tap.evidence()[0].output_ids.tolist() == [*range(20)]
