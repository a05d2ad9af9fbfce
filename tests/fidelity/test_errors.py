"""Cases 41 to 51: what goes wrong upstream is told as what it is, once, and never as a good end."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fidelity.frames import BODIES, BODY, DONE, FINISH, ONE, PATHS, ROLE, STREAM, STREAMS, TWO, begun, script
from tests.fidelity.gateway import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Gateway, Gateways
from tests.fidelity.meaning import Event, assert_answer, assert_begins, assert_same, events
from tests.support import wire
from tests.support.fake_backend import Close, FakeBackend, PeerCloses, Step
from tests.support.raw_http import Answer
from tests.support.waiting import PATIENCE

STATUSES = (400, 401, 403, 404, 408, 409, 413, 415, 422, 429, 500, 501, 502, 503, 504, 529)
ERROR = b'{"object":"error", "error": {"message":"no","type":"BadRequestError","param":null,"code":400}}'
LOST: dict[str, list[Step]] = {"clean": [Close()], "reset": [0.05, Close(reset=True)], "ended": [wire.LAST_CHUNK]}


def _last_event(answer: Answer) -> Event:
    """Type and data of the last event of a stream."""
    kind, data = events(answer.body)[-1]
    assert isinstance(data, dict), data
    return kind, data


@pytest.mark.cases(42)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("path", PATHS)
def test_statuses_stay_what_they_are(gateway: Gateway, upstream: FakeBackend, path: str, stream: bool) -> None:
    seen = []
    for status in STATUSES:
        upstream.script = [wire.whole(ERROR, status)]
        seen.append(gateway.ask(path, stream=stream).status)
    assert seen == list(STATUSES)


@pytest.mark.cases(41)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
def test_a_refusal_keeps_status_and_body(
    gateway: Gateway, upstream: FakeBackend, status: int, path: str, stream: bool
) -> None:
    upstream.script = [wire.whole(ERROR, status)]
    answer = gateway.ask(path, stream=stream)
    assert_answer(answer, status, ERROR)
    assert answer.header("content-type") == "application/json" or not gateway.ours
    assert answer.whole


@pytest.mark.cases(41)
def test_a_refusal_that_is_no_json_keeps_its_body(gateway: Gateway, upstream: FakeBackend) -> None:
    upstream.script = [wire.whole(b"<h1>no</h1>", 503, "text/html")]
    answer = gateway.ask(stream=True)
    assert_answer(answer, 503, b"<h1>no</h1>")
    assert answer.header("content-type") == "text/html" or not gateway.ours


@pytest.mark.cases(43)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("how", [[Close()], [Close(reset=True)], [b"HTTP/1.1 20"]], ids=["fin", "rst", "half a head"])
def test_lost_before_headers(gateway: Gateway, upstream: FakeBackend, path: str, stream: bool, how: list[Step]) -> None:
    upstream.script = [*how, Close()]
    answer = gateway.ask(path, stream=stream)
    assert answer.status == 502
    assert {"message", "type", "code"} <= answer.json()["error"].keys()


@pytest.mark.cases(43, 45)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("how", LOST)
def test_lost_before_the_first_event(gateway: Gateway, upstream: FakeBackend, path: str, how: str) -> None:
    upstream.script = [wire.SSE_HEAD, *LOST[how]]
    answer = gateway.ask(path, stream=True)
    if answer.status == 200 and not gateway.ours:
        assert "error" in _last_event(answer)[1]
        assert b"[DONE]" not in answer.body
    else:
        assert answer.status == 502 if gateway.ours else answer.status >= 500
        assert "error" in answer.json()


@pytest.mark.cases(43)
@pytest.mark.parametrize("path", PATHS)
def test_lost_in_a_whole_body(gateway: Gateway, upstream: FakeBackend, path: str) -> None:
    upstream.script = [wire.whole(BODIES[path])[:-9], Close()]
    answer = gateway.ask(path)
    assert answer.status == 502
    assert "error" in answer.json()


@pytest.mark.cases(44, 45)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("how", LOST)
def test_lost_in_a_stream(gateway: Gateway, upstream: FakeBackend, path: str, how: str) -> None:
    frames = STREAMS[path][:2]
    upstream.script = [*begun(frames), *LOST[how]]
    answer = gateway.ask(path, stream=True)
    assert answer.status == 200
    assert_begins(answer.body, b"".join(frames))
    assert b"[DONE]" not in answer.body
    kind, data = _last_event(answer)
    if path in (MESSAGES, RESPONSES):
        assert (kind, data["type"]) == ("error", "error")
        assert {"message", "code"} <= (data if path == RESPONSES else data["error"]).keys()
    else:
        assert {"message", "type", "code"} <= data["error"].keys()
        assert kind == ""


@pytest.mark.cases(44)
@pytest.mark.parametrize("rest", [[DONE], []], ids=["done", "end"])
def test_an_error_in_a_stream_passes_and_is_the_last_word(
    gateway: Gateway, upstream: FakeBackend, rest: list[bytes]
) -> None:
    frames = (ROLE, ONE, b"data: " + ERROR + b"\n\n", *rest)
    upstream.script = script(frames)
    body = gateway.ask(stream=True).body
    if gateway.ours:
        assert body == b"".join(frames)
    assert_begins(body, ROLE + ONE)
    said = [data for _, data in events(body)[2:]]
    assert "error" in said[0]
    assert said[1:] in ([], ["[DONE]"] if rest else [])


@pytest.mark.cases(45)
@pytest.mark.parametrize("kept", [1, 2, 3, 4])
def test_no_good_end_is_made_up(gateway: Gateway, upstream: FakeBackend, kept: int) -> None:
    upstream.script = script(STREAM[:kept])
    answer = gateway.ask(stream=True)
    assert b"[DONE]" not in answer.body
    assert '"error"' in json.dumps(_last_event(answer)[1])
    assert b'"finish_reason":"stop"' not in answer.body


@pytest.mark.cases(46)
@pytest.mark.parametrize("path", PATHS)
def test_done_may_be_missing(gateway: Gateway, upstream: FakeBackend, path: str) -> None:
    frames = [frame for frame in STREAMS[path] if frame != DONE]
    upstream.script = script(frames)
    answer = gateway.ask(path, stream=True)
    assert_same(answer.body if gateway.ours else answer.body.removesuffix(DONE), b"".join(frames))
    assert answer.whole


@pytest.mark.cases(46)
def test_the_upstream_may_vanish_after_done(gateway: Gateway, upstream: FakeBackend) -> None:
    upstream.script = [*begun(STREAM), Close(reset=True)]
    answer = gateway.ask(stream=True)
    assert_same(answer.body, b"".join(STREAM))
    assert answer.whole or not gateway.ours


@pytest.mark.cases(47)
@pytest.mark.parametrize(
    ("path", "frame", "status"),
    [
        (CHAT, b'data: {"error":{"message":"no","type":"BadRequestError","param":null,"code":400}}\n\n', 400),
        (CHAT, b'data: {"error":{"message":"slow down","type":"rate_limit_error","code":"429"}}\n\n', 429),
        (CHAT, b'data: {"error":{"message":"broken","type":"InternalServerError","code":500}}\n\n', 500),
        (CHAT, b'data: {"error":{"message":"broken"}}\n\n', 502),
        (COMPLETIONS, b'data: {"error":{"message":"no","code":422}}\n\n', 422),
        (MESSAGES, b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"x"}}\n\n', 503),
        (RESPONSES, b'event: error\ndata: {"type":"error","code":"rate_limit_error","message":"x"}\n\n', 429),
    ],
)
@pytest.mark.parametrize("rest", [[DONE], [], [PeerCloses()]], ids=["done", "end", "silence"])
def test_a_stream_that_begins_with_an_error_has_its_status(
    gateway: Gateway, upstream: FakeBackend, path: str, frame: bytes, status: int, rest: list[Step]
) -> None:
    upstream.script = [*begun([frame]), *(wire.chunk(step) if isinstance(step, bytes) else step for step in rest)]
    if PeerCloses() not in rest:
        upstream.script.append(wire.LAST_CHUNK)
    answer = gateway.ask(path, stream=True)
    assert answer.status == status if gateway.ours else 400 <= answer.status < 600
    assert answer.header("content-type") == "application/json"
    if gateway.ours:
        assert answer.json() == json.loads(frame.split(b"data: ")[1])
    assert "error" in answer.body.decode()


@pytest.mark.cases(48)
@pytest.mark.feature("second upstream")
@pytest.mark.parametrize("how", LOST)
def test_no_second_try_after_the_first_byte(
    gateways: Gateways, upstream: FakeBackend, second: FakeBackend, how: str
) -> None:
    gateway = gateways.variant("pair")
    upstream.script = second.script = [*begun((ROLE, ONE)), *LOST[how]]
    answer = gateway.ask(stream=True)
    assert_begins(answer.body, ROLE + ONE)
    assert answer.body.count(b"One") == 1
    assert len(upstream.requests) + len(second.requests) == 1


@pytest.mark.cases(48)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.ours
@pytest.mark.parametrize("how", ["closed", "503", "empty", "first event"])
def test_a_second_try_before_the_first_byte(
    gateways: Gateways, upstream: FakeBackend, second: FakeBackend, how: str, stream: bool
) -> None:
    failures: dict[str, list[Step]] = {
        "closed": [Close()],
        "503": [wire.whole(ERROR, 503)],
        "empty": [wire.SSE_HEAD, wire.LAST_CHUNK] if stream else [wire.whole(BODY)[:-9], Close()],
        "first event": script([b'data: {"error":{"message":"x","code":503}}\n\n']) if stream else [Close(reset=True)],
    }
    gateway = gateways.variant("pair")
    good: list[Step] = script(STREAM) if stream else [wire.whole(BODY)]
    for bad, fine in ((upstream, second), (second, upstream)):
        bad.script, fine.script = failures[how], good
        for _ in range(2):
            answer = gateway.ask(stream=stream)
            assert_answer(answer, 200, b"".join(STREAM) if stream else BODY)


@pytest.mark.cases(49)
def test_when_to_come_again_is_passed_on(gateway: Gateway, upstream: FakeBackend) -> None:
    again = ("retry-after: 7", "retry-after-ms: 7000", "x-should-retry: false", "x-ratelimit-remaining-tokens: 0")
    upstream.script = [wire.whole(ERROR, 429, "application/json", *again)]
    answer = gateway.ask(stream=True)
    assert [f"{name}: {answer.header(name)}" for name in (line.split(":")[0] for line in again)] == list(again)


@pytest.mark.cases(49)
@pytest.mark.feature("second upstream")
def test_the_last_one_asked_says_when_to_come_again(
    gateways: Gateways, upstream: FakeBackend, second: FakeBackend
) -> None:
    gateway = gateways.variant("pair")
    upstream.script = [wire.whole(ERROR, 429, "application/json", "retry-after: 7")]
    second.script = [wire.whole(ERROR, 503, "application/json", "retry-after: 9")]
    for _ in range(2):
        answer = gateway.ask()
        last = max((upstream, second), key=lambda asked: asked.last.at)
        assert (answer.status, answer.header("retry-after")) == ((429, "7") if last is upstream else (503, "9"))
    assert len(upstream.requests) == len(second.requests) == 2 or not gateway.ours


@pytest.mark.cases(50)
@pytest.mark.parametrize("kind", ["application/json", "text/plain"])
def test_an_endless_error_is_not_read_to_its_end(gateway: Gateway, upstream: FakeBackend, kind: str) -> None:
    endless = [wire.chunk(b"x" * 262_144)] * 400
    upstream.script = [wire.head(500, kind, "transfer-encoding: chunked"), *endless, PeerCloses()]
    answer = gateway.ask()
    assert answer.status >= 500
    assert len(answer.body) < 20_000_000
    assert upstream.last.peer_closed.wait(PATIENCE)
    assert len(upstream.last.sent) < 200


@pytest.mark.cases(51)
def test_refused_requests_do_not_shut_a_backend_out(gateways: Gateways, upstream: FakeBackend) -> None:
    gateway = gateways.variant("breaker", otherwise="plain")
    for status in (400, 401, 404, 413, 422, 429):
        upstream.script = [wire.whole(ERROR, status)]
        assert {gateway.ask().status for _ in range(10)} == {status}
    upstream.script = script((ROLE, TWO, FINISH, DONE))
    answer = gateway.ask(stream=True)
    assert_answer(answer, 200, b"".join((ROLE, TWO, FINISH, DONE)))


HEADS = st.sampled_from([b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 500 X\r\n", b"HTTP/1.0 200 OK\r\n", b"HTTP/2 200\r\n", b""])
ROWS = st.sampled_from(
    [
        b"content-type: text/event-stream\r\n",
        b"content-type: application/json\r\n",
        b"content-length: 20\r\n",
        b"content-length: -1\r\n",
        b"content-length: 5\r\ncontent-length: 7\r\n",
        b"transfer-encoding: chunked\r\n",
        b"transfer-encoding: gzip\r\n",
        b"content-encoding: gzip\r\n",
        b"x-\xff: \x00\r\n",
        b"no colon\r\n",
        b"\r\n",
    ]
)
PIECES = st.lists(HEADS | ROWS | st.binary(max_size=30) | st.sampled_from(STREAM).map(wire.chunk), max_size=8)


@pytest.mark.cases(43, 45)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), phases=(Phase.generate,))
@given(pieces=PIECES, stream=st.booleans(), path=st.sampled_from(PATHS))
def test_rubbish_never_looks_like_an_answer(
    gateway: Gateway, upstream: FakeBackend, pieces: list[bytes], stream: bool, path: str
) -> None:
    upstream.script = [b"".join(pieces) or b"\r\n", Close()]
    answer = gateway.ask(path, stream=stream)
    assert answer.status >= 200
    if answer.header("content-type") == "application/json":
        assert answer.whole
    if gateway.ours and answer.status >= 500 and not b"".join(pieces).startswith(b"HTTP/1.1 500"):
        assert "error" in answer.json()
    if b"[DONE]" not in b"".join(pieces):
        assert b"[DONE]" not in answer.body
