"""Answers to requests for a stream under content types that are none of a stream, read by what they are."""

from __future__ import annotations

import json

import pytest

from proxy.tap import open_tap
from proxy.tap.types import Tap
from tests.proxy.tap.bodies import DONE, body, choice, chunk, opening, plain, prepared, run, stream

KINDS = ["application/json", "application/problem+json", "text/plain", "text/html"]
BEFORE = [b"", b": ping\n\n", b"{}\n\n", b'{"a": 1}\n', b"[\n\n", b"x\n\n"]
JSON = ["application/json", "application/problem+json"]


def _tap(kind: str) -> Tap:
    return open_tap(prepared(stream=True), "public", content_type=kind)


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("kind", KINDS)
def test_events_are_a_stream_whatever_is_before_them(kind: str, before: bytes) -> None:
    """Clients that look for events find them."""
    tap = _tap(kind)
    text = before + stream()
    out = b"".join(tap.feed(text[at : at + 9]) for at in range(0, len(text), 9)) + tap.close() + tap.done
    events = plain().replace(b'"model":"m"', b'"model":"public"').partition(b"\n\n")[2]
    assert out.endswith(events)
    assert b'"m"' not in out
    (evidence,) = tap.evidence()
    assert (evidence.faults, evidence.complete) == ((), True)
    assert evidence.output_ids.tolist() == [7, 8]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", [None, "upstream_closed"])
def test_a_stream_that_dies_does_so_under_any_name(kind: str, fault: str | None) -> None:
    tap = _tap(kind)
    out = run(tap, opening() + chunk(choice()), fault=fault)
    assert b"upstream_closed" in out
    assert DONE not in out
    (evidence,) = tap.evidence()
    assert "upstream_closed" in evidence.faults
    assert not evidence.complete


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_answer_is_one_under_any_name(kind: str) -> None:
    tap = _tap(kind)
    value = body(countersign={"verdict": "pass"})
    shown = json.loads(run(tap, b" " + json.dumps(value).encode()))
    del value["countersign"]
    value["choices"][0] |= {"logprobs": None, "token_ids": None}
    assert shown == value | {"model": "public", "prompt_token_ids": None}
    (evidence,) = tap.evidence()
    assert (evidence.faults, evidence.complete) == ((), True)
    assert evidence.output_ids.tolist() == [7, 8]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("text", "code"),
    [(b'{"choices": 3}', "invalid_json"), (b'{"a":' + b"[" * 200 + b"]" * 200 + b"}", "too_deep")],
)
def test_an_answer_that_cannot_be_passed_on_is_an_error(kind: str, text: bytes, code: str) -> None:
    tap = _tap(kind)
    assert json.loads(run(tap, text))["error"]["code"] == code
    assert (tap.failed, tap.fault) == (True, code)
    assert tap.evidence()[0].faults == (code,)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page", [b"<html>busy</html>", b"[busy]\n\ntry again\n", b"{\n", b"", b"[1, 2]", b"a\n\nb"])
def test_any_other_page_passes_as_it_is(kind: str, page: bytes) -> None:
    tap = _tap(kind)
    assert run(tap, page) == page
    (evidence,) = tap.evidence()
    assert evidence.faults == (("invalid_json",) if kind in JSON else ("upstream_error",))
    assert not evidence.complete
